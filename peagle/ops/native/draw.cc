// See kernels.h, Draw.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"
#include "vectors.h"

namespace peagle {
namespace {

constexpr int64_t kSlice = 1 << 14;     // weights of a row per chunk
constexpr int64_t kWorkPerWeight = 8;   // multiplications, about
constexpr int64_t kBlock = 4 * kLanes;  // weights per test of whether one may win
constexpr float kMargin = 1.0001f;      // of that test, for rounding

struct Winner {
  float speed;    // weight over waiting time
  int64_t index;  // of the first such weight; -1: none is above 0; -2: there was a NaN
};

// As `_mixed` in peagle/ops/draw.py.
PEAGLE_INLINE Words Mixed(Words bits) {
  bits = (bits ^ (bits >> 16)) * 0x7FEB352Du;
  bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
  return bits ^ (bits >> 16);
}

// The waiting time at a value of its distribution function, as `_waiting_time` in peagle/ops/draw.py. It is at least `past`,
// up to rounding.
float WaitingTime(float past) {
  if (past < 0x1p-7f) return past * (1 + past * (0.5f + past * (1 / 3.0f + past / 4)));
  return -std::log(1 - past);
}

Winner Race(const Draw& op, int64_t row, int64_t begin, int64_t end) {
  const float* const weights = op.weights + row * op.width;
  const uint32_t first_key = op.keys[2 * row], second_key = op.keys[2 * row + 1];
  Words lane_ids;
  for (int lane = 0; lane < kLanes; ++lane) lane_ids[lane] = lane;
  Winner best{0, -1};
  Ints odd = {};  // lanes that held a NaN
  Floats past[4], weight[4];
  Ints may[4];
  // Exact waiting times take long. Compute them only for tokens that would win if they waited for `past`, the least time.
  const auto test = [&](int part, int64_t at, Floats values) {
    const Words ids = op.token_ids == nullptr ? lane_ids + static_cast<uint32_t>(at)
                                              : LoadFirst<Words>(op.token_ids + at, end - at);
    const Words bits = Mixed(Mixed(ids * 0x9E3779B9u + first_key) ^ second_key);
    past[part] = __builtin_convertvector(bits, Floats) * 0x1p-32f + 0x1p-33f;
    weight[part] = values;
    odd |= values != values;
    may[part] = (values > 0.0f) & (past[part] * best.speed <= values * kMargin);
  };
  const auto take = [&](int part, int64_t at) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (may[part][lane] == 0 || past[part][lane] * best.speed > weight[part][lane] * kMargin) continue;
      const float speed = weight[part][lane] / WaitingTime(past[part][lane]);
      if (speed > best.speed) best = {speed, at + lane};
    }
  };
  int64_t i = begin;
  for (; i + kBlock <= end; i += kBlock) {
    for (int part = 0; part < 4; ++part) test(part, i + part * kLanes, Load<Floats>(weights + i + part * kLanes));
    if (!Any(may[0] | may[1] | may[2] | may[3])) continue;
    for (int part = 0; part < 4; ++part) take(part, i + part * kLanes);
  }
  for (; i < end; i += kLanes) {  // beyond the end LoadFirst reads zeros, which never win
    test(0, i, LoadFirst<Floats>(weights + i, end - i));
    take(0, i);
  }
  return Any(odd) ? Winner{0, -2} : best;
}

}  // namespace

void RunDraw(const Draw& op, Parallel& parallel) {
  const int64_t slices = (op.width + kSlice - 1) / kSlice, chunks = op.rows * slices;
  Scratch scratch;
  Winner* const winners = scratch.Take<Winner>(chunks);
  ForEach(parallel, chunks, kWorkPerWeight * op.rows * op.width, [&](int64_t chunk) {
    const int64_t begin = chunk % slices * kSlice;
    winners[chunk] = Race(op, chunk / slices, begin, std::min(begin + kSlice, op.width));
  });
  for (int64_t row = 0; row < op.rows; ++row) {
    Winner best = winners[row * slices];
    for (int64_t slice = 1; slice < slices && best.index != -2; ++slice) {
      const Winner& other = winners[row * slices + slice];
      if (other.index == -2 || other.speed > best.speed) best = other;
    }
    op.index[row] = static_cast<int32_t>(std::max<int64_t>(best.index, -1));
  }
}

}  // namespace peagle
