// See kernels.h, Likeliest.

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"
#include "vectors.h"

namespace peagle {
namespace {

constexpr int64_t kSlice = 1 << 14;  // values of a row per chunk

struct Peak {
  float value;
  int64_t index;  // of the first such value; -1: there was a NaN
};

template <bool kHalf>
Peak FindPeak(const void* row, int64_t begin, int64_t end) {
  // four chains, since each maximum depends on the one before
  Floats highest[4];
  for (Floats& high : highest) high = Broadcast(LoadOne<kHalf>(row, begin));
  Ints odd = {};  // lanes that held a NaN
  int64_t i = begin;
  const auto take = [&](Floats& high, int64_t at) {
    const Floats values = LoadLanes<kHalf>(row, at);
    odd |= values != values;
    high = Max(values, high);
  };
  for (; i + 4 * kLanes <= end; i += 4 * kLanes)
    for (int chain = 0; chain < 4; ++chain) take(highest[chain], i + chain * kLanes);
  for (; i + kLanes <= end; i += kLanes) take(highest[0], i);
  const Floats most = Max(Max(highest[0], highest[1]), Max(highest[2], highest[3]));
  float value = most[0];
  bool nan = Any(odd);
  for (int lane = 0; lane < kLanes; ++lane) value = std::max(value, most[lane]);
  for (; i < end; ++i) {
    const float one = LoadOne<kHalf>(row, i);
    nan |= one != one;
    value = std::max(value, one);
  }
  if (nan) return {value, -1};
  i = begin;
  while (i + kLanes <= end && !Any(LoadLanes<kHalf>(row, i) == value)) i += kLanes;
  while (LoadOne<kHalf>(row, i) != value) ++i;
  return {value, i};
}

template <bool kHalf>
float SumOfExp(const void* row, int64_t begin, int64_t end, float peak) {
  Floats sums = {};
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) sums += Exp(LoadLanes<kHalf>(row, i) - peak);
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
  for (; i < end; ++i) total += Exp(Broadcast(LoadOne<kHalf>(row, i) - peak))[0];
  return total;
}

template <bool kHalf>
void RunLikeliestAs(const Likeliest& op, Parallel& parallel) {
  const int64_t slices = (op.width + kSlice - 1) / kSlice, chunks = op.rows * slices, bytes = op.width * (kHalf ? 2 : 4);
  const auto row_of = [&](int64_t row) { return static_cast<const char*>(op.logits) + row * bytes; };
  Scratch scratch;
  Peak* const peaks = scratch.Take<Peak>(chunks);
  ForEach(parallel, chunks, op.rows * bytes, [&](int64_t chunk) {
    const int64_t begin = chunk % slices * kSlice;
    peaks[chunk] = FindPeak<kHalf>(row_of(chunk / slices), begin, std::min(begin + kSlice, op.width));
  });
  for (int64_t row = 0; row < op.rows; ++row) {
    Peak& best = peaks[row * slices];
    for (int64_t slice = 1; slice < slices && best.index >= 0; ++slice) {
      const Peak& other = peaks[row * slices + slice];
      if (other.index < 0 || other.value > best.value) best = other;
    }
    if (__builtin_isinf(best.value)) best.index = -1;
    op.index[row] = static_cast<int32_t>(best.index);
  }
  if (op.probability == nullptr) return;
  float* const sums = scratch.Take<float>(chunks);
  ForEach(parallel, chunks, 4 * op.rows * bytes, [&](int64_t chunk) {
    const int64_t row = chunk / slices, begin = chunk % slices * kSlice;
    sums[chunk] = SumOfExp<kHalf>(row_of(row), begin, std::min(begin + kSlice, op.width), peaks[row * slices].value);
  });
  for (int64_t row = 0; row < op.rows; ++row) {
    float total = 0;
    for (int64_t slice = 0; slice < slices; ++slice) total += sums[row * slices + slice];
    op.probability[row] = peaks[row * slices].index < 0 ? __builtin_nanf("") : 1.0f / total;
  }
}

}  // namespace

void RunLikeliest(const Likeliest& op, Parallel& parallel) {
  op.bfloat16 ? RunLikeliestAs<true>(op, parallel) : RunLikeliestAs<false>(op, parallel);
}

}  // namespace peagle
