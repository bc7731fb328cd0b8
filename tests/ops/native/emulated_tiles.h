// The instructions for tiles of bfloat16, by the operation sections of Intel's manual, for a compiler whose flags do not
// include them: -include this file. Wrong shapes end the process, as on a processor.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define __AMX_BF16__ 1

namespace emulated {

struct alignas(64) Shapes {
  uint8_t palette, first_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

inline thread_local Shapes shapes{};
inline thread_local float tiles[8][16][16];

inline void Expect(bool legal) {
  if (!legal) __builtin_trap();
}

inline float Flush(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }

inline float Half(float pair, int which) {  // the lower or the upper bfloat16 number
  uint32_t bits;
  std::memcpy(&bits, &pair, 4);
  bits = which == 0 ? bits << 16 : bits & 0xffff0000u;
  std::memcpy(&pair, &bits, 4);
  return Flush(pair);
}

inline void Clear(int tile) {
  Expect(shapes.palette == 1 && shapes.rows[tile] > 0);
  std::memset(tiles[tile], 0, sizeof(tiles[tile]));
}

inline void LoadShapes(const void* from) {
  std::memcpy(&shapes, from, sizeof(shapes));
  Expect(shapes.palette == 1);
  for (int tile = 0; tile < 8; ++tile) {
    Expect(shapes.rows[tile] <= 16 && shapes.row_bytes[tile] <= 64 && shapes.row_bytes[tile] % 4 == 0);
    Expect((shapes.rows[tile] == 0) == (shapes.row_bytes[tile] == 0));
  }
  std::memset(tiles, 0, sizeof(tiles));
}

inline void Load(int tile, const void* from, int64_t stride) {
  Clear(tile);
  for (int i = 0; i < shapes.rows[tile]; ++i)
    std::memcpy(tiles[tile][i], static_cast<const char*>(from) + i * stride, shapes.row_bytes[tile]);
}

inline void Store(int tile, void* to, int64_t stride) {
  Expect(shapes.palette == 1);
  for (int i = 0; i < shapes.rows[tile]; ++i)
    std::memcpy(static_cast<char*>(to) + i * stride, tiles[tile][i], shapes.row_bytes[tile]);
}

inline void AddProducts(int sums, int a, int b) {
  const int rows = shapes.rows[sums], pairs = shapes.row_bytes[a] / 4, columns = shapes.row_bytes[sums] / 4;
  Expect(shapes.palette == 1 && sums != a && sums != b && a != b);
  Expect(shapes.rows[a] == rows && shapes.rows[b] == pairs && shapes.row_bytes[b] == 4 * columns);
  for (int m = 0; m < rows; ++m) {
    float both[2][16] = {};
    for (int k = 0; k < pairs; ++k)
      for (int half = 0; half < 2; ++half)
        for (int n = 0; n < columns; ++n)
          both[half][n] = Flush(std::fma(Half(tiles[a][m][k], half), Half(tiles[b][k][n], half), both[half][n]));
    for (int n = 0; n < columns; ++n) tiles[sums][m][n] = Flush(tiles[sums][m][n] + Flush(both[0][n] + both[1][n]));
  }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::LoadShapes
#define _tile_loadd emulated::Load
#define _tile_stored emulated::Store
#define _tile_zero emulated::Clear
#define _tile_dpbf16ps emulated::AddProducts
#define _tile_release() (emulated::shapes = {})
