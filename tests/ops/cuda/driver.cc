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

template <typename T>
T __shfl_xor_sync(unsigned, T mine, int with) {
  const T* all = Gather(mine);
  return all[Lane() ^ with];
}

void __threadfence() {}
template <typename T>
T __ldcg(const T* from) {
  return *from;
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

struct uint4 {
  unsigned x, y, z, w;
};
struct int4 {
  int x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
float2 make_float2(float x, float y) { return {x, y}; }

unsigned __ballot_sync(unsigned, bool mine) {
  const bool* all = Gather(mine);
  unsigned bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(all[lane]) << lane;
  return bits;
}
unsigned __reduce_max_sync(unsigned, unsigned mine) {
  const unsigned* all = Gather(mine);
  return *std::max_element(all, all + 32);
}
template <typename T>
T __shfl_up_sync(unsigned, T mine, int distance) {
  const T* all = Gather(mine);
  return Lane() < distance ? mine : all[Lane() - distance];
}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
unsigned __funnelshift_l(unsigned low, unsigned high, int by) { return high << by | low >> (32 - by); }
#define __expf(x) std::exp(x)  // the C library has a function of that name
float __fdividef(float x, float y) { return x / y; }
float rsqrtf(float x) { return 1 / std::sqrt(x); }

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
void __syncwarp() { warp_barriers[Warp()].Wait(); }

alignas(1024) unsigned char dynamic_shared[227 << 10];
void* DynamicBlock() { return dynamic_shared; }

template <int kWords>
void LoadStream(unsigned (&to)[kWords], bool wanted, const void* from) {
  if (wanted) std::memcpy(to, from, sizeof(to));
  else std::memset(to, 0, sizeof(to));
}
void LoadTwo(unsigned* to, bool wanted, const void* from) { LoadStream(reinterpret_cast<unsigned(&)[2]>(*to), wanted, from); }

// cp.async: here at once.
void CopyAsync(Words* to, const void* from, bool wanted) { *to = LoadIf(wanted, from); }
void CommitCopies() {}
template <int>
void WaitForCopies() {}

// ldmatrix.m8n8.x4. PTX ISA: lanes 8 i .. 8 i + 7 give the rows of matrix i; of each, a lane gets elements 2 (lane % 4) and
// the next one of row lane / 4, or transposed element lane / 4 of rows 2 (lane % 4) and the next one.
void LoadMatrices(unsigned (&to)[4], const Words* row) {
  const Words* const* rows = Gather(row);
  for (int i = 0; i < 4; ++i) to[i] = rows[8 * i + Lane() / 4]->of[Lane() % 4];
}
void LoadMatricesTransposed(unsigned (&to)[4], const Words* row) {
  const Words* const* rows = Gather(row);
  const auto element = [&](int matrix, int of_row) {
    return reinterpret_cast<const uint16_t*>(rows[8 * matrix + of_row])[Lane() / 4];
  };
  for (int i = 0; i < 4; ++i)
    to[i] = element(i, Lane() % 4 * 2) | static_cast<unsigned>(element(i, Lane() % 4 * 2 + 1)) << 16;
}

unsigned Pack(float low, float high) {
  const auto rounded = [](float value) {
    const unsigned bits = __float_as_uint(value);
    return value != value ? 0x7fffu : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  };
  return rounded(low) | rounded(high) << 16;
}

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
#include "linear.cu"
#include "experts.cu"
#include "attention.cu"
#include "experts_hopper.h"
#include "hopper.cuh"

// In place of hopper.cuh's instructions: copies and products are done at once.
namespace tiles {

Word SharedAddress(const void* at) { return static_cast<const unsigned char*>(at) - dynamic_shared; }

void WaitForGrid() {}
void LetNextBegin() {}

// mbarrier: a phase ends when all arrivals have come and no bytes are awaited.
struct PhaseBarrier {
  int expected, arrived;
  long bytes;
  Word phase;
  void MayEnd() {
    if (arrived != expected || bytes != 0) return;
    arrived = 0;
    phase ^= 1;
  }
};
std::map<Word, PhaseBarrier> phase_barriers;

void InitBarrier(Word barrier, int arrivals) { phase_barriers[barrier] = {arrivals, 0, 0, 0}; }
void Arrive(Word barrier) {
  ++phase_barriers[barrier].arrived;
  phase_barriers[barrier].MayEnd();
}
void Expect(Word barrier, Word bytes) {
  phase_barriers[barrier].bytes += bytes;
  Arrive(barrier);
}
void Wait(Word barrier, Word parity) {
  while (phase_barriers[barrier].phase == parity) Pause();
}
void Copy(Word to, const void* from, Word bytes, Word barrier, Policy) {
  if (to % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || to + bytes > sizeof(dynamic_shared)) {
    std::fprintf(stderr, "%u bytes are copied from %p to %u\n", bytes, from, to);
    std::abort();
  }
  std::memcpy(dynamic_shared + to, from, bytes);
  phase_barriers[barrier].bytes -= bytes;
  phase_barriers[barrier].MayEnd();
}
Policy ReadOnce() { return 0; }
Policy ReadAgain() { return 0; }
void ShowBarriers() {}

template <int>
void GiveRegisters() {}
template <int>
void TakeRegisters() {}
bool IsElected() { return Lane() == 0; }
void Keep(Word&) {}
void Keep(float&) {}

uint4 LoadShared16(Word from) {
  uint4 value;
  std::memcpy(&value, dynamic_shared + from, 16);
  return value;
}
Word LoadShared4(Word from) {
  Word value;
  std::memcpy(&value, dynamic_shared + from, 4);
  return value;
}

Word Transpose(Word pair) {
  const Word* all = Gather(pair);
  const auto half = [&](int row, int column) { return all[4 * row + column / 2] >> column % 2 * 16 & 0xffff; };
  return half(Lane() % 4 * 2, Lane() / 4) | half(Lane() % 4 * 2 + 1, Lane() / 4) << 16;
}

Barrier four_warps{128};
void WaitForFourWarps() { four_warps.Wait(); }

// wgmma.mma_async.m64nNk16. PTX ISA 9.7.15: the 16 rows of a that a warp has are laid out as mma.m16n8k16's; column n of b is
// 128 bytes after column n - 1, and eight columns 1024 bytes; address bits 4..6 are combined with bits 7..9; of the sums,
// eight columns after eight are laid out as mma.m16n8k16's.
//
// A lane adds up, by row and column, the products of its own elements of a. What the four lanes with elements of the same
// rows have is added when all products are waited for: a warp would take long to wait for its lanes at each of them.
struct Unfinished {
  float* sums;
  int columns;
  float of[2][256];
};
Unfinished unfinished[1024];  // by thread

void ProductsFence() {}
void CommitProducts() {}
template <int left>
void WaitForProducts() {
  Unfinished& own = unfinished[threadIdx.x];
  if (left > 0 || own.columns == 0) return;
  Gather(0);  // all lanes have added theirs
  const Unfinished* group = &unfinished[threadIdx.x / 4 * 4];
  for (int i = 0; i < own.columns / 2; ++i) {
    const int column = i / 4 * 8 + Lane() % 4 * 2 + i % 2;
    for (int lane = 0; lane < 4; ++lane) own.sums[i] += group[lane].of[i / 2 % 2][column];
  }
  Gather(0);  // all lanes have read
  own.columns = 0;
}

template <int N>
struct Product {
  static void Add(float (&sums)[N / 2], Word a0, Word a1, Word a2, Word a3, unsigned long long rows, int add) {
    Unfinished& own = unfinished[threadIdx.x];
    if (!add) {
      std::fill(sums, sums + N / 2, 0.f);
      own = {sums, N, {}};
    }
    const Word begin = (rows & 0x3fff) << 4;
    for (int k = 0; k < 4; ++k) {  // inputs 2 q, 2 q + 1, and eight further
      const int input = Lane() % 4 * 2 + k % 2 + k / 2 * 8;
      const auto element = [&](Word pair) { return k % 2 ? Upper16(pair) : Lower16(pair); };
      const float low = element(k < 2 ? a0 : a2), high = element(k < 2 ? a1 : a3);
      for (int n = 0; n < N; ++n) {
        const Word at = begin + n / 8 * 1024 + n % 8 * 128 + 2 * input;
        uint16_t bits;
        std::memcpy(&bits, dynamic_shared + (at ^ (at >> 7 & 7) << 4), 2);
        own.of[0][n] += low * Lower16(bits);
        own.of[1][n] += high * Lower16(bits);
      }
    }
  }
};

}  // namespace tiles

#include "experts_hopper.cu"
// clang-format on

struct CUctx_st {};
struct CUmod_st {};
struct CUfunc_st {
  void (*run)(void** arguments);
};
struct CUstream_st;

namespace {

// cuda.h's CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  CUstream_st* stream;
  void* attributes;
  unsigned num_attributes;
};

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
      {"peagle_linear_4", {Call<peagle_linear_4>}},   {"peagle_linear_8", {Call<peagle_linear_8>}},
      {"peagle_rotate", {Call<peagle_rotate>}},       {"peagle_attend", {Call<peagle_attend>}},
      {"peagle_prompt", {Call<peagle_prompt>}},       {"peagle_router", {Call<peagle_router>}},
      {"peagle_choose", {Call<peagle_choose>}}, {"peagle_route_few", {Call<peagle_route_few>}},
      {"peagle_route_many", {Call<peagle_route_many>}},
      {"peagle_gather", {Call<peagle_gather>}},       {"peagle_combine_experts", {Call<peagle_combine_experts>}},
      {"peagle_tiles_gate_up_0", {Call<peagle_tiles_gate_up_0>}}, {"peagle_tiles_down_0", {Call<peagle_tiles_down_0>}},
      {"peagle_tiles_gate_up_1", {Call<peagle_tiles_gate_up_1>}}, {"peagle_tiles_down_1", {Call<peagle_tiles_down_1>}},
      {"peagle_tiles_gate_up_2", {Call<peagle_tiles_gate_up_2>}}, {"peagle_tiles_down_2", {Call<peagle_tiles_down_2>}},
      {"peagle_tiles_gate_up_3", {Call<peagle_tiles_gate_up_3>}}, {"peagle_tiles_down_3", {Call<peagle_tiles_down_3>}},
  };
  const auto at = functions.find(name);
  if (at == functions.end()) return 1;
  *found = &at->second;
  return 0;
}
int cuCtxGetDevice(int* device) { return *device = 0; }
int cuDeviceGetAttribute(int* value, int, int) {
  *value = 2;  // multiprocessors
  return 0;
}
int cuFuncSetAttribute(CUfunc_st*, int, int) { return 0; }
int cuLaunchKernelEx(const LaunchConfig* config, CUfunc_st* kernel, void** arguments, void**) {
  const auto [x, y, z] = config->grid;
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
      for (blockIdx.x = 0; blockIdx.x < int(x); ++blockIdx.x) RunBlock(config->block[0]);
  std::fesetenv(&before);
  return 0;
}
}
