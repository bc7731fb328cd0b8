// Shared by the XLA FFI handlers of the CPU kernels and of the CUDA kernels.

#pragma once

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

#define PEAGLE_EXPORT extern "C" __attribute__((visibility("default")))

namespace peagle {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using Out = ffi::Result<AnyBuffer>;

// The buffer's shape as "[2, 3]", for an error.
inline std::string Shape(const AnyBuffer& buffer) {
  std::string text = "[";
  for (int64_t size : buffer.dimensions()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

}  // namespace peagle
