// See packed.h. Dot products of R neighbouring columns with T rows; a column is the part of a panel that fits a register.
// Each weight format has its own. For rows of bfloat16 there is one more where the processor multiplies pairs of them, and
// one where it multiplies tiles; for float32 rows MXFP4 has one for processors that multiply bytes and one for the others.

#include "packed.h"

#include <algorithm>
#include <type_traits>

#include "digits.h"
#include "vectors.h"

namespace peagle {
namespace {

constexpr int64_t kColumns = kPanelRows / kLanes;  // of a panel

// The offset of column r of a group, in units of `lane` bytes or scales. A group is whole panels, or columns of one panel.
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
    for (int r = 0; r < R; ++r) sums[r][t] = MulAdd(weights[r], value, sums[r][t]);
  }
}

// Reads the weights of R columns side by side, and prefetches: `distance` bytes ahead in their panels, and near a panel's end
// the beginning of the next group. Processors prefetch by themselves, but not for several panels at once. A prefetch past
// the end is harmless.
constexpr int64_t kAheadDense = 8192, kAheadMxfp4 = 2048;  // bytes; four-bit weights last longer (tuned on Zen 5)
[[maybe_unused]] constexpr int64_t kAheadPairs = 512;      // of dense weights by pairs (tuned on Zen 4)

template <int R>
class Reader {
 public:
  Reader(const char* panels, int64_t panel, int64_t distance)
      : panels_(panels),
        panel_(panel),
        near_(std::min(distance, panel)),
        far_(near_ + (R - 1) / kColumns * panel),
        turn_(panel - near_) {}

  PEAGLE_INLINE const char* Place(int r, int64_t offset) const { return panels_ + At(r, panel_, 4) + offset; }

  PEAGLE_INLINE const char* Ahead(int r, int64_t offset) const {
    return Place(r, offset) + (offset < turn_ ? near_ : far_);
  }

  PEAGLE_INLINE void Fetch(int r, int64_t offset) const {
    if (r % kColumns == 0) __builtin_prefetch(Ahead(r, offset));
  }

  template <class Vector>
  PEAGLE_INLINE void Read(int64_t offset, Vector (&weights)[R]) const {
    for (int r = 0; r < R; ++r) {
      weights[r] = Load<Vector>(Place(r, offset));
      Fetch(r, offset);
    }
  }

 private:
  const char* panels_;
  int64_t panel_, near_, far_, turn_;
};

// The number of rows in the first group, and of columns for a group of rows. The sum of a row is one chain of additions. A
// core runs about eight chains at a time, and their sums must fit into registers.
struct Dense {
  using Input = float;
  static constexpr int Rows(int rows) { return rows <= (kManyRegisters ? 6 : 5) ? rows : rows == 7 && !kManyRegisters ? 5 : 4; }
  static constexpr int Columns(int rows) { return kManyRegisters || rows <= 2 ? 4 : 2; }
};

struct Float32 : Dense {
  static int64_t PanelBytes(int64_t inputs) { return inputs * kPanelRows * 4; }

  template <int T, int R>
  static PEAGLE_INLINE void Dot(const char* panels, const uint8_t*, const float* const* x, int64_t inputs,
                                Floats (&sums)[R][T]) {
    const Reader<R> reader(panels, PanelBytes(inputs), kAheadDense);
    for (int64_t k = 0; k < inputs; ++k) {
      Floats weights[R];
      reader.Read(k * 64, weights);
      AddOuter<T, R>(weights, x, k, sums);
    }
  }
};

struct Bfloat16 : Dense {
  static int64_t PanelBytes(int64_t inputs) { return (inputs + 1) / 2 * kPanelRows * 4; }

  template <int T, int R>
  static PEAGLE_INLINE void Dot(const char* panels, const uint8_t*, const float* const* x, int64_t inputs,
                                Floats (&sums)[R][T]) {
    const Reader<R> reader(panels, PanelBytes(inputs), kAheadDense);
    const auto both = [&](int r, int64_t pair) { return Load<Words>(reader.Place(r, pair * 64)); };
    for (int64_t pair = 0; pair < inputs / 2; ++pair) {
      // one input of the pair after the other: the registers beside the sums hold no more
      Floats weights[R];
      for (int r = 0; r < R; ++r) {
        reader.Fetch(r, pair * 64);
        weights[r] = reinterpret_cast<Floats>(both(r, pair) << 16);
      }
      AddOuter<T, R>(weights, x, 2 * pair, sums);
      for (int r = 0; r < R; ++r) weights[r] = reinterpret_cast<Floats>(both(r, pair) & 0xffff0000u);
      AddOuter<T, R>(weights, x, 2 * pair + 1, sums);
    }
    if (inputs % 2) {
      Floats last[R];
      for (int r = 0; r < R; ++r) last[r] = reinterpret_cast<Floats>(both(r, inputs / 2) << 16);
      AddOuter<T, R>(last, x, inputs - 1, sums);
    }
  }
};

struct Mxfp4 {
  static constexpr int Rows(int rows) { return rows; }
  static int64_t PanelBytes(int64_t inputs) { return inputs / 8 * kPanelRows * 4; }

  // 2^(scale - 127) for each row of a column. XLA flushes denormals, so scale 0 (2^-127) counts as 0.
  static PEAGLE_INLINE Floats Power(const uint8_t* scales) {
    Words exponents;
    for (int i = 0; i < kLanes; ++i) exponents[i] = scales[i];
    return reinterpret_cast<Floats>(exponents << 23);
  }
};

#if defined(PEAGLE_DIGITS)
template <int n>
struct Mxfp4Digits : Mxfp4 {
  using Input = Digits<n>;
  static int64_t Width(int64_t inputs) { return inputs / 32; }
  static void Convert(const float* x, int64_t inputs, Digits<n>* out) { ToDigits(x, inputs, out); }
#if defined(__AVX512VNNI__)
  static constexpr int Columns(int rows) {  // sums of each digit, too
    return rows <= (n == 3 ? 1 : 2) ? 4 : rows <= (n == 3 ? 4 : 6) ? 2 : 1;
  }

  template <int T, int R>
  static PEAGLE_INLINE void Dot(const char* panels, const uint8_t* scales, const Digits<n>* const* x, int64_t inputs,
                                Floats (&sums)[R][T]) {
    const __m512i values = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));  // 2 * e2m1 + kCodeOffset
    const __m512i low = _mm512_set1_epi8(15);
    const int64_t blocks = inputs / 32;
    const Reader<R> reader(panels, PanelBytes(inputs), kAheadMxfp4);
    for (int64_t block = 0; block < blocks; ++block) {
      __m512i part[R][T][n];
      for (int t = 0; t < T; ++t)
        for (int i = 0; i < n; ++i)
          for (int r = 0; r < R; ++r) part[r][t][i] = _mm512_set1_epi32(x[t][block].offset[i]);
#pragma GCC unroll 4
      for (int64_t word = 0; word < 4; ++word) {
        __m512i codes[R], even[R], odd[R];
        reader.Read((4 * block + word) * 64, codes);
        for (int r = 0; r < R; ++r) {
          even[r] = _mm512_shuffle_epi8(values, _mm512_and_si512(codes[r], low));
          odd[r] = _mm512_shuffle_epi8(values, _mm512_and_si512(_mm512_srli_epi16(codes[r], 4), low));
        }
        for (int t = 0; t < T; ++t)
          for (int i = 0; i < n; ++i) {
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
          // the highest digit's and the lower two's are below 2^24 in magnitude, so floats hold them exactly
          const __m512i lower = _mm512_add_epi32(_mm512_slli_epi32(part[r][t][n - 2], 8), part[r][t][n - 1]);
          __m512 sum = _mm512_cvtepi32_ps(lower);
          if constexpr (n == 3) sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[r][t][0]), _mm512_set1_ps(65536.0f), sum);
          const __m512 scaled = _mm512_scalef_ps(sum, _mm512_set1_ps(x[t][block].exponent));
          sums[r][t] = MulAdd(reinterpret_cast<Floats>(scaled), power, sums[r][t]);
        }
      }
    }
  }
#else
  static constexpr int Columns(int) { return 1; }  // a block of one column fills eight registers

  template <int T, int R>
  static PEAGLE_INLINE void Dot(const char* panels, const uint8_t* scales, const Digits<n>* const* x, int64_t inputs,
                                Floats (&sums)[R][T]) {
    static_assert(R == 1);
    const __m256i values = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));  // 2 * e2m1 + kCodeOffset
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const int64_t blocks = inputs / 32;
    const Reader<R> reader(panels, PanelBytes(inputs), kAheadMxfp4);
    for (int64_t block = 0; block < blocks; ++block) {
      __m256i codes[8];
#pragma GCC unroll 4
      for (int64_t word = 0; word < 4; ++word) {
        __m256i both[1];
        reader.Read((4 * block + word) * 64, both);
        codes[2 * word] = _mm256_shuffle_epi8(values, _mm256_and_si256(both[0], low));
        codes[2 * word + 1] = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(both[0], 4), low));
      }
      const Floats power = Power(scales + block * kPanelRows);
      for (int t = 0; t < T; ++t) {
        const Digits<n>& row = x[t][block];
        __m256i part[n];
#pragma GCC unroll 3
        for (int i = 0; i < n; ++i) {
          // a sum of two neighbouring byte products is at most 6144 in magnitude: four such sums fit into sixteen bits
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
        // the highest digit's and the lower two's are below 2^24 in magnitude, so floats hold them exactly
        const __m256i lower = _mm256_add_epi32(_mm256_slli_epi32(part[n - 2], 8), part[n - 1]);
        __m256 sum = _mm256_cvtepi32_ps(lower);
        if constexpr (n == 3) sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(part[0]), _mm256_set1_ps(65536.0f), sum);
        sums[0][t] = MulAdd(reinterpret_cast<Floats>(sum * row.unit[0] * row.unit[1]), power, sums[0][t]);
      }
    }
  }
#endif
};
#else
struct Mxfp4Floats : Mxfp4 {
  using Input = float;
  static constexpr int Columns(int rows) {  // a block's sums beside the row's take more registers
    return kManyRegisters ? (rows <= 1 ? 4 : 2) : (rows <= 1 ? 2 : 1);
  }

  template <int T, int R>
  static PEAGLE_INLINE void Dot(const char* panels, const uint8_t* scales, const float* const* x, int64_t inputs,
                                Floats (&sums)[R][T]) {
    const int64_t blocks = inputs / 32;
    const Reader<R> reader(panels, PanelBytes(inputs), kAheadMxfp4);
    for (int64_t block = 0; block < blocks; ++block) {
      Floats part[R][T] = {};
      for (int64_t word = 4 * block; word < 4 * block + 4; ++word) {
        Words nibbles[R];
        reader.Read(word * 64, nibbles);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
          Floats weights[R];
          for (int r = 0; r < R; ++r) weights[r] = Code(nibbles[r] >> (4 * j));
          AddOuter<T, R>(weights, x, 8 * word + j, part);
        }
      }
      for (int r = 0; r < R; ++r) {
        const Floats power = Power(scales + At(r, blocks * kPanelRows, 1) + block * kPanelRows);
        for (int t = 0; t < T; ++t) sums[r][t] = MulAdd(part[r][t], power, sums[r][t]);
      }
    }
  }
};
#endif

#if defined(__AVX512BF16__)
// Rows of bfloat16, two inputs in a word. A row's sum is one chain of pairs (AddPairs).

// Rounds a row to bfloat16, in pairs of neighbours; apart: of eight inputs j and j + 4.
void ToPairs(const float* x, int64_t inputs, bool apart, uint32_t* out) {
  const __m256i order = _mm256_setr_epi16(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  for (; inputs > 0; inputs -= 16, x += 16, out += 8) {
    const auto present = static_cast<__mmask16>(inputs >= 16 ? 0xffff : (1 << inputs) - 1);
    auto rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(present, x)));
    if (apart) rounded = _mm256_permutexvar_epi16(order, rounded);
    _mm256_mask_storeu_epi32(out, static_cast<__mmask8>(inputs >= 16 ? 0xff : (1 << (inputs + 1) / 2) - 1), rounded);
  }
}

struct Bfloat16Pairs : Bfloat16 {
  using Input = uint32_t;  // inputs 2 i and 2 i + 1
  static int64_t Width(int64_t inputs) { return (inputs + 1) / 2; }
  static void Convert(const float* x, int64_t inputs, uint32_t* out) { ToPairs(x, inputs, false, out); }
  static constexpr int Rows(int rows) { return rows; }
  static constexpr int Columns(int rows) { return rows <= 6 ? 4 : 2; }

  template <int T, int R>
  static PEAGLE_INLINE void Dot(const char* panels, const uint8_t*, const uint32_t* const* x, int64_t inputs,
                                Floats (&sums)[R][T]) {
    const Reader<R> reader(panels, PanelBytes(inputs), kAheadPairs);
    for (int64_t pair = 0; pair < (inputs + 1) / 2; ++pair) {
      Floats weights[R];
      reader.Read(pair * 64, weights);
      for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) sums[r][t] = AddPairs(weights[r], Repeat(x[t] + pair), sums[r][t]);
    }
  }
};

struct Mxfp4Pairs : Mxfp4 {
  using Input = uint32_t;  // inputs j and j + 4 of eight: their codes lie 16 bits apart, so one shift brings both into place
  static int64_t Width(int64_t inputs) { return inputs / 2; }
  static void Convert(const float* x, int64_t inputs, uint32_t* out) { ToPairs(x, inputs, true, out); }
  static constexpr int Columns(int rows) { return rows <= 1 ? 4 : 2; }

  static PEAGLE_INLINE __m512i Values() {  // e2m1 as bfloat16; twice, because the lookup reads five bits
    alignas(32) static constexpr uint16_t kCodes[16] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                        0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    return _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(kCodes)));
  }

  template <int T, int R>
  static PEAGLE_INLINE void Dot(const char* panels, const uint8_t* scales, const uint32_t* const* x, int64_t inputs,
                                Floats (&sums)[R][T]) {
    const __m512i values = Values();
    const int64_t blocks = inputs / 32;
    const Reader<R> reader(panels, PanelBytes(inputs), kAheadMxfp4);
    for (int64_t block = 0; block < blocks; ++block) {
      Floats part[R][T] = {};
      for (int64_t word = 4 * block; word < 4 * block + 4; ++word) {
        __m512i codes[R];
        reader.Read(word * 64, codes);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          Floats weights[R];
          for (int r = 0; r < R; ++r)
            weights[r] = reinterpret_cast<Floats>(_mm512_permutexvar_epi16(_mm512_srli_epi32(codes[r], 4 * j), values));
          for (int t = 0; t < T; ++t)
            for (int r = 0; r < R; ++r) part[r][t] = AddPairs(weights[r], Repeat(x[t] + 4 * word + j), part[r][t]);
        }
      }
      for (int r = 0; r < R; ++r) {
        const Floats power = Power(scales + (r * blocks + block) * kPanelRows);
        for (int t = 0; t < T; ++t) sums[r][t] = MulAdd(part[r][t], power, sums[r][t]);
      }
    }
  }
};
#endif

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

// DotGroup for R columns, in groups of as many as suit T rows.
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
      const uint8_t* powers = scales == nullptr ? nullptr : scales + At(c, scale_bytes, 1);
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

#if defined(__AMX_BF16__)
// Rows of bfloat16 by tiles. One instruction adds the products of 16 pairs of inputs: up to 16 rows by the 16 outputs of a
// panel. A row's sum is one chain of these blocks, whatever the number of rows. No weight is moved: a block of a panel is a
// tile as it lies.
constexpr int64_t kBlockPairs = 16, kAheadTiles = 2048;  // bytes ahead; not tuned

struct Bfloat16Tiles : Bfloat16Pairs {
  static constexpr int64_t kBlockBytes = 64 * kBlockPairs;

  // Returns a block of weights, of which `pairs` are present; in `room` if zeros have to follow.
  static PEAGLE_INLINE const void* Block(const char* weights, const uint8_t*, int64_t, int64_t pairs, Words* room) {
    if (pairs >= kBlockPairs) return weights;
    for (int i = 0; i < kBlockPairs; ++i) room[i] = i < pairs ? Load<Words>(weights + i * 64) : Words{};
    return room;
  }
};

struct Mxfp4Tiles : Mxfp4Pairs {
  static constexpr int64_t kBlockBytes = 16 * kBlockPairs;

  // Decodes a block to bfloat16. Its scales, from `at` on, are added to the exponents: exact in the range of bfloat16. Scales
  // above 252, of numbers beyond it, count as 252.
  static PEAGLE_INLINE const void* Block(const char* weights, const uint8_t* scales, int64_t at, int64_t, Words* room) {
    const __m512i one = _mm512_cvtepu8_epi32(Load<__m128i>(scales + at));
    const __m512i both = _mm512_or_si512(one, _mm512_slli_epi32(one, 16));
    const __m512i least = _mm512_min_epu16(both, _mm512_set1_epi16(252));
    const __m512i power = _mm512_slli_epi16(_mm512_sub_epi16(least, _mm512_set1_epi16(127)), 7);
    const __mmask32 scaled = _mm512_test_epi16_mask(both, both);
    for (int i = 0; i < kBlockPairs; ++i) {
      const __m512i codes = _mm512_srli_epi32(Load<__m512i>(weights + i / 4 * 64), 4 * (i % 4));
      const __mmask32 nonzero = _mm512_mask_test_epi16_mask(scaled, codes, _mm512_set1_epi16(7));
      room[i] = reinterpret_cast<Words>(_mm512_maskz_add_epi16(nonzero, _mm512_permutexvar_epi16(codes, Values()), power));
    }
    return room;
  }
};

// Compilers do not know that an instruction for tiles reads memory.
PEAGLE_INLINE void Settle() { asm volatile("" ::: "memory"); }

// The sums of R neighbouring panels, in tiles 0 .. 3, of the rows as DotFormat orders them.
template <class W, int R>
PEAGLE_INLINE void DotTiles(const char* panels, const uint8_t* scales, int64_t inputs, const Words* x, int64_t rows,
                            float (*out)[kTileRows][kPanelRows]) {
  static_assert(R == 4 || R == 1);
  const Reader<R> reader(panels, W::PanelBytes(inputs), kAheadTiles);
  const int64_t pairs = W::Width(inputs), blocks = (pairs + kBlockPairs - 1) / kBlockPairs;
  Words room[R][kBlockPairs];
  _tile_zero(0);
  if constexpr (R == 4) {
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t offset = block * W::kBlockBytes;
    const void* weights[R];
    Settle();
    for (int r = 0; r < R; ++r) {
      const char* const ahead = reader.Ahead(r, offset);
      for (int64_t i = 0; i < W::kBlockBytes; i += 64) __builtin_prefetch(ahead + i);
      const int64_t scales_at = (r * blocks + block) * kPanelRows;
      weights[r] = W::Block(reader.Place(r, offset), scales, scales_at, pairs - block * kBlockPairs, room[r]);
    }
    Settle();
    _tile_loadd(4, x + block * rows, 64);
    _tile_loadd(5, weights[0], 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (R == 4) {
      _tile_loadd(6, weights[1], 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, weights[2], 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, weights[3], 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, out[0], 64);
  if constexpr (R == 4) {
    _tile_stored(1, out[1], 64);
    _tile_stored(2, out[2], 64);
    _tile_stored(3, out[3], 64);
  }
}

struct alignas(64) TileShapes {  // as the processor reads it
  uint8_t palette = 1, first_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16];
};

template <class W>
  requires(W::kBlockBytes > 0)
void DotFormat(const Matrix& matrix, int64_t first, int64_t count, const void* const* x, int64_t rows, Tile& tile) {
  const int64_t inputs = matrix.inputs, width = W::Width(inputs), blocks = (width + kBlockPairs - 1) / kBlockPairs;
  Scratch scratch;
  auto* const together = scratch.Take<Words>(blocks * rows);  // the first block of all rows, then the second
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t at = block * kBlockPairs;
      together[block * rows + t] = LoadFirst<Words>(static_cast<const uint32_t*>(x[t]) + at, width - at);
    }
  const auto of_rows = static_cast<uint8_t>(rows);
  const TileShapes shapes{.rows = {of_rows, of_rows, of_rows, of_rows, of_rows, 16, 16, 16}};
  const auto* panels = static_cast<const char*>(matrix.panels);
  int64_t p = 0;
  const auto group = [&]<int R>() {
    for (; p + R <= count; p += R) {
      const uint8_t* scales = matrix.scales == nullptr ? nullptr : matrix.scales + (first + p) * (inputs / 32) * kPanelRows;
      DotTiles<W, R>(panels + (first + p) * W::PanelBytes(inputs), scales, inputs, together, rows, tile.values + p);
    }
  };
  // Shapes belong to a thread, and XLA may call from any. Released, they do not reach other code that uses tiles, and the
  // system saves no tiles when it switches threads.
  Settle();
  _tile_loadconfig(&shapes);
  group.template operator()<4>();
  group.template operator()<1>();
  _tile_release();
}
#endif

// Calls f<W>() for the format of a matrix and its rows.
template <class F>
auto OfFormat(const Matrix& matrix, const F& f) {
#if defined(__AMX_BF16__)
  if (matrix.bfloat16_rows && matrix.format == Format::kBfloat16) return f.template operator()<Bfloat16Tiles>();
  if (matrix.bfloat16_rows && matrix.format == Format::kMxfp4) return f.template operator()<Mxfp4Tiles>();
#elif defined(__AVX512BF16__)
  if (matrix.bfloat16_rows && matrix.format == Format::kBfloat16) return f.template operator()<Bfloat16Pairs>();
  if (matrix.bfloat16_rows && matrix.format == Format::kMxfp4) return f.template operator()<Mxfp4Pairs>();
#endif
  switch (matrix.format) {
    case Format::kFloat32: return f.template operator()<Float32>();
    case Format::kBfloat16: return f.template operator()<Bfloat16>();
    default: break;
  }
#if defined(PEAGLE_DIGITS)
  return matrix.bfloat16_rows ? f.template operator()<Mxfp4Digits<2>>() : f.template operator()<Mxfp4Digits<3>>();
#else
  return f.template operator()<Mxfp4Floats>();
#endif
}

}  // namespace

void Dot(const Matrix& matrix, int64_t first, int64_t count, const void* const* x, int64_t rows, Tile& tile) {
  OfFormat(matrix, [&]<class W>() { DotFormat<W>(matrix, first, count, x, rows, tile); });
}

int64_t PanelBytes(const Matrix& matrix) {
  return OfFormat(matrix, [&]<class W>() { return W::PanelBytes(matrix.inputs); });
}

// The arithmetic of four rows costs as much as reading the weights; decoding MXFP4 in narrow registers costs much more
// (tuned on Zen 3).
int64_t Work(const Matrix& matrix, int64_t panels, int64_t rows) {
  const int64_t bytes = panels * PanelBytes(matrix);
  return matrix.format == Format::kMxfp4 && !kManyRegisters ? 5 * bytes * rows : bytes * (4 + rows) / 4;
}

Inputs::Inputs(const Matrix& matrix, const float* const* x, int64_t rows, Parallel& parallel, Scratch& scratch)
    : row_(scratch.Take<const void*>(rows)) {
  OfFormat(matrix, [&]<class W>() {
    if constexpr (std::is_same_v<typename W::Input, float>) {
      std::copy_n(x, rows, row_);
    } else {
      const int64_t width = W::Width(matrix.inputs);
      auto* const converted = scratch.Take<typename W::Input>(rows * width);
      ForEach(parallel, rows, rows * matrix.inputs, [&](int64_t row) {
        W::Convert(x[row], matrix.inputs, converted + row * width);
        row_[row] = converted + row * width;
      });
    }
  });
}

}  // namespace peagle
