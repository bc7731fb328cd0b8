// MXFP4 experts.
//
// Codes become bfloat16 in registers, and tensor cores multiply them by up to eight rows at a time, at the cost of one.
//
// A pass of few rows, up to 16, is decoding or verification. Reading the weights takes most of it, so each selected expert
// is read once for all rows that selected it: a block computes 16 outputs of one expert for all rows, and its warps split
// the inputs into kWarps parts.
//
// A pass of many rows is a part of a prompt, or many requests'. Its pairs of a row and an expert are sorted by expert and
// cut into tiles of up to 64: a block computes 64 outputs of a tile, 16 a warp, and reads the weights once for a tile.
//
// The parts and the order of their sums are fixed, so a row's bits depend neither on the other rows nor on their number.
//
// With many rows, x goes through shared memory, because direct loads by each lane would take most of the time: a warp's load
// touches sixteen lines, and four loads touch the same lines. With few rows direct loads are faster (H100, 20b's shape: 43,
// 152 and 254 us for 1, 8 and 16 rows, against 48, 168 and 312 through shared memory).

namespace {

constexpr int kOutputs = 16;         // per warp; in a pass of few rows also per block
constexpr int kColumns = 8;          // rows of x per product
constexpr int kBlock = 32;           // inputs that share a scale: 16 bytes
constexpr int kChunk = 4 * kBlock;   // inputs that a warp multiplies at a time: a block for each quarter
constexpr int kPieces = kChunk / 8;  // of 16 bytes, of a row's chunk of x
constexpr int kAhead = 3;            // chunks whose weights are in flight together, in a pass of few rows
constexpr int kMaxExperts = 1024;
constexpr int kSortThreads = 512;
constexpr int kPanel = kWarps * kOutputs;  // outputs of a block, of a pass of many rows
constexpr int kTileRows = 64;              // pairs of a tile

// 2^(scale - 1) as two bfloat16, for scales up to 128.
__device__ inline unsigned Power(unsigned scale) { return Twice((scale + 126) << 7); }

// Values j and j + 4 of the eight in a word, times 2^-126: a code's three low bits become a bfloat16's last exponent bits and
// its first mantissa bit, and a code with exponent 0 becomes a denormal number. One multiplication shifts these bits, and
// the sign, into place: two shifts in one instruction, on another unit.
__device__ inline unsigned Pair(unsigned word, int j) {
  const unsigned codes = j < 2 ? word : word >> 8;
  return (j % 2 == 0 ? (codes & 0x000f000fu) * 0x1040u : (codes & 0x00f000f0u) * 0x104u) & 0x81c081c0u;
}

// An expert's matrix [outputs, inputs], and its bias; outputs are a multiple of 16, inputs of 32.
struct Matrix {
  Bytes blocks;
  Bytes scales;
  const Half* bias;
  int outputs;
  int inputs;

  __device__ Matrix Of(int expert) const {
    const long long rows = static_cast<long long>(expert) * outputs, scales_a_row = inputs / kBlock;
    return {blocks + rows * scales_a_row * 16, scales + rows * scales_a_row, bias + rows, outputs, inputs};
  }
};

// The selected experts, ids [rows, top_k]. A pair is a row and one of its choices, row * top_k + choice. An id of
// num_experts or more selects nothing.
struct Routing {
  const int* ids;
  int rows;
  int top_k;
  int num_experts;
};

template <int kTiles>
struct Shared {
  unsigned present[kMaxExperts / 32];  // a bit per expert that any row selected
  int choice[kTiles * kColumns];       // of a row that selected this block's expert, or -1
  float sums[kWarps][kOutputs][kTiles * kColumns + 2];  // padded by two, else eight lanes write to one bank
};

// Finds this block's expert, counting the selected ones in ascending order, and its rows' choices; -1 if there are fewer.
template <int kTiles>
__device__ int FindExpert(const Routing& routing, Shared<kTiles>& shared) {
  const int thread = threadIdx.x, pairs = routing.rows * routing.top_k;
  for (int i = thread; i < kMaxExperts / 32; i += kThreads) shared.present[i] = 0;
  for (int i = thread; i < kTiles * kColumns; i += kThreads) shared.choice[i] = -1;
  __syncthreads();
  for (int pair = thread; pair < pairs; pair += kThreads) {
    const unsigned id = routing.ids[pair];
    if (id < routing.num_experts) atomicOr(&shared.present[id / 32], 1u << id % 32);
  }
  __syncthreads();
  int before = blockIdx.y, expert = -1;
  for (int i = 0; i * 32 < routing.num_experts && expert < 0; ++i) {
    unsigned bits = shared.present[i];
    const int here = __popc(bits);
    if (before >= here) {
      before -= here;
      continue;
    }
    for (; before > 0; --before) bits &= bits - 1;
    expert = 32 * i + __ffs(bits) - 1;
  }
  if (expert < 0) return -1;
  for (int pair = thread; pair < pairs; pair += kThreads)
    if (routing.ids[pair] == expert) shared.choice[pair / routing.top_k] = pair % routing.top_k;
  __syncthreads();
  return expert;
}

// A row's 32 codes of one block, and their scale. Zeros if there is no such block.
struct Codes {
  Words words;
  unsigned scale;

  __device__ void Read(const Matrix& matrix, int output, int block) {
    const int blocks = matrix.inputs / kBlock;
    if (block < blocks) {
      const long long at = static_cast<long long>(output) * blocks + block;
      words = LoadOnce(matrix.blocks + at * 16);
      scale = matrix.scales[at];
    } else {
      words = {};
      scale = 0;
    }
  }
};

// Eight values in the order in which codes come: j and j + 4.
__device__ inline Words Paired(const Words& values) {
  const unsigned(&v)[4] = values.of;
  return {Lower(v[0], v[2]), Upper(v[0], v[2]), Lower(v[1], v[3]), Upper(v[1], v[3])};
}

// Loads a lane's values of a chunk of 8 kTiles rows of x without shared memory, from input `start` on. Missing rows, and
// inputs past the end, are zeros.
template <int kTiles>
struct Direct {
  const Half* const (&rows)[kTiles];
  long long start;
  int inputs;

  __device__ Words operator()(int tile, int word) const {
    return Paired(LoadIf(start < inputs && rows[tile] != nullptr, rows[tile] + start + 8 * word));
  }
};

// The place of a staged row's piece: lanes that read together read from different banks.
__device__ inline int Slot(int row, int piece) { return row * kPieces + (piece % 4 * 4 + piece / 4 ^ row % 2 * 4); }

// Stages a thread's part of a chunk of 8 kTiles rows of x [.., inputs] in shared memory. `source` numbers the rows of x; rows
// of negative number, and inputs past the end, are zeros.
template <int kTiles>
struct Staging {
  static constexpr int kCount = kTiles * kColumns * kPieces / kThreads;
  Words held[kCount];

  __device__ void Read(const Half* x, const int* source, int inputs, int chunk) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = threadIdx.x + i * kThreads, row = source[at / kPieces];
      const int input = chunk * kChunk + at % kPieces * 8;
      held[i] = LoadIf(row >= 0 && input < inputs, x + static_cast<long long>(row) * inputs + input);
    }
  }

  __device__ void Write(Words* staged) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = threadIdx.x + i * kThreads;
      staged[Slot(at / kPieces, at % kPieces)] = Paired(held[i]);
    }
  }
};

// A lane's values of a staged chunk.
struct Staged {
  const Words* staged;

  __device__ Words operator()(int tile, int word) const {
    const int group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    return staged[Slot(tile * kColumns + group, 4 * quarter + word)];
  }
};

// sums += a chunk of weights times the same chunk of x. values(tile, word): this lane's part of x. `large`: some lane has a
// scale above 2^1, and needs two factors to undo 2^-126.
template <bool large, int kTiles, typename Values>
__device__ __forceinline__ void AddScaled(const Codes& low, const Codes& high, const Values& values,
                                          float (&sums)[kTiles][4]) {
  const unsigned powers[2] = {Power(large ? min(low.scale, 128u) : low.scale), Power(large ? min(high.scale, 128u) : high.scale)};
  const unsigned rest[2] = {Twice((max(low.scale, 128u) - 1) << 7), Twice((max(high.scale, 128u) - 1) << 7)};
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    unsigned a[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Codes& codes = i % 2 == 0 ? low : high;
        a[half][i] = MultiplyPairs(Pair(codes.words.of[word], 2 * half + i / 2), powers[i % 2]);
        if (large) a[half][i] = MultiplyPairs(a[half][i], rest[i % 2]);
      }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const Words x = values(tile, word);
      const unsigned first[2] = {x.of[0], x.of[1]}, second[2] = {x.of[2], x.of[3]};
      MultiplyAdd(sums[tile], a[0], first);
      MultiplyAdd(sums[tile], a[1], second);
    }
  }
}

template <int kTiles, typename Values>
__device__ __forceinline__ void AddChunk(const Codes& low, const Codes& high, const Values& values,
                                         float (&sums)[kTiles][4]) {
  if (__any_sync(~0u, max(low.scale, high.scale) > 128))
    AddScaled<true>(low, high, values, sums);
  else
    AddScaled<false>(low, high, values, sums);
}

// shared.sums = this block's outputs of its expert's matrix, for each row that selected the expert; zeros for other rows.
// x [.., inputs] has one line for each row, or with `by_pair` for each pair.
template <int kTiles>
__device__ void Multiply(const Matrix& matrix, const Half* x, bool by_pair, const Routing& routing,
                         Shared<kTiles>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const int low = blockIdx.x * kOutputs + group, chunks = (matrix.inputs + kChunk - 1) / kChunk;
  const Half* rows[kTiles];  // of x, or null
  for (int tile = 0; tile < kTiles; ++tile) {
    const int row = tile * kColumns + group, choice = shared.choice[row];
    const long long at = by_pair ? row * routing.top_k + choice : row;
    rows[tile] = choice < 0 ? nullptr : x + at * matrix.inputs;
  }
  float sums[kTiles][4] = {};
  for (int first = warp; first < chunks; first += kWarps * kAhead) {
    Codes lows[kAhead], highs[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int block = 4 * (first + kWarps * i) + quarter;
      lows[i].Read(matrix, low, block);
      highs[i].Read(matrix, low + 8, block);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int block = 4 * (first + kWarps * i) + quarter;
      AddChunk(lows[i], highs[i], Direct<kTiles>{rows, static_cast<long long>(block) * kBlock, matrix.inputs}, sums);
    }
  }

  for (int tile = 0; tile < kTiles; ++tile) {
    const int column = tile * kColumns + 2 * quarter;
    shared.sums[warp][group][column] = sums[tile][0];
    shared.sums[warp][group][column + 1] = sums[tile][1];
    shared.sums[warp][group + 8][column] = sums[tile][2];
    shared.sums[warp][group + 8][column + 1] = sums[tile][3];
  }
  __syncthreads();
}

template <int kTiles>
__device__ inline float Total(const Shared<kTiles>& shared, int output, int row) {
  float total = 0;
  for (int warp = 0; warp < kWarps; ++warp) total += shared.sums[warp][output][row];
  return total;
}

__device__ inline Half Activated(float gate, float up, float limit) {
  gate = fminf(gate, limit);
  up = fmaxf(fminf(up, limit), -limit);
  return ToHalf(gate / (1 + expf(-1.702f * gate)) * (up + 1));
}

// hidden [pairs, F] = swiglu of the pairs' gates and ups, which alternate among the outputs.
template <int kTiles>
__device__ void GateUp(const Half* x, const Routing& routing, const Matrix& experts, float limit, Half* hidden) {
  __shared__ Shared<kTiles> shared;
  const int expert = FindExpert(routing, shared);
  if (expert < 0) return;
  const Matrix matrix = experts.Of(expert);
  Multiply(matrix, x, false, routing, shared);
  for (int i = threadIdx.x; i < kOutputs / 2 * kTiles * kColumns; i += kThreads) {
    const int output = 2 * (i % (kOutputs / 2)), row = i / (kOutputs / 2), at = blockIdx.x * kOutputs + output;
    if (shared.choice[row] < 0) continue;
    const float gate = Total(shared, output, row) + ToFloat(matrix.bias[at]);
    const float up = Total(shared, output + 1, row) + ToFloat(matrix.bias[at + 1]);
    const long long pair = row * routing.top_k + shared.choice[row];
    hidden[pair * (matrix.outputs / 2) + at / 2] = Activated(gate, up, limit);
  }
}

// out [pairs, D] = the pairs' experts of hidden [pairs, F], bias included.
template <int kTiles>
__device__ void Down(const Half* hidden, const Routing& routing, const Matrix& experts, float* out) {
  __shared__ Shared<kTiles> shared;
  const int expert = FindExpert(routing, shared);
  if (expert < 0) return;
  const Matrix matrix = experts.Of(expert);
  Multiply(matrix, hidden, true, routing, shared);
  for (int i = threadIdx.x; i < kOutputs * kTiles * kColumns; i += kThreads) {
    const int output = i % kOutputs, row = i / kOutputs, at = blockIdx.x * kOutputs + output;
    if (shared.choice[row] < 0) continue;
    const long long pair = row * routing.top_k + shared.choice[row];
    out[pair * matrix.outputs + at] = Total(shared, output, row) + ToFloat(matrix.bias[at]);
  }
}

// `count` <= kTileRows sorted pairs of one expert, from `begin` on. No tile: expert -1.
struct Tile {
  int expert;
  int begin;
  int count;
};

union ManyShared {
  Words staged[2][kTileRows * kPieces];  // used alternately
  float sums[kPanel][kTileRows + 2];     // padded as Shared's
};

// shared.sums = this block's outputs for the tile's pairs, at most 8 kTiles. x [.., inputs] has one line for each row, or with
// top_k 1 for each pair.
template <int kTiles>
__device__ void MultiplyTile(const Matrix& matrix, const Half* x, const int* pairs, int count, int top_k,
                             ManyShared& shared) {
  __shared__ int source[kTiles * kColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const int chunks = (matrix.inputs + kChunk - 1) / kChunk, first = warp * kOutputs;
  // a warp beyond the outputs computes the last outputs again
  const int low = min(static_cast<int>(blockIdx.x) * kPanel + first, matrix.outputs - kOutputs) + group;
  for (int i = threadIdx.x; i < kTiles * kColumns; i += kThreads) source[i] = i < count ? pairs[i] / top_k : -1;
  __syncthreads();

  Staging<kTiles> next;
  Codes next_low, next_high;
  const auto read = [&](int chunk) {
    next.Read(x, source, matrix.inputs, chunk);
    next_low.Read(matrix, low, 4 * chunk + quarter);
    next_high.Read(matrix, low + 8, 4 * chunk + quarter);
  };
  read(0);
  float totals[kTiles][4] = {};
  int turn = 0;
  for (int part = 0; part < kWarps; ++part) {
    float sums[kTiles][4] = {};
    for (int chunk = part; chunk < chunks; chunk += kWarps, turn ^= 1) {
      next.Write(shared.staged[turn]);
      __syncthreads();  // all have read what the next turn overwrites
      const Codes low_codes = next_low, high_codes = next_high;
      read(chunk + kWarps < chunks ? chunk + kWarps : part + 1);
      AddChunk(low_codes, high_codes, Staged{shared.staged[turn]}, sums);
    }
    for (int tile = 0; tile < kTiles; ++tile)
      for (int i = 0; i < 4; ++i) totals[tile][i] += sums[tile][i];
  }
  __syncthreads();
  for (int tile = 0; tile < kTiles; ++tile)
    for (int i = 0; i < 4; ++i)
      shared.sums[first + group + i / 2 * 8][tile * kColumns + 2 * quarter + i % 2] = totals[tile][i];
  __syncthreads();
}

__device__ inline void MultiplyTile(const Matrix& matrix, const Half* x, const int* pairs, int count, int top_k,
                                    ManyShared& shared) {
  if (count <= kColumns)
    MultiplyTile<1>(matrix, x, pairs, count, top_k, shared);
  else if (count <= 2 * kColumns)
    MultiplyTile<2>(matrix, x, pairs, count, top_k, shared);
  else if (count <= 4 * kColumns)
    MultiplyTile<4>(matrix, x, pairs, count, top_k, shared);
  else
    MultiplyTile<8>(matrix, x, pairs, count, top_k, shared);
}

}  // namespace

// sorted [pairs] = the pairs of ids [pairs], sorted by expert, in any order within an expert; pairs without one are left out.
// tiles [num_tiles]: those of all experts; the rest have expert -1. One block.
extern "C" __global__ void __launch_bounds__(kSortThreads) peagle_sort(const int* ids, int pairs, int num_experts,
                                                                       int num_tiles, int* sorted, Tile* tiles) {
  __shared__ int next[kMaxExperts];  // an expert's number of pairs, then where its next one goes
  for (int i = threadIdx.x; i < num_experts; i += kSortThreads) next[i] = 0;
  __syncthreads();
  for (int pair = threadIdx.x; pair < pairs; pair += kSortThreads)
    if (static_cast<unsigned>(ids[pair]) < num_experts) atomicAdd(&next[ids[pair]], 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    int begin = 0, tile = 0;
    for (int expert = 0; expert < num_experts; ++expert) {
      const int count = next[expert];
      next[expert] = begin;
      for (int i = 0; i < count; i += kTileRows) tiles[tile++] = {expert, begin + i, min(count - i, kTileRows)};
      begin += count;
    }
    while (tile < num_tiles) tiles[tile++] = {-1, 0, 0};
  }
  __syncthreads();
  for (int pair = threadIdx.x; pair < pairs; pair += kSortThreads)
    if (static_cast<unsigned>(ids[pair]) < num_experts) sorted[atomicAdd(&next[ids[pair]], 1)] = pair;
}

// As peagle_gate_up_*, of many rows. Grids: (outputs / kPanel, rounded up; num_tiles); blocks of kThreads.
extern "C" __global__ void __launch_bounds__(kThreads, 2) peagle_gate_up_many(
    const Half* x, const int* sorted, const Tile* tiles, int top_k, Bytes blocks, Bytes scales, const Half* bias,
    int outputs, int inputs, float limit, Half* hidden) {
  __shared__ ManyShared shared;
  const Tile tile = tiles[blockIdx.y];
  if (tile.expert < 0) return;
  const Matrix matrix = Matrix{blocks, scales, bias, outputs, inputs}.Of(tile.expert);
  const int* pairs = sorted + tile.begin;
  MultiplyTile(matrix, x, pairs, tile.count, top_k, shared);
  for (int i = threadIdx.x; i < kPanel / 2 * tile.count; i += kThreads) {
    const int output = 2 * (i % (kPanel / 2)), row = i / (kPanel / 2), at = blockIdx.x * kPanel + output;
    if (at >= outputs) continue;
    const float gate = shared.sums[output][row] + ToFloat(matrix.bias[at]);
    const float up = shared.sums[output + 1][row] + ToFloat(matrix.bias[at + 1]);
    hidden[static_cast<long long>(pairs[row]) * (outputs / 2) + at / 2] = Activated(gate, up, limit);
  }
}

// As peagle_down_*, of many rows.
extern "C" __global__ void __launch_bounds__(kThreads, 2) peagle_down_many(
    const Half* hidden, const int* sorted, const Tile* tiles, Bytes blocks, Bytes scales, const Half* bias, int outputs,
    int inputs, float* out) {
  __shared__ ManyShared shared;
  const Tile tile = tiles[blockIdx.y];
  if (tile.expert < 0) return;
  const Matrix matrix = Matrix{blocks, scales, bias, outputs, inputs}.Of(tile.expert);
  const int* pairs = sorted + tile.begin;
  MultiplyTile(matrix, hidden, pairs, tile.count, 1, shared);
  for (int i = threadIdx.x; i < kPanel * tile.count; i += kThreads) {
    const int output = i % kPanel, row = i / kPanel, at = blockIdx.x * kPanel + output;
    if (at < outputs)
      out[static_cast<long long>(pairs[row]) * outputs + at] = shared.sums[output][row] + ToFloat(matrix.bias[at]);
  }
}

// Grids: (outputs / 16, the most experts that can be selected); blocks of kThreads. A tile is up to 8 rows. At
// least blocks_together blocks fit into a multiprocessor, so that some compute while others wait for memory.
#define PEAGLE_KERNELS(tiles, blocks_together)                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads, blocks_together) peagle_gate_up_##tiles(                        \
      const Half* x, const int* ids, int rows, int top_k, int num_experts, Bytes blocks, Bytes scales, const Half* bias, \
      int outputs, int inputs, float limit, Half* hidden) {                                                              \
    GateUp<tiles>(x, {ids, rows, top_k, num_experts}, {blocks, scales, bias, outputs, inputs}, limit, hidden);           \
  }                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads, blocks_together) peagle_down_##tiles(                           \
      const Half* hidden, const int* ids, int rows, int top_k, int num_experts, Bytes blocks, Bytes scales,              \
      const Half* bias, int outputs, int inputs, float* out) {                                                           \
    Down<tiles>(hidden, {ids, rows, top_k, num_experts}, {blocks, scales, bias, outputs, inputs}, out);                  \
  }

PEAGLE_KERNELS(1, 5)
PEAGLE_KERNELS(2, 4)
