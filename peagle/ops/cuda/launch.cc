// XLA FFI handlers of the CUDA kernels: they check every shape, then launch on XLA's own stream. The driver is opened at run
// time, and its few functions are declared here, so compiling this file needs no CUDA.

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../native/buffers.h"
#include "experts_hopper.h"
#include "xla/ffi/api/ffi.h"

// CUDA driver API, cuda.h
struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUstream_st;

namespace peagle {

using Stream = CUstream_st*;

#if defined(PEAGLE_TEST_ON_HOST)  // a CPU has no streams
struct StreamContext;
}  // namespace peagle

template <>
struct xla::ffi::CtxDecoding<peagle::StreamContext> {
  using Type = peagle::Stream;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) { return nullptr; }
};

namespace peagle {
#else
using StreamContext = ffi::PlatformStream<Stream>;
#endif

namespace {

// common.cuh, linear.cu, experts.cu, attention.cu
constexpr int64_t kThreads = 128, kOutputs = 16, kColumns = 8, kFewRows = 16, kMaxRows = 4096, kMaxExperts = 1024;
constexpr int64_t kBlock = 32, kSortThreads = 512, kPanel = 64, kTileRows = 64, kTileWords = 3;
constexpr int64_t kLinearRows = 16, kLinearOutputs = 32, kLinearThreads = 512, kLinearManyBlocks = 66;
constexpr int64_t kHead = 64, kSlots = 64, kQueryRows = 16, kTileQueries = 128, kStepRows = 16;
constexpr int64_t kMostTiles = 1 << 16, kMostSplits = 32;
constexpr int64_t kBlocksWanted = 1056;  // of attention: eight for each multiprocessor of a large GPU
constexpr unsigned kAttendBytes = 90752;  // peagle_attend's shared memory

struct LaunchAttribute {
  int id, padding;
  int value[16];
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

constexpr int kMultiprocessors = 16;        // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kMostSharedBytes = 8;         // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kProgrammaticSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

struct Driver {
  int (*GetErrorString)(int, const char**);
  int (*StreamGetCtx)(Stream, CUctx_st**);
  int (*CtxPushCurrent)(CUctx_st*);
  int (*CtxPopCurrent)(CUctx_st**);
  int (*ThreadExchangeStreamCaptureMode)(int*);
  int (*ModuleLoadData)(CUmod_st**, const void*);
  int (*ModuleGetFunction)(CUfunc_st**, CUmod_st*, const char*);
  int (*LaunchKernelEx)(const LaunchConfig*, CUfunc_st*, void**, void**);
  int (*CtxGetDevice)(int*);
  int (*DeviceGetAttribute)(int*, int, int);
  int (*FuncSetAttribute)(CUfunc_st*, int, int);

  // Returns "", or an error that names the missing library or function.
  std::string Open(const char* name) {
    void* library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) return dlerror();
    const char* missing = nullptr;
    auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
      if (function == nullptr) missing = symbol;
    };
    find(GetErrorString, "cuGetErrorString");
    find(StreamGetCtx, "cuStreamGetCtx");
    find(CtxPushCurrent, "cuCtxPushCurrent_v2");
    find(CtxPopCurrent, "cuCtxPopCurrent_v2");
    find(ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
    find(ModuleLoadData, "cuModuleLoadData");
    find(ModuleGetFunction, "cuModuleGetFunction");
    find(LaunchKernelEx, "cuLaunchKernelEx");
    find(CtxGetDevice, "cuCtxGetDevice");
    find(DeviceGetAttribute, "cuDeviceGetAttribute");
    find(FuncSetAttribute, "cuFuncSetAttribute");
    return missing == nullptr ? "" : std::string(name) + " has no " + missing;
  }
};

// The kernels of experts_hopper.cu for both products, for up to that many rows of an expert.
struct TileKernels {
  CUfunc_st *gate_up, *down;
  tiles::Widths widths;
  unsigned shared_bytes, threads, blocks;  // blocks: that run together

  int Widest() const { return widths.of[widths.count - 1]; }
};

struct Kernels {
  TileKernels tiles[4];  // of Hopper alone
  CUfunc_st *router, *choose, *route_few, *route_many, *gather, *combine_experts;
  CUfunc_st* gate_up[2];  // for up to kColumns rows, and for twice as many: kFewRows
  CUfunc_st* down[2];
  CUfunc_st *sort, *gate_up_many, *down_many;
  CUfunc_st* linear[2];  // of 32 and of 64 outputs a block
  CUfunc_st *rotate, *attend, *prompt;
};

std::mutex mutex;
Driver driver;
std::vector<char> image;              // the machine code that NVRTC compiled
bool has_tiles = false;               // whether it has the kernels of experts_hopper.cu
std::map<CUctx_st*, Kernels> loaded;  // by the device's context

ffi::Error Failed(const char* what, int code) {
  const char* said = nullptr;
  driver.GetErrorString(code, &said);
  return ffi::Error::Internal(std::string(what) + ": " + (said == nullptr ? "CUDA error " + std::to_string(code) : said));
}

#define PEAGLE_TRY(call)                                         \
  if (const int code = driver.call; code != 0) return Failed(#call, code)

// Lets the thread load modules, for its lifetime, even while XLA records the thread's launches into a CUDA graph.
class Relaxed {
 public:
  Relaxed() { driver.ThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { driver.ThreadExchangeStreamCaptureMode(&mode_); }

 private:
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED, then the mode to restore
};

template <class C>
ffi::Error LoadTiles(CUmod_st* module, int multiprocessors, int number, TileKernels& kernels) {
  const std::string name = std::to_string(number);
  PEAGLE_TRY(ModuleGetFunction(&kernels.gate_up, module, ("peagle_tiles_gate_up_" + name).c_str()));
  PEAGLE_TRY(ModuleGetFunction(&kernels.down, module, ("peagle_tiles_down_" + name).c_str()));
  PEAGLE_TRY(FuncSetAttribute(kernels.gate_up, kMostSharedBytes, C::kSharedBytes));
  PEAGLE_TRY(FuncSetAttribute(kernels.down, kMostSharedBytes, C::kSharedBytes));
  kernels.widths = C::kWidths;
  kernels.shared_bytes = C::kSharedBytes;
  kernels.threads = C::kThreads;
  kernels.blocks = C::kBlocks * multiprocessors;
  return ffi::Error::Success();
}

ffi::Error LoadTiles(CUmod_st* module, Kernels& kernels) {
  int device, multiprocessors;
  PEAGLE_TRY(CtxGetDevice(&device));
  PEAGLE_TRY(DeviceGetAttribute(&multiprocessors, kMultiprocessors, device));
  PEAGLE_TRY(ModuleGetFunction(&kernels.router, module, "peagle_router"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.choose, module, "peagle_choose"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.route_few, module, "peagle_route_few"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.route_many, module, "peagle_route_many"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.gather, module, "peagle_gather"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.combine_experts, module, "peagle_combine_experts"));
  if (auto error = LoadTiles<tiles::UpTo16>(module, multiprocessors, 0, kernels.tiles[0]); error.failure()) return error;
  if (auto error = LoadTiles<tiles::UpTo48>(module, multiprocessors, 1, kernels.tiles[1]); error.failure()) return error;
  if (auto error = LoadTiles<tiles::UpTo90>(module, multiprocessors, 2, kernels.tiles[2]); error.failure()) return error;
  return LoadTiles<tiles::Beyond>(module, multiprocessors, 3, kernels.tiles[3]);
}

// Loads the kernels into the context, which is current, or finds those loaded before.
ffi::Error Load(CUctx_st* context, Kernels& kernels) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (auto found = loaded.find(context); found != loaded.end()) {
    kernels = found->second;
    return ffi::Error::Success();
  }
  const Relaxed relaxed;
  CUmod_st* module;
  PEAGLE_TRY(ModuleLoadData(&module, image.data()));
  for (int i = 0; i < 2; ++i) {
    const std::string tiles = std::to_string(1 << i);
    PEAGLE_TRY(ModuleGetFunction(&kernels.gate_up[i], module, ("peagle_gate_up_" + tiles).c_str()));
    PEAGLE_TRY(ModuleGetFunction(&kernels.down[i], module, ("peagle_down_" + tiles).c_str()));
  }
  PEAGLE_TRY(ModuleGetFunction(&kernels.sort, module, "peagle_sort"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.gate_up_many, module, "peagle_gate_up_many"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.down_many, module, "peagle_down_many"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.linear[0], module, "peagle_linear_4"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.linear[1], module, "peagle_linear_8"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.rotate, module, "peagle_rotate"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.attend, module, "peagle_attend"));
  PEAGLE_TRY(FuncSetAttribute(kernels.attend, kMostSharedBytes, kAttendBytes));
  PEAGLE_TRY(ModuleGetFunction(&kernels.prompt, module, "peagle_prompt"));
  if (has_tiles)
    if (ffi::Error error = LoadTiles(module, kernels); error.failure()) return error;
  loaded[context] = kernels;
  return ffi::Error::Success();
}

bool Is(const AnyBuffer& buffer, ffi::DataType type, std::initializer_list<int64_t> shape) {
  const auto dimensions = buffer.dimensions();
  return buffer.element_type() == type && dimensions.size() == shape.size() &&
         std::equal(shape.begin(), shape.end(), dimensions.begin());
}

void* Address(const AnyBuffer& buffer) { return buffer.untyped_data(); }

// Launches kernels on a stream, in the stream's context, until the first error.
class Launcher {
 public:
  Kernels kernels;

  ~Launcher() {
    CUctx_st* popped;
    if (pushed_) driver.CtxPopCurrent(&popped);
  }

  // Enters the stream's context and loads the kernels.
  ffi::Error Open(Stream stream) {
    stream_ = stream;
    CUctx_st* context;
    PEAGLE_TRY(StreamGetCtx(stream, &context));
    PEAGLE_TRY(CtxPushCurrent(context));
    pushed_ = true;
    return Load(context, kernels);
  }

  // `arguments` are addresses of the kernel's arguments, with the order and types of its source.
  void Launch(CUfunc_st* kernel, unsigned x, unsigned y, unsigned threads, std::initializer_list<void*> arguments,
              unsigned z = 1, unsigned shared_bytes = 0) {
    Launch({{x, y, z}, {threads, 1, 1}, shared_bytes, stream_, nullptr, 0}, kernel, arguments);
  }

  // As Launch, for a kernel that itself waits for the kernel before, and so may begin while that still runs. What it loads
  // before it waits, weights and norms, must not be an output of the kernel before.
  void LaunchEarly(CUfunc_st* kernel, unsigned x, unsigned y, unsigned threads, unsigned shared_bytes,
                   std::initializer_list<void*> arguments) {
    LaunchAttribute early = {kProgrammaticSerialization, 0, {1}};
    Launch({{x, y, 1}, {threads, 1, 1}, shared_bytes, stream_, &early, 1}, kernel, arguments);
  }

  ffi::Error Error() const { return code_ == 0 ? ffi::Error::Success() : Failed("cuLaunchKernelEx", code_); }

 private:
  void Launch(const LaunchConfig& config, CUfunc_st* kernel, std::initializer_list<void*> arguments) {
    std::vector<void*> pointers(arguments);
    if (code_ == 0) code_ = driver.LaunchKernelEx(&config, kernel, pointers.data(), nullptr);
  }

  Stream stream_ = nullptr;
  bool pushed_ = false;
  int code_ = 0;
};

#define PEAGLE_EXPECT(buffer, type, ...)                                                                     \
  if (!Is(buffer, ffi::type, {__VA_ARGS__}))                                                                 \
  return ffi::Error::InvalidArgument(#buffer " " + Shape(buffer) + " is not " #type " [" #__VA_ARGS__ "]")

ffi::Error Experts(Stream stream, AnyBuffer x, AnyBuffer ids, AnyBuffer gate_up_blocks, AnyBuffer gate_up_scales,
                   AnyBuffer gate_up_bias, AnyBuffer down_blocks, AnyBuffer down_scales, AnyBuffer down_bias, Out result,
                   Out scratch, Out by_expert, float limit) {
  const AnyBuffer &out = *result, &hidden = *scratch, &order = *by_expert;
  if (ids.dimensions().size() != 2 || x.dimensions().size() != 2 || gate_up_bias.dimensions().size() != 2)
    return ffi::Error::InvalidArgument("experts: x " + Shape(x) + ", ids " + Shape(ids) + " and gate_up_bias " +
                                       Shape(gate_up_bias) + " are not [T, D], [T, k] and [E, 2F]");
  const int64_t T = ids.dimensions()[0], k = ids.dimensions()[1], D = x.dimensions()[1];
  const int64_t E = gate_up_bias.dimensions()[0], F = gate_up_bias.dimensions()[1] / 2;
  if (T > kMaxRows || E > kMaxExperts || D % kBlock || F % kBlock || T * k == 0 || D * F == 0)
    return ffi::Error::InvalidArgument("experts: x " + Shape(x) + ", ids " + Shape(ids) + " and gate_up_bias " +
                                       Shape(gate_up_bias) + ": expected up to 4096 rows, 1024 experts, and whole MXFP4 blocks");
  const int64_t most_tiles = T > kFewRows ? T * k / kTileRows + E : 0;
  PEAGLE_EXPECT(x, BF16, T, D);
  PEAGLE_EXPECT(ids, S32, T, k);
  PEAGLE_EXPECT(gate_up_blocks, U8, E, 2 * F, D / kBlock, kBlock / 2);
  PEAGLE_EXPECT(gate_up_scales, U8, E, 2 * F, D / kBlock);
  PEAGLE_EXPECT(gate_up_bias, BF16, E, 2 * F);
  PEAGLE_EXPECT(down_blocks, U8, E, D, F / kBlock, kBlock / 2);
  PEAGLE_EXPECT(down_scales, U8, E, D, F / kBlock);
  PEAGLE_EXPECT(down_bias, BF16, E, D);
  PEAGLE_EXPECT(out, F32, T, k, D);
  PEAGLE_EXPECT(hidden, BF16, T * k, F);
  PEAGLE_EXPECT(order, S32, most_tiles == 0 ? 0 : T * k + kTileWords * most_tiles);

  Launcher on;
  if (ffi::Error error = on.Open(stream); error.failure()) return error;
  const unsigned experts = std::min(E, T * k);
  void *x_at = Address(x), *ids_at = Address(ids), *hidden_at = Address(hidden), *out_at = Address(out);
  void *gate_up[3] = {Address(gate_up_blocks), Address(gate_up_scales), Address(gate_up_bias)};
  void *down[3] = {Address(down_blocks), Address(down_scales), Address(down_bias)};
  int rows = T, top_k = k, num_experts = E, width = D, twice = 2 * F, expert_width = F;
  if (most_tiles > 0) {
    int pairs = T * k, num_tiles = most_tiles;
    void *sorted_at = Address(order), *tiles_at = static_cast<int32_t*>(Address(order)) + pairs;
    on.Launch(on.kernels.sort, 1, 1, kSortThreads, {&ids_at, &pairs, &num_experts, &num_tiles, &sorted_at, &tiles_at});
    on.Launch(on.kernels.gate_up_many, (twice + kPanel - 1) / kPanel, num_tiles, kThreads,
              {&x_at, &sorted_at, &tiles_at, &top_k, &gate_up[0], &gate_up[1], &gate_up[2], &twice, &width, &limit,
               &hidden_at});
    on.Launch(on.kernels.down_many, (width + kPanel - 1) / kPanel, num_tiles, kThreads,
              {&hidden_at, &sorted_at, &tiles_at, &down[0], &down[1], &down[2], &width, &expert_width, &out_at});
    return on.Error();
  }
  const int which = T <= kColumns ? 0 : 1;
  on.Launch(on.kernels.gate_up[which], twice / kOutputs, experts, kThreads,
            {&x_at, &ids_at, &rows, &top_k, &num_experts, &gate_up[0], &gate_up[1], &gate_up[2], &twice, &width, &limit,
             &hidden_at});
  on.Launch(on.kernels.down[which], width / kOutputs, experts, kThreads,
            {&hidden_at, &ids_at, &rows, &top_k, &num_experts, &down[0], &down[1], &down[2], &width, &expert_width, &out_at});
  return on.Error();
}

// The kernels of experts_hopper.cu. first: of the experts here, if they are a part of them; out is then their part of the sum,
// in float32. Scratch: the pairs' rows, the results of gate_up and of down, and small tables.
ffi::Error ExpertBlock(Stream stream, AnyBuffer x, AnyBuffer norm, AnyBuffer router, AnyBuffer router_bias,
                       AnyBuffer positions, AnyBuffer first, AnyBuffer gate_up, AnyBuffer gate_up_bias, AnyBuffer down,
                       AnyBuffer down_bias, AnyBuffer next_norm, Out result, Out next_rows, Out rows_scratch,
                       Out hidden_scratch, Out outputs_scratch, Out tables_scratch, float epsilon, float limit) {
  const AnyBuffer &out = *result, &normalised = *next_rows, &rows = *rows_scratch, &hidden = *hidden_scratch;
  const AnyBuffer& outputs = *outputs_scratch;
  const AnyBuffer& tables = *tables_scratch;
  constexpr int64_t D = tiles::kInputs, kWords = tiles::kUnitBytes / 4, kWide = tiles::kUnitsAGroup * 64;
  if (x.dimensions().size() != 2 || router.dimensions().size() != 2 || gate_up_bias.dimensions().size() != 2)
    return ffi::Error::InvalidArgument("expert_block: x " + Shape(x) + ", router " + Shape(router) + " and gate_up_bias " +
                                       Shape(gate_up_bias) + " are not [T, D], [D, E] and [experts here, 2D]");
  const int64_t T = x.dimensions()[0], E = router.dimensions()[1], pairs = T * tiles::kTopK;
  const bool is_part = first.element_count() != 0;
  const int64_t here = is_part ? gate_up_bias.dimensions()[0] : E;
  if (!has_tiles || T == 0 || T > tiles::kMostRows || E > tiles::kMostExperts || E % tiles::kExpertsABlock || here > E)
    return ffi::Error::InvalidArgument("expert_block: x " + Shape(x) + ", router " + Shape(router) + " and gate_up_bias " +
                                       Shape(gate_up_bias) + ": expected up to 4096 rows, up to 128 experts in eights, or a " +
                                       "part of them, and a Hopper GPU");
  PEAGLE_EXPECT(x, BF16, T, D);
  PEAGLE_EXPECT(norm, BF16, D);
  PEAGLE_EXPECT(router, BF16, D, E);
  PEAGLE_EXPECT(router_bias, BF16, E);
  if (positions.element_count() != 0) PEAGLE_EXPECT(positions, S32, T);
  if (is_part) PEAGLE_EXPECT(first, S32, 1);
  PEAGLE_EXPECT(gate_up, U32, here, 2 * D / kWide, tiles::kChunks, tiles::kUnitsAGroup, kWords);
  PEAGLE_EXPECT(gate_up_bias, BF16, here, 2 * D);
  PEAGLE_EXPECT(down, U32, here, D / kWide, tiles::kChunks, tiles::kUnitsAGroup, kWords);
  PEAGLE_EXPECT(down_bias, BF16, here, D);
  const bool has_next = next_norm.element_count() != 0 && !is_part;
  if (has_next) PEAGLE_EXPECT(next_norm, BF16, D);
  if (is_part) {
    PEAGLE_EXPECT(out, F32, T, D);
  } else {
    PEAGLE_EXPECT(out, BF16, T, D);
  }
  PEAGLE_EXPECT(normalised, BF16, has_next ? T : 0, D);
  PEAGLE_EXPECT(rows, BF16, pairs, D);
  PEAGLE_EXPECT(hidden, BF16, pairs, D);
  PEAGLE_EXPECT(outputs, F32, pairs, D);
  PEAGLE_EXPECT(tables, S32, 2 * tiles::kMostTiles + 5 * pairs + T + T * E + 1);

  Launcher on;
  if (ffi::Error error = on.Open(stream); error.failure()) return error;
  const double mean = static_cast<double>(pairs) / E, most = mean + 3 * std::sqrt(mean);  // rows of an expert
  int which = 0;
  while (which < 3 && on.kernels.tiles[which].Widest() < most) ++which;
  TileKernels& kernels = on.kernels.tiles[which];
  int num_rows = T, num_pairs = pairs, num_experts = E, num_here = here, twice = 2 * D, width = D;
  int rows_a_block = T <= tiles::kFewRowsRouted ? 1 : 8;
  int32_t* at = static_cast<int32_t*>(Address(tables));
  const auto table = [&](int64_t size) -> void* { return std::exchange(at, at + size); };
  void *tiles_at = table(2 * tiles::kMostTiles), *places_at = table(2 * pairs), *ids_at = table(pairs);
  void *order_at = table(pairs), *weights_at = table(pairs), *scales_at = table(T), *logits_at = table(T * E);
  void* num_tiles_at = table(1);
  void *x_at = Address(x), *norm_at = Address(norm), *router_at = Address(router), *router_bias_at = Address(router_bias);
  void *positions_at = positions.element_count() == 0 ? nullptr : Address(positions), *rows_at = Address(rows);
  void *first_at = is_part ? Address(first) : nullptr, *added_at = is_part ? nullptr : x_at;
  void *hidden_at = Address(hidden), *outputs_at = Address(outputs), *out_at = Address(out);
  void *gate_up_at = Address(gate_up), *gate_up_bias_at = Address(gate_up_bias);
  void *down_at = Address(down), *down_bias_at = Address(down_bias);
  on.LaunchEarly(on.kernels.router, (T + rows_a_block - 1) / rows_a_block, E / tiles::kExpertsABlock, tiles::kRouterThreads,
                 0, {&x_at, &norm_at, &epsilon, &router_at, &router_bias_at, &num_rows, &num_experts, &rows_a_block,
                     &logits_at, &scales_at});
  if (T <= tiles::kFewRowsRouted) {
    on.LaunchEarly(on.kernels.route_few, pairs, 1, tiles::kRouteFewThreads, 0,
                   {&x_at, &norm_at, &scales_at, &logits_at, &positions_at, &first_at, &num_pairs, &num_experts, &num_here,
                    &kernels.widths, &weights_at, &tiles_at, &num_tiles_at, &order_at, &rows_at});
  } else {
    on.LaunchEarly(on.kernels.choose, (T + 3) / 4, 1, tiles::kRouterThreads, 0,
                   {&logits_at, &positions_at, &first_at, &num_rows, &num_experts, &ids_at, &weights_at});
    on.LaunchEarly(on.kernels.route_many, 1, 1, tiles::kRouteManyThreads, 0,
                   {&ids_at, &num_pairs, &num_here, &kernels.widths, &tiles_at, &num_tiles_at, &order_at, &places_at});
    on.LaunchEarly(on.kernels.gather, T, 1, tiles::kGatherThreads, 0, {&x_at, &norm_at, &scales_at, &places_at, &rows_at});
  }
  on.LaunchEarly(kernels.gate_up, kernels.blocks, 1, kernels.threads, kernels.shared_bytes,
                 {&gate_up_at, &gate_up_bias_at, &twice, &rows_at, &tiles_at, &num_tiles_at, &limit, &hidden_at});
  on.LaunchEarly(kernels.down, kernels.blocks, 1, kernels.threads, kernels.shared_bytes,
                 {&down_at, &down_bias_at, &width, &hidden_at, &tiles_at, &num_tiles_at, &limit, &outputs_at});
  void *next_norm_at = has_next ? Address(next_norm) : nullptr, *normalised_at = Address(normalised);
  on.LaunchEarly(on.kernels.combine_experts, T, 1, tiles::kCombineThreads, 0,
                 {&added_at, &outputs_at, &order_at, &weights_at, &next_norm_at, &epsilon, &out_at, &normalised_at});
  return on.Error();
}

// A product of few rows; empty: no bias, no residual.
ffi::Error Linear(Stream stream, AnyBuffer x, AnyBuffer weights, AnyBuffer bias, AnyBuffer residual, Out result) {
  const AnyBuffer& out = *result;
  if (x.dimensions().size() != 2 || weights.dimensions().size() != 2)
    return ffi::Error::InvalidArgument("linear: x " + Shape(x) + " and weights " + Shape(weights) +
                                       " are not [T, K] and [K, N]");
  const int64_t T = x.dimensions()[0], K = weights.dimensions()[0], N = weights.dimensions()[1];
  if (T == 0 || T > kLinearRows || K % 16 || N % kLinearOutputs)
    return ffi::Error::InvalidArgument("linear: x " + Shape(x) + " and weights " + Shape(weights) +
                                       ": expected up to 16 rows, inputs in sixteens and outputs in 32s");
  PEAGLE_EXPECT(x, BF16, T, K);
  PEAGLE_EXPECT(weights, BF16, K, N);
  if (bias.element_count() != 0) PEAGLE_EXPECT(bias, BF16, N);
  if (residual.element_count() != 0) PEAGLE_EXPECT(residual, BF16, T, N);
  PEAGLE_EXPECT(out, BF16, T, N);
  Launcher on;
  if (ffi::Error error = on.Open(stream); error.failure()) return error;
  // twice the outputs per block, if that still makes blocks for half of a large GPU's multiprocessors
  const bool wide = N % (2 * kLinearOutputs) == 0 && N / (2 * kLinearOutputs) >= kLinearManyBlocks;
  void *x_at = Address(x), *weights_at = Address(weights), *out_at = Address(out);
  void* bias_at = bias.element_count() == 0 ? nullptr : Address(bias);
  void* residual_at = residual.element_count() == 0 ? nullptr : Address(residual);
  int rows = T, inputs = K, outputs = N;
  on.Launch(on.kernels.linear[wide], N / (wide ? 2 * kLinearOutputs : kLinearOutputs), 1, kLinearThreads,
            {&x_at, &weights_at, &bias_at, &residual_at, &rows, &inputs, &outputs, &out_at});
  return on.Error();
}

// Few rows go by splits, which `parts` has; many go by queries, and `parts` is empty.
ffi::Error PagedAttention(Stream stream, AnyBuffer qkv, AnyBuffer cosine, AnyBuffer sine, AnyBuffer key, AnyBuffer value,
                          AnyBuffer table, AnyBuffer write, AnyBuffer first, AnyBuffer last, AnyBuffer sinks, Out result,
                          Out new_key, Out new_value, Out rotated, Out parts, Out part_peaks, Out part_totals) {
  const AnyBuffer &out = *result, &query = *rotated, &partial = *parts, &peaks = *part_peaks, &totals = *part_totals;
  if (qkv.dimensions().size() != 3 || key.dimensions().size() != 3 || table.dimensions().size() != 2 ||
      partial.dimensions().size() != 5)
    return ffi::Error::InvalidArgument("paged_attention: qkv " + Shape(qkv) + ", key " + Shape(key) + " and table " +
                                       Shape(table) + " are not [B, T, (N + 2G) H], [P, 64, G H] and [B, M]");
  const int64_t B = qkv.dimensions()[0], T = qkv.dimensions()[1], P = key.dimensions()[0];
  const int64_t H = kHead, G = key.dimensions()[2] / H, M = table.dimensions()[1], splits = partial.dimensions()[2];
  const int64_t N = qkv.dimensions()[2] / kHead - 2 * G;
  const int64_t tiles = G == 0 ? 0 : (T * (N / G) + kQueryRows - 1) / kQueryRows;  // of few rows
  if (key.dimensions()[1] != kSlots || B * T * P * G * M == 0 || N < G || N % G ||
      (T <= kStepRows) != (splits > 0) || splits & (splits - 1) || splits > kMostSplits ||
      (splits > 0 && B * G * tiles > kMostTiles))
    return ffi::Error::InvalidArgument("paged_attention: qkv " + Shape(qkv) + " does not fit key " + Shape(key) +
                                       ": expected pages of 64, heads of 64, as many query heads for each of the others, "
                                       "splits, 1 to 32 and a power of two, for up to 16 rows, and then up to 65536 tiles of "
                                       "16 queries");
  PEAGLE_EXPECT(qkv, BF16, B, T, (N + 2 * G) * H);
  PEAGLE_EXPECT(cosine, BF16, B, T, H / 2);
  PEAGLE_EXPECT(sine, BF16, B, T, H / 2);
  PEAGLE_EXPECT(key, BF16, P, kSlots, G * H);
  PEAGLE_EXPECT(value, BF16, P, kSlots, G * H);
  PEAGLE_EXPECT(table, S32, B, M);
  PEAGLE_EXPECT(write, S32, B, T);
  PEAGLE_EXPECT(first, S32, B, T);
  PEAGLE_EXPECT(last, S32, B, T);
  if (sinks.element_count() != 0) PEAGLE_EXPECT(sinks, BF16, N);
  PEAGLE_EXPECT(out, BF16, B, T, N * H);
  PEAGLE_EXPECT(query, BF16, B, splits == 0 ? T : 0, N, H);
  PEAGLE_EXPECT(partial, F32, B, G, splits, T * (N / G), H);
  PEAGLE_EXPECT(peaks, F32, B, G, splits, T * (N / G));
  PEAGLE_EXPECT(totals, F32, B, G, splits, T * (N / G));
  if (new_key->untyped_data() != key.untyped_data() || new_value->untyped_data() != value.untyped_data())
    return ffi::Error::InvalidArgument("paged_attention: the pages are not written in place");

  Launcher on;
  if (ffi::Error error = on.Open(stream); error.failure()) return error;
  void *qkv_at = Address(qkv), *cosine_at = Address(cosine), *sine_at = Address(sine), *key_at = Address(key);
  void *value_at = Address(value), *table_at = Address(table), *write_at = Address(write), *first_at = Address(first);
  void *last_at = Address(last), *query_at = Address(query), *out_at = Address(out);
  void *sinks_at = sinks.element_count() == 0 ? nullptr : Address(sinks);
  void *partial_at = Address(partial), *peaks_at = Address(peaks), *totals_at = Address(totals);
  int rows = T, width = M, heads = N, kv_heads = G;
  if (splits > 0) {
    int64_t blocks = splits;  // with many sequences fewer, each for several splits
    while (blocks > 1 && blocks / 2 * B * G * tiles >= kBlocksWanted) blocks /= 2;
    int num_splits = splits;
    on.Launch(on.kernels.attend, blocks, B * G, kThreads,
              {&qkv_at, &cosine_at, &sine_at, &key_at, &value_at, &table_at, &write_at, &first_at, &last_at, &sinks_at, &rows,
               &width, &heads, &kv_heads, &num_splits, &partial_at, &peaks_at, &totals_at, &out_at},
              tiles, kAttendBytes);
    return on.Error();
  }
  on.Launch(on.kernels.rotate, B * T, ((N + 2 * G) * kHead / 2 + kThreads - 1) / kThreads, kThreads,
            {&qkv_at, &cosine_at, &sine_at, &key_at, &value_at, &table_at, &write_at, &rows, &width, &heads, &kv_heads,
             &query_at});
  on.Launch(on.kernels.prompt, (T * (N / G) + kTileQueries - 1) / kTileQueries, B * G, kThreads,
            {&query_at, &key_at, &value_at, &table_at, &first_at, &last_at, &sinks_at, &rows, &width, &heads, &kv_heads,
             &out_at});
  return on.Error();
}

}  // namespace
}  // namespace peagle

// Sets the driver, and `cubin`, with or without the kernels of experts_hopper.cu, as the kernels of later launches. Returns
// null, or an error message.
PEAGLE_EXPORT const char* peagle_cuda_open(const char* driver, const char* cubin, int64_t size, int tiles) {
  static std::string said;
  const std::lock_guard<std::mutex> lock(peagle::mutex);
  said = peagle::driver.Open(driver);
  peagle::image.assign(cubin, cubin + size);
  peagle::has_tiles = tiles != 0;
  peagle::loaded.clear();
  return said.empty() ? nullptr : said.c_str();
}

PEAGLE_EXPORT XLA_FFI_Error* peagle_cuda_experts(XLA_FFI_CallFrame* frame) {
  static auto* handler = xla::ffi::Ffi::Bind()
                             .Ctx<peagle::StreamContext>()
                             .Arg<xla::ffi::AnyBuffer>()  // x
                             .Arg<xla::ffi::AnyBuffer>()  // ids
                             .Arg<xla::ffi::AnyBuffer>()  // gate_up_blocks
                             .Arg<xla::ffi::AnyBuffer>()  // gate_up_scales
                             .Arg<xla::ffi::AnyBuffer>()  // gate_up_bias
                             .Arg<xla::ffi::AnyBuffer>()  // down_blocks
                             .Arg<xla::ffi::AnyBuffer>()  // down_scales
                             .Arg<xla::ffi::AnyBuffer>()  // down_bias
                             .Ret<xla::ffi::AnyBuffer>()  // out
                             .Ret<xla::ffi::AnyBuffer>()  // hidden
                             .Ret<xla::ffi::AnyBuffer>()  // order
                             .Attr<float>("limit")
                             .To(peagle::Experts, {xla::ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}

PEAGLE_EXPORT XLA_FFI_Error* peagle_cuda_expert_block(XLA_FFI_CallFrame* frame) {
  static auto* handler = xla::ffi::Ffi::Bind()
                             .Ctx<peagle::StreamContext>()
                             .Arg<xla::ffi::AnyBuffer>()  // x
                             .Arg<xla::ffi::AnyBuffer>()  // norm
                             .Arg<xla::ffi::AnyBuffer>()  // router
                             .Arg<xla::ffi::AnyBuffer>()  // router_bias
                             .Arg<xla::ffi::AnyBuffer>()  // positions
                             .Arg<xla::ffi::AnyBuffer>()  // first
                             .Arg<xla::ffi::AnyBuffer>()  // gate_up
                             .Arg<xla::ffi::AnyBuffer>()  // gate_up_bias
                             .Arg<xla::ffi::AnyBuffer>()  // down
                             .Arg<xla::ffi::AnyBuffer>()  // down_bias
                             .Arg<xla::ffi::AnyBuffer>()  // next_norm
                             .Ret<xla::ffi::AnyBuffer>()  // out
                             .Ret<xla::ffi::AnyBuffer>()  // normalised
                             .Ret<xla::ffi::AnyBuffer>()  // rows
                             .Ret<xla::ffi::AnyBuffer>()  // hidden
                             .Ret<xla::ffi::AnyBuffer>()  // outputs
                             .Ret<xla::ffi::AnyBuffer>()  // tables
                             .Attr<float>("epsilon")
                             .Attr<float>("limit")
                             .To(peagle::ExpertBlock, {xla::ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}

PEAGLE_EXPORT XLA_FFI_Error* peagle_cuda_linear(XLA_FFI_CallFrame* frame) {
  static auto* handler = xla::ffi::Ffi::Bind()
                             .Ctx<peagle::StreamContext>()
                             .Arg<xla::ffi::AnyBuffer>()  // x
                             .Arg<xla::ffi::AnyBuffer>()  // weights
                             .Arg<xla::ffi::AnyBuffer>()  // bias
                             .Arg<xla::ffi::AnyBuffer>()  // residual
                             .Ret<xla::ffi::AnyBuffer>()  // out
                             .To(peagle::Linear, {xla::ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}

PEAGLE_EXPORT XLA_FFI_Error* peagle_cuda_paged_attention(XLA_FFI_CallFrame* frame) {
  static auto* handler = xla::ffi::Ffi::Bind()
                             .Ctx<peagle::StreamContext>()
                             .Arg<xla::ffi::AnyBuffer>()  // qkv
                             .Arg<xla::ffi::AnyBuffer>()  // cosine
                             .Arg<xla::ffi::AnyBuffer>()  // sine
                             .Arg<xla::ffi::AnyBuffer>()  // key
                             .Arg<xla::ffi::AnyBuffer>()  // value
                             .Arg<xla::ffi::AnyBuffer>()  // table
                             .Arg<xla::ffi::AnyBuffer>()  // write
                             .Arg<xla::ffi::AnyBuffer>()  // first
                             .Arg<xla::ffi::AnyBuffer>()  // last
                             .Arg<xla::ffi::AnyBuffer>()  // sinks
                             .Ret<xla::ffi::AnyBuffer>()  // out
                             .Ret<xla::ffi::AnyBuffer>()  // key
                             .Ret<xla::ffi::AnyBuffer>()  // value
                             .Ret<xla::ffi::AnyBuffer>()  // query, rotated
                             .Ret<xla::ffi::AnyBuffer>()  // partial
                             .Ret<xla::ffi::AnyBuffer>()  // peaks
                             .Ret<xla::ffi::AnyBuffer>()  // totals
                             .To(peagle::PagedAttention, {xla::ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}
