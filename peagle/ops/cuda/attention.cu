// Attention over keys and values in pages of 64 slots, [P, 64, G H]. Index i of sequence b is slot i mod 64 of page
// table[b, i / 64 mod M].
//
//     few rows   attend: the pages of a kv head of a sequence, in chunks of four, are distributed over splits, so that the
//                whole GPU reads them. A block reads the chunks of a split, a page for each warp. It rotates its queries, and
//                rotates and writes the new keys and values of its chunks. A kv head's last block joins the splits and sinks
//     many rows  rotate, which writes queries, keys and values; then prompt: per block 128 queries of a kv head, 32 a warp,
//                which read their pages one after the other through shared memory
//
// Chunks begin at fixed indices, the number of a chunk decides its split, and what a query does not see changes nothing. So a
// row's bits depend neither on the other rows of its pass nor on page numbers.

namespace {

constexpr int kHead = 64;  // values of a head
constexpr int kHalf = kHead / 2;
constexpr int kSlots = 64;  // per page
constexpr int kChunkSlots = kSlots * kWarps;
constexpr int kRows = 16;  // queries per product
constexpr int kMostSplits = 32;
constexpr int kMostTiles = 1 << 16;  // of sixteen queries, in a pass of few rows
constexpr float kNothing = -1e30f, kLog2E = 1.44269504f;
constexpr float kScale = 0.125f * kLog2E;  // 1 / sqrt(kHead), for powers of two

// The pages of one sequence and one kv head.
struct Table {
  const int* numbers;  // of this sequence [M]
  int width;
  Half *key, *value;  // of this kv head
  long long row_stride, page_stride;

  __device__ Table(const int* table, int table_width, int b, Half* key, Half* value, int g, int kv_heads)
      : numbers(table + static_cast<long long>(b) * table_width),
        width(table_width),
        key(key + g * kHead),
        value(value + g * kHead),
        row_stride(static_cast<long long>(kv_heads) * kHead),
        page_stride(kSlots * row_stride) {}

  __device__ long long Page(int page) const { return numbers[page % width] * page_stride; }
  __device__ long long Slot(int index) const { return Page(index / kSlots) + index % kSlots * row_stride; }
};

// The indices that queries see, from the first to the last; nothing if last < first.
struct Range {
  int first, last;
  __device__ bool Has(int index) const { return index >= first && index <= last; }
};

constexpr Range kNothingSeen = {0x7fffffff, -1};

__device__ inline Range SeenBy(const int* first, const int* last, int row) { return {first[row], last[row]}; }

__device__ inline void Cover(Range& all, Range one) {
  if (one.last < one.first) return;
  all.first = min(all.first, one.first);
  all.last = max(all.last, one.last);
}

// Rotates a value of a head with its partner, half a head before, or with `minus` half a head further.
__device__ inline float Rotated(float own, float other, float c, float s, bool minus) {
  return minus ? own * c - other * s : own * c + other * s;
}

// Two neighbours.
__device__ inline unsigned Rotated(unsigned own, unsigned other, unsigned c, unsigned s, bool minus) {
  return Pack(Rotated(LowerFloat(own), LowerFloat(other), LowerFloat(c), LowerFloat(s), minus),
              Rotated(UpperFloat(own), UpperFloat(other), UpperFloat(c), UpperFloat(s), minus));
}

// The largest, or the sum, over the four lanes of a group.
__device__ inline float MaxOfGroup(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}
__device__ inline float SumOfGroup(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

constexpr int kPieceCount = kHead / 8;  // of 16 bytes, of a slot or a query

// Piece p of a row of 64 values is at p ^ (row % 8), so that the pieces of eight rows lie in different banks.
__device__ inline int PieceAt(int row, int piece) { return row * kPieceCount + (piece ^ row % 8); }

// A page's keys and values in shared memory.
struct alignas(128) StagedPage {
  Words keys[kSlots * kPieceCount], values[kSlots * kPieceCount];
};

// Begins to copy a page's slots to shared memory, by `threads` threads of which this is number `thread`; those outside of
// `wanted` become zero.
template <int threads>
__device__ inline void CopyPage(const Table& table, int page, Range wanted, int thread, StagedPage& staged) {
  const long long at = table.Page(page);
#pragma unroll 4
  for (int i = thread; i < kSlots * kPieceCount; i += threads) {
    const int slot = i / kPieceCount, piece = i % kPieceCount, to = PieceAt(slot, piece);
    const long long from = at + slot * table.row_stride + piece * 8;
    const bool has = wanted.Has(page * kSlots + slot);
    CopyAsync(&staged.keys[to], table.key + from, has);
    CopyAsync(&staged.values[to], table.value + from, has);
  }
}

// Sixteen queries of a warp, as products take them: a lane holds values 16 k + 2 quarter, .. + 1, and eight further, of
// queries `group` and `group` + 8.
struct Queries {
  unsigned a[kHead / 16][4];
  Range seen[2];
};

// The partial results of sixteen queries: sums weighted by exp2(kScale (score - peak)), and this lane's part of the sum of
// these weights. out[n]: values 8 n + 2 quarter, .. + 1 of queries group and group + 8.
struct Attended {
  float peak[2] = {kNothing, kNothing}, total[2] = {0, 0}, out[kHead / 8][4] = {};
};

// Adds 16 kCount slots of a staged page, from `slot` on, to the results of kQueries times sixteen queries. `slot` is index
// `start`. `masked`: some query does not see all of them.
template <int kCount, int kQueries>
__device__ __forceinline__ void Attend(const Queries (&q)[kQueries], const StagedPage& page, int slot, int start, bool masked,
                                       Attended (&result)[kQueries]) {
  const int lane = threadIdx.x % 32, quarter = lane % 4;
  float scores[kQueries][2 * kCount][4];
  // keys: lane l gives the address of slot l % 8 of matrix l / 8; matrices are 8 slots by 8 values
#pragma unroll
  for (int n = 0; n < 2 * kCount; ++n) {
#pragma unroll
    for (int i = 0; i < kQueries; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[i][n][c] = 0;
#pragma unroll
    for (int k = 0; k < kHead / 16; k += 2) {
      unsigned keys[4];
      LoadMatrices(keys, &page.keys[PieceAt(slot + 8 * n + lane % 8, 2 * k + lane / 8)]);
      const unsigned left[2] = {keys[0], keys[1]}, right[2] = {keys[2], keys[3]};
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        MultiplyAdd(scores[i][n], q[i].a[k], left);
        MultiplyAdd(scores[i][n], q[i].a[k + 1], right);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    Attended& own = result[i];
    float top[2] = {own.peak[0], own.peak[1]};
    if (masked)
#pragma unroll
      for (int n = 0; n < 2 * kCount; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (!q[i].seen[c / 2].Has(start + 8 * n + 2 * quarter + c % 2)) scores[i][n][c] = kNothing;
#pragma unroll
    for (int n = 0; n < 2 * kCount; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) top[c / 2] = fmaxf(top[c / 2], scores[i][n][c]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = MaxOfGroup(top[half]);
      const float kept = exp2f((own.peak[half] - top[half]) * kScale);
      own.peak[half] = top[half];
      own.total[half] *= kept;
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) own.out[n][2 * half + c] *= kept;
      // a query that has seen nothing yet has a peak of kNothing, and its scores must not become 1
      top[half] = top[half] <= kNothing ? 0 : top[half] * kScale;
    }
#pragma unroll
    for (int n = 0; n < 2 * kCount; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        scores[i][n][c] = exp2f(scores[i][n][c] * kScale - top[c / 2]);
        own.total[c / 2] += scores[i][n][c];
      }
  }
  // values: matrices of 8 slots by 8 values, transposed: slots 16 n .. + 7, + 8 .., then the same 8 values further
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    unsigned a[kQueries][4];
#pragma unroll
    for (int i = 0; i < kQueries; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) a[i][c] = Pack(scores[i][2 * n + c / 2][c % 2 * 2], scores[i][2 * n + c / 2][c % 2 * 2 + 1]);
#pragma unroll
    for (int h = 0; h < kHead / 8; h += 2) {
      unsigned values[4];
      LoadMatricesTransposed(values, &page.values[PieceAt(slot + 16 * n + lane % 16, h + lane / 16)]);
      const unsigned left[2] = {values[0], values[1]}, right[2] = {values[2], values[3]};
#pragma unroll
      for (int i = 0; i < kQueries; ++i) {
        MultiplyAdd(result[i].out[h], a[i], left);
        MultiplyAdd(result[i].out[h + 1], a[i], right);
      }
    }
  }
}

struct AttentionShared {
  float peak[kWarps][kRows];
  float total[kWarps][kRows];
  float out[kWarps][kRows][kHead + 8];  // padded, so that rows begin in different banks
};

// Combines the warps' results for the first `count` of a tile's queries: partial [count, H], peaks and totals [count]. If no
// warp has weights for a query, its total is 0 and nothing else of it is written.
__device__ inline void CombineWarps(const AttentionShared& shared, int count, float* partial, float* peaks, float* totals) {
#pragma unroll 1
  for (int i = threadIdx.x; i < count * kHead; i += kThreads) {
    const int row = i / kHead, h = i % kHead;
    float top = kNothing, sum = 0, result = 0;
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared.peak[w][row]);
    for (int w = 0; w < kWarps; ++w) {
      const float scale = shared.total[w][row] == 0 ? 0 : exp2f(shared.peak[w][row] - top);  // not a number stays so
      sum += scale * shared.total[w][row];
      result += scale * shared.out[w][row][h];
    }
    if (h == 0) totals[row] = sum;
    if (sum == 0) continue;
    partial[row * kHead + h] = result;
    if (h == 0) peaks[row] = top;
  }
}

// How many blocks of a tile have stored their partial results. Zero between grids; one grid runs at a time.
__device__ int attended[kMostTiles];

struct SplitShared {
  float scale[kRows][kMostSplits], total[kRows][kMostSplits], sink[kRows];
};

// The chunks that a pass's rows of a sequence see. Chunk c belongs to split c mod splits.
struct Chunks {
  int first, last, splits;

  // The first of a split's chunks; beyond `last` if it has none.
  __device__ int Begin(int split) const { return first + (split + splits - first % splits) % splits; }
  __device__ bool Used(int split) const { return Begin(split) <= last; }
};

// Joins the splits' results, and the sinks, for `count` of a kv head's `queries`, from `tile` on. A row that sees nothing gets
// zeros. The pointers are to the results of the first of these queries and splits.
__device__ inline void CombineSplits(const float* partial, const float* peaks, const float* totals, const Half* sinks,
                                     const Chunks& chunks, int queries, int tile, int count, int shared_heads,
                                     SplitShared& shared, Half* out, long long row_stride) {
  constexpr int kLanes = kThreads / kRows, kOwn = kRows * kHead / kThreads;
  const int h = threadIdx.x % kHead, begin = threadIdx.x / kHead;
  const int mine = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;  // a query for each few lanes
  const bool there = mine < count;
  const float sink = there && sinks != nullptr ? ToFloat(sinks[(tile + mine) % shared_heads]) * kLog2E : kNothing;
  float top = sink;
  for (int split = lane; there && split < chunks.splits; split += kLanes) {
    const int at = split * queries + mine;
    const float total = chunks.Used(split) ? __ldcg(totals + at) : 0;
    shared.total[mine][split] = total;
    shared.scale[mine][split] = total == 0 ? kNothing : __ldcg(peaks + at);
    top = fmaxf(top, shared.scale[mine][split]);
  }
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
  for (int split = lane; there && split < chunks.splits; split += kLanes) {
    const float scale = shared.total[mine][split] == 0 ? 0 : exp2f(shared.scale[mine][split] - top);
    shared.scale[mine][split] = scale;
    shared.total[mine][split] *= scale;
  }
  if (lane == 0) shared.sink[mine] = there && sinks != nullptr ? exp2f(sink - top) : 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int query = begin + i * (kThreads / kHead), index = tile + query;
    if (query >= count) continue;
    float result = 0, sum = 0;
#pragma unroll 4
    for (int split = 0; split < chunks.splits; ++split) {
      if (!chunks.Used(split)) continue;
      const float scale = shared.scale[query][split];
      const float value = __ldcg(partial + (static_cast<long long>(split) * queries + query) * kHead + h);
      sum += shared.total[query][split];
      result += scale == 0 ? 0 : scale * value;
    }
    sum += shared.sink[query];
    out[index / shared_heads * row_stride + index % shared_heads * kHead + h] = ToHalf(sum == 0 ? 0 : result / sum);
  }
}

constexpr int kMostFewRows = 16;

// The keys and values of a pass's new rows, rotated.
struct NewRows {
  int index[kMostFewRows];
  Half keys[kMostFewRows][kHead], values[kMostFewRows][kHead];
};

// Of a warp: rotates the keys of the rows whose index is within `wanted`, and writes keys and values; with `pages_too` to the
// pages, too.
__device__ inline void WriteRows(const Half* qkv, const Half* cosine, const Half* sine, const Table& pages, const int* write,
                                 int b, int g, int rows, int heads, int kv_heads, Range wanted, bool pages_too,
                                 NewRows& to) {
  const int at = threadIdx.x % 32;  // two values of a head
#pragma unroll 1
  for (int t = 0; t < rows; ++t) {
    const long long row = b * rows + t;
    const int index = write[row];
    if (!wanted.Has(index)) continue;
    const Half* own = qkv + (row * (heads + 2 * kv_heads) + heads + g) * kHead + at;
    const float c = ToFloat(cosine[row * kHalf + at]), s = ToFloat(sine[row * kHalf + at]);
    const float x = ToFloat(own[0]), y = ToFloat(own[kHalf]);
    const Half value[2] = {own[kv_heads * kHead], own[kv_heads * kHead + kHalf]};
    const Half key[2] = {ToHalf(Rotated(x, y, c, s, true)), ToHalf(Rotated(y, x, c, s, false))};
    const long long slot = pages.Slot(index) + at;
    if (at == 0) to.index[t] = index;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to.keys[t][at + i * kHalf] = key[i];
      to.values[t][at + i * kHalf] = value[i];
      if (!pages_too) continue;
      pages.key[slot + i * kHalf] = key[i];
      pages.value[slot + i * kHalf] = value[i];
    }
  }
}

// Of a warp: puts the new rows of a page into its staged copy.
__device__ inline void PutRows(const NewRows& from, int rows, int page, StagedPage& staged) {
  const int at = threadIdx.x % 32;  // two neighbours of a head
#pragma unroll 1
  for (int t = 0; t < rows; ++t) {
    const int slot = from.index[t] - page * kSlots;
    if (slot < 0 || slot >= kSlots) continue;
    const int to = PieceAt(slot, at / 4) * 4 + at % 4;
    reinterpret_cast<unsigned*>(staged.keys)[to] = reinterpret_cast<const unsigned*>(from.keys[t])[at];
    reinterpret_cast<unsigned*>(staged.values)[to] = reinterpret_cast<const unsigned*>(from.values[t])[at];
  }
}

// Rotates queries `tile` .. `tile` + 15 of a sequence, counted row by row, `shared_heads` heads each, into shared memory.
__device__ inline void StageQueries(const Half* qkv, const Half* cosine, const Half* sine, int b, int g, int rows,
                                    int all_heads, int shared_heads, int tile, Words (&staged)[kRows * kPieceCount]) {
  const int query = threadIdx.x / kPieceCount, part = threadIdx.x % kPieceCount, index = tile + query;
  Half* to = reinterpret_cast<Half*>(staged);
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // two neighbours, and those half a head further
    const int at = 4 * part + 2 * i;
    unsigned low = 0, high = 0;
    if (index < rows * shared_heads) {
      const long long row = b * rows + index / shared_heads;
      const Half* own = qkv + (row * all_heads + g * shared_heads + index % shared_heads) * kHead + at;
      const unsigned x = *reinterpret_cast<const unsigned*>(own), y = *reinterpret_cast<const unsigned*>(own + kHalf);
      const unsigned c = *reinterpret_cast<const unsigned*>(cosine + row * kHalf + at);
      const unsigned s = *reinterpret_cast<const unsigned*>(sine + row * kHalf + at);
      low = Rotated(x, y, c, s, true);
      high = Rotated(y, x, c, s, false);
    }
    *reinterpret_cast<unsigned*>(to + PieceAt(query, at / 8) * 8 + at % 8) = low;
    *reinterpret_cast<unsigned*>(to + PieceAt(query, (at + kHalf) / 8) * 8 + at % 8) = high;
  }
}

}  // namespace

// out [B, T, N, H]: attention of few rows over the pages, with the sinks, if any. qkv [B, T, (N + 2G) H] is not rotated yet:
// cosine and sine are [B, T, H/2]. Keys and values of rows whose index `write` [B, T] is not negative are written first.
//
// partial [B, G, splits, R, H]: the weighted sums over a split's slots for the R = T N/G queries of a kv head, row by row,
// and per query `peaks` and `totals` [B, G, splits, R]: the largest score, and the sum of powers of two relative to it. If a
// query sees nothing of a split, its total is 0 and nothing else of it is written. Blocks: (a power of two up to `splits`,
// which is one, too; B G; R / kRows rounded up).
extern "C" __global__ void __launch_bounds__(kThreads, 2) peagle_attend(
    const Half* qkv, const Half* cosine, const Half* sine, Half* key, Half* value, const int* table, const int* write,
    const int* first, const int* last, const Half* sinks, int rows, int table_width, int heads, int kv_heads, int splits,
    float* partial, float* peaks, float* totals, Half* out) {
  struct Shared {
    StagedPage pages[kWarps];
    Words queries[kRows * kPieceCount];
    NewRows rows;
    union {
      AttentionShared warps;
      SplitShared splits;
    };
  };
  Shared& shared = *reinterpret_cast<Shared*>(DynamicBlock());
  __shared__ int is_last;
  const int b = blockIdx.y / kv_heads, g = blockIdx.y % kv_heads, tile = blockIdx.z * kRows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const int shared_heads = heads / kv_heads, queries = rows * shared_heads, all_heads = heads + 2 * kv_heads;
  Range all = kNothingSeen;
  for (int t = 0; t < rows; ++t) Cover(all, SeenBy(first, last, b * rows + t));
  const Chunks chunks = {all.last < 0 ? 0 : all.first / kChunkSlots, all.last < 0 ? 0 : all.last / kChunkSlots, splits};
  const int num_blocks = min(static_cast<int>(gridDim.x), chunks.last - chunks.first + 1);  // that have a chunk
  if ((static_cast<int>(blockIdx.x) + splits - chunks.first % splits) % static_cast<int>(gridDim.x) >= num_blocks) return;
  const Table pages(table, table_width, b, key, value, g, kv_heads);
  StagedPage& mine = shared.pages[warp];
  if (threadIdx.x < kMostFewRows) shared.rows.index[threadIdx.x] = -1;
  StageQueries(qkv, cosine, sine, b, g, rows, all_heads, shared_heads, tile, shared.queries);
  Queries q[1];
  for (int half = 0; half < 2; ++half) {
    const int index = tile + group + 8 * half;
    q[0].seen[half] = index < queries ? SeenBy(first, last, b * rows + index / shared_heads) : kNothingSeen;
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kHead / 16; ++k) LoadMatrices(q[0].a[k], &shared.queries[PieceAt(lane % 16, 2 * k + lane / 16)]);
  const int count = min(kRows, queries - tile);
  const long long own = static_cast<long long>(blockIdx.y) * splits * queries + tile;
#pragma unroll 1
  for (int split = blockIdx.x; split < splits; split += gridDim.x) {
    if (!chunks.Used(split)) continue;
    Attended result[1];
#pragma unroll 1
    for (int chunk = chunks.Begin(split); chunk <= chunks.last; chunk += splits) {
      const int page = chunk * kWarps + warp, start = page * kSlots;
      const bool any = start <= all.last && start + kSlots > all.first;
      if (any) CopyPage<32>(pages, page, all, lane, mine);
      CommitCopies();
      // rows whose index is in no chunk are written with the first and the last chunk
      const Range writes = {chunk == chunks.first && warp == 0 ? 0 : start,
                            chunk == chunks.last && warp == kWarps - 1 ? 0x7fffffff : start + kSlots - 1};
      WriteRows(qkv, cosine, sine, pages, write, b, g, rows, heads, kv_heads, writes, tile == 0, shared.rows);
      WaitForCopies<0>();
      __syncwarp();
      PutRows(shared.rows, rows, page, mine);
      __syncwarp();
      if (any)
#pragma unroll 1
        for (int slot = 0; slot < kSlots; slot += 16) Attend<1, 1>(q, mine, slot, start + slot, true, result);
      __syncwarp();  // all have read what the next chunk overwrites
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = group + 8 * half;
      const float total = SumOfGroup(result[0].total[half]);
      if (quarter == 0) {
        shared.warps.peak[warp][row] = result[0].peak[half] * kScale;
        shared.warps.total[warp][row] = total;
      }
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) shared.warps.out[warp][row][8 * n + 2 * quarter + i] = result[0].out[n][2 * half + i];
    }
    __syncthreads();
    const long long at = own + static_cast<long long>(split) * queries;
    CombineWarps(shared.warps, count, partial + at * kHead, peaks + at, totals + at);
    __syncthreads();
  }
  if (num_blocks > 1) {
    int& finished = attended[blockIdx.y * gridDim.z + blockIdx.z];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(&finished, 1) == num_blocks - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    if (threadIdx.x == 0) finished = 0;
  }
  const long long row_stride = static_cast<long long>(heads) * kHead;
  CombineSplits(partial + own * kHead, peaks + own, totals + own, sinks == nullptr ? nullptr : sinks + g * shared_heads,
                chunks, queries, tile, count, shared_heads, shared.splits,
                out + b * rows * row_stride + g * shared_heads * kHead, row_stride);
}

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
  float first = ToFloat(own[0]), second = ToFloat(own[kHalf]);
  if (head < heads + kv_heads) {
    const float c = ToFloat(cosine[row * kHalf + at]), s = ToFloat(sine[row * kHalf + at]);
    const float x = first;
    first = Rotated(x, second, c, s, true);
    second = Rotated(second, x, c, s, false);
  }
  Half* to = query + (static_cast<long long>(row) * heads + head) * kHead + at;
  if (head >= heads) {
    const int index = write[row];
    if (index < 0) return;
    const Table pages(table, table_width, b, key, value, (head - heads) % kv_heads, kv_heads);
    to = (head < heads + kv_heads ? pages.key : pages.value) + pages.Slot(index) + at;
  }
  to[0] = ToHalf(first);
  to[kHalf] = ToHalf(second);
}

namespace {

constexpr int kTileQueries = 2 * kRows * kWarps;  // of a block, two products of queries a warp
constexpr int kStages = 2;                        // pages in shared memory

}  // namespace

// out [B, T, N, H]: attention of many rows, with the sinks, if any. A row that sees nothing gets zeros. Blocks: (the
// queries of a kv head by kTileQueries, rounded up, B G); the last queries, which see most, come first.
extern "C" __global__ void __launch_bounds__(kThreads, 2) peagle_prompt(
    const Half* query, Half* key, Half* value, const int* table, const int* first, const int* last, const Half* sinks,
    int rows, int table_width, int heads, int kv_heads, Half* out) {
  __shared__ StagedPage staged[kStages];
  const int b = blockIdx.y / kv_heads, g = blockIdx.y % kv_heads, shared_heads = heads / kv_heads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const int queries = rows * shared_heads, tile = (gridDim.x - 1 - blockIdx.x) * kTileQueries;
  const Table pages(table, table_width, b, key, value, g, kv_heads);
  Range all = kNothingSeen, warps_all = kNothingSeen;  // of the block's and the warp's queries
  Range each = {-1, 0x7fffffff};                       // what every query of the warp sees
  const int begin = tile + warp * 2 * kRows;
  for (int t = tile / shared_heads; t <= (min(tile + kTileQueries, queries) - 1) / shared_heads; ++t) {
    const Range one = SeenBy(first, last, b * rows + t);
    Cover(all, one);
    if (t < begin / shared_heads || t > (begin + 2 * kRows - 1) / shared_heads) continue;
    Cover(warps_all, one);
    each.first = max(each.first, one.first);
    each.last = min(each.last, one.last);
  }
  Queries q[2];
  Attended result[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = begin + i * kRows + group + 8 * half, head = g * shared_heads + index % shared_heads;
      const bool there = index < queries;
      const long long row = b * rows + (there ? index / shared_heads : 0);
      q[i].seen[half] = there ? SeenBy(first, last, row) : kNothingSeen;
      const Half* from = query + (row * heads + (there ? head : 0)) * kHead + 2 * quarter;
#pragma unroll
      for (int k = 0; k < kHead / 16; ++k)
#pragma unroll
        for (int later = 0; later < 2; ++later)
          q[i].a[k][half + 2 * later] = there ? *reinterpret_cast<const unsigned*>(from + 16 * k + 8 * later) : 0;
    }
  const int first_page = all.last < 0 ? 0 : all.first / kSlots, last_page = all.last < 0 ? -1 : all.last / kSlots;
  if (first_page <= last_page) CopyPage<kThreads>(pages, first_page, all, threadIdx.x, staged[0]);
  CommitCopies();
  for (int page = first_page; page <= last_page; ++page) {
    const StagedPage& now = staged[(page - first_page) % kStages];
    if (page < last_page) CopyPage<kThreads>(pages, page + 1, all, threadIdx.x, staged[(page + 1 - first_page) % kStages]);
    CommitCopies();
    WaitForCopies<1>();
    __syncthreads();
    const int start = page * kSlots;
    if (start <= warps_all.last && start + kSlots > warps_all.first) {
      const bool masked = start < each.first || start + kSlots - 1 > each.last;
      Attend<kSlots / 16, 2>(q, now, 0, start, masked, result);
    }
    __syncthreads();  // all have read what the next copy overwrites
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = begin + i * kRows + group + 8 * half, head = g * shared_heads + index % shared_heads;
      const float seen = SumOfGroup(result[i].total[half]), peak = result[i].peak[half] * kScale;
      if (index >= queries) continue;
      float top = peak, total = seen;
      if (sinks != nullptr) {
        const float sink = ToFloat(sinks[head]) * kLog2E;
        top = fmaxf(top, sink);
        total = (seen > 0 ? seen * exp2f(peak - top) : 0) + exp2f(sink - top);
      }
      const float scale = seen > 0 ? exp2f(peak - top) / total : 0;
      Half* to = out + ((b * rows + index / shared_heads) * static_cast<long long>(heads) + head) * kHead + 2 * quarter;
#pragma unroll
      for (int n = 0; n < kHead / 8; ++n)
        *reinterpret_cast<unsigned*>(to + 8 * n) =
            Pack(scale * result[i].out[n][2 * half], scale * result[i].out[n][2 * half + 1]);
    }
}
