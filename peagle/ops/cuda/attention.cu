// Attention of a pass of few rows over a KV cache, in three kernels:
//
//     rotate    rotates queries and keys, writes keys and values to their slots
//     attend    per block one kv head and one chunk of slots, for all queries of that head; reads only slots that a query
//               attends to
//     combine   combines the chunks' results with the sinks
//
// Chunks begin at fixed slots, so a row's bits do not depend on the other rows.

namespace {

constexpr int kHead = 64;  // values of a head
constexpr int kHalf = kHead / 2;
constexpr int kSlots = 64;  // per warp
constexpr int kChunkSlots = kSlots * kWarps;
constexpr int kRows = 16;  // queries per product
constexpr float kNothing = -1e30f;

// The map between a sequence's positions and its cache's slots. `newest` is the largest position that the pass has written;
// negative if it wrote none.
struct Slots {
  int capacity;
  int newest;
  int begun;   // the position that was, or will be, in slot 0 when `newest` was written: of a ring, of its last round
  int before;  // a slot beyond the newest holds a position so far before: a ring's last round, or nothing

  __device__ Slots(int capacity, int ring, int newest)
      : capacity(capacity),
        newest(newest),
        begun(ring ? newest / capacity * capacity : 0),
        before(ring ? capacity : 1 << 30) {}

  // The position in a slot; negative for an empty slot.
  __device__ int Position(int slot) const {
    const int position = begun + slot;
    return slot >= capacity ? -1 : position > newest ? position - before : position;
  }
};

}  // namespace

// query [B, T, N, H] = the queries of qkv [B, T, (N + 2G) H], rotated by cosine and sine [B, T, H/2]. Also writes rotated
// keys, and values, to the caches [B, C, G, H] for rows whose position [B, T] is not negative. A thread for each two values:
// blocks (B T, (N + 2G) H / 2 / kThreads, rounded up).
extern "C" __global__ void __launch_bounds__(kThreads) peagle_rotate(
    const Half* qkv, const Half* cosine, const Half* sine, Half* key, Half* value, const int* positions, int rows,
    int capacity, int heads, int kv_heads, int ring, Half* query) {
  const int row = blockIdx.x, b = row / rows;  // row of [B, T]
  const int i = blockIdx.y * kThreads + threadIdx.x, head = i / kHalf, at = i % kHalf;
  if (head >= heads + 2 * kv_heads) return;
  const Half* own = qkv + (static_cast<long long>(row) * (heads + 2 * kv_heads) + head) * kHead + at;
  Half first = own[0], second = own[kHalf];
  if (head < heads + kv_heads) {
    const float c = ToFloat(cosine[row * kHalf + at]), s = ToFloat(sine[row * kHalf + at]);
    const float x = ToFloat(first), y = ToFloat(second);
    first = ToHalf(x * c - y * s);
    second = ToHalf(y * c + x * s);
  }
  Half* to = query + (static_cast<long long>(row) * heads + head) * kHead + at;
  if (head >= heads) {
    const int position = positions[row], slot = ring ? position % capacity : position;
    if (position < 0 || slot >= capacity) return;
    Half* cache = head < heads + kv_heads ? key : value;
    to = cache + ((static_cast<long long>(b) * capacity + slot) * kv_heads + (head - heads) % kv_heads) * kHead + at;
  }
  to[0] = first;
  to[kHalf] = second;
}

namespace {

struct AttentionShared {
  float peak[kWarps][kRows];
  float total[kWarps][kRows];
  float out[kWarps][kRows][kHead + 4];  // padded by four, so that rows begin in different banks
};

__device__ inline unsigned Pack(float low, float high) { return ToHalf(low) | static_cast<unsigned>(ToHalf(high)) << 16; }

// The largest, or the sum, over the four lanes of a group.
__device__ inline float MaxOfGroup(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
__device__ inline float SumOfGroup(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// Combines the warps' results for the first `count` of a tile's queries: partial [count, H], peaks and totals [count]. If no
// warp has weights for a query, its total is 0 and nothing else of it is written.
__device__ inline void CombineWarps(const AttentionShared& shared, int count, float* partial, float* peaks, float* totals) {
  for (int i = threadIdx.x; i < kRows * kHead; i += kThreads) {
    const int row = i / kHead, h = i % kHead;
    if (row >= count) continue;
    float top = kNothing, sum = 0, result = 0;
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.peak[w][row]);
    for (int w = 0; w < kWarps; ++w) {
      const float scale = shared.total[w][row] > 0 ? expf(shared.peak[w][row] - top) : 0;
      sum += scale * shared.total[w][row];
      result += scale * shared.out[w][row][h];
    }
    if (h == 0) totals[row] = sum;
    if (!(sum > 0)) continue;
    partial[row * kHead + h] = result;
    if (h == 0) peaks[row] = top;
  }
}

}  // namespace

// partial [B, G, chunks, R, H] = the weighted sums over the chunk's slots for the R = T N/G queries of a kv head, and per
// query `peaks` and `totals` [B, G, chunks, R]: the largest score, and the sum of exponentials relative to it. Queries of a
// kv head go row by row, N/G heads each. If a query attends to no slot of a chunk, its total is 0 and nothing else of it is
// written. Blocks: (chunks, B G).
extern "C" __global__ void __launch_bounds__(kThreads, 2) peagle_attend(
    const Half* query, const Half* key, const Half* value, const int* positions, int rows, int capacity, int heads,
    int kv_heads, int window, int ring, float* partial, float* peaks, float* totals) {
  __shared__ AttentionShared shared;
  const int chunk = blockIdx.x, num_chunks = gridDim.x, b = blockIdx.y / kv_heads, g = blockIdx.y % kv_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const int shared_heads = heads / kv_heads, queries = rows * shared_heads;
  const int first_slot = chunk * kChunkSlots + warp * kSlots;
  // the newest and the oldest position that any row attends to; rows of negative position attend to nothing
  int newest = -1;
  for (int t = 0; t < rows; ++t) newest = max(newest, positions[b * rows + t]);
  int oldest = newest;
  for (int t = 0; t < rows; ++t)
    if (positions[b * rows + t] >= 0) oldest = min(oldest, positions[b * rows + t]);
  const Slots slots(capacity, ring, newest);
  oldest = window > 0 ? max(0, oldest - window + 1) : 0;
  const long long row_stride = static_cast<long long>(kv_heads) * kHead;
  const Half* keys = key + static_cast<long long>(b) * capacity * row_stride + g * kHead;
  const Half* values = value + static_cast<long long>(b) * capacity * row_stride + g * kHead;
  const long long at = (static_cast<long long>(blockIdx.y) * num_chunks + chunk) * queries;
  if (!ring && (chunk * kChunkSlots > newest || (chunk + 1) * kChunkSlots <= oldest)) {
    for (int i = threadIdx.x; i < queries; i += kThreads) totals[at + i] = 0;
    return;
  }

  for (int tile = 0; tile < queries; tile += kRows) {
    // queries of this lane: rows group and group + 8 of the tile; values 16 quarter .. 16 quarter + 15 of each
    Words q[2][2];
    int own_position[2];
    for (int half = 0; half < 2; ++half) {
      const int index = tile + group + 8 * half, t = index / shared_heads, head = g * shared_heads + index % shared_heads;
      const bool there = index < queries;
      own_position[half] = there ? positions[b * rows + t] : -1;
      const Half* from = query + (static_cast<long long>(b * rows + (there ? t : 0)) * heads + (there ? head : 0)) * kHead;
      for (int i = 0; i < 2; ++i) q[half][i] = LoadIf(there, from + 16 * quarter + 8 * i);
    }
    float scores[kSlots / 8][4];
    float peak[2] = {kNothing, kNothing};
#pragma unroll
    for (int n = 0; n < kSlots / 8; ++n) {
      const int slot = first_slot + 8 * n + group, position = slots.Position(slot);
      const bool seen = position >= oldest && position <= newest;
      Words k[2];
      for (int i = 0; i < 2; ++i) k[i] = LoadIf(seen, keys + slot * row_stride + 16 * quarter + 8 * i);
      for (int i = 0; i < 4; ++i) scores[n][i] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int words = i / 2, word = i % 2 * 2;
        const unsigned a[4] = {q[0][words].of[word], q[1][words].of[word], q[0][words].of[word + 1], q[1][words].of[word + 1]};
        const unsigned kb[2] = {k[words].of[word], k[words].of[word + 1]};
        MultiplyAdd(scores[n], a, kb);
      }
      // this lane's scores are those of slots 2 quarter and 2 quarter + 1
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int theirs = slots.Position(first_slot + 8 * n + 2 * quarter + i % 2), mine = own_position[i / 2];
        const bool sees = theirs >= 0 && theirs <= mine && (window == 0 || theirs > mine - window);
        scores[n][i] = sees ? scores[n][i] * 0.125f : kNothing;  // 1 / sqrt(kHead)
        peak[i / 2] = fmaxf(peak[i / 2], scores[n][i]);
      }
    }
    float total[2] = {0, 0};
    for (int half = 0; half < 2; ++half) peak[half] = MaxOfGroup(peak[half]);
#pragma unroll
    for (int n = 0; n < kSlots / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = scores[n][i] <= kNothing ? 0 : expf(scores[n][i] - peak[i / 2]);
        total[i / 2] += scores[n][i];
      }
    for (int half = 0; half < 2; ++half) total[half] = SumOfGroup(total[half]);
    float out[kHead / 8][4] = {};
#pragma unroll
    for (int n = 0; n < kSlots / 8; n += 2) {
      const unsigned a[4] = {Pack(scores[n][0], scores[n][1]), Pack(scores[n][2], scores[n][3]),
                             Pack(scores[n + 1][0], scores[n + 1][1]), Pack(scores[n + 1][2], scores[n + 1][3])};
      Words v[4];  // of slots 2 quarter, 2 quarter + 1, and eight further: values 8 group .. 8 group + 7
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int slot = first_slot + 8 * n + 2 * quarter + i % 2 + i / 2 * 8, position = slots.Position(slot);
        const bool seen = position >= oldest && position <= newest;
        v[i] = LoadIf(seen, values + slot * row_stride + 8 * group);
      }
#pragma unroll
      for (int h = 0; h < kHead / 8; ++h) {
        const unsigned vb[2] = {
            h % 2 ? Upper(v[0].of[h / 2], v[1].of[h / 2]) : Lower(v[0].of[h / 2], v[1].of[h / 2]),
            h % 2 ? Upper(v[2].of[h / 2], v[3].of[h / 2]) : Lower(v[2].of[h / 2], v[3].of[h / 2]),
        };
        MultiplyAdd(out[h], a, vb);
      }
    }
    // column c of product h is value 8 c + h
    for (int half = 0; half < 2; ++half) {
      const int row = group + 8 * half;
      if (quarter == 0) {
        shared.peak[warp][row] = peak[half];
        shared.total[warp][row] = total[half];
      }
      for (int h = 0; h < kHead / 8; ++h)
        for (int i = 0; i < 2; ++i) shared.out[warp][row][8 * (2 * quarter + i) + h] = out[h][2 * half + i];
    }
    __syncthreads();
    CombineWarps(shared, queries - tile, partial + (at + tile) * kHead, peaks + at + tile, totals + at + tile);
    __syncthreads();
  }
}

// out [B, T, N, H] = the chunks' results combined with the sinks, if any. A row that attends to nothing gets zeros. A block
// for each row and head, a thread for each value.
extern "C" __global__ void __launch_bounds__(kHead) peagle_combine(
    const float* partial, const float* peaks, const float* totals, const Half* sinks, int rows, int heads, int kv_heads,
    int num_chunks, Half* out) {
  const int row = blockIdx.x / heads, head = blockIdx.x % heads, b = row / rows, h = threadIdx.x;
  const int shared_heads = heads / kv_heads, queries = rows * shared_heads;
  const int index = row % rows * shared_heads + head % shared_heads;
  const long long first = (static_cast<long long>(b) * kv_heads + head / shared_heads) * num_chunks * queries + index;
  const float sink = sinks == nullptr ? kNothing : ToFloat(sinks[head]);
  float top = sink;
  for (int c = 0; c < num_chunks; ++c) {
    const long long at = first + static_cast<long long>(c) * queries;
    if (totals[at] > 0) top = fmaxf(top, peaks[at]);
  }
  float sum = sinks == nullptr ? 0 : expf(sink - top), result = 0;
  for (int c = 0; c < num_chunks; ++c) {
    const long long at = first + static_cast<long long>(c) * queries;
    if (!(totals[at] > 0)) continue;
    const float scale = expf(peaks[at] - top);
    sum += scale * totals[at];
    result += scale * partial[at * kHead + h];
  }
  out[(static_cast<long long>(row) * heads + head) * kHead + h] = ToHalf(sum > 0 ? result / sum : 0);
}
