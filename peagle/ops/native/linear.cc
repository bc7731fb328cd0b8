// See kernels.h, Linear, and linear.h.

#include "linear.h"

#include <algorithm>

#include "packed.h"
#include "vectors.h"

namespace peagle {
namespace {

constexpr int64_t kBlockRows = 64;  // rows whose inputs stay in cache during one pass over all panels

template <bool kHalf>
void Normalize(const void* x, int64_t at, const Norm& norm, int64_t width, float* out) {
  Floats squares = {};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    Floats values = LoadLanes<kHalf>(x, at + i);
    squares = MulAdd(values, values, squares);
  }
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += squares[lane];
  for (; i < width; ++i) sum = MulAdd(LoadOne<kHalf>(x, at + i), LoadOne<kHalf>(x, at + i), sum);
  const float scale = 1.0f / __builtin_sqrtf(sum / static_cast<float>(width) + norm.epsilon);
  for (i = 0; i < width; i += kLanes) {
    Floats values = GetFirst<kHalf>(x, at + i, width - i) * scale * LoadFirst(norm.weight + i, width - i);
    if (kHalf) values = Rounded(values);
    PutFirst<false>(out, i, values, width - i);
  }
}

}  // namespace

ActiveRows::ActiveRows(const void* all, bool bfloat16, const Norm& norm, const int32_t* positions, int64_t rows,
                       int64_t width, Parallel& parallel, Scratch& scratch)
    : row(scratch.Take<int64_t>(rows)), x(scratch.Take<const float*>(rows)) {
  for (int64_t i = 0; i < rows; ++i)
    if (positions == nullptr || positions[i] >= 0) row[count++] = i;
  if (norm.weight == nullptr && !bfloat16) {
    for (int64_t i = 0; i < count; ++i) x[i] = static_cast<const float*>(all) + row[i] * width;
    return;
  }
  float* const room = scratch.Take<float>(count * width);
  ForEach(parallel, count, count * width, [&](int64_t i) {
    float* const to = room + i * width;
    x[i] = to;
    if (norm.weight == nullptr) return Widen(static_cast<const uint16_t*>(all) + row[i] * width, width, to);
    (bfloat16 ? Normalize<true> : Normalize<false>)(all, row[i] * width, norm, width, to);
  });
}

void ClearInactive(const int32_t* positions, int64_t rows, int64_t width, void* out, bool bfloat16) {
  const int64_t bytes = width * (bfloat16 ? 2 : 4);
  for (int64_t i = 0; positions != nullptr && i < rows; ++i)
    if (positions[i] < 0) std::fill_n(static_cast<char*>(out) + i * bytes, bytes, 0);
}

template <bool kHalf>
void Multiply(const Matrix& weight, const ActiveRows& active, const float* bias, const void* residual, void* out,
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
      const int64_t most = RowsAtOnce(weight);
      for (int64_t row = start; row < end; row += most) {
        const int64_t rows = std::min(most, end - row);
        Dot(weight, first, count, inputs.From(row - start), rows, tile);
        for (int64_t t = 0; t < rows; ++t) {
          for (int64_t p = 0; p < count; ++p) {
            for (int64_t i = 0; i < kPanelRows; i += kLanes) {
              const int64_t column = (first + p) * kPanelRows + i, kept = outputs - column;
              const int64_t at = active.row[row + t] * outputs + column;
              Floats values = Load<Floats>(tile.values[p][t] + i);
              if (bias != nullptr) values += LoadFirst(bias + column, kept);
              if (residual != nullptr) values += GetFirst<kHalf>(residual, at, kept);
              PutFirst<kHalf>(out, at, values, kept);
            }
          }
        }
      }
    });
  }
}

template void Multiply<false>(const Matrix&, const ActiveRows&, const float*, const void*, void*, Parallel&);
template void Multiply<true>(const Matrix&, const ActiveRows&, const float*, const void*, void*, Parallel&);

void RunLinear(const Linear& op, Parallel& parallel) {
  Scratch scratch;
  const ActiveRows active(op.x, op.weight.bfloat16_rows, op.norm, op.positions, op.rows, op.weight.inputs, parallel,
                          scratch);
  ClearInactive(op.positions, op.rows, op.weight.outputs, op.out, op.bfloat16_out);
  const auto multiply = op.bfloat16_out ? Multiply<true> : Multiply<false>;
  multiply(op.weight, active, op.bias, op.residual, op.out, parallel);
}

}  // namespace peagle
