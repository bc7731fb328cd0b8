// See kernels.h. One source for all instruction sets: vectors of as many lanes as the machine's registers have.

#include "kernels.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace peagle {
namespace {

// Those of one register: what is wider, compilers keep in memory.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
constexpr bool kManyRegisters = true;  // 32, else 16
#elif defined(__AVX2__)
#define PEAGLE_AVX2  // the best there is
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

PEAGLE_INLINE Floats Broadcast(float value) { return Floats{} + value; }

// The first `count` floats, and zeros behind them.
PEAGLE_INLINE Floats LoadFirst(const float* from, int64_t count) {
  if (count >= kLanes) return Load<Floats>(from);
  Floats values = {};
  for (int64_t i = 0; i < count; ++i) values[i] = from[i];
  return values;
}

PEAGLE_INLINE void StoreFirst(float* to, Floats values, int64_t count) {
  if (count >= kLanes) return Store(to, values);
  for (int64_t i = 0; i < count; ++i) to[i] = values[i];
}

PEAGLE_INLINE Floats Max(Floats a, Floats b) { return a > b ? a : b; }

// ---------------------------------------------------------------------------------------------------------------------
// Memory

// Memory for as long as a Scratch lives, the latest first to end. An op takes a dozen pieces, and malloc is slower than
// what small ones are needed for; so each thread keeps room for those.
class Scratch {
 public:
  Scratch() : begin_(used_) {}
  ~Scratch() { used_ = begin_; }
  Scratch(const Scratch&) = delete;

  template <class T>
  T* Take(int64_t count) {
    const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    if (bytes > kRoom - used_) {
      large_.push_back(std::make_unique_for_overwrite<char[]>(bytes));
      return reinterpret_cast<T*>(large_.back().get());
    }
    if (room_ == nullptr) room_ = std::make_unique_for_overwrite<char[]>(kRoom);
    used_ += bytes;
    return reinterpret_cast<T*>(room_.get() + used_ - bytes);
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int64_t kRoom = 0;  // it knows the ends of pieces that malloc gave
#else
  static constexpr int64_t kRoom = 1 << 18;
#endif
  static inline thread_local std::unique_ptr<char[]> room_;
  static inline thread_local int64_t used_ = 0;
  const int64_t begin_;
  std::vector<std::unique_ptr<char[]>> large_;
};

// ---------------------------------------------------------------------------------------------------------------------
// exp

// e^x within 2 ulp for x in [-87, 88]; 0 below, inf above.
PEAGLE_INLINE Floats Exp(Floats x) {
  const Floats magic = Broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Floats clamped = x < -87.0f ? Broadcast(-87.0f) : x;
  clamped = clamped > 88.0f ? Broadcast(88.0f) : clamped;
  Floats shifted = clamped * 1.44269504f + magic;
  Floats n = shifted - magic;
  Floats r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;  // ln 2 in two parts
  Floats p = Broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Ints exponent = (reinterpret_cast<Ints>(shifted) << 23) + (127 << 23);  // magic's low bits hold n
  Floats result = p * reinterpret_cast<Floats>(exponent);
  result = x < -87.0f ? Floats{} : result;
  return x > 88.0f ? Broadcast(__builtin_inff()) : result;
}

PEAGLE_INLINE Floats Sigmoid(Floats x) { return 1.0f / (1.0f + Exp(-x)); }

// ---------------------------------------------------------------------------------------------------------------------
// Panels: dot products of R neighbouring columns with T rows. A column is as much of a panel as a register holds.

constexpr int64_t kColumns = kPanelRows / kLanes;  // of a panel
constexpr int kTileRows = 8;  // the most rows that panels are read for at once

// Where column r of a group begins, in a panel's bytes or scales of `lane` each. A group is of whole panels, or of
// columns of one.
constexpr int64_t At(int64_t r, int64_t panel, int64_t lane) {
  return r / kColumns * panel + r % kColumns * kLanes * lane;
}

PEAGLE_INLINE Floats Code(Words nibbles) {  // the low four bits of each lane as an e2m1 number
#if defined(__AVX512F__)
  const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
  return reinterpret_cast<Floats>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(nibbles), table));
#else
  // e2m1 by arithmetic: magnitudes 0..7 are 0 .5 1 1.5 2 3 4 6
  Words magnitude = nibbles & 7u, exponent = magnitude >> 1, mantissa = magnitude & 1u;
  Words normal = ((exponent + 126u) << 23) | (mantissa << 22);
  Words small = mantissa * 0x3f000000u;
  Words bits = exponent > 0u ? normal : small;
  return reinterpret_cast<Floats>(bits | ((nibbles & 8u) << 28));
#endif
}

// sums[r][t] += weights[r] * input k of row t
template <int T, int R>
PEAGLE_INLINE void AddOuter(const Floats (&weights)[R], const float* const* x, int64_t k, Floats (&sums)[R][T]) {
  for (int t = 0; t < T; ++t) {
    const float value = x[t][k];
    for (int r = 0; r < R; ++r) sums[r][t] += weights[r] * value;
  }
}

// Asks the memory for weights before their turn: those `distance` bytes on in each of the panels of R columns that are
// read side by side, and at a panel's end the beginning of the next group's. Processors do so themselves, but not for
// several panels at once. Nothing is read: past the end is no harm.
constexpr int64_t kAheadDense = 8192, kAheadMxfp4 = 2048;  // bytes; those of four bits last longer (tried on Zen 5)

template <int R>
class Ahead {
 public:
  Ahead(int64_t panel, int64_t distance)
      : near_(std::min(distance, panel)), far_(near_ + (R - 1) / kColumns * panel), turn_(panel - near_) {}

  PEAGLE_INLINE void Fetch(int r, const char* weights, int64_t position) const {
    if (r % kColumns == 0) __builtin_prefetch(weights + (position < turn_ ? near_ : far_));
  }

 private:
  int64_t near_, far_, turn_;
};

// How many of the rows go together first, and how many columns with so many of them. One row's sum is one chain of
// additions, and a core works on eight or so at a time; more sums than registers are none the quicker.
struct Dense {
  using Input = float;
  static constexpr int Rows(int rows) { return kManyRegisters || rows <= 5 ? rows : rows == 7 ? 5 : 4; }
  static constexpr int Columns(int rows) { return rows <= (kManyRegisters ? 4 : 2) ? 4 : 2; }
};

struct Float32 : Dense {
  static int64_t PanelBytes(int64_t inputs) { return inputs * kPanelRows * 4; }

  template <int T, int R>
  static PEAGLE_INLINE void Dot(const char* panels, const uint8_t*, const float* const* x, int64_t inputs,
                                Floats (&sums)[R][T]) {
    const int64_t panel = PanelBytes(inputs);
    const Ahead<R> ahead(panel, kAheadDense);
    for (int64_t k = 0; k < inputs; ++k) {
      Floats weights[R];
      for (int r = 0; r < R; ++r) {
        const char* at = panels + At(r, panel, 4) + k * 64;
        weights[r] = Load<Floats>(at);
        ahead.Fetch(r, at, k * 64);
      }
      AddOuter<T, R>(weights, x, k, sums);
    }
  }
};

struct Bfloat16 : Dense {
  static int64_t PanelBytes(int64_t inputs) { return (inputs + 1) / 2 * kPanelRows * 4; }

  template <int T, int R>
  static PEAGLE_INLINE void Dot(const char* panels, const uint8_t*, const float* const* x, int64_t inputs,
                                Floats (&sums)[R][T]) {
    const int64_t panel = PanelBytes(inputs);
    const Ahead<R> ahead(panel, kAheadDense);
    for (int64_t pair = 0; pair < inputs / 2; ++pair) {
      // one input of the pair after the other: registers hold no more beside the sums
      const auto both = [&](int r) { return panels + At(r, panel, 4) + pair * 64; };
      Floats weights[R];
      for (int r = 0; r < R; ++r) {
        ahead.Fetch(r, both(r), pair * 64);
        weights[r] = reinterpret_cast<Floats>(Load<Words>(both(r)) << 16);
      }
      AddOuter<T, R>(weights, x, 2 * pair, sums);
      for (int r = 0; r < R; ++r) weights[r] = reinterpret_cast<Floats>(Load<Words>(both(r)) & 0xffff0000u);
      AddOuter<T, R>(weights, x, 2 * pair + 1, sums);
    }
    if (inputs % 2) {
      Floats last[R];
      for (int r = 0; r < R; ++r)
        last[r] = reinterpret_cast<Floats>(Load<Words>(panels + At(r, panel, 4) + inputs / 2 * 64) << 16);
      AddOuter<T, R>(last, x, inputs - 1, sums);
    }
  }
};

#if defined(__AVX512VNNI__) || defined(PEAGLE_AVX2)
#define PEAGLE_DIGITS
// Thirty-two neighbouring inputs of a row, for machines that add up products of bytes: integers of 23 bits times one
// power of two, which the largest of them decides. So each is off by at most 2^-23 of the largest, as its products with
// the others would be in a sum of floats; and sums of their products with codes are exact.
struct Digits {
  int8_t digits[3][32];  // to base 256, -128 .. 127, the highest first; of eight inputs 0, 2, 4, 6, 1, 3, 5, 7
  int32_t offset[3];     // what makes up for kCodeOffset: -kCodeOffset * the sum of the digits
#if defined(__AVX512VNNI__)
  float exponent;        // of half an integer's unit; NaN where an input is no number
#else
  float unit[2];         // half an integer's unit is their product, which may be no normal number; NaN as above
#endif
};

constexpr int kCodeOffset = 12;  // codes count as twice their value and so much more: unsigned bytes

#if defined(__AVX512VNNI__)
void ToDigits(const float* x, int64_t inputs, Digits* out) {
  const __m128i evens_first = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  for (; inputs > 0; inputs -= 32, x += 32, ++out) {
    const __m512 halves[2] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)};
    const __m512i magnitudes = _mm512_max_epu32(_mm512_castps_si512(_mm512_abs_ps(halves[0])),
                                                _mm512_castps_si512(_mm512_abs_ps(halves[1])));
    const int exponent = static_cast<int>(_mm512_reduce_max_epu32(magnitudes) >> 23) - 127;
    __m128i sums[3] = {};
    for (int half = 0; half < 2; ++half) {
      const __m512 scaled = _mm512_scalef_ps(halves[half], _mm512_set1_ps(static_cast<float>(21 - exponent)));
      // carries to the digit above where one is beyond 127, and its byte as a signed one
      const __m512i carry = _mm512_set1_epi32(0x8080);
      const __m512i bytes = _mm512_xor_si512(_mm512_add_epi32(_mm512_cvtps_epi32(scaled), carry), carry);
      const __m128i digits[3] = {_mm512_cvtepi32_epi8(_mm512_srli_epi32(bytes, 16)),
                                 _mm512_cvtepi32_epi8(_mm512_srli_epi32(bytes, 8)), _mm512_cvtepi32_epi8(bytes)};
      for (int i = 0; i < 3; ++i) {
        const __m128i ordered = _mm_shuffle_epi8(digits[i], evens_first);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out->digits[i] + 16 * half), ordered);
        sums[i] = _mm_dpbusd_epi32(sums[i], _mm_set1_epi8(kCodeOffset), ordered);
      }
    }
    const __m128i each = _mm_hadd_epi32(_mm_hadd_epi32(sums[0], sums[1]), _mm_hadd_epi32(sums[2], sums[2]));
    int32_t offset[4];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(offset), _mm_sub_epi32(_mm_setzero_si128(), each));
    std::copy_n(offset, 3, out->offset);
    out->exponent = exponent == 128 ? __builtin_nanf("") : static_cast<float>(exponent - 22);
  }
}
#else
// 2^n = factors[0] * factors[1], both normal numbers, for n in -252 .. 254
PEAGLE_INLINE void Factors(int n, float (&factors)[2]) {
  const int32_t halves[2] = {n >> 1, n - (n >> 1)};
  for (int i = 0; i < 2; ++i) {
    const int32_t bits = (halves[i] + 127) << 23;
    factors[i] = Load<float>(&bits);
  }
}

void ToDigits(const float* x, int64_t inputs, Digits* out) {
  // of each four integers the highest digits of the even and the odd ones, then the second, then the third
  const __m256i by_digit =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(2, 10, 6, 14, 1, 9, 5, 13, 0, 8, 4, 12, -1, -1, -1, -1));
  const __m256i carry = _mm256_set1_epi32(0x8080), magnitude = _mm256_set1_epi32(0x7fffffff);
  for (; inputs > 0; inputs -= 32, x += 32, ++out) {
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 8)
      largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), magnitude));
    const Words each = reinterpret_cast<Words>(largest);
    uint32_t most = each[0];
    for (int i = 1; i < kLanes; ++i) most = std::max(most, each[i]);
    const int exponent = static_cast<int>(most >> 23) - 127;
    float factors[2];
    Factors(21 - exponent, factors);
    for (int i = 0; i < 32; i += 8) {
      const __m256 scaled = _mm256_loadu_ps(x + i) * factors[0] * factors[1];
      // carries to the digit above where one is beyond 127, and its byte as a signed one
      const __m256i bytes = _mm256_xor_si256(_mm256_add_epi32(_mm256_cvtps_epi32(scaled), carry), carry);
      const __m256i sorted = _mm256_shuffle_epi8(bytes, by_digit);
      const __m128i four = _mm256_castsi256_si128(sorted), more = _mm256_extracti128_si256(sorted, 1);
      const __m128i higher = _mm_unpacklo_epi16(four, more), lowest = _mm_unpackhi_epi16(four, more);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out->digits[0] + i), higher);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out->digits[1] + i), _mm_srli_si128(higher, 8));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out->digits[2] + i), lowest);
    }
    for (int i = 0; i < 3; ++i) {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(kCodeOffset), Load<__m256i>(out->digits[i]));
      const Ints sums = reinterpret_cast<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(-1)));
      out->offset[i] = 0;
      for (int lane = 0; lane < kLanes; ++lane) out->offset[i] += sums[lane];
    }
    Factors(exponent - 22, out->unit);
    if (exponent == 128) out->unit[0] = __builtin_nanf("");
  }
}
#endif
#endif

struct Mxfp4 {
  static constexpr int Rows(int rows) { return rows; }
  static int64_t PanelBytes(int64_t inputs) { return inputs / 8 * kPanelRows * 4; }

  // 2^(scale - 127) for each row of a column. XLA flushes denormals, so scale 0 (2^-127) counts as 0.
  static PEAGLE_INLINE Floats Power(const uint8_t* scales) {
    Words exponents;
    for (int i = 0; i < kLanes; ++i) exponents[i] = scales[i];
    return reinterpret_cast<Floats>(exponents << 23);
  }

#if defined(__AVX512VNNI__)
  using Input = Digits;
  static constexpr int Columns(int rows) { return rows <= 1 ? 4 : rows <= 4 ? 2 : 1; }  // sums of three digits, too

  template <int T, int R>
  static PEAGLE_INLINE void Dot(const char* panels, const uint8_t* scales, const Digits* const* x, int64_t inputs,
                                Floats (&sums)[R][T]) {
    const __m512i values = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));  // 2 * e2m1 + kCodeOffset
    const __m512i low = _mm512_set1_epi8(15);
    const int64_t panel = PanelBytes(inputs), blocks = inputs / 32;
    const Ahead<R> ahead(panel, kAheadMxfp4);
    for (int64_t block = 0; block < blocks; ++block) {
      __m512i part[R][T][3];
      for (int t = 0; t < T; ++t)
        for (int i = 0; i < 3; ++i)
          for (int r = 0; r < R; ++r) part[r][t][i] = _mm512_set1_epi32(x[t][block].offset[i]);
#pragma GCC unroll 4
      for (int64_t word = 0; word < 4; ++word) {
        __m512i even[R], odd[R];
        for (int r = 0; r < R; ++r) {
          const int64_t at = (4 * block + word) * 64;
          const __m512i codes = _mm512_loadu_si512(panels + r * panel + at);
          ahead.Fetch(r, panels + r * panel + at, at);
          even[r] = _mm512_shuffle_epi8(values, _mm512_and_si512(codes, low));
          odd[r] = _mm512_shuffle_epi8(values, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low));
        }
        for (int t = 0; t < T; ++t)
          for (int i = 0; i < 3; ++i) {
            const int8_t* digits = x[t][block].digits[i] + 8 * word;
            const __m512i of_even = _mm512_set1_epi32(Load<int32_t>(digits));
            const __m512i of_odd = _mm512_set1_epi32(Load<int32_t>(digits + 4));
            for (int r = 0; r < R; ++r) {
              part[r][t][i] = _mm512_dpbusd_epi32(part[r][t][i], even[r], of_even);
              part[r][t][i] = _mm512_dpbusd_epi32(part[r][t][i], odd[r], of_odd);
            }
          }
      }
      for (int r = 0; r < R; ++r) {
        const Floats power = Power(scales + At(r, blocks * kPanelRows, 1) + block * kPanelRows);
        for (int t = 0; t < T; ++t) {
          // both are below 2^24 in magnitude: floats hold them
          const __m512i lower = _mm512_add_epi32(_mm512_slli_epi32(part[r][t][1], 8), part[r][t][2]);
          const __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[r][t][0]), _mm512_set1_ps(65536.0f),
                                             _mm512_cvtepi32_ps(lower));
          const __m512 scaled = _mm512_scalef_ps(sum, _mm512_set1_ps(x[t][block].exponent));
          sums[r][t] += reinterpret_cast<Floats>(scaled) * power;
        }
      }
    }
  }
#elif defined(PEAGLE_AVX2)
  using Input = Digits;
  static constexpr int Columns(int) { return 1; }  // a block of one column fills eight registers

  template <int T, int R>
  static PEAGLE_INLINE void Dot(const char* panels, const uint8_t* scales, const Digits* const* x, int64_t inputs,
                                Floats (&sums)[R][T]) {
    static_assert(R == 1);
    const __m256i values = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));  // 2 * e2m1 + kCodeOffset
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const int64_t panel = PanelBytes(inputs), blocks = inputs / 32;
    const Ahead<R> ahead(panel, kAheadMxfp4);
    for (int64_t block = 0; block < blocks; ++block) {
      __m256i codes[8];
#pragma GCC unroll 4
      for (int64_t word = 0; word < 4; ++word) {
        const int64_t at = (4 * block + word) * 64;
        const __m256i both = Load<__m256i>(panels + at);
        ahead.Fetch(0, panels + at, at);
        codes[2 * word] = _mm256_shuffle_epi8(values, _mm256_and_si256(both, low));
        codes[2 * word + 1] = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
      }
      const Floats power = Power(scales + block * kPanelRows);
      for (int t = 0; t < T; ++t) {
        const Digits& row = x[t][block];
        __m256i part[3];
#pragma GCC unroll 3
        for (int i = 0; i < 3; ++i) {
          // products of two bytes are 6144 at most in magnitude, with the one beside: four such sums fit into sixteen bits
          auto products = [&](int64_t first) {
            __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 4
            for (int64_t j = first; j < first + 4; ++j)
              sum = _mm256_add_epi16(
                  sum, _mm256_maddubs_epi16(codes[j], _mm256_set1_epi32(Load<int32_t>(row.digits[i] + 4 * j))));
            return _mm256_madd_epi16(sum, ones);
          };
          part[i] = _mm256_add_epi32(_mm256_add_epi32(products(0), products(4)), _mm256_set1_epi32(row.offset[i]));
        }
        // both are below 2^24 in magnitude: floats hold them
        const __m256i lower = _mm256_add_epi32(_mm256_slli_epi32(part[1], 8), part[2]);
        const __m256 sum =
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(part[0]), _mm256_set1_ps(65536.0f), _mm256_cvtepi32_ps(lower));
        sums[0][t] += reinterpret_cast<Floats>(sum * row.unit[0] * row.unit[1]) * power;
      }
    }
  }
#else
  using Input = float;
  static constexpr int Columns(int rows) {  // sums of a block beside those of the row: more registers
    return kManyRegisters ? (rows <= 1 ? 4 : 2) : (rows <= 1 ? 2 : 1);
  }

  template <int T, int R>
  static PEAGLE_INLINE void Dot(const char* panels, const uint8_t* scales, const float* const* x, int64_t inputs,
                                Floats (&sums)[R][T]) {
    const int64_t panel = PanelBytes(inputs), blocks = inputs / 32;
    const Ahead<R> ahead(panel, kAheadMxfp4);
    for (int64_t block = 0; block < blocks; ++block) {
      Floats part[R][T] = {};
      for (int64_t word = 4 * block; word < 4 * block + 4; ++word) {
        Words nibbles[R];
        for (int r = 0; r < R; ++r) {
          const char* at = panels + At(r, panel, 4) + word * 64;
          nibbles[r] = Load<Words>(at);
          ahead.Fetch(r, at, word * 64);
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
          Floats weights[R];
          for (int r = 0; r < R; ++r) weights[r] = Code(nibbles[r] >> (4 * j));
          AddOuter<T, R>(weights, x, 8 * word + j, part);
        }
      }
      for (int r = 0; r < R; ++r) {
        const Floats power = Power(scales + At(r, blocks * kPanelRows, 1) + block * kPanelRows);
        for (int t = 0; t < T; ++t) sums[r][t] += part[r][t] * power;
      }
    }
  }
#endif
};

constexpr int kTilePanels = 16;   // panels of a chunk
constexpr int64_t kBlockRows = 64;  // rows whose inputs stay in cache while all panels pass by

struct Tile {
  float values[kTilePanels][kTileRows][kPanelRows];  // [panel][row][output of the panel]
};

// Rows of inputs in the form in which the weights' format multiplies them.
class Inputs {
 public:
  Inputs(const Matrix& matrix, const float* const* x, int64_t rows, Parallel& parallel, Scratch& scratch);
  const void* const* From(int64_t row) const { return row_ + row; }

 private:
  const void** row_;
};

template <class W, int T, int R>
__attribute__((noinline)) void DotGroup(const char* panels, const uint8_t* scales, int64_t inputs,
                                        const void* const* x, float* out) {
  const typename W::Input* rows[T];
  for (int t = 0; t < T; ++t) rows[t] = static_cast<const typename W::Input*>(x[t]);
  Floats sums[R][T] = {};
  W::template Dot<T, R>(panels, scales, rows, inputs, sums);
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) Store(out + At(r, kTileRows * kPanelRows, 1) + t * kPanelRows, sums[r][t]);
}

// The same of R columns that are more than go together with so many rows.
template <class W, int T, int R>
PEAGLE_INLINE void DotColumns(const char* panels, const uint8_t* scales, int64_t inputs, const void* const* x, float* out) {
  constexpr int kTogether = std::min(R, W::Columns(T));
  const int64_t bytes = W::PanelBytes(inputs), scale_bytes = inputs / 32 * kPanelRows;
  for (int r = 0; r < R; r += kTogether)
    DotGroup<W, T, kTogether>(panels + At(r, bytes, 4), scales + At(r, scale_bytes, 1), inputs, x,
                              out + At(r, kTileRows * kPanelRows, 1));
}

// The tile of `count` panels (from `first` on) and T rows, by groups of columns.
template <class W, int T>
void DotPanels(const Matrix& matrix, int64_t first, int64_t count, const void* const* x, Tile& tile) {
  constexpr int kFirst = W::Rows(T), kRest = T - kFirst;
  constexpr int kMost = std::max(W::Columns(kFirst), kRest > 0 ? W::Columns(kRest) : 1);
  const int64_t bytes = W::PanelBytes(matrix.inputs), scale_bytes = matrix.inputs / 32 * kPanelRows;
  auto panels = static_cast<const char*>(matrix.panels) + first * bytes;
  auto scales = matrix.scales == nullptr ? nullptr : matrix.scales + first * scale_bytes;
  int64_t c = 0;
  auto group = [&]<int R>() {
    for (; c + R <= count * kColumns; c += R) {
      const char* weights = panels + At(c, bytes, 4);
      const uint8_t* powers = scales + At(c, scale_bytes, 1);
      float* out = tile.values[0][0] + At(c, kTileRows * kPanelRows, 1);
      DotColumns<W, kFirst, R>(weights, powers, matrix.inputs, x, out);
      if constexpr (kRest > 0) DotColumns<W, kRest, R>(weights, powers, matrix.inputs, x + kFirst, out + kFirst * kPanelRows);
    }
  };
  if constexpr (kMost >= 4) group.template operator()<4>();
  if constexpr (kMost >= 2) group.template operator()<2>();
  group.template operator()<1>();
}

template <class W>
void DotFormat(const Matrix& matrix, int64_t first, int64_t count, const void* const* x, int64_t rows, Tile& tile) {
  switch (rows) {
    case 1: return DotPanels<W, 1>(matrix, first, count, x, tile);
    case 2: return DotPanels<W, 2>(matrix, first, count, x, tile);
    case 3: return DotPanels<W, 3>(matrix, first, count, x, tile);
    case 4: return DotPanels<W, 4>(matrix, first, count, x, tile);
    case 5: return DotPanels<W, 5>(matrix, first, count, x, tile);
    case 6: return DotPanels<W, 6>(matrix, first, count, x, tile);
    case 7: return DotPanels<W, 7>(matrix, first, count, x, tile);
    default: return DotPanels<W, 8>(matrix, first, count, x, tile);
  }
}

// tile = the dot products of panels first .. first + count - 1 with up to kTileRows rows
void Dot(const Matrix& matrix, int64_t first, int64_t count, const void* const* x, int64_t rows, Tile& tile) {
  switch (matrix.format) {
    case Format::kFloat32: return DotFormat<Float32>(matrix, first, count, x, rows, tile);
    case Format::kBfloat16: return DotFormat<Bfloat16>(matrix, first, count, x, rows, tile);
    case Format::kMxfp4: return DotFormat<Mxfp4>(matrix, first, count, x, rows, tile);
  }
}

int64_t Panels(int64_t outputs) { return (outputs + kPanelRows - 1) / kPanelRows; }

int64_t PanelBytes(const Matrix& matrix) {
  switch (matrix.format) {
    case Format::kFloat32: return Float32::PanelBytes(matrix.inputs);
    case Format::kBfloat16: return Bfloat16::PanelBytes(matrix.inputs);
    default: return Mxfp4::PanelBytes(matrix.inputs);
  }
}

// How many chunks to make of that much work: one for each thread, none of them less than half of what is worth one.
int64_t Shares(int64_t work, const Parallel& parallel) {
  return std::clamp<int64_t>(2 * work / kWorthAThread, 1, parallel.threads());
}

// `panels` cut into that many equal chunks, or more where they would hold more than kTilePanels.
struct Cut {
  int64_t panels, size, chunks;

  Cut(int64_t panels, int64_t shares)
      : panels(panels),
        size(std::clamp<int64_t>((panels + shares - 1) / shares, 1, kTilePanels)),
        chunks((panels + size - 1) / size) {}
  int64_t First(int64_t chunk) const { return chunk * size; }
  int64_t Count(int64_t chunk) const { return std::min(size, panels - First(chunk)); }
};

template <class Body>
void ForEach(Parallel& parallel, int64_t chunks, int64_t work, const Body& body) {
  parallel.Run(
      chunks, work, [](void* context, int64_t chunk) { (*static_cast<const Body*>(context))(chunk); },
      const_cast<Body*>(&body));
}

Inputs::Inputs([[maybe_unused]] const Matrix& matrix, const float* const* x, int64_t rows,
               [[maybe_unused]] Parallel& parallel, Scratch& scratch)
    : row_(scratch.Take<const void*>(rows)) {
#if defined(PEAGLE_DIGITS)
  if (matrix.format == Format::kMxfp4) {
    const int64_t blocks = matrix.inputs / 32;
    Digits* const digits = scratch.Take<Digits>(rows * blocks);
    ForEach(parallel, rows, rows * matrix.inputs, [&](int64_t row) {
      ToDigits(x[row], matrix.inputs, digits + row * blocks);
      row_[row] = digits + row * blocks;
    });
    return;
  }
#endif
  std::copy_n(x, rows, row_);
}

// What multiplying `rows` rows costs, in weight bytes read: the arithmetic of four rows weighs as much as reading, and that
// of codes, where registers are narrow, much more (tried on Zen 3).
int64_t Work(const Matrix& matrix, int64_t panels, int64_t rows) {
  const int64_t bytes = panels * PanelBytes(matrix);
  return matrix.format == Format::kMxfp4 && !kManyRegisters ? 5 * bytes * rows : bytes * (4 + rows) / 4;
}

// ---------------------------------------------------------------------------------------------------------------------
// Linear

void Normalize(const float* x, const Norm& norm, int64_t width, float* out) {
  Floats squares = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    Floats values = Load<Floats>(x + i);
    squares += values * values;
  }
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += squares[lane];
  for (; i < width; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + norm.epsilon);
  for (i = 0; i < width; ++i) out[i] = x[i] * scale * norm.weight[i];
}

// The active ones of T rows, and each one's inputs: normalised into `room` where there is a norm.
struct ActiveRows {
  int64_t* const row;
  const float** const x;
  int64_t count = 0;

  ActiveRows(const float* all, const Norm& norm, const int32_t* positions, int64_t rows, int64_t width, Scratch& scratch)
      : row(scratch.Take<int64_t>(rows)), x(scratch.Take<const float*>(rows)) {
    float* const room = norm.weight == nullptr ? nullptr : scratch.Take<float>(rows * width);
    for (int64_t i = 0; i < rows; ++i) {
      if (positions != nullptr && positions[i] < 0) continue;
      row[count] = i;
      x[count] = all + i * width;
      if (room != nullptr) {
        Normalize(x[count], norm, width, room + count * width);
        x[count] = room + count * width;
      }
      ++count;
    }
  }
};

// Zeros for the inactive rows of out.
void ClearInactive(const int32_t* positions, int64_t rows, int64_t width, float* out) {
  for (int64_t i = 0; positions != nullptr && i < rows; ++i)
    if (positions[i] < 0) std::fill_n(out + i * width, width, 0.0f);
}

// out, bias and residual as in Linear
void Multiply(const Matrix& weight, const ActiveRows& active, const float* bias, const float* residual, float* out_rows,
              Parallel& parallel) {
  const int64_t outputs = weight.outputs, panels = Panels(outputs);
  for (int64_t start = 0; start < active.count; start += kBlockRows) {
    const int64_t end = std::min(active.count, start + kBlockRows);
    const int64_t work = Work(weight, panels, end - start);
    const Cut cut(panels, Shares(work, parallel));
    Scratch scratch;
    const Inputs inputs(weight, active.x + start, end - start, parallel, scratch);
    ForEach(parallel, cut.chunks, work, [&](int64_t chunk) {
      Tile tile;
      const int64_t first = cut.First(chunk), count = cut.Count(chunk);
      for (int64_t row = start; row < end; row += kTileRows) {
        const int64_t rows = std::min<int64_t>(kTileRows, end - row);
        Dot(weight, first, count, inputs.From(row - start), rows, tile);
        for (int64_t t = 0; t < rows; ++t) {
          for (int64_t p = 0; p < count; ++p) {
            for (int64_t i = 0; i < kPanelRows; i += kLanes) {
              const int64_t column = (first + p) * kPanelRows + i, kept = outputs - column;
              const int64_t at = active.row[row + t] * outputs + column;
              Floats values = Load<Floats>(tile.values[p][t] + i);
              if (bias != nullptr) values += LoadFirst(bias + column, kept);
              if (residual != nullptr) values += LoadFirst(residual + at, kept);
              StoreFirst(out_rows + at, values, kept);
            }
          }
        }
      }
    });
  }
}

}  // namespace

void RunLinear(const Linear& op, Parallel& parallel) {
  Scratch scratch;
  const ActiveRows active(op.x, op.norm, op.positions, op.rows, op.weight.inputs, scratch);
  ClearInactive(op.positions, op.rows, op.weight.outputs, op.out);
  Multiply(op.weight, active, op.bias, op.residual, op.out, parallel);
}

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Experts

struct Choice {
  int64_t row;  // its place among the active ones
  float weight;
};

// The experts that some row selected, in ascending order, each with its rows.
struct Routing {
  int64_t *expert, *begin;  // expert i's choices are begin[i] .. begin[i + 1] - 1
  Choice* choices;
  int64_t count = 0;
};

// The top_k experts by the logits, the highest first; of equal ones the lower.
void Select(const float* logits, int64_t num_experts, int64_t top_k, int64_t* chosen) {
  int64_t count = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    if (count == top_k && !(logits[e] > logits[chosen[count - 1]])) continue;
    int64_t place = count < top_k ? count++ : count - 1;
    for (; place > 0 && logits[e] > logits[chosen[place - 1]]; --place) chosen[place] = chosen[place - 1];
    chosen[place] = e;
  }
}

Routing Route(const Experts& op, const ActiveRows& active, const float* all_logits, Scratch& scratch) {
  const int64_t total = active.count * op.top_k;
  int64_t *ids = scratch.Take<int64_t>(total), *load = scratch.Take<int64_t>(op.num_experts + 1);
  float* weights = scratch.Take<float>(total);
  std::fill_n(load, op.num_experts + 1, 0);
  for (int64_t row = 0; row < active.count; ++row) {
    const float* logits = all_logits + active.row[row] * op.num_experts;
    int64_t* chosen = ids + row * op.top_k;
    float* weight = weights + row * op.top_k;
    Select(logits, op.num_experts, op.top_k, chosen);
    float sum = 0;
    for (int64_t j = 0; j < op.top_k; ++j) {
      ++load[chosen[j] + 1];
      sum += weight[j] = Exp(Broadcast(logits[chosen[j]] - logits[chosen[0]]))[0];
    }
    for (int64_t j = 0; j < op.top_k; ++j) weight[j] /= sum;
  }
  Routing routing{scratch.Take<int64_t>(op.num_experts), scratch.Take<int64_t>(op.num_experts + 1),
                  scratch.Take<Choice>(total)};
  for (int64_t e = 0; e < op.num_experts; ++e) {
    if (load[e + 1] > 0) {
      routing.begin[routing.count] = load[e];
      routing.expert[routing.count++] = e;
    }
    load[e + 1] += load[e];
  }
  routing.begin[routing.count] = total;
  for (int64_t i = 0; i < total; ++i) routing.choices[load[ids[i]]++] = {i / op.top_k, weights[i]};
  return routing;
}

PEAGLE_INLINE Floats SwiGlu(Floats gate, Floats up, float limit) {
  const Floats most = Broadcast(limit);
  gate = gate > most ? most : gate;
  up = up > most ? most : up;
  up = up < -most ? -most : up;
  return gate * Sigmoid(1.702f * gate) * (up + 1.0f);
}

}  // namespace

void RunExperts(const Experts& op, Parallel& parallel) {
  const int64_t width = op.gate_up.inputs, hidden = op.down.inputs;
  const int64_t pairs = Panels(hidden), padded = pairs * kPanelRows, columns = Panels(width);
  Scratch scratch;
  const ActiveRows active(op.x, op.norm, op.positions, op.rows, width, scratch);
  ClearInactive(op.positions, op.rows, width, op.out);
  float* const logits = scratch.Take<float>(op.rows * op.num_experts);
  Multiply(op.router, active, op.router_bias, nullptr, logits, parallel);
  const Routing routing = Route(op, active, logits, scratch);
  const int64_t total = active.count * op.top_k;
  const Inputs inputs(op.gate_up, active.x, active.count, parallel, scratch);
  // the hidden values of each choice
  float* const activations = scratch.Take<float>(total * padded);

  auto of_expert = [&](const Matrix& matrix, int64_t panels, int64_t i) {
    Matrix one = matrix;
    const int64_t expert = routing.expert[i];
    one.panels = static_cast<const char*>(matrix.panels) + expert * panels * PanelBytes(matrix);
    if (matrix.scales != nullptr) one.scales = matrix.scales + expert * panels * (matrix.inputs / 32) * kPanelRows;
    return one;
  };

  const int64_t chosen = std::max<int64_t>(1, routing.count), rows_per_expert = (total + chosen - 1) / chosen;
  const int64_t up_work = Work(op.gate_up, 2 * pairs, rows_per_expert) * routing.count;
  const Cut up_cut(pairs, (Shares(up_work, parallel) + chosen - 1) / chosen);
  // whole pairs of panels: a chunk of n pairs is a tile of 2 n panels
  const int64_t pairs_per_chunk = std::min<int64_t>(up_cut.size, kTilePanels / 2);
  const int64_t up_chunks = (pairs + pairs_per_chunk - 1) / pairs_per_chunk;
  ForEach(parallel, routing.count * up_chunks, up_work, [&](int64_t chunk) {
    Tile tile;
    const int64_t i = chunk / up_chunks, first = chunk % up_chunks * pairs_per_chunk;
    const int64_t count = std::min(pairs_per_chunk, pairs - first);
    const Matrix matrix = of_expert(op.gate_up, 2 * pairs, i);
    const float* bias = op.gate_up_bias + routing.expert[i] * 2 * padded;
    for (int64_t choice = routing.begin[i]; choice < routing.begin[i + 1]; choice += kTileRows) {
      const int64_t rows = std::min<int64_t>(kTileRows, routing.begin[i + 1] - choice);
      const void* x[kTileRows];
      for (int64_t t = 0; t < rows; ++t) x[t] = *inputs.From(routing.choices[choice + t].row);
      Dot(matrix, 2 * first, 2 * count, x, rows, tile);
      for (int64_t p = 0; p < count; ++p) {
        const float* gate_bias = bias + 2 * (first + p) * kPanelRows;
        const float* up_bias = gate_bias + kPanelRows;
        for (int64_t t = 0; t < rows; ++t) {
          float* activated = activations + (choice + t) * padded + (first + p) * kPanelRows;
          for (int64_t i = 0; i < kPanelRows; i += kLanes) {
            const Floats gate = Load<Floats>(tile.values[2 * p][t] + i) + Load<Floats>(gate_bias + i);
            const Floats up = Load<Floats>(tile.values[2 * p + 1][t] + i) + Load<Floats>(up_bias + i);
            Store(activated + i, SwiGlu(gate, up, op.limit));
          }
        }
      }
    }
  });

  const float** const hidden_of = scratch.Take<const float*>(total);
  for (int64_t choice = 0; choice < total; ++choice) hidden_of[choice] = activations + choice * padded;
  const Inputs hidden_inputs(op.down, hidden_of, total, parallel, scratch);

  // each chunk owns some output columns of all rows, and adds up the experts in ascending order
  const int64_t down_work = Work(op.down, columns, rows_per_expert) * routing.count;
  const Cut down_cut(columns, Shares(down_work, parallel));
  ForEach(parallel, down_cut.chunks, down_work, [&](int64_t chunk) {
    Tile tile;
    const int64_t first = down_cut.First(chunk), count = down_cut.Count(chunk);
    const int64_t left = first * kPanelRows, right = std::min(width, (first + count) * kPanelRows);
    for (int64_t i = 0; i < active.count; ++i) {
      const int64_t at = active.row[i] * width;
      std::copy(op.x + at + left, op.x + at + right, op.out + at + left);
    }
    for (int64_t i = 0; i < routing.count; ++i) {
      const Matrix matrix = of_expert(op.down, columns, i);
      const float* bias = op.down_bias + routing.expert[i] * width;
      for (int64_t choice = routing.begin[i]; choice < routing.begin[i + 1]; choice += kTileRows) {
        const int64_t rows = std::min<int64_t>(kTileRows, routing.begin[i + 1] - choice);
        Dot(matrix, first, count, hidden_inputs.From(choice), rows, tile);
        for (int64_t t = 0; t < rows; ++t) {
          const Choice& one = routing.choices[choice + t];
          float* out = op.out + active.row[one.row] * width;
          for (int64_t p = 0; p < count; ++p) {
            for (int64_t j = 0; j < kPanelRows; j += kLanes) {
              const int64_t column = left + p * kPanelRows + j, kept = width - column;
              const Floats values = Load<Floats>(tile.values[p][t] + j) + LoadFirst(bias + column, kept);
              StoreFirst(out + column, LoadFirst(out + column, kept) + one.weight * values, kept);
            }
          }
        }
      }
    }
  });
}

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Attention

template <bool kHalf>
PEAGLE_INLINE Floats LoadLanes(const void* base, int64_t index) {
  if constexpr (kHalf) {
    const Halves halves = Load<Halves>(static_cast<const uint16_t*>(base) + index);
#if defined(PEAGLE_AVX2)
    const Words words = reinterpret_cast<Words>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(halves)));  // gcc: by lane
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

template <bool kHalf>
PEAGLE_INLINE void PutLanes(void* base, int64_t index, Floats values) {
  if constexpr (kHalf) {
    const Words bits = reinterpret_cast<Words>(values);
    Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    rounded = (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 64u : rounded;
#if defined(PEAGLE_AVX2)
    const __m256i words = reinterpret_cast<__m256i>(rounded);  // gcc: by lane
    Store(static_cast<uint16_t*>(base) + index,
          _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    Store(static_cast<uint16_t*>(base) + index, __builtin_convertvector(rounded, Halves));
#endif
  } else {
    Store(static_cast<float*>(base) + index, values);
  }
}

// The lanes of a, then of b, that `place` names for each lane.
template <class Place, int32_t... lane>
PEAGLE_INLINE Floats Pick(Floats a, Floats b, Place place, std::integer_sequence<int32_t, lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, place(lane)...);
#else
  return __builtin_shuffle(a, b, Ints{place(lane)...});
#endif
}

using EachLane = std::make_integer_sequence<int32_t, kLanes>;

// Of each 2 n lanes the first n of a, then the first n of b.
template <int n>
PEAGLE_INLINE Floats Firsts(Floats a, Floats b) {
  return Pick(a, b, [](int32_t lane) constexpr { return lane % (2 * n) < n ? lane : lane - n + int32_t{kLanes}; }, EachLane());
}

// Of each 2 n lanes the last n of a, then the last n of b.
template <int n>
PEAGLE_INLINE Floats Lasts(Floats a, Floats b) {
  return Pick(a, b, [](int32_t lane) constexpr { return lane % (2 * n) < n ? lane + n : lane + int32_t{kLanes}; }, EachLane());
}

// The first of v are the sums of two neighbours each, by n lanes.
template <int n>
PEAGLE_INLINE void AddNeighbours(Floats (&v)[kLanes]) {
#pragma GCC unroll 8
  for (int i = 0; i < kLanes / (2 * n); ++i) v[i] = Firsts<n>(v[2 * i], v[2 * i + 1]) + Lasts<n>(v[2 * i], v[2 * i + 1]);
  if constexpr (4 * n <= kLanes) AddNeighbours<2 * n>(v);
}

// Lane i = the sum over the lanes of parts[i]: rounds of adding neighbours.
PEAGLE_INLINE Floats SumEach(Floats (&parts)[kLanes]) {
  AddNeighbours<1>(parts);
  return parts[0];
}

// Rows become columns in squares of 2 n, then in smaller ones.
template <int n = kLanes / 2>
PEAGLE_INLINE void Turn(Floats (&v)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & n) continue;
    const Floats a = v[i], b = v[i + n];
    v[i] = Firsts<n>(a, b);
    v[i + n] = Lasts<n>(a, b);
  }
  if constexpr (n > 1) Turn<n / 2>(v);
}

constexpr int64_t kStretch = 64;  // positions whose values go together

// Where the vectors of neighbouring positions start in the cache, from a multiple of kLanes on. Positions outside of those
// that some query reads stand for the nearest that one does.
struct Places {
  int64_t at[kStretch];
};

// One query head at one position, and what becomes of it. Everything is summed in the order of positions, by tiles, so
// that the result depends on the position and on what the cache holds.
struct Query {
  int64_t oldest, newest;  // the positions it reads
  int64_t place;           // of its vector, and of what comes out
  const float* sink;       // or null
  float* vector;           // scaled; [head_dim]
  float* weights;          // of all positions of the tiles
  float* sums;             // [2][head_dim]: of values at even and at odd positions
  float total;
};

PEAGLE_INLINE bool Overlaps(const Query& query, int64_t position) {
  return position <= query.newest && position + kLanes > query.oldest;
}

// The scores of a tile are the dot products of a query with its keys, kLanes of them. A head's inputs are multiplied lane
// by lane, kLanes after kLanes, then the lanes are added up, each with its neighbour. What is behind the last kLanes comes
// last.

// kHead: the head's width where it is known, else 0
template <bool kHalf, int kHead>
PEAGLE_INLINE Floats Scores(const Query& query, const void* keys, const int64_t* at, int64_t width) {
  const int64_t whole = (kHead > 0 ? kHead : width) / kLanes * kLanes;
  Floats parts[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    Floats part = {};
#pragma GCC unroll 4
    for (int64_t h = 0; h < whole; h += kLanes)
      part += Load<Floats>(query.vector + h) * LoadLanes<kHalf>(keys, at[i] + h);
    parts[i] = part;
  }
  return SumEach(parts);
}

// A tile's keys as [head_dim][kLanes], without what is behind the last kLanes inputs: then a lane is a position, and several
// queries take the same values.
template <bool kHalf>
void TurnKeys(const void* keys, const int64_t* at, int64_t width, float* turned) {
  for (int64_t h = 0; h + kLanes <= width; h += kLanes) {
    Floats rows[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = LoadLanes<kHalf>(keys, at[i] + h);
    Turn(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) Store(turned + (h + i) * kLanes, rows[i]);
  }
}

// sums[q] = what inputs first .. first + count - 1 of every kLanes bring, added up as in Scores
template <int kQueries, int kFirst, int kCount, int kHead>
PEAGLE_INLINE void AddInputs(const float* const (&vectors)[kQueries], const float* turned, int64_t width,
                             Floats (&sums)[kQueries]) {
  if constexpr (kCount == 1) {
    const int64_t whole = (kHead > 0 ? kHead : width) / kLanes * kLanes;
    for (int q = 0; q < kQueries; ++q) sums[q] = Floats{};
#pragma GCC unroll 4
    for (int64_t h = kFirst; h < whole; h += kLanes) {
      const Floats keys = Load<Floats>(turned + h * kLanes);
      for (int q = 0; q < kQueries; ++q) sums[q] += vectors[q][h] * keys;
    }
  } else {
    Floats others[kQueries];
    AddInputs<kQueries, kFirst, kCount / 2, kHead>(vectors, turned, width, sums);
    AddInputs<kQueries, kFirst + kCount / 2, kCount / 2, kHead>(vectors, turned, width, others);
    for (int q = 0; q < kQueries; ++q) sums[q] += others[q];
  }
}

template <int kQueries, int kHead>
__attribute__((noinline)) void ScoresTurned(const Query* queries, const float* turned, int64_t width,
                                            Floats (&scores)[kQueries]) {
  const float* vectors[kQueries];
  for (int q = 0; q < kQueries; ++q) vectors[q] = queries[q].vector;
  AddInputs<kQueries, 0, kLanes, kHead>(vectors, turned, width, scores);
}

// The scores whole: what is behind the last kLanes inputs comes to them, and -inf for what the query does not read.
template <bool kHalf>
PEAGLE_INLINE Floats Finish(Floats scores, const Query& query, const void* keys, const int64_t* at, int64_t position,
                            int64_t width) {
  for (int64_t h = width / kLanes * kLanes; h < width; ++h)
    for (int i = 0; i < kLanes; ++i) scores[i] += query.vector[h] * LoadOne<kHalf>(keys, at[i] + h);
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const int32_t before = static_cast<int32_t>(std::clamp<int64_t>(query.oldest - position, 0, kLanes));
  const int32_t behind = static_cast<int32_t>(std::clamp<int64_t>(query.newest - position, -1, kLanes));
  scores = lane < before ? Broadcast(-__builtin_inff()) : scores;
  scores = lane > behind ? Broadcast(-__builtin_inff()) : scores;
  return scores;
}

// Scores become weights exp(score - the largest); total is their sum with the sink's.
void Weigh(Query& query, int64_t first, int64_t last) {
  Floats peak = Broadcast(query.sink == nullptr ? -__builtin_inff() : *query.sink), sums = {};
  for (int64_t p = first; p <= last; p += kLanes)
    if (Overlaps(query, p)) peak = Max(Load<Floats>(query.weights + p - first), peak);
  float most = peak[0];
  for (int i = 1; i < kLanes; ++i) most = std::max(most, peak[i]);
  for (int64_t p = first; p <= last; p += kLanes) {
    if (!Overlaps(query, p)) continue;
    Floats weights = Exp(Load<Floats>(query.weights + p - first) - most);
    sums += weights;
    Store(query.weights + p - first, weights);
  }
  query.total = query.sink == nullptr ? 0.0f : Exp(Broadcast(*query.sink - most))[0];
  for (int i = 0; i < kLanes; ++i) query.total += sums[i];
}

// sums += a tile's weights times its values, for queries that all read positions begin .. end - 1 of it, in their order
template <bool kHalf, int kQueries>
void AddValues(const Query* queries, int64_t offset, const void* values, const int64_t* at, int64_t begin, int64_t end,
               int64_t head_dim) {
  const float* weights[kQueries];
  for (int q = 0; q < kQueries; ++q) weights[q] = queries[q].weights + offset;
  constexpr int kBlocks = kManyRegisters ? 4 : 2;  // sums that registers hold
  int64_t h = 0;
  for (; h + kBlocks * kLanes <= head_dim; h += kBlocks * kLanes) {
    Floats sums[kQueries][2][kBlocks];
    for (int q = 0; q < kQueries; ++q)
      for (int j = 0; j < 2; ++j)
        for (int b = 0; b < kBlocks; ++b) sums[q][j][b] = Load<Floats>(queries[q].sums + j * head_dim + h + b * kLanes);
    auto add = [&](int64_t i, int j) {
      Floats read[kBlocks];
      for (int b = 0; b < kBlocks; ++b) read[b] = LoadLanes<kHalf>(values, at[i] + h + b * kLanes);
      for (int q = 0; q < kQueries; ++q)
        for (int b = 0; b < kBlocks; ++b) sums[q][j][b] += weights[q][i] * read[b];
    };
    int64_t i = begin;
    if (i % 2 == 1 && i < end) add(i++, 1);
    for (; i + 2 <= end; i += 2) {
      add(i, 0);
      add(i + 1, 1);
    }
    if (i < end) add(i, 0);
    for (int q = 0; q < kQueries; ++q)
      for (int j = 0; j < 2; ++j)
        for (int b = 0; b < kBlocks; ++b) Store(queries[q].sums + j * head_dim + h + b * kLanes, sums[q][j][b]);
  }
  for (; h < head_dim; ++h)
    for (int64_t i = begin; i < end; ++i)
      for (int q = 0; q < kQueries; ++q)
        queries[q].sums[i % 2 * head_dim + h] += weights[q][i] * LoadOne<kHalf>(values, at[i] + h);
}

constexpr int64_t kWorthTurning = 6;  // queries for which keys are turned

// Queries begin .. end - 1 of the rows' heads of one kv head, row by row, of sequence b: a tile of keys or values is
// fetched once for all of them.
template <bool kHalf>
void Attend(const Attention& op, int64_t b, int64_t group, int64_t begin, int64_t end) {
  const int64_t repeat = op.heads / op.kv_heads, width = op.head_dim;
  Scratch memory;
  Query* const queries = memory.Take<Query>(end - begin);
  int64_t count = 0, oldest = INT64_MAX, newest = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = b * op.width + i / repeat, head = group * repeat + i % repeat;
    Query& query = queries[count];
    query.place = (row * op.heads + head) * width;
    query.newest = op.positions[row];
    query.oldest = op.window > 0 ? std::max<int64_t>(0, query.newest - op.window + 1) : 0;
    if (!op.ring) query.newest = std::min(query.newest, op.capacity - 1);
    if (query.newest < query.oldest) {  // inactive, or its window is beyond the cache
      for (int64_t h = 0; h < width; ++h) Put<kHalf>(op.out, query.place + h, 0.0f);
      continue;
    }
    query.sink = op.sinks == nullptr ? nullptr : op.sinks + head;
    oldest = std::min(oldest, query.oldest);
    newest = std::max(newest, query.newest);
    ++count;
  }
  if (count == 0) return;
  const int64_t first = oldest / kLanes * kLanes, last = newest, span = (last - first) / kLanes * kLanes + kLanes;
  float* const scratch = memory.Take<float>(count * (3 * width + span));
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(width));
  for (int64_t i = 0; i < count; ++i) {
    Query& query = queries[i];
    query.vector = scratch + i * (3 * width + span);
    query.sums = query.vector + width;
    query.weights = query.sums + 2 * width;
    int64_t h = 0;
    for (; h + kLanes <= width; h += kLanes)
      Store(query.vector + h, LoadLanes<kHalf>(op.query, query.place + h) * scale);
    for (; h < width; ++h) query.vector[h] = LoadOne<kHalf>(op.query, query.place + h) * scale;
    std::fill_n(query.sums, 2 * width, 0.0f);
  }
  auto places_from = [&](int64_t position) {
    Places places;
    const int64_t shift = op.ring ? position % op.capacity - position : 0;
    for (int64_t i = 0; i < kStretch; ++i) {
      int64_t slot = std::clamp(position + i, oldest, newest) + shift;
      if (op.ring && slot >= op.capacity) slot %= op.capacity;
      places.at[i] = ((b * op.capacity + slot) * op.kv_heads + group) * width;
    }
    return places;
  };
  const bool turn = count >= kWorthTurning;
  float* const turned = memory.Take<float>(turn ? width * kLanes : 0);
  auto score = [&](int64_t p, const int64_t* at) {
    auto put = [&](Floats scores, const Query& query) {
      Store(query.weights + p - first, Finish<kHalf>(scores, query, op.key, at, p, width));
    };
    auto by = [&]<int kQueries>(int64_t i) {
      for (; i + kQueries <= count; i += kQueries) {
        Floats scores[kQueries];
        width == 64 ? ScoresTurned<kQueries, 64>(&queries[i], turned, width, scores)
                    : ScoresTurned<kQueries, 0>(&queries[i], turned, width, scores);
        for (int q = 0; q < kQueries; ++q) put(scores[q], queries[i + q]);
      }
      return i;
    };
    if (turn) {
      TurnKeys<kHalf>(op.key, at, width, turned);
      by.template operator()<1>(by.template operator()<2>(by.template operator()<4>(0)));
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (!Overlaps(queries[i], p)) continue;
      put(width == 64 ? Scores<kHalf, 64>(queries[i], op.key, at, width) : Scores<kHalf, 0>(queries[i], op.key, at, width),
          queries[i]);
    }
  };
  for (int64_t p = first; p <= last; p += kStretch) {
    const Places places = places_from(p);
    for (int64_t i = 0; i < kStretch && p + i <= last; i += kLanes) score(p + i, places.at + i);
  }
  for (int64_t i = 0; i < count; ++i) Weigh(queries[i], first, last);
  for (int64_t p = first; p <= last; p += kStretch) {
    const Places places = places_from(p);
    auto from = [&](int64_t i) { return std::max<int64_t>(0, queries[i].oldest - p); };
    auto to = [&](int64_t i) { return std::min(kStretch, queries[i].newest - p + 1); };
    for (int64_t i = 0; i < count; ++i) {
      if (i + 1 < count && from(i) == from(i + 1) && to(i) == to(i + 1)) {
        AddValues<kHalf, 2>(&queries[i], p - first, op.value, places.at, from(i), to(i), width);
        ++i;
      } else {
        AddValues<kHalf, 1>(&queries[i], p - first, op.value, places.at, from(i), to(i), width);
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const Query& query = queries[i];
    int64_t h = 0;
    for (; h + kLanes <= width; h += kLanes) {
      const Floats sums = Load<Floats>(query.sums + h) + Load<Floats>(query.sums + width + h);
      PutLanes<kHalf>(op.out, query.place + h, sums / query.total);
    }
    for (; h < width; ++h)
      Put<kHalf>(op.out, query.place + h, (query.sums[h] + query.sums[width + h]) / query.total);
  }
}

// Rotates pairs (x[i], x[i + half]) by the row's angles.
template <bool kHalf>
void Rotate(const float* x, const float* cos, const float* sin, int64_t half, void* out, int64_t at) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats a = Load<Floats>(x + i), b = Load<Floats>(x + i + half);
    const Floats c = Load<Floats>(cos + i), s = Load<Floats>(sin + i);
    PutLanes<kHalf>(out, at + i, a * c - b * s);
    PutLanes<kHalf>(out, at + i + half, b * c + a * s);
  }
  for (; i < half; ++i) {
    Put<kHalf>(out, at + i, x[i] * cos[i] - x[i + half] * sin[i]);
    Put<kHalf>(out, at + i + half, x[i + half] * cos[i] + x[i] * sin[i]);
  }
}

template <bool kHalf>
void RotateAndWriteAs(const Attention& op, const Rotation& rotation) {
  const int64_t width = op.head_dim, half = width / 2, heads = op.heads + 2 * op.kv_heads;
  for (int64_t row = 0; row < op.batch * op.width; ++row) {
    const float* qkv = rotation.qkv + row * heads * width;
    const float *cos = rotation.cos + row * half, *sin = rotation.sin + row * half;
    for (int64_t n = 0; n < op.heads; ++n)
      Rotate<kHalf>(qkv + n * width, cos, sin, half, rotation.query, (row * op.heads + n) * width);
    int64_t slot = op.positions[row];
    if (slot < 0 || (!op.ring && slot >= op.capacity)) continue;
    slot %= op.capacity;
    const float* keys = qkv + op.heads * width;
    const float* values = keys + op.kv_heads * width;
    const int64_t at = (row / op.width * op.capacity + slot) * op.kv_heads * width;
    for (int64_t g = 0; g < op.kv_heads; ++g)
      Rotate<kHalf>(keys + g * width, cos, sin, half, rotation.key, at + g * width);
    int64_t i = 0;
    for (; i + kLanes <= op.kv_heads * width; i += kLanes)
      PutLanes<kHalf>(rotation.value, at + i, Load<Floats>(values + i));
    for (; i < op.kv_heads * width; ++i) Put<kHalf>(rotation.value, at + i, values[i]);
  }
}

}  // namespace

void RotateAndWrite(const Attention& op, const Rotation& rotation) {
  op.bfloat16 ? RotateAndWriteAs<true>(op, rotation) : RotateAndWriteAs<false>(op, rotation);
}

void RunAttention(const Attention& op, Parallel& parallel) {
  int64_t longest = 1, all = 0, active = 0;
  for (int64_t row = 0; row < op.batch * op.width; ++row) {
    int64_t seen = std::min<int64_t>(op.positions[row] + int64_t{1}, op.capacity);
    if (op.window > 0) seen = std::min(seen, op.window);
    longest = std::max(longest, seen);
    all += std::max<int64_t>(seen, 0);
    active += seen > 0;
  }
  // queries that go together: as many as keep their weights within 1 MB, and fewer where that leaves threads idle
  const int64_t repeat = op.heads / op.kv_heads, queries = op.width * repeat, pairs = op.batch * op.kv_heads;
  const int64_t work = 4 * all * op.heads * op.head_dim, shares = Shares(work, parallel);
  const int64_t most = std::clamp<int64_t>((1 << 18) / longest, repeat, 2 * kTileRows * repeat);
  const int64_t block = std::clamp<int64_t>((active * op.heads + shares - 1) / shares, 2, most);
  const int64_t blocks = (queries + block - 1) / block;
  ForEach(parallel, pairs * blocks, work, [&](int64_t chunk) {
    const int64_t begin = chunk % blocks * block, pair = chunk / blocks;
    auto attend = op.bfloat16 ? Attend<true> : Attend<false>;
    attend(op, pair / op.kv_heads, pair % op.kv_heads, begin, std::min(queries, begin + block));
  });
}

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Likeliest

constexpr int64_t kSlice = 1 << 14;  // values of a row that go together

struct Peak {
  float value;
  int64_t index;  // of the first such value; -1: a NaN was seen
};

template <bool kHalf>
Peak FindPeak(const void* row, int64_t begin, int64_t end) {
  // four chains: one maximum depends on the one before
  Floats highest[4];
  for (Floats& each : highest) each = Broadcast(LoadOne<kHalf>(row, begin));
  Ints odd = {};  // lanes in which something was no number
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
  bool nan = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    value = std::max(value, most[lane]);
    nan |= odd[lane] != 0;
  }
  for (; i < end; ++i) {
    const float one = LoadOne<kHalf>(row, i);
    nan |= one != one;
    value = std::max(value, one);
  }
  if (nan) return {value, -1};
  i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    const Ints found = LoadLanes<kHalf>(row, i) == value;
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= found[lane];
    if (any != 0) break;
  }
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
  const auto peaks = std::make_unique<Peak[]>(chunks);
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
    op.index[row] = static_cast<int32_t>(best.index < 0 ? op.width - 1 : best.index);
  }
  if (op.probability == nullptr) return;
  const auto sums = std::make_unique<float[]>(chunks);
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
