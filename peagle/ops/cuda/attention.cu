// Attention over keys and values in pages of 64 slots, [P, 64, G, H]. Index i of sequence b is slot i mod 64 of page
// table[b, i / 64 mod M].
//
//     rotate    rotates queries and keys, writes keys and values to their pages
//     few rows  attend: per block one kv head and one chunk of four pages, a page for each warp, so that all of the GPU
//               reads; then combine joins the chunks with the sinks
//     many rows prompt: per warp 16 queries, which read their pages one after the other
//
// Chunks begin at fixed indices, so with few rows a row's bits depend neither on the other rows nor on page numbers.

namespace {

constexpr int kHead = 64;  // values of a head
constexpr int kHalf = kHead / 2;
constexpr int kSlots = 64;  // per page
constexpr int kChunkSlots = kSlots * kWarps;
constexpr int kRows = 16;  // queries per product
constexpr float kNothing = -1e30f;

// The pages of one sequence and one kv head.
struct Table {
  const int* numbers;  // of this sequence [M]
  int width;
  const Half *key, *value;  // of this kv head
  long long row_stride, page_stride;

  __device__ Table(const int* table, int table_width, int b, const Half* key, const Half* value, int g, int kv_heads)
      : numbers(table + static_cast<long long>(b) * table_width),
        width(table_width),
        key(key + g * kHead),
        value(value + g * kHead),
        row_stride(static_cast<long long>(kv_heads) * kHead),
        page_stride(kSlots * row_stride) {}

  __device__ long long Page(int page) const { return numbers[page % width] * page_stride; }
};

// The indices that queries see, from the first to the last; nothing if last < first.
struct Range {
  int first, last;
};

__device__ inline Range SeenBy(const int* first, const int* last, int row) { return {first[row], last[row]}; }

__device__ inline void Cover(Range& all, Range one) {
  if (one.last < one.first) return;
  all.first = min(all.first, one.first);
  all.last = max(all.last, one.last);
}

constexpr Range kNothingSeen = {0x7fffffff, -1};

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

// Sixteen queries of one kv head, in the registers of a warp: a lane holds values 16 quarter .. 16 quarter + 15 of queries
// `group` and `group` + 8.
struct Queries {
  Words values[2][2];
  Range seen[2];

  // Takes queries `tile` .. `tile` + 15 of a sequence, counted row by row, `shared_heads` heads each.
  __device__ Queries(const Half* query, const int* first, const int* last, int b, int g, int rows, int heads,
                     int shared_heads, int tile) {
    const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    for (int half = 0; half < 2; ++half) {
      const int index = tile + group + 8 * half, t = index / shared_heads, head = g * shared_heads + index % shared_heads;
      const bool there = index < rows * shared_heads;
      seen[half] = there ? SeenBy(first, last, b * rows + t) : kNothingSeen;
      const Half* from = query + (static_cast<long long>(b * rows + (there ? t : 0)) * heads + (there ? head : 0)) * kHead;
      for (int i = 0; i < 2; ++i) values[half][i] = LoadIf(there, from + 16 * quarter + 8 * i);
    }
  }
};

// The results of sixteen queries over one page: sums weighted by exp(score - peak), and the sum of these weights. Lane
// (group, quarter): queries group and group + 8; out[h][2 half + i] is value 8 (2 quarter + i) + h.
struct PageResult {
  float peak[2], total[2], out[kHead / 8][4];
};

// Reads the slots of a page that lie within `all`, which covers what every query of the tile sees.
__device__ inline PageResult AttendToPage(const Queries& q, const Table& table, int page, Range all) {
  const int lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4, begin = page * kSlots;
  const bool any = begin <= all.last && begin + kSlots > all.first;
  const long long at = any ? table.Page(page) : 0;
  const Half *keys = table.key + at, *values = table.value + at;
  auto read = [&](int slot) { return any && begin + slot >= all.first && begin + slot <= all.last; };
  PageResult result = {{kNothing, kNothing}, {0, 0}, {}};
  float scores[kSlots / 8][4];
#pragma unroll
  for (int n = 0; n < kSlots / 8; ++n) {
    const int slot = 8 * n + group;
    Words k[2];
    for (int i = 0; i < 2; ++i) k[i] = LoadIf(read(slot), keys + slot * table.row_stride + 16 * quarter + 8 * i);
    for (int i = 0; i < 4; ++i) scores[n][i] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int words = i / 2, word = i % 2 * 2;
      const unsigned a[4] = {q.values[0][words].of[word], q.values[1][words].of[word], q.values[0][words].of[word + 1],
                             q.values[1][words].of[word + 1]};
      const unsigned kb[2] = {k[words].of[word], k[words].of[word + 1]};
      MultiplyAdd(scores[n], a, kb);
    }
    // this lane's scores are those of slots 2 quarter and 2 quarter + 1
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int index = begin + 8 * n + 2 * quarter + i % 2;
      const Range mine = q.seen[i / 2];
      scores[n][i] = index >= mine.first && index <= mine.last ? scores[n][i] * 0.125f : kNothing;  // 1 / sqrt(kHead)
      result.peak[i / 2] = fmaxf(result.peak[i / 2], scores[n][i]);
    }
  }
  for (int half = 0; half < 2; ++half) result.peak[half] = MaxOfGroup(result.peak[half]);
#pragma unroll
  for (int n = 0; n < kSlots / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[n][i] = scores[n][i] <= kNothing ? 0 : expf(scores[n][i] - result.peak[i / 2]);
      result.total[i / 2] += scores[n][i];
    }
  for (int half = 0; half < 2; ++half) result.total[half] = SumOfGroup(result.total[half]);
#pragma unroll
  for (int n = 0; n < kSlots / 8; n += 2) {
    const unsigned a[4] = {Pack(scores[n][0], scores[n][1]), Pack(scores[n][2], scores[n][3]),
                           Pack(scores[n + 1][0], scores[n + 1][1]), Pack(scores[n + 1][2], scores[n + 1][3])};
    Words v[4];  // of slots 2 quarter, 2 quarter + 1, and eight further: values 8 group .. 8 group + 7
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slot = 8 * n + 2 * quarter + i % 2 + i / 2 * 8;
      v[i] = LoadIf(read(slot), values + slot * table.row_stride + 8 * group);
    }
#pragma unroll
    for (int h = 0; h < kHead / 8; ++h) {
      const unsigned vb[2] = {
          h % 2 ? Upper(v[0].of[h / 2], v[1].of[h / 2]) : Lower(v[0].of[h / 2], v[1].of[h / 2]),
          h % 2 ? Upper(v[2].of[h / 2], v[3].of[h / 2]) : Lower(v[2].of[h / 2], v[3].of[h / 2]),
      };
      MultiplyAdd(result.out[h], a, vb);
    }
  }
  return result;
}

}  // namespace

// query [B, T, N, H] = the queries of qkv [B, T, (N + 2G) H], rotated by cosine and sine [B, T, H/2]. Also writes rotated
// keys, and values, to the pages for rows whose index `write` [B, T] is not negative. A thread for each two values: blocks
// (B T, (N + 2G) H / 2 / kThreads, rounded up).
extern "C" __global__ void __launch_bounds__(kThreads) peagle_rotate(
    const Half* qkv, const Half* cosine, const Half* sine, Half* key, Half* value, const int* table, const int* write,
    int rows, int table_width, int heads, int kv_heads, Half* query) {
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
    const int index = write[row];
    if (index < 0) return;
    const Table pages(table, table_width, b, key, value, (head - heads) % kv_heads, kv_heads);
    const long long offset = pages.Page(index / kSlots) + index % kSlots * pages.row_stride + at;
    to = const_cast<Half*>(head < heads + kv_heads ? pages.key : pages.value) + offset;
  }
  to[0] = first;
  to[kHalf] = second;
}

// partial [B, G, chunks, R, H] = the weighted sums over a chunk's slots for the R = T N/G queries of a kv head, and per
// query `peaks` and `totals` [B, G, chunks, R]: the largest score, and the sum of exponentials relative to it. Queries of a
// kv head go row by row, N/G heads each. If a query sees nothing of a chunk, its total is 0 and nothing else of it is
// written. The first chunk is that of the first index that some row of the sequence sees. Blocks: (chunks, B G), as many
// chunks as any sequence's rows span.
extern "C" __global__ void __launch_bounds__(kThreads, 2) peagle_attend(
    const Half* query, const Half* key, const Half* value, const int* table, const int* first, const int* last, int rows,
    int table_width, int heads, int kv_heads, float* partial, float* peaks, float* totals) {
  __shared__ AttentionShared shared;
  const int b = blockIdx.y / kv_heads, g = blockIdx.y % kv_heads, num_chunks = gridDim.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const int shared_heads = heads / kv_heads, queries = rows * shared_heads;
  Range all = kNothingSeen;
  for (int t = 0; t < rows; ++t) Cover(all, SeenBy(first, last, b * rows + t));
  const int chunk = (all.last < 0 ? 0 : all.first / kChunkSlots) + blockIdx.x;
  const long long at = (static_cast<long long>(blockIdx.y) * num_chunks + blockIdx.x) * queries;
  if (chunk * kChunkSlots > all.last) {
    for (int i = threadIdx.x; i < queries; i += kThreads) totals[at + i] = 0;
    return;
  }
  const Table pages(table, table_width, b, key, value, g, kv_heads);
  for (int tile = 0; tile < queries; tile += kRows) {
    const Queries q(query, first, last, b, g, rows, heads, shared_heads, tile);
    const PageResult result = AttendToPage(q, pages, chunk * kWarps + warp, all);
    for (int half = 0; half < 2; ++half) {
      const int row = group + 8 * half;
      if (quarter == 0) {
        shared.peak[warp][row] = result.peak[half];
        shared.total[warp][row] = result.total[half];
      }
      for (int h = 0; h < kHead / 8; ++h)
        for (int i = 0; i < 2; ++i) shared.out[warp][row][8 * (2 * quarter + i) + h] = result.out[h][2 * half + i];
    }
    __syncthreads();
    CombineWarps(shared, queries - tile, partial + (at + tile) * kHead, peaks + at + tile, totals + at + tile);
    __syncthreads();
  }
}

// out [B, T, N, H] = the chunks' results combined with the sinks, if any. A row that sees nothing gets zeros. A block
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

// out [B, T, N, H]: attention of many rows, with the sinks, if any. A row that sees nothing gets zeros. Blocks: (the
// queries of a kv head by kWarps kRows, rounded up, B G).
extern "C" __global__ void __launch_bounds__(kThreads, 2) peagle_prompt(
    const Half* query, const Half* key, const Half* value, const int* table, const int* first, const int* last,
    const Half* sinks, int rows, int table_width, int heads, int kv_heads, Half* out) {
  const int b = blockIdx.y / kv_heads, g = blockIdx.y % kv_heads, shared_heads = heads / kv_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const int queries = rows * shared_heads, tile = (blockIdx.x * kWarps + warp) * kRows;
  if (tile >= queries) return;
  const Queries q(query, first, last, b, g, rows, heads, shared_heads, tile);
  Range all = kNothingSeen;
  for (int t = tile / shared_heads; t <= (min(tile + kRows, queries) - 1) / shared_heads; ++t)
    Cover(all, SeenBy(first, last, b * rows + t));
  const Table pages(table, table_width, b, key, value, g, kv_heads);
  PageResult sum = {{kNothing, kNothing}, {0, 0}, {}};
  for (int page = all.last < 0 ? 0 : all.first / kSlots; page * kSlots <= all.last; ++page) {
    const PageResult next = AttendToPage(q, pages, page, all);
    for (int half = 0; half < 2; ++half) {
      const float top = fmaxf(sum.peak[half], next.peak[half]);
      const float kept = sum.total[half] > 0 ? expf(sum.peak[half] - top) : 0;
      const float added = next.total[half] > 0 ? expf(next.peak[half] - top) : 0;
      sum.peak[half] = top;
      sum.total[half] = kept * sum.total[half] + added * next.total[half];
      for (int h = 0; h < kHead / 8; ++h)
        for (int i = 2 * half; i < 2 * half + 2; ++i) sum.out[h][i] = kept * sum.out[h][i] + added * next.out[h][i];
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int index = tile + group + 8 * half, head = g * shared_heads + index % shared_heads;
    if (index >= queries) continue;
    float top = sum.peak[half], total = sum.total[half];
    if (sinks != nullptr) {
      const float sink = ToFloat(sinks[head]);
      top = fmaxf(top, sink);
      total = (sum.total[half] > 0 ? sum.total[half] * expf(sum.peak[half] - top) : 0) + expf(sink - top);
    }
    const float scale = sum.total[half] > 0 ? expf(sum.peak[half] - top) / total : 0;
    Half* to = out + (static_cast<long long>(b * rows + index / shared_heads) * heads + head) * kHead;
    for (int i = 0; i < 2; ++i)
      for (int h = 0; h < kHead / 8; ++h) to[8 * (2 * quarter + i) + h] = ToHalf(scale * sum.out[h][2 * half + i]);
  }
}
