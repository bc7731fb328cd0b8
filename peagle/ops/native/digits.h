// A row's inputs as bytes, for processors that multiply bytes faster than floats.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace peagle {

#if defined(__AVX512VNNI__) || defined(PEAGLE_AVX2)
#define PEAGLE_DIGITS
// Thirty-two neighbouring inputs of a row, for machines that add products of bytes: integers of 8 n - 1 bits times a shared
// power of two, set by the largest input. With three digits the error of an input is at most 2^-23 of the largest, as in a
// sum of floats; two, for rows of bfloat16, leave 2^-15. Sums of products with codes are exact.
template <int n>
struct Digits {
  int8_t digits[n][32];  // to base 256, -128 .. 127, the highest first; of eight inputs 0, 2, 4, 6, 1, 3, 5, 7
  int32_t offset[n];     // compensates kCodeOffset: -kCodeOffset * the sum of the digits
#if defined(__AVX512VNNI__)
  float exponent;        // of half an integer's unit; NaN if an input is not finite
#else
  float unit[2];         // half an integer's unit is their product, which may be denormal; NaN as above
#endif
};

constexpr int kCodeOffset = 12;  // a code becomes the unsigned byte 2 * value + kCodeOffset

// A digit beyond 127 carries into the one above, and its byte becomes a signed one: add this to an integer, then flip it.
template <int n>
constexpr int32_t kCarry = n == 3 ? 0x8080 : 0x80;

#if defined(__AVX512VNNI__)
template <int n>
void ToDigits(const float* x, int64_t inputs, Digits<n>* out) {
  const __m128i evens_first = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  for (; inputs > 0; inputs -= 32, x += 32, ++out) {
    const __m512 halves[2] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)};
    const __m512i magnitudes = _mm512_max_epu32(_mm512_castps_si512(_mm512_abs_ps(halves[0])),
                                                _mm512_castps_si512(_mm512_abs_ps(halves[1])));
    const int exponent = static_cast<int>(_mm512_reduce_max_epu32(magnitudes) >> 23) - 127;
    __m128i sums[4] = {};
    for (int half = 0; half < 2; ++half) {
      const __m512 scaled = _mm512_scalef_ps(halves[half], _mm512_set1_ps(static_cast<float>(8 * n - 3 - exponent)));
      const __m512i carry = _mm512_set1_epi32(kCarry<n>);
      const __m512i bytes = _mm512_xor_si512(_mm512_add_epi32(_mm512_cvtps_epi32(scaled), carry), carry);
      for (int i = 0; i < n; ++i) {
        const __m128i digits = _mm512_cvtepi32_epi8(_mm512_srli_epi32(bytes, 8 * (n - 1 - i)));
        const __m128i ordered = _mm_shuffle_epi8(digits, evens_first);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out->digits[i] + 16 * half), ordered);
        sums[i] = _mm_dpbusd_epi32(sums[i], _mm_set1_epi8(kCodeOffset), ordered);
      }
    }
    const __m128i each = _mm_hadd_epi32(_mm_hadd_epi32(sums[0], sums[1]), _mm_hadd_epi32(sums[2], sums[3]));
    int32_t offset[4];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(offset), _mm_sub_epi32(_mm_setzero_si128(), each));
    std::copy_n(offset, n, out->offset);
    out->exponent = exponent == 128 ? __builtin_nanf("") : static_cast<float>(exponent - (8 * n - 2));
  }
}
#else
// 2^power = factors[0] * factors[1], both normal numbers, for powers of -252 .. 254
PEAGLE_INLINE void Factors(int power, float (&factors)[2]) {
  const int32_t halves[2] = {power >> 1, power - (power >> 1)};
  for (int i = 0; i < 2; ++i) {
    const int32_t bits = (halves[i] + 127) << 23;
    factors[i] = Load<float>(&bits);
  }
}

template <int n>
void ToDigits(const float* x, int64_t inputs, Digits<n>* out) {
  // of each four integers the highest digits of the even and the odd ones, then the second digits, then the third
  const __m128i places = n == 3 ? _mm_setr_epi8(2, 10, 6, 14, 1, 9, 5, 13, 0, 8, 4, 12, -1, -1, -1, -1)
                                : _mm_setr_epi8(1, 9, 5, 13, 0, 8, 4, 12, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i by_digit = _mm256_broadcastsi128_si256(places);
  const __m256i carry = _mm256_set1_epi32(kCarry<n>), magnitude = _mm256_set1_epi32(0x7fffffff);
  for (; inputs > 0; inputs -= 32, x += 32, ++out) {
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 8)
      largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), magnitude));
    const Words each = reinterpret_cast<Words>(largest);
    uint32_t most = each[0];
    for (int i = 1; i < kLanes; ++i) most = std::max(most, each[i]);
    const int exponent = static_cast<int>(most >> 23) - 127;
    float factors[2];
    Factors(8 * n - 3 - exponent, factors);
    for (int i = 0; i < 32; i += 8) {
      const __m256 scaled = _mm256_loadu_ps(x + i) * factors[0] * factors[1];
      const __m256i bytes = _mm256_xor_si256(_mm256_add_epi32(_mm256_cvtps_epi32(scaled), carry), carry);
      const __m256i sorted = _mm256_shuffle_epi8(bytes, by_digit);
      const __m128i four = _mm256_castsi256_si128(sorted), more = _mm256_extracti128_si256(sorted, 1);
      const __m128i higher = _mm_unpacklo_epi16(four, more);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out->digits[0] + i), higher);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out->digits[1] + i), _mm_srli_si128(higher, 8));
      if constexpr (n == 3)
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out->digits[2] + i), _mm_unpackhi_epi16(four, more));
    }
    for (int i = 0; i < n; ++i) {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(kCodeOffset), Load<__m256i>(out->digits[i]));
      const Ints sums = reinterpret_cast<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(-1)));
      out->offset[i] = 0;
      for (int lane = 0; lane < kLanes; ++lane) out->offset[i] += sums[lane];
    }
    Factors(exponent - (8 * n - 2), out->unit);
    if (exponent == 128) out->unit[0] = __builtin_nanf("");
  }
}
#endif
#endif

}  // namespace peagle
