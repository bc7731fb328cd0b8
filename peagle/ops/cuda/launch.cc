// XLA FFI handlers of the CUDA kernels: they check every shape, then launch on XLA's own stream. The driver is opened at run
// time, and its few functions are declared here, so compiling this file needs no CUDA.

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "../native/buffers.h"
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

// common.cuh, experts.cu, attention.cu
constexpr int64_t kThreads = 128, kOutputs = 16, kColumns = 8, kFewRows = 16, kMaxRows = 4096, kMaxExperts = 1024;
constexpr int64_t kBlock = 32, kSortThreads = 512, kPanel = 64, kTileRows = 64, kTileWords = 3;
constexpr int64_t kHead = 64, kSlots = 64, kChunkSlots = 256, kTileQueries = 64, kStepRows = 16;

struct Driver {
  int (*GetErrorString)(int, const char**);
  int (*StreamGetCtx)(Stream, CUctx_st**);
  int (*CtxPushCurrent)(CUctx_st*);
  int (*CtxPopCurrent)(CUctx_st**);
  int (*ThreadExchangeStreamCaptureMode)(int*);
  int (*ModuleLoadData)(CUmod_st**, const void*);
  int (*ModuleGetFunction)(CUfunc_st**, CUmod_st*, const char*);
  int (*LaunchKernel)(CUfunc_st*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**);

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
    find(LaunchKernel, "cuLaunchKernel");
    return missing == nullptr ? "" : std::string(name) + " has no " + missing;
  }
};

struct Kernels {
  CUfunc_st* gate_up[2];  // for up to kColumns rows, and for twice as many: kFewRows
  CUfunc_st* down[2];
  CUfunc_st *sort, *gate_up_many, *down_many;
  CUfunc_st *rotate, *attend, *combine, *prompt;
};

std::mutex mutex;
Driver driver;
std::vector<char> image;              // the machine code that NVRTC compiled
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
  PEAGLE_TRY(ModuleGetFunction(&kernels.rotate, module, "peagle_rotate"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.attend, module, "peagle_attend"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.combine, module, "peagle_combine"));
  PEAGLE_TRY(ModuleGetFunction(&kernels.prompt, module, "peagle_prompt"));
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
  void Launch(CUfunc_st* kernel, unsigned x, unsigned y, unsigned threads, std::initializer_list<void*> arguments) {
    std::vector<void*> pointers(arguments);
    if (code_ == 0)
      code_ = driver.LaunchKernel(kernel, x, y, 1, threads, 1, 1, 0, stream_, pointers.data(), nullptr);
  }

  ffi::Error Error() const { return code_ == 0 ? ffi::Error::Success() : Failed("cuLaunchKernel", code_); }

 private:
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

// Few rows go by chunks, of which `parts` has as many as any sequence's rows span; many go by queries, and `parts` is empty.
ffi::Error PagedAttention(Stream stream, AnyBuffer qkv, AnyBuffer cosine, AnyBuffer sine, AnyBuffer key, AnyBuffer value,
                          AnyBuffer table, AnyBuffer write, AnyBuffer first, AnyBuffer last, AnyBuffer sinks, Out result,
                          Out new_key, Out new_value, Out rotated, Out parts, Out part_peaks, Out part_totals) {
  const AnyBuffer &out = *result, &query = *rotated, &partial = *parts, &peaks = *part_peaks, &totals = *part_totals;
  if (qkv.dimensions().size() != 3 || key.dimensions().size() != 4 || table.dimensions().size() != 2 ||
      partial.dimensions().size() != 5)
    return ffi::Error::InvalidArgument("paged_attention: qkv " + Shape(qkv) + ", key " + Shape(key) + " and table " +
                                       Shape(table) + " are not [B, T, (N + 2G) H], [P, 64, G, H] and [B, M]");
  const int64_t B = qkv.dimensions()[0], T = qkv.dimensions()[1], P = key.dimensions()[0], G = key.dimensions()[2];
  const int64_t H = key.dimensions()[3], M = table.dimensions()[1], chunks = partial.dimensions()[2];
  const int64_t N = qkv.dimensions()[2] / kHead - 2 * G;
  if (H != kHead || key.dimensions()[1] != kSlots || B * T * P * G * M == 0 || N < G || N % G ||
      (T <= kStepRows) != (chunks > 0))
    return ffi::Error::InvalidArgument("paged_attention: qkv " + Shape(qkv) + " does not fit key " + Shape(key) +
                                       ": expected pages of 64, heads of 64, as many query heads for each of the others, and "
                                       "chunks for up to 16 rows");
  PEAGLE_EXPECT(qkv, BF16, B, T, (N + 2 * G) * H);
  PEAGLE_EXPECT(cosine, BF16, B, T, H / 2);
  PEAGLE_EXPECT(sine, BF16, B, T, H / 2);
  PEAGLE_EXPECT(key, BF16, P, kSlots, G, H);
  PEAGLE_EXPECT(value, BF16, P, kSlots, G, H);
  PEAGLE_EXPECT(table, S32, B, M);
  PEAGLE_EXPECT(write, S32, B, T);
  PEAGLE_EXPECT(first, S32, B, T);
  PEAGLE_EXPECT(last, S32, B, T);
  if (sinks.element_count() != 0) PEAGLE_EXPECT(sinks, BF16, N);
  PEAGLE_EXPECT(out, BF16, B, T, N * H);
  PEAGLE_EXPECT(query, BF16, B, T, N, H);
  PEAGLE_EXPECT(partial, F32, B, G, chunks, T * (N / G), H);
  PEAGLE_EXPECT(peaks, F32, B, G, chunks, T * (N / G));
  PEAGLE_EXPECT(totals, F32, B, G, chunks, T * (N / G));
  if (new_key->untyped_data() != key.untyped_data() || new_value->untyped_data() != value.untyped_data())
    return ffi::Error::InvalidArgument("paged_attention: the pages are not written in place");

  Launcher on;
  if (ffi::Error error = on.Open(stream); error.failure()) return error;
  void *qkv_at = Address(qkv), *cosine_at = Address(cosine), *sine_at = Address(sine), *key_at = Address(key);
  void *value_at = Address(value), *table_at = Address(table), *write_at = Address(write), *first_at = Address(first);
  void *last_at = Address(last), *query_at = Address(query), *out_at = Address(out);
  void *sinks_at = sinks.element_count() == 0 ? nullptr : Address(sinks);
  void *partial_at = Address(partial), *peaks_at = Address(peaks), *totals_at = Address(totals);
  int rows = T, width = M, heads = N, kv_heads = G, num_chunks = chunks;
  on.Launch(on.kernels.rotate, B * T, ((N + 2 * G) * kHead / 2 + kThreads - 1) / kThreads, kThreads,
            {&qkv_at, &cosine_at, &sine_at, &key_at, &value_at, &table_at, &write_at, &rows, &width, &heads, &kv_heads,
             &query_at});
  if (chunks == 0) {
    on.Launch(on.kernels.prompt, (T * (N / G) + kTileQueries - 1) / kTileQueries, B * G, kThreads,
              {&query_at, &key_at, &value_at, &table_at, &first_at, &last_at, &sinks_at, &rows, &width, &heads, &kv_heads,
               &out_at});
    return on.Error();
  }
  on.Launch(on.kernels.attend, chunks, B * G, kThreads,
            {&query_at, &key_at, &value_at, &table_at, &first_at, &last_at, &rows, &width, &heads, &kv_heads, &partial_at,
             &peaks_at, &totals_at});
  on.Launch(on.kernels.combine, B * T * N, 1, kHead,
            {&partial_at, &peaks_at, &totals_at, &sinks_at, &rows, &heads, &kv_heads, &num_chunks, &out_at});
  return on.Error();
}

}  // namespace
}  // namespace peagle

// Sets the driver, and `cubin` as the kernels of later launches. Returns null, or an error message.
PEAGLE_EXPORT const char* peagle_cuda_open(const char* driver, const char* cubin, int64_t size) {
  static std::string said;
  const std::lock_guard<std::mutex> lock(peagle::mutex);
  said = peagle::driver.Open(driver);
  peagle::image.assign(cubin, cubin + size);
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
