// See kernels.h, Linear, and linear.h.

#include "linear.h"

#include <algorithm>

#include "packed.h"
#include "vectors.h"

namespace peagle {
namespace {

constexpr int64_t kBlockRows = 64;  // rows whose inputs stay in cache during one pass over all panels

void Normalize(const float* x, const Norm& norm, int64_t width, float* out) {
  Floats squares = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    Floats values = Load<Floats>(x + i);
    squares = MulAdd(values, values, squares);
  }
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += squares[lane];
  for (; i < width; ++i) sum = MulAdd(x[i], x[i], sum);
  const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + norm.epsilon);
  for (i = 0; i < width; ++i) out[i] = x[i] * scale * norm.weight[i];
}

}  // namespace

ActiveRows::ActiveRows(const float* all, const Norm& norm, const int32_t* positions, int64_t rows, int64_t width,
                       Scratch& scratch)
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

void ClearInactive(const int32_t* positions, int64_t rows, int64_t width, float* out) {
  for (int64_t i = 0; positions != nullptr && i < rows; ++i)
    if (positions[i] < 0) std::fill_n(out + i * width, width, 0.0f);
}

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
              PutFirst<false>(out_rows, at, values, kept);
            }
          }
        }
      }
    });
  }
}

void RunLinear(const Linear& op, Parallel& parallel) {
  Scratch scratch;
  const ActiveRows active(op.x, op.norm, op.positions, op.rows, op.weight.inputs, scratch);
  ClearInactive(op.positions, op.rows, op.weight.outputs, op.out);
  Multiply(op.weight, active, op.bias, op.residual, op.out, parallel);
}

}  // namespace peagle
