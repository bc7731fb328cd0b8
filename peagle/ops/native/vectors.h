// Vectors as wide as the machine's registers, one source for all instruction sets, and functions by lane: multiply-add, exp,
// conversions between bfloat16 and float.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace peagle {

// Lanes of one register; compilers keep wider vectors in memory.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
constexpr bool kManyRegisters = true;  // 32, else 16
#elif defined(__AVX2__)
#define PEAGLE_AVX2  // and no AVX-512
constexpr int64_t kLanes = 8;
constexpr bool kManyRegisters = false;
#else
constexpr int64_t kLanes = 4;
constexpr bool kManyRegisters = false;
#endif
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));

#define PEAGLE_INLINE inline __attribute__((always_inline))

template <class Vector>
PEAGLE_INLINE Vector Load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

template <class Vector>
PEAGLE_INLINE void Store(void* to, Vector vector) {
  std::memcpy(to, &vector, sizeof(vector));
}

PEAGLE_INLINE Floats Broadcast(float value) { return value - Floats{}; }  // keeps -0

// a * b + c, rounded once if the instruction set has one instruction for it. Compilers must not fuse other products and sums
// (-ffp-contract=off): they would fuse in one loop and not in another, and a row's bits would depend on the loop.
PEAGLE_INLINE float MulAdd(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

PEAGLE_INLINE Floats MulAdd(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(PEAGLE_AVX2)
  return reinterpret_cast<Floats>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#elif defined(__aarch64__)
  return reinterpret_cast<Floats>(vfmaq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a),
                                            reinterpret_cast<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}

PEAGLE_INLINE Floats MulAdd(Floats a, float b, Floats c) { return MulAdd(a, Broadcast(b), c); }

// A 32-bit value in all lanes.
PEAGLE_INLINE Floats Repeat(const void* from) { return reinterpret_cast<Floats>(Load<uint32_t>(from) + Words{}); }

#if defined(__AVX512BF16__)
// sum + the products of a pair of bfloat16 values in each lane, added one after the other. Denormals count as 0.
PEAGLE_INLINE Floats AddPairs(Floats a, Floats b, Floats sum) {
  return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a),
                                                   reinterpret_cast<__m512bh>(b)));
}
#endif

// The first `count` values, then zeros; none if it is negative, as behind the last output of a panel.
template <class Vector = Floats>
PEAGLE_INLINE Vector LoadFirst(const void* from, int64_t count) {
  if (count >= kLanes) return Load<Vector>(from);
  Vector values = {};
  if (count > 0) std::memcpy(&values, from, 4 * count);
  return values;
}

PEAGLE_INLINE Floats Max(Floats a, Floats b) { return a > b ? a : b; }

// Whether some lane is not 0.
PEAGLE_INLINE bool Any(Ints lanes) {
  int32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= lanes[lane];
  return any != 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// exp

// e^x within 2 ulp for x in [-87, 88]; 0 below, inf above.
PEAGLE_INLINE Floats Exp(Floats x) {
  const Floats magic = Broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats clamped = x < -87.0f ? Broadcast(-87.0f) : x;
  clamped = clamped > 88.0f ? Broadcast(88.0f) : clamped;
  Floats shifted = MulAdd(clamped, 1.44269504f, magic);
  Floats n = shifted - magic;
  Floats r = MulAdd(n, -0.693359375f, clamped);
  r = MulAdd(n, 2.12194440e-4f, r);  // ln 2 in two parts
  Floats p = Broadcast(1.9875691500e-4f);
  p = MulAdd(p, r, Broadcast(1.3981999507e-3f));
  p = MulAdd(p, r, Broadcast(8.3334519073e-3f));
  p = MulAdd(p, r, Broadcast(4.1665795894e-2f));
  p = MulAdd(p, r, Broadcast(1.6666665459e-1f));
  p = MulAdd(p, r, Broadcast(5.0000001201e-1f));
  p = MulAdd(p, r * r, r) + 1.0f;
  Ints exponent = (reinterpret_cast<Ints>(shifted) << 23) + (127 << 23);  // magic's low bits hold n
  Floats result = p * reinterpret_cast<Floats>(exponent);
  result = x < -87.0f ? Floats{} : result;
  return x > 88.0f ? Broadcast(__builtin_inff()) : result;
}

PEAGLE_INLINE Floats Sigmoid(Floats x) { return 1.0f / (1.0f + Exp(-x)); }

// ---------------------------------------------------------------------------------------------------------------------
// Values in memory: float, or bfloat16 with kHalf

template <bool kHalf>
PEAGLE_INLINE Floats LoadLanes(const void* base, int64_t index) {
  if constexpr (kHalf) {
    const Halves halves = Load<Halves>(static_cast<const uint16_t*>(base) + index);
#if defined(PEAGLE_AVX2)
    const Words words = reinterpret_cast<Words>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(halves)));  // gcc: lane by lane
#else
    const Words words = __builtin_convertvector(halves, Words);
#endif
    return reinterpret_cast<Floats>(words << 16);
  } else {
    return Load<Floats>(static_cast<const float*>(base) + index);
  }
}

template <bool kHalf>
PEAGLE_INLINE float LoadOne(const void* base, int64_t index) {
  if constexpr (kHalf) {
    uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(base)[index]) << 16;
    return Load<float>(&bits);
  } else {
    return static_cast<const float*>(base)[index];
  }
}

// The first `count` values, then zeros; none if it is negative.
template <bool kHalf>
PEAGLE_INLINE Floats GetFirst(const void* base, int64_t index, int64_t count) {
  if (count >= kLanes) return LoadLanes<kHalf>(base, index);
  Floats values = {};
  for (int64_t i = 0; i < count; ++i) values[i] = LoadOne<kHalf>(base, index + i);
  return values;
}

PEAGLE_INLINE uint16_t ToBfloat16(float value) {  // to nearest, ties to even
  uint32_t bits = Load<uint32_t>(&value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 64u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <bool kHalf>
PEAGLE_INLINE void Put(void* base, int64_t index, float value) {
  if constexpr (kHalf)
    static_cast<uint16_t*>(base)[index] = ToBfloat16(value);
  else
    static_cast<float*>(base)[index] = value;
}

// The bits of each lane as bfloat16.
PEAGLE_INLINE Words ToBfloat16(Floats values) {
  const Words bits = reinterpret_cast<Words>(values);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 64u : rounded;
}

// The nearest bfloat16 numbers.
PEAGLE_INLINE Floats Rounded(Floats values) { return reinterpret_cast<Floats>(ToBfloat16(values) << 16); }

template <bool kHalf>
PEAGLE_INLINE void PutLanes(void* base, int64_t index, Floats values) {
  if constexpr (kHalf) {
    const Words rounded = ToBfloat16(values);
#if defined(PEAGLE_AVX2)
    const __m256i words = reinterpret_cast<__m256i>(rounded);  // gcc: lane by lane
    Store(static_cast<uint16_t*>(base) + index,
          _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    Store(static_cast<uint16_t*>(base) + index, __builtin_convertvector(rounded, Halves));
#endif
  } else {
    Store(static_cast<float*>(base) + index, values);
  }
}

// Writes the first `count` lanes, or all if count is larger.
template <bool kHalf>
PEAGLE_INLINE void PutFirst(void* base, int64_t index, Floats values, int64_t count) {
  if (count >= kLanes) return PutLanes<kHalf>(base, index, values);
  for (int64_t i = 0; i < count; ++i) Put<kHalf>(base, index + i, values[i]);
}

inline void Widen(const uint16_t* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Store(to + i, LoadLanes<true>(from, i));
  for (; i < count; ++i) to[i] = LoadOne<true>(from, i);
}

inline void Round(const float* from, int64_t count, uint16_t* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) PutLanes<true>(to, i, Load<Floats>(from + i));
  for (; i < count; ++i) Put<true>(to, i, from[i]);
}

}  // namespace peagle
