// The GPU kernels once more, on buffers that are as long as their values, for AddressSanitizer.
//
//     bounds [NUMBER]      the buffer of this number is an element shorter than it has to be

#include "driver.cc"

namespace {

constexpr int kRowCount = 9, kTopK = 2, kExpertCount = 3, kWidth = 160, kExpertWidth = 32;

int buffers = 0, shorter = -1;

// Never freed, so that nothing else lies behind it.
template <typename T>
T* Make(size_t count, T value) {
  T* values = static_cast<T*>(std::malloc((count - (buffers++ == shorter ? 1 : 0)) * sizeof(T)));
  for (size_t i = 0; i + 1 < count; ++i) values[i] = value;
  return values;
}

template <typename... T>
void Launch(void (*)(T...), const char* name, int outputs, T... values) {
  CUfunc_st* kernel;
  if (cuModuleGetFunction(&kernel, &module, name) != 0) std::abort();
  void* arguments[] = {&values...};
  cuLaunchKernel(kernel, outputs / kOutputs, kExpertCount, 1, kThreads, 1, 1, 0, nullptr, arguments, nullptr);
}

}  // namespace

int main(int count, char** words) {
  if (count > 1) shorter = std::atoi(words[1]);
  const Half one = 0x3f80;
  const Half* x = Make<Half>(kRowCount * kWidth, one);
  int* ids = Make<int>(kRowCount * kTopK, 0);
  for (int i = 0; i + 1 < kRowCount * kTopK; ++i) ids[i] = (i / kTopK + i % kTopK) % kExpertCount;
  Bytes gate_up = Make<unsigned char>(kExpertCount * 2 * kExpertWidth * kWidth / 2, 0x22);
  Bytes gate_up_scales = Make<unsigned char>(kExpertCount * 2 * kExpertWidth * kWidth / 32, 120);
  const Half* gate_up_bias = Make<Half>(kExpertCount * 2 * kExpertWidth, one);
  Bytes down = Make<unsigned char>(kExpertCount * kWidth * kExpertWidth / 2, 0x22);
  Bytes down_scales = Make<unsigned char>(kExpertCount * kWidth * kExpertWidth / 32, 120);
  const Half* down_bias = Make<Half>(kExpertCount * kWidth, one);
  Half* hidden = Make<Half>(kRowCount * kTopK * kExpertWidth, one);
  float* out = Make<float>(kRowCount * kTopK * kWidth, 0);
  // these have last elements that nothing has written yet
  if (shorter != 1) ids[kRowCount * kTopK - 1] = 0;
  Launch(peagle_gate_up_2, "peagle_gate_up_2", 2 * kExpertWidth, x, static_cast<const int*>(ids), kRowCount, kTopK,
         kExpertCount, gate_up, gate_up_scales, gate_up_bias, 2 * kExpertWidth, kWidth, 7.0f, hidden);
  Launch(peagle_down_2, "peagle_down_2", kWidth, static_cast<const Half*>(hidden), static_cast<const int*>(ids), kRowCount,
         kTopK, kExpertCount, down, down_scales, down_bias, kWidth, kExpertWidth, out);
  std::printf("%d buffers\n", buffers);
}
