// The functions of linear.cc that other ops use.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "scratch.h"

namespace peagle {

// The active rows of T: their indices and inputs, normalised if there is a norm.
struct ActiveRows {
  int64_t* const row;
  const float** const x;
  int64_t count = 0;

  ActiveRows(const float* all, const Norm& norm, const int32_t* positions, int64_t rows, int64_t width, Scratch& scratch);
};

// Sets the inactive rows of out to zero.
void ClearInactive(const int32_t* positions, int64_t rows, int64_t width, float* out);

// out, bias and residual as in Linear; writes the active rows only.
void Multiply(const Matrix& weight, const ActiveRows& active, const float* bias, const float* residual, float* out,
              Parallel& parallel);

}  // namespace peagle
