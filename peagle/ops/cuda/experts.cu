// MXFP4 experts for passes of few rows.
//
// Reading the weights takes most of such a pass. So each selected expert is read once for all rows that selected it, up to
// 64 rows. Codes become bfloat16 in registers, and tensor cores multiply them by up to eight rows at a time, at the cost of
// one.
//
// A block computes 16 outputs of one expert for all rows. Its warps always split the inputs in the same way and add their
// sums in the same order, so a row's bits do not depend on the other rows.

namespace {

constexpr int kOutputs = 16;        // per block
constexpr int kColumns = 8;         // rows of x per product
constexpr int kBlock = 32;          // inputs that share a scale: 16 bytes
constexpr int kChunk = 4 * kBlock;  // inputs that a warp multiplies at a time: a block for each quarter
constexpr int kAhead = 3;           // chunks whose loads are in flight together
constexpr int kMaxExperts = 1024;

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

// The selected experts, ids [rows, top_k]. A pair is a row and one of its choices, row * top_k + choice.
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
    if (id < kMaxExperts) atomicOr(&shared.present[id / 32], 1u << id % 32);
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

// sums += a chunk of weights times the same chunk of x, whose rows are `rows`, from this lane's block on. One factor cannot
// raise 2^-126 to powers above 2^1: `large` if any lane has one.
template <int kTiles, bool large>
__device__ __forceinline__ void AddChunk(const Codes& low, const Codes& high, const Half* const (&rows)[kTiles], bool any,
                                         long long start, float (&sums)[kTiles][4]) {
  const unsigned powers[2] = {Power(large ? min(low.scale, 128u) : low.scale), Power(large ? min(high.scale, 128u) : high.scale)};
  const unsigned rest[2] = {Twice((max(low.scale, 128u) - 1) << 7), Twice((max(high.scale, 128u) - 1) << 7)};
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    Words values[kTiles];  // eight of x
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      values[tile] = any && rows[tile] != nullptr ? Load(rows[tile] + start + 8 * word) : Words{};
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      unsigned a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Codes& codes = i % 2 == 0 ? low : high;
        a[i] = MultiplyPairs(Pair(codes.words.of[word], j + i / 2), powers[i % 2]);
        if (large) a[i] = MultiplyPairs(a[i], rest[i % 2]);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const unsigned(&v)[4] = values[tile].of;
        const unsigned b[2] = {Lower(v[j / 2], v[j / 2 + 2]), Upper(v[j / 2], v[j / 2 + 2])};
        MultiplyAdd(sums[tile], a, b);
      }
    }
  }
}

// shared.sums = this block's outputs of the matrix (its expert's) for each row of x that selected it; x [.., inputs] is by
// row, or with `by_pair` by pair. Columns of other rows are zero.
template <int kTiles>
__device__ void Multiply(const Matrix& matrix, const Half* x, bool by_pair, const Routing& routing,
                         Shared<kTiles>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const int low = blockIdx.x * kOutputs + group, high = low + 8;
  const int blocks = matrix.inputs / kBlock, chunks = (matrix.inputs + kChunk - 1) / kChunk;

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
      highs[i].Read(matrix, high, block);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int block = 4 * (first + kWarps * i) + quarter;
      const long long start = static_cast<long long>(block) * kBlock;
      if (__any_sync(~0u, max(lows[i].scale, highs[i].scale) > 128))
        AddChunk<kTiles, true>(lows[i], highs[i], rows, block < blocks, start, sums);
      else
        AddChunk<kTiles, false>(lows[i], highs[i], rows, block < blocks, start, sums);
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
    const float gate = fminf(Total(shared, output, row) + ToFloat(matrix.bias[at]), limit);
    const float up = fmaxf(fminf(Total(shared, output + 1, row) + ToFloat(matrix.bias[at + 1]), limit), -limit);
    const long long pair = row * routing.top_k + shared.choice[row];
    hidden[pair * (matrix.outputs / 2) + at / 2] = ToHalf(gate / (1 + expf(-1.702f * gate)) * (up + 1));
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

}  // namespace

// Grids: (outputs / 16, the most experts that can be selected); blocks of kThreads. A tile is up to 8 rows. blocks_together
// blocks at least fit into a multiprocessor, so that some compute while others wait for memory.
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
PEAGLE_KERNELS(4, 3)
PEAGLE_KERNELS(8, 2)
