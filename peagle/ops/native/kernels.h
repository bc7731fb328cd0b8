// The kernels' interface, without XLA: plain pointers in and out. linear.cc, experts.cc, attention.cc, rope.cc, likeliest.cc
// and draw.cc implement it; ffi.cc checks shapes and calls them. Each instruction set has a shared library of its own,
// because in one library the linker could use a template compiled for one set in the code of another.
//
// T rows, K inputs, N outputs of a matrix. Every result is a function of its own row alone: the order of summation is
// fixed, so a row's bits do not depend on T, on the other rows, or on the number of threads. If positions are given, a row
// of negative position is inactive: it is not computed, and its output is zero.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace peagle {

// A packed matrix: panels of 16 output rows, [panel][input][row]; zero rows fill the last panel.
//     kFloat32    [panel][K][16] float
//     kBfloat16   [panel][ceil(K/2)][16][2] bfloat16: two neighbouring inputs of a row share 32 bits
//     kMxfp4      [panel][K/8][16] uint32: eight neighbouring inputs of a row share 32 bits, the first in the lowest;
//                 scales [panel][K/32][16] uint8: value = code * 2^(scale - 127)
enum class Format { kFloat32, kBfloat16, kMxfp4 };

constexpr int64_t kPanelRows = 16;

struct Matrix {
  Format format;
  const void* panels;
  const uint8_t* scales;  // kMxfp4 only
  int64_t inputs, outputs;
  bool bfloat16_rows;  // the rows are bfloat16 numbers; sums are float32 still
};

// Root-mean-square normalisation of each row, times a weight; none if the weight is null. All that is multiplied by a matrix
// is rounded to bfloat16 if the op's rows are bfloat16: normalised rows, and an expert's hidden values.
struct Norm {
  const float* weight;
  float epsilon;
};

// out[T, N] = norm(x[T, K]) W^T (+ bias[N]) (+ residual[T, N])
struct Linear {
  const void* x;  // float, or bfloat16 if weight.bfloat16_rows
  Norm norm;
  Matrix weight;
  const float* bias;     // may be null
  const void* residual;  // may be null
  const int32_t* positions;  // [T] or null: all rows are active
  void* out;
  bool bfloat16_out;  // of residual, too
  int64_t rows;
};

// The feed-forward half of a GPT-OSS layer: out = x + sum of weight * (down(swiglu(gate_up(y))) + bias) with y = norm(x)
// over the top_k experts by the router's logits of y (equal logits: the lower first), weighted by softmax over those.
// gate_up and down hold only the local experts, `first` .. `first + num_local - 1`, end to end; only these are computed.
// gate_up alternates a panel of gate rows with the panel of the same up rows, as does its bias. Without `residual` x is
// not added.
struct Experts {
  const void* x;  // [T, D], float, or bfloat16 if the matrices' bfloat16_rows
  Norm norm;
  Matrix router;  // D inputs, E outputs
  const float* router_bias;    // [E]
  Matrix gate_up;              // per expert: D inputs, 2 * ceil(F/16) * 16 outputs
  const float* gate_up_bias;   // [num_local, 2 * ceil(F/16) * 16]
  Matrix down;                 // per expert: F inputs, D outputs
  const float* down_bias;      // [num_local, D]
  const int32_t* positions;    // [T] or null: all rows are active
  void* out;                   // [T, D]
  bool bfloat16_out;
  int64_t rows, num_experts, first, num_local, top_k;
  bool residual;
  float limit;
};

// Attention of T rows per sequence over keys and values in pages [P, S, G H]. Index i of sequence b is slot i mod S of page
// table[b, (i / S) mod M]. A row sees indices first .. last, those alone, oldest first; a row whose last is below its first
// gives zeros. N query heads; query head n reads kv head n / (N / G). The caller checks that every page that a row sees or
// writes is one of the P.
struct Attention {
  const void* query;  // [B, T, N, H]
  const void* key;    // [P, S, G H]
  const void* value;  // [P, S, G H]
  bool bfloat16;      // of all three, and of out
  const int32_t *write, *first, *last;  // [B, T]; write: the row's own index, negative if it writes nothing
  const int32_t* table;                 // [B, M]
  const float* sinks;                   // [N] or null
  void* out;                            // [B, T, N, H]
  int64_t batch, width, heads, head_dim, pages, page_size, kv_heads, table_width;

  // The offset of an index's first vector, in vectors of one head.
  int64_t At(int64_t sequence, int64_t index) const {
    const int64_t page = table[sequence * table_width + index / page_size % table_width];
    return (page * page_size + index % page_size) * kv_heads;
  }
};

// Cosine and sine of position * frequency, a float32 product, times the concentration. No row is inactive.
struct RopeTables {
  const int32_t* positions;  // [T]
  const float* frequencies;  // [H/2]
  float concentration;
  bool bfloat16;    // of both tables
  void *cos, *sin;  // [T, H/2]
  int64_t rows, half;
};

// Before attention: rotates queries and keys, and writes keys and values to the rows' own indices.
struct Rotation {
  const float* qkv;         // [B, T, (N + 2 G) H]: queries, keys, values
  const float *cos, *sin;   // [B, T, H/2]
  void *query, *key, *value;  // as in Attention
};

// For each row of [T, V] the index of the largest value, the first of equal ones, and its softmax probability; -1 and NaN if
// a value is NaN or the largest is not finite.
struct Likeliest {
  const void* logits;  // [T, V]
  bool bfloat16;
  int32_t* index;      // [T]
  float* probability;  // [T] or null: not computed
  int64_t rows, width;
};

// For each row of [T, V] the index of the largest weight over waiting time, the first of equal ones: a draw in proportion to
// the weights. The waiting time, of an exponential distribution, depends on the row's keys and the token id alone
// (peagle/ops/draw.py). -1 if no weight is above 0, or one is NaN.
struct Draw {
  const float* weights;      // [T, V]
  const uint32_t* keys;      // [T, 2]
  const int32_t* token_ids;  // [V] or null: 0, 1, 2, ...
  int32_t* index;            // [T]
  int64_t rows, width;
};

void RunLinear(const Linear&, Parallel&);
void RunExperts(const Experts&, Parallel&);
void RunAttention(const Attention&, Parallel&);
void RotateAndWrite(const Attention&, const Rotation&, Parallel&);
void RunRopeTables(const RopeTables&, Parallel&);
void RunLikeliest(const Likeliest&, Parallel&);
void RunDraw(const Draw&, Parallel&);

}  // namespace peagle
