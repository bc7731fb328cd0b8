// What linear.cc does for the other ops, too.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "scratch.h"

namespace peagle {

// The active ones of T rows: each one's index and its inputs, normalised where there is a norm.
struct ActiveRows {
  int64_t* const row;
  const float** const x;
  int64_t count = 0;

  ActiveRows(const float* all, const Norm& norm, const int32_t* positions, int64_t rows, int64_t width, Scratch& scratch);
};

// Zeros for the inactive rows of out.
void ClearInactive(const int32_t* positions, int64_t rows, int64_t width, float* out);

// out, bias and residual as in Linear; the active rows alone are written.
void Multiply(const Matrix& weight, const ActiveRows& active, const float* bias, const float* residual, float* out,
              Parallel& parallel);

}  // namespace peagle
