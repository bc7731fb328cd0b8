// The functions of linear.cc that other ops use.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "scratch.h"

namespace peagle {

// The active rows of T: their indices, and their inputs as floats, normalised if there is a norm, and then rounded
// to bfloat16 again if they were that.
struct ActiveRows {
  int64_t* const row;
  const float** const x;
  int64_t count = 0;

  ActiveRows(const void* all, bool bfloat16, const Norm& norm, const int32_t* positions, int64_t rows, int64_t width,
             Parallel& parallel, Scratch& scratch);
};

// Sets the inactive rows of out to zero.
void ClearInactive(const int32_t* positions, int64_t rows, int64_t width, void* out, bool bfloat16);

// out, bias and residual as in Linear; writes the active rows only.
template <bool kHalf>
void Multiply(const Matrix& weight, const ActiveRows& active, const float* bias, const void* residual, void* out,
              Parallel& parallel);

}  // namespace peagle
