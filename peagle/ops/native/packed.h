// Products of rows with packed matrices (kernels.h), for all ops that multiply by a matrix.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"

namespace peagle {

#if defined(__AMX_BF16__)
constexpr int kTileRows = 16;
#else
constexpr int kTileRows = 8;
#endif
constexpr int kTilePanels = 16;  // the most panels of a chunk

// The most rows that one read of a panel serves.
inline int64_t RowsAtOnce(const Matrix& matrix) {
  return matrix.bfloat16_rows && matrix.format != Format::kFloat32 ? kTileRows : 8;
}

struct Tile {
  float values[kTilePanels][kTileRows][kPanelRows];  // [panel][row][output of the panel]
};

// Rows of inputs, converted for the weights' format.
class Inputs {
 public:
  Inputs(const Matrix& matrix, const float* const* x, int64_t rows, Parallel& parallel, Scratch& scratch);
  const void* const* From(int64_t row) const { return row_ + row; }

 private:
  const void** row_;
};

// tile = dot products of panels first .. first + count - 1 with up to RowsAtOnce rows.
void Dot(const Matrix& matrix, int64_t first, int64_t count, const void* const* x, int64_t rows, Tile& tile);

inline int64_t Panels(int64_t outputs) { return (outputs + kPanelRows - 1) / kPanelRows; }

int64_t PanelBytes(const Matrix& matrix);

// The cost of multiplying `rows` rows by that many panels, in weight bytes read.
int64_t Work(const Matrix& matrix, int64_t panels, int64_t rows);

// `panels` cut into `shares` equal chunks, or more if a chunk would exceed kTilePanels.
struct Cut {
  int64_t panels, size, chunks;

  Cut(int64_t panels, int64_t shares)
      : panels(panels),
        size(std::clamp<int64_t>((panels + shares - 1) / shares, 1, kTilePanels)),
        chunks((panels + size - 1) / size) {}
  int64_t First(int64_t chunk) const { return chunk * size; }
  int64_t Count(int64_t chunk) const { return std::min(size, panels - First(chunk)); }
};

}  // namespace peagle
