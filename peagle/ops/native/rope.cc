// See kernels.h, RopeTables.

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "parallel.h"
#include "vectors.h"

namespace peagle {
namespace {

constexpr int64_t kTurns = kLanes / 2;  // angles per vector: a register's doubles
using Angles = float __attribute__((vector_size(4 * kTurns)));
using Doubles = double __attribute__((vector_size(8 * kTurns)));
using Longs = int64_t __attribute__((vector_size(8 * kTurns)));

constexpr int64_t kMultiplications = 32;  // per angle, for its cosine and sine

// Cosines and sines, rounded once from doubles with an error of at most 2e-9, for any position of a context.
PEAGLE_INLINE void Turn(const float* angles, float* cos, float* sin) {
  const Doubles x = __builtin_convertvector(Load<Angles>(angles), Doubles);
  const Doubles magic = Doubles{} + 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const Doubles shifted = x * 0.63661977236758134 + magic;
  const Doubles n = shifted - magic;                          // quarter turns
  Doubles r = x - n * 1.5707963267948966;                     // the remainder: -pi/4 .. pi/4
  r = r - n * 6.123233995736766e-17;                          // pi / 2 in two parts
  const Doubles rr = r * r;
  Doubles s = rr * (1.0 / 362880) - 1.0 / 5040;  // Taylor series to the ninth power (s) and to the tenth (c)
  s = s * rr + 1.0 / 120;
  s = s * rr - 1.0 / 6;
  s = s * rr * r + r;
  Doubles c = 1.0 / 40320 - rr * (1.0 / 3628800);
  c = c * rr - 1.0 / 720;
  c = c * rr + 1.0 / 24;
  c = c * rr - 0.5;
  c = c * rr + 1.0;
  const Longs quarter = reinterpret_cast<Longs>(shifted);  // its low bits hold n
  const Longs odd = (quarter & 1) != 0, cos_sign = ((quarter + 1) & 2) << 62, sin_sign = (quarter & 2) << 62;
  const Longs cos_bits = reinterpret_cast<Longs>(odd ? s : c) ^ cos_sign;
  const Longs sin_bits = reinterpret_cast<Longs>(odd ? c : s) ^ sin_sign;
  Store(cos, __builtin_convertvector(reinterpret_cast<Doubles>(cos_bits), Angles));
  Store(sin, __builtin_convertvector(reinterpret_cast<Doubles>(sin_bits), Angles));
}

template <bool kHalf>
void RunRopeTablesAs(const RopeTables& op, Parallel& parallel) {
  const int64_t work = op.rows * op.half * kMultiplications, chunks = std::min(Shares(work, parallel), op.rows);
  ForEach(parallel, chunks, work, [&](int64_t chunk) {
    for (int64_t row = chunk * op.rows / chunks; row < (chunk + 1) * op.rows / chunks; ++row) {
      const float position = static_cast<float>(op.positions[row]);
      for (int64_t i = 0; i < op.half; i += kLanes) {
        float angles[kLanes], cos[kLanes], sin[kLanes];
        Store(angles, LoadFirst(op.frequencies + i, op.half - i) * position);
        for (int64_t part = 0; part < kLanes; part += kTurns) Turn(angles + part, cos + part, sin + part);
        const int64_t at = row * op.half + i;
        PutFirst<kHalf>(op.cos, at, Load<Floats>(cos) * op.concentration, op.half - i);
        PutFirst<kHalf>(op.sin, at, Load<Floats>(sin) * op.concentration, op.half - i);
      }
    }
  });
}

}  // namespace

void RunRopeTables(const RopeTables& op, Parallel& parallel) {
  op.bfloat16 ? RunRopeTablesAs<true>(op, parallel) : RunRopeTablesAs<false>(op, parallel);
}

}  // namespace peagle
