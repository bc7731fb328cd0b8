// XLA FFI handlers of the kernels: they check every shape before they read anything, and run on XLA's own threads.

#include <algorithm>
#include <cstring>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "buffers.h"
#include "thread_team.h"
#include "kernels.h"
#include "scratch.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace peagle {
namespace {

bool IsFloat(const AnyBuffer& buffer) {
  return buffer.element_type() == ffi::DataType::F32 || buffer.element_type() == ffi::DataType::BF16;
}

// A buffer's values as float32: in place if they are, else a copy.
const float* AsFloats(const AnyBuffer& buffer, Scratch& scratch) {
  if (buffer.element_type() == ffi::DataType::F32) return static_cast<const float*>(buffer.untyped_data());
  const auto count = static_cast<int64_t>(buffer.element_count());
  float* const copy = scratch.Take<float>(count);
  Widen(static_cast<const uint16_t*>(buffer.untyped_data()), count, copy);
  return copy;
}

// Makes a matrix of its buffers for rows x, after checking that they hold `copies` times inputs x outputs.
ffi::ErrorOr<Matrix> MakeMatrix(const char* name, const AnyBuffer& x, const AnyBuffer& panels, const AnyBuffer* scales,
                                int64_t copies, int64_t inputs, int64_t outputs) {
  const int64_t scales_seen = scales == nullptr ? 0 : scales->element_count();
  const int64_t count = copies * ((outputs + kPanelRows - 1) / kPanelRows) * kPanelRows;
  Matrix matrix{Format::kFloat32, panels.untyped_data(), nullptr, inputs, outputs,
                x.element_type() == ffi::DataType::BF16};
  int64_t elements = count * inputs, scale_elements = 0;
  if (panels.element_type() == ffi::DataType::BF16) {
    matrix.format = Format::kBfloat16;
    elements = count * ((inputs + 1) / 2) * 2;
  } else if (panels.element_type() == ffi::DataType::U32 && scales != nullptr &&
             scales->element_type() == ffi::DataType::U8) {
    matrix.format = Format::kMxfp4;
    matrix.scales = static_cast<const uint8_t*>(scales->untyped_data());
    elements = inputs % 32 == 0 ? count * inputs / 8 : -1;
    scale_elements = count * inputs / 32;
  } else if (panels.element_type() != ffi::DataType::F32) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        std::string(name) + ": panels are float32, bfloat16, or uint32 with scales of uint8"));
  }
  if (static_cast<int64_t>(panels.element_count()) != elements ||
      scales_seen != scale_elements) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        std::string(name) + ": panels " + Shape(panels) + " with " + std::to_string(scales_seen) +
        " scales do not hold " +
        std::to_string(copies) + " matrices of " + std::to_string(inputs) + " inputs and " + std::to_string(outputs) +
        " outputs"));
  }
  return matrix;
}

// Returns `count` float32 values, or null for an empty buffer.
ffi::ErrorOr<const float*> Optional(const char* what, const AnyBuffer& buffer, int64_t count) {
  if (buffer.element_count() == 0) return nullptr;
  if (buffer.element_type() != ffi::DataType::F32 || static_cast<int64_t>(buffer.element_count()) != count)
    return ffi::Unexpected(ffi::Error::InvalidArgument(std::string(what) + " " + Shape(buffer) + " is not float32 [" +
                                                       std::to_string(count) + "]"));
  return buffer.typed_data<float>();
}

// Returns the positions of `rows` rows, or null for an empty buffer.
ffi::ErrorOr<const int32_t*> OptionalPositions(const char* what, const AnyBuffer& buffer, int64_t rows) {
  if (buffer.element_count() == 0) return nullptr;
  if (buffer.element_type() != ffi::DataType::S32 || static_cast<int64_t>(buffer.element_count()) != rows)
    return ffi::Unexpected(ffi::Error::InvalidArgument(std::string(what) + " " + Shape(buffer) + " are not int32 [" +
                                                       std::to_string(rows) + "]"));
  return buffer.typed_data<int32_t>();
}

#define PEAGLE_TRY(name, expression)          \
  auto name##_or = expression;                \
  if (name##_or.has_error()) return name##_or.error(); \
  auto name = *name##_or

ffi::Error LinearHandler(ffi::ThreadPool pool, AnyBuffer x, AnyBuffer norm, AnyBuffer panels, AnyBuffer scales,
                         AnyBuffer bias, AnyBuffer residual, AnyBuffer positions, Out out, float epsilon) {
  const auto in = x.dimensions(), to = out->dimensions();
  if (in.size() != 2 || to.size() != 2 || in[0] != to[0] || !IsFloat(x) || !IsFloat(*out))
    return ffi::Error::InvalidArgument("linear: x " + Shape(x) + " and out " + Shape(*out) + " are not [T, K] and [T, N]");
  if (residual.element_count() > 0 && (residual.element_type() != out->element_type() || residual.dimensions() != to))
    return ffi::Error::InvalidArgument("linear: residual " + Shape(residual) + " is not like out " + Shape(*out));
  PEAGLE_TRY(weight, MakeMatrix("linear", x, panels, &scales, 1, in[1], to[1]));
  PEAGLE_TRY(norm_weight, Optional("linear: norm", norm, in[1]));
  PEAGLE_TRY(bias_values, Optional("linear: bias", bias, to[1]));
  PEAGLE_TRY(row_positions, OptionalPositions("linear: positions", positions, in[0]));
  PoolParallel parallel(pool);
  RunLinear({x.untyped_data(), {norm_weight, epsilon}, weight, bias_values,
             residual.element_count() > 0 ? residual.untyped_data() : nullptr, row_positions, out->untyped_data(),
             out->element_type() == ffi::DataType::BF16, in[0]},
            parallel);
  return ffi::Error::Success();
}

ffi::Error ExpertsHandler(ffi::ThreadPool pool, AnyBuffer x, AnyBuffer norm, AnyBuffer router, AnyBuffer router_bias,
                          AnyBuffer gate_up, AnyBuffer gate_up_scales, AnyBuffer gate_up_bias, AnyBuffer down,
                          AnyBuffer down_scales, AnyBuffer down_bias, AnyBuffer positions, AnyBuffer first_local,
                          Out out, int64_t num_experts, int64_t top_k, int64_t hidden, bool residual, float limit,
                          float epsilon) {
  const auto in = x.dimensions();
  if (in.size() != 2 || out->dimensions() != in || !IsFloat(x) || !IsFloat(*out))
    return ffi::Error::InvalidArgument("experts: x " + Shape(x) + " and out " + Shape(*out) + " are not [T, D] twice");
  if (num_experts < 1 || top_k < 1 || top_k > num_experts || hidden < 1)
    return ffi::Error::InvalidArgument("experts: top_k is not in 1..E");
  const int64_t rows = in[0], width = in[1];
  // fewer experts than the router's outputs: this rank holds only these
  const int64_t num_local = width > 0 ? static_cast<int64_t>(down_bias.element_count()) / width : 0;
  if (num_local < 1 || num_local > num_experts || (first_local.element_count() == 0 && num_local != num_experts) ||
      first_local.element_count() > 1 ||
      (first_local.element_count() == 1 && first_local.element_type() != ffi::DataType::S32))
    return ffi::Error::InvalidArgument("experts: " + std::to_string(num_local) + " of " + std::to_string(num_experts) +
                                       " experts are local, and the first of them is not one int32");
  const int64_t first_expert = first_local.element_count() == 1 ? *first_local.typed_data<int32_t>() : 0;
  if (first_expert < 0 || first_expert + num_local > num_experts)
    return ffi::Error::InvalidArgument("experts: the local ones do not lie in 0..E-1");
  const int64_t padded = 2 * ((hidden + kPanelRows - 1) / kPanelRows) * kPanelRows;
  PEAGLE_TRY(route, MakeMatrix("experts, router", x, router, nullptr, 1, width, num_experts));
  PEAGLE_TRY(first, MakeMatrix("experts, gate and up", x, gate_up, &gate_up_scales, num_local, width, padded));
  PEAGLE_TRY(second, MakeMatrix("experts, down", x, down, &down_scales, num_local, hidden, width));
  PEAGLE_TRY(norm_weight, Optional("experts: norm", norm, width));
  PEAGLE_TRY(route_bias, Optional("experts: router bias", router_bias, num_experts));
  PEAGLE_TRY(first_bias, Optional("experts: gate and up bias", gate_up_bias, num_local * padded));
  PEAGLE_TRY(second_bias, Optional("experts: down bias", down_bias, num_local * width));
  PEAGLE_TRY(row_positions, OptionalPositions("experts: positions", positions, rows));
  if (first_bias == nullptr || second_bias == nullptr) return ffi::Error::InvalidArgument("experts: a bias is missing");
  PoolParallel parallel(pool);
  RunExperts({x.untyped_data(), {norm_weight, epsilon}, route, route_bias, first, first_bias, second, second_bias,
              row_positions, out->untyped_data(), out->element_type() == ffi::DataType::BF16, rows, num_experts,
              first_expert, num_local, top_k, residual, limit},
             parallel);
  return ffi::Error::Success();
}

// Returns whether every page that the rows of a sequence see or write is in the pool.
bool PagesExist(const Attention& op, int64_t sequence) {
  int64_t first = INT64_MAX, last = -1;
  auto cover = [&](int64_t from, int64_t to) { first = std::min(first, from), last = std::max(last, to); };
  for (int64_t row = sequence * op.width; row < (sequence + 1) * op.width; ++row) {
    if (op.write[row] >= 0) cover(op.write[row], op.write[row]);
    if (op.last[row] < op.first[row]) continue;
    if (op.first[row] < 0) return false;
    cover(op.first[row], op.last[row]);
  }
  if (last < first) return true;
  const int64_t begin = first / op.page_size, end = std::min(last / op.page_size + 1, begin + op.table_width);
  for (int64_t page = begin; page < end; ++page) {
    const int64_t number = op.table[sequence * op.table_width + page % op.table_width];
    if (number < 0 || number >= op.pages) return false;
  }
  return true;
}

// Rotates, writes and attends.
ffi::Error AttentionHandler(ffi::ThreadPool pool, AnyBuffer qkv, AnyBuffer cos, AnyBuffer sin, AnyBuffer key,
                            AnyBuffer value, AnyBuffer table, AnyBuffer write, AnyBuffer first, AnyBuffer last,
                            AnyBuffer sinks, Out out, Out key_out, Out value_out) {
  auto wrong = [](const std::string& what) { return ffi::Error::InvalidArgument("attention: " + what); };
  const auto in = qkv.dimensions(), to = out->dimensions(), k = key.dimensions(), m = table.dimensions(), r = write.dimensions();
  const auto c = cos.dimensions();
  const int64_t head_dim = c.size() == 3 ? 2 * c[2] : 0;
  if (in.size() != 3 || to.size() != 3 || k.size() != 3 || in[0] != to[0] || in[1] != to[1] || k[1] < 1 || head_dim < 2 ||
      k[2] < 1 || k[2] % head_dim != 0 || in[2] != to[2] + 2 * k[2] || to[2] < 1 || to[2] % k[2] != 0 ||
      value.dimensions() != k)
    return wrong("qkv " + Shape(qkv) + ", cos " + Shape(cos) + ", out " + Shape(*out) + ", key " + Shape(key) + ", value " +
                 Shape(value) + " are not [B, T, (N + 2 G) H], [B, T, H/2], [B, T, N H] and [P, S, G H] twice");
  if (m.size() != 2 || m[0] != in[0] || m[1] < 1 || r.size() != 2 || r[0] != in[0] || r[1] != in[1] ||
      first.dimensions() != r || last.dimensions() != r || table.element_type() != ffi::DataType::S32 ||
      write.element_type() != ffi::DataType::S32 || first.element_type() != ffi::DataType::S32 ||
      last.element_type() != ffi::DataType::S32)
    return wrong("table " + Shape(table) + ", write " + Shape(write) + ", first " + Shape(first) + " and last " +
                 Shape(last) + " are not [B, M] and [B, T] three times, of int32");
  if (!IsFloat(qkv) || !IsFloat(key) || value.element_type() != key.element_type() ||
      out->element_type() != key.element_type())
    return wrong("keys, values and results are not of one type, float32 or bfloat16");
  if (key_out->untyped_data() != key.untyped_data() || value_out->untyped_data() != value.untyped_data())
    return wrong("the pages are not written in place");
  const int64_t angles = in[0] * in[1] * head_dim / 2, heads = to[2] / head_dim;
  if (!IsFloat(cos) || !IsFloat(sin) || static_cast<int64_t>(cos.element_count()) != angles ||
      static_cast<int64_t>(sin.element_count()) != angles)
    return wrong("cos " + Shape(cos) + " and sin " + Shape(sin) + " do not fit out " + Shape(*out));
  PEAGLE_TRY(sink_values, Optional("attention: sinks", sinks, heads));
  Attention op{};
  op.key = key.untyped_data(), op.value = value.untyped_data(), op.out = out->untyped_data();
  op.bfloat16 = key.element_type() == ffi::DataType::BF16;
  op.table = table.typed_data<int32_t>(), op.write = write.typed_data<int32_t>();
  op.first = first.typed_data<int32_t>(), op.last = last.typed_data<int32_t>();
  op.sinks = sink_values;
  op.batch = in[0], op.width = in[1], op.heads = heads, op.head_dim = head_dim, op.kv_heads = k[2] / head_dim;
  op.pages = k[0], op.page_size = k[1], op.table_width = m[1];
  for (int64_t b = 0; b < op.batch; ++b)
    if (!PagesExist(op, b))
      return wrong("sequence " + std::to_string(b) + " sees or writes a page that is not in the pool");
  Scratch scratch;
  char* const query = scratch.Take<char>(op.batch * op.width * heads * op.head_dim * (op.bfloat16 ? 2 : 4));
  PoolParallel parallel(pool);
  RotateAndWrite(op, {AsFloats(qkv, scratch), AsFloats(cos, scratch), AsFloats(sin, scratch), query,
                      key_out->untyped_data(), value_out->untyped_data()}, parallel);
  op.query = query;
  RunAttention(op, parallel);
  return ffi::Error::Success();
}

ffi::Error RopeTablesHandler(ffi::ThreadPool pool, AnyBuffer positions, AnyBuffer frequencies, Out cos, Out sin,
                             float concentration) {
  const auto at = positions.dimensions(), of = frequencies.dimensions(), out = cos->dimensions();
  if (at.size() != 2 || of.size() != 1 || out.size() != 3 || out[0] != at[0] || out[1] != at[1] || out[2] != of[0] ||
      sin->dimensions() != out || !IsFloat(*cos) || sin->element_type() != cos->element_type() ||
      positions.element_type() != ffi::DataType::S32 || frequencies.element_type() != ffi::DataType::F32)
    return ffi::Error::InvalidArgument("rope_tables: positions " + Shape(positions) + ", frequencies " +
                                       Shape(frequencies) + ", cos " + Shape(*cos) + " and sin " + Shape(*sin) +
                                       " are not [B, T], [H/2] and [B, T, H/2] twice");
  PoolParallel parallel(pool);
  RunRopeTables({positions.typed_data<int32_t>(), frequencies.typed_data<float>(), concentration,
                 cos->element_type() == ffi::DataType::BF16, cos->untyped_data(), sin->untyped_data(), at[0] * at[1],
                 of[0]},
                parallel);
  return ffi::Error::Success();
}

ffi::Error LikeliestHandler(ffi::ThreadPool pool, AnyBuffer logits, Out index, Out probability) {
  const auto in = logits.dimensions(), out = index->dimensions();
  const int64_t asked = probability->element_count();
  if (in.size() != 2 || in[1] < 1 || in[1] > INT32_MAX || out.size() != 1 || out[0] != in[0] || !IsFloat(logits) ||
      index->element_type() != ffi::DataType::S32 || probability->element_type() != ffi::DataType::F32 ||
      (asked != 0 && asked != in[0]))
    return ffi::Error::InvalidArgument("likeliest: logits " + Shape(logits) + ", index " + Shape(*index) +
                                       " and probability " + Shape(*probability) + " are not [T, V], [T] and [T] or [0]");
  PoolParallel parallel(pool);
  RunLikeliest({logits.untyped_data(), logits.element_type() == ffi::DataType::BF16, index->typed_data<int32_t>(),
                asked ? probability->typed_data<float>() : nullptr, in[0], in[1]},
               parallel);
  return ffi::Error::Success();
}

ffi::Error DrawHandler(ffi::ThreadPool pool, AnyBuffer weights, AnyBuffer keys, AnyBuffer token_ids, Out index) {
  const auto in = weights.dimensions(), of = keys.dimensions(), out = index->dimensions();
  const int64_t ids = token_ids.element_count();
  if (in.size() != 2 || in[1] < 1 || in[1] > INT32_MAX || of.size() != 2 || of[0] != in[0] || of[1] != 2 ||
      out.size() != 1 || out[0] != in[0] || (ids != 0 && ids != in[1]) ||
      weights.element_type() != ffi::DataType::F32 || keys.element_type() != ffi::DataType::U32 ||
      token_ids.element_type() != ffi::DataType::S32 || index->element_type() != ffi::DataType::S32)
    return ffi::Error::InvalidArgument("draw: weights " + Shape(weights) + ", keys " + Shape(keys) + ", token ids " +
                                       Shape(token_ids) + " and index " + Shape(*index) +
                                       " are not [T, V], [T, 2], [V] or [0], and [T]");
  PoolParallel parallel(pool);
  RunDraw({weights.typed_data<float>(), keys.typed_data<uint32_t>(), ids ? token_ids.typed_data<int32_t>() : nullptr,
           index->typed_data<int32_t>(), in[0], in[1]},
          parallel);
  return ffi::Error::Success();
}

// Copies the first count[b] of rows[b] into into[b], from start[b] on; those beyond its end are left out.
ffi::Error PutRowsHandler(AnyBuffer into, AnyBuffer rows, AnyBuffer start, AnyBuffer count, Out out) {
  const auto to = into.dimensions(), of = rows.dimensions();
  if (to.size() < 2 || of.size() != to.size() || of[0] != to[0] || !std::equal(to.begin() + 2, to.end(), of.begin() + 2) ||
      rows.element_type() != into.element_type() || start.element_type() != ffi::DataType::S32 ||
      count.element_type() != ffi::DataType::S32 || static_cast<int64_t>(start.element_count()) != to[0] ||
      static_cast<int64_t>(count.element_count()) != to[0])
    return ffi::Error::InvalidArgument("put_rows: into " + Shape(into) + ", rows " + Shape(rows) + ", start " +
                                       Shape(start) + " and count " + Shape(count) +
                                       " are not [B, S, ...], [B, T, ...] of one type, and [B] twice");
  if (out->untyped_data() != into.untyped_data()) return ffi::Error::InvalidArgument("put_rows: not in place");
  if (into.element_count() == 0 || rows.element_count() == 0) return ffi::Error::Success();
  const int64_t bytes = static_cast<int64_t>(into.size_bytes()) / (to[0] * to[1]);
  for (int64_t b = 0; b < to[0]; ++b) {
    const int64_t at = start.typed_data<int32_t>()[b];
    const int64_t most = std::min<int64_t>({count.typed_data<int32_t>()[b], of[1], to[1] - at});
    if (at < 0 || most <= 0) continue;
    std::memcpy(static_cast<char*>(out->untyped_data()) + (b * to[1] + at) * bytes,
                static_cast<const char*>(rows.untyped_data()) + b * of[1] * bytes, most * bytes);
  }
  return ffi::Error::Success();
}

// Whether the processor multiplies tiles of bfloat16, and Linux permits it to this process, which has to ask.
[[maybe_unused]] bool HasTiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kTiles = 1u << 24 | 1u << 22;             // amx_tile, amx_bf16
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTiles) == kTiles &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace
}  // namespace peagle

PEAGLE_EXPORT XLA_FFI_Error* peagle_linear(XLA_FFI_CallFrame* frame) {
  static auto* handler = xla::ffi::Ffi::Bind()
                             .Ctx<xla::ffi::ThreadPool>()
                             .Arg<xla::ffi::AnyBuffer>()  // x
                             .Arg<xla::ffi::AnyBuffer>()  // norm
                             .Arg<xla::ffi::AnyBuffer>()  // panels
                             .Arg<xla::ffi::AnyBuffer>()  // scales
                             .Arg<xla::ffi::AnyBuffer>()  // bias
                             .Arg<xla::ffi::AnyBuffer>()  // residual
                             .Arg<xla::ffi::AnyBuffer>()  // positions
                             .Ret<xla::ffi::AnyBuffer>()  // out
                             .Attr<float>("epsilon")
                             .To(peagle::LinearHandler)
                             .release();
  return handler->Call(frame);
}

PEAGLE_EXPORT XLA_FFI_Error* peagle_experts(XLA_FFI_CallFrame* frame) {
  static auto* handler = xla::ffi::Ffi::Bind()
                             .Ctx<xla::ffi::ThreadPool>()
                             .Arg<xla::ffi::AnyBuffer>()  // x
                             .Arg<xla::ffi::AnyBuffer>()  // norm
                             .Arg<xla::ffi::AnyBuffer>()  // router
                             .Arg<xla::ffi::AnyBuffer>()  // router_bias
                             .Arg<xla::ffi::AnyBuffer>()  // gate_up
                             .Arg<xla::ffi::AnyBuffer>()  // gate_up_scales
                             .Arg<xla::ffi::AnyBuffer>()  // gate_up_bias
                             .Arg<xla::ffi::AnyBuffer>()  // down
                             .Arg<xla::ffi::AnyBuffer>()  // down_scales
                             .Arg<xla::ffi::AnyBuffer>()  // down_bias
                             .Arg<xla::ffi::AnyBuffer>()  // positions
                             .Arg<xla::ffi::AnyBuffer>()  // first_local
                             .Ret<xla::ffi::AnyBuffer>()  // out
                             .Attr<int64_t>("num_experts")
                             .Attr<int64_t>("top_k")
                             .Attr<int64_t>("hidden")
                             .Attr<bool>("residual")
                             .Attr<float>("limit")
                             .Attr<float>("epsilon")
                             .To(peagle::ExpertsHandler)
                             .release();
  return handler->Call(frame);
}

PEAGLE_EXPORT XLA_FFI_Error* peagle_paged_attention(XLA_FFI_CallFrame* frame) {
  static auto* handler = xla::ffi::Ffi::Bind()
                             .Ctx<xla::ffi::ThreadPool>()
                             .Arg<xla::ffi::AnyBuffer>()  // qkv
                             .Arg<xla::ffi::AnyBuffer>()  // cos
                             .Arg<xla::ffi::AnyBuffer>()  // sin
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
                             .To(peagle::AttentionHandler)
                             .release();
  return handler->Call(frame);
}

PEAGLE_EXPORT XLA_FFI_Error* peagle_rope_tables(XLA_FFI_CallFrame* frame) {
  static auto* handler = xla::ffi::Ffi::Bind()
                             .Ctx<xla::ffi::ThreadPool>()
                             .Arg<xla::ffi::AnyBuffer>()  // positions
                             .Arg<xla::ffi::AnyBuffer>()  // frequencies
                             .Ret<xla::ffi::AnyBuffer>()  // cos
                             .Ret<xla::ffi::AnyBuffer>()  // sin
                             .Attr<float>("concentration")
                             .To(peagle::RopeTablesHandler)
                             .release();
  return handler->Call(frame);
}

PEAGLE_EXPORT XLA_FFI_Error* peagle_likeliest(XLA_FFI_CallFrame* frame) {
  static auto* handler = xla::ffi::Ffi::Bind()
                             .Ctx<xla::ffi::ThreadPool>()
                             .Arg<xla::ffi::AnyBuffer>()  // logits
                             .Ret<xla::ffi::AnyBuffer>()  // index
                             .Ret<xla::ffi::AnyBuffer>()  // probability
                             .To(peagle::LikeliestHandler)
                             .release();
  return handler->Call(frame);
}

PEAGLE_EXPORT XLA_FFI_Error* peagle_draw(XLA_FFI_CallFrame* frame) {
  static auto* handler = xla::ffi::Ffi::Bind()
                             .Ctx<xla::ffi::ThreadPool>()
                             .Arg<xla::ffi::AnyBuffer>()  // weights
                             .Arg<xla::ffi::AnyBuffer>()  // keys
                             .Arg<xla::ffi::AnyBuffer>()  // token_ids
                             .Ret<xla::ffi::AnyBuffer>()  // index
                             .To(peagle::DrawHandler)
                             .release();
  return handler->Call(frame);
}

PEAGLE_EXPORT XLA_FFI_Error* peagle_put_rows(XLA_FFI_CallFrame* frame) {
  static auto* handler = xla::ffi::Ffi::Bind()
                             .Arg<xla::ffi::AnyBuffer>()  // into
                             .Arg<xla::ffi::AnyBuffer>()  // rows
                             .Arg<xla::ffi::AnyBuffer>()  // start
                             .Arg<xla::ffi::AnyBuffer>()  // count
                             .Ret<xla::ffi::AnyBuffer>()  // out
                             .To(peagle::PutRowsHandler)
                             .release();
  return handler->Call(frame);
}

// Returns the widest instruction set of this machine, of those with a library.
PEAGLE_EXPORT const char* peagle_machine() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma")) {
    if (!__builtin_cpu_supports("avx512vnni")) return "avx512";
    if (!__builtin_cpu_supports("avx512bf16")) return "avx512vnni";
    return peagle::HasTiles() ? "avx512amx" : "avx512bf16";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "portable";
}
