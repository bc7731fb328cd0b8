// A CUDA driver without a GPU, with the functions that peagle/ops/cuda/launch.cc uses. It runs the kernels of
// peagle/ops/cuda; their threads take turns, each on a stack of its own until it waits for others.
//
// Reads of other lanes' registers and warp-wide operations follow the PTX ISA, independently of those sources.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time

namespace {

struct Index {
  int x, y, z;
};

struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf place;       // where it goes on; unlike swapcontext, a jump is no system call
  std::vector<char> stack;
  Index index;
  bool begun = false, done = false;
};

std::vector<Fiber> fibers;
Fiber* running;
jmp_buf scheduler;
Index blockIdx, gridDim;
#define threadIdx (running->index)

int Lane() { return threadIdx.x % 32; }
int Warp() { return threadIdx.x / 32; }

void Pause() {
  if (_setjmp(running->place) == 0) _longjmp(scheduler, 1);
}

// A barrier for `members`. Lanes of a warp, or threads of a block, that wait at different barriers are an error of the
// kernel: it would hang.
struct Barrier {
  int members = 0, arrived = 0;
  long generation = 0;

  void Wait() {
    const long mine = generation;
    if (++arrived == members) {
      arrived = 0;
      ++generation;
    }
    while (generation == mine) Pause();
  }
};

Barrier block_barrier;
std::vector<Barrier> warp_barriers;

void __syncthreads() { block_barrier.Wait(); }

// Values that a warp's lanes exchange. Two buffers alternate, so values stay readable until the exchange after the next.
template <typename T>
const T* Gather(const T& mine) {
  static T handed[2][32 * 32];
  Barrier& barrier = warp_barriers[Warp()];
  T* all = handed[barrier.generation % 2] + 32 * Warp();
  all[Lane()] = mine;
  barrier.Wait();
  return all;
}

bool __any_sync(unsigned, bool mine) {
  const bool* all = Gather(mine);
  return std::find(all, all + 32, true) != all + 32;
}

float __shfl_xor_sync(unsigned, float mine, int with) {
  const float* all = Gather(mine);
  return all[Lane() ^ with];
}

void atomicOr(unsigned* where, unsigned bits) { *where |= bits; }
int atomicAdd(int* where, int more) { return std::exchange(*where, *where + more); }
int __popc(unsigned bits) { return __builtin_popcount(bits); }
int __ffs(unsigned bits) { return __builtin_ffs(bits); }
template <typename T>
T min(T a, T b) {
  return std::min(a, b);
}
template <typename T>
T max(T a, T b) {
  return std::max(a, b);
}

float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

struct alignas(16) Words {
  unsigned of[4];
};

Words LoadOnce(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(Words) != 0) {
    std::fprintf(stderr, "16 bytes are read from %p, which is not a multiple of 16\n", from);
    std::abort();
  }
  return *static_cast<const Words*>(from);
}
Words LoadIf(bool wanted, const void* from) { return wanted ? LoadOnce(from) : Words{}; }

float Lower16(unsigned pair) { return __uint_as_float(pair << 16); }
float Upper16(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// fma.rn.bf16x2 with an addend of -0.
unsigned MultiplyPairs(unsigned a, unsigned b) {
  auto rounded = [](float value) {
    const unsigned bits = __float_as_uint(value);
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  };
  return rounded(Lower16(a) * Lower16(b)) | rounded(Upper16(a) * Upper16(b)) << 16;
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32. PTX ISA 9.7.14.5.8: element i (of 8) of a is at row
// lane/4 (+ 8 for i = 2, 3, 6, 7) and column (lane%4) * 2 + i%2 (+ 8 for i >= 4); element i (of 4) of b at row
// (lane%4) * 2 + i%2 (+ 8 for i >= 2) and column lane/4; element i (of 4) of c at row lane/4 (+ 8 for i >= 2) and column
// (lane%4) * 2 + i%2.
void MultiplyAdd(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  struct Fragments {
    unsigned a[4], b[2];
  };
  Fragments mine;
  std::memcpy(mine.a, a, sizeof(mine.a));
  std::memcpy(mine.b, b, sizeof(mine.b));
  const Fragments* all = Gather(mine);
  auto element = [](const unsigned* registers, int i) {
    return i % 2 ? Upper16(registers[i / 2]) : Lower16(registers[i / 2]);
  };
  float left[16][16], right[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 8; ++i) {
      const int row = lane / 4 + (i == 2 || i == 3 || i == 6 || i == 7 ? 8 : 0);
      left[row][lane % 4 * 2 + i % 2 + (i >= 4 ? 8 : 0)] = element(all[lane].a, i);
    }
    for (int i = 0; i < 4; ++i) right[lane % 4 * 2 + i % 2 + (i >= 2 ? 8 : 0)][lane / 4] = element(all[lane].b, i);
  }
  for (int i = 0; i < 4; ++i) {
    const int row = Lane() / 4 + (i >= 2 ? 8 : 0), column = Lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) sums[i] += left[row][k] * right[k][column];
  }
}

}  // namespace

// clang-format off: in this order, as NVRTC gets them
#include "common.cuh"
#include "experts.cu"
#include "attention.cu"
// clang-format on

struct CUctx_st {};
struct CUmod_st {};
struct CUfunc_st {
  void (*run)(void** arguments);
};
struct CUstream_st;

namespace {

CUctx_st context;
CUmod_st module;

// Calls the kernel with the values at the addresses in `arguments`.
template <auto kernel>
void Call(void** arguments) {
  [&]<typename... T>(void (*)(T...)) {
    [&]<size_t... i>(std::index_sequence<i...>) {
      kernel(*static_cast<T*>(arguments[i])...);
    }(std::index_sequence_for<T...>{});
  }(kernel);
}

void (*current)(void**);
void** current_arguments;

void Begin() {
  current(current_arguments);
  running->done = true;
  _longjmp(scheduler, 1);
}

void Resume() {
  if (_setjmp(scheduler) != 0) return;
  if (running->begun) _longjmp(running->place, 1);
  running->begun = true;
  setcontext(&running->context);
}

void RunBlock(int threads) {
  fibers.resize(threads);
  block_barrier = {threads};
  warp_barriers.assign((threads + 31) / 32, Barrier{32});
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.stack.resize(1 << 16);
    fiber.index = {i, 0, 0};
    fiber.begun = fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, Begin, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (Fiber& fiber : fibers) {
      if (fiber.done) continue;
      running = &fiber;
      Resume();
      left |= !fiber.done;
    }
  }
}

}  // namespace

extern "C" {

int cuGetErrorString(int, const char** said) {
  *said = "this driver is a test's";
  return 0;
}
int cuStreamGetCtx(CUstream_st*, CUctx_st** found) {
  *found = &context;
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  static int current_mode = 0;
  std::swap(*mode, current_mode);
  return 0;
}
int cuCtxPushCurrent_v2(CUctx_st*) { return 0; }
int cuCtxPopCurrent_v2(CUctx_st**) { return 0; }
// The image is "refuse" if a test wants the driver to fail.
int cuModuleLoadData(CUmod_st** made, const void* image) {
  *made = &module;
  return std::strncmp(static_cast<const char*>(image), "refuse", 6) == 0 ? 1 : 0;
}
int cuModuleGetFunction(CUfunc_st** found, CUmod_st*, const char* name) {
  static std::map<std::string, CUfunc_st> functions = {
      {"peagle_gate_up_1", {Call<peagle_gate_up_1>}}, {"peagle_down_1", {Call<peagle_down_1>}},
      {"peagle_gate_up_2", {Call<peagle_gate_up_2>}}, {"peagle_down_2", {Call<peagle_down_2>}},
      {"peagle_sort", {Call<peagle_sort>}},           {"peagle_gate_up_many", {Call<peagle_gate_up_many>}},
      {"peagle_down_many", {Call<peagle_down_many>}},
      {"peagle_rotate", {Call<peagle_rotate>}},       {"peagle_attend", {Call<peagle_attend>}},
      {"peagle_combine", {Call<peagle_combine>}},     {"peagle_prompt", {Call<peagle_prompt>}},
  };
  const auto at = functions.find(name);
  if (at == functions.end()) return 1;
  *found = &at->second;
  return 0;
}
int cuLaunchKernel(CUfunc_st* kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned, unsigned,
                   CUstream_st*, void** arguments, void**) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  std::fenv_t before;  // XLA's threads flush denormal numbers to zero; GPUs do not
  std::fegetenv(&before);
  std::fesetenv(FE_DFL_ENV);
  current = kernel->run;
  current_arguments = arguments;
  gridDim = {int(x), int(y), int(z)};
  for (blockIdx.z = 0; blockIdx.z < int(z); ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < int(y); ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < int(x); ++blockIdx.x) RunBlock(threads);
  std::fesetenv(&before);
  return 0;
}
}
