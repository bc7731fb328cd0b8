// MXFP4 experts on Hopper GPUs (sm_90a), for the published geometries: rows of 2880, four of up to 128 experts.
//
//     router     computes a row's logits from its normalised values
//     route      chooses each row's experts, sorts the pairs of a row and an expert by expert, cuts them into tiles and copies
//                their rows, normalised, tile by tile
//     gate_up    per tile: products, bias, activation; down: products, bias
//     combine    adds the four outputs of a row, with their weights, and the residual
//
// Of experts that are shared out over devices, each device computes its own: pairs with another's experts have no place, and
// combine gives this device's part of the sum, in float32 and without the residual.
//
// A product is wgmma.m64nNk16: 64 outputs by the N rows of a tile, 16 inputs a time. The weights are operand A, in
// registers, where codes become bfloat16; the rows are operand B, in shared memory. All inputs of an output are added in
// their order, whatever N: a row's bits depend on that row alone.
//
// Layouts, so that every load is a plain copy of consecutive bytes (cp.async.bulk):
//
//     weights    [expert][outputs / 192][chunk of 64 inputs][3 units][kUnitBytes]; a unit is 64 outputs by 64 inputs.
//                Thread t = 32 w + 4 g + q of a warpgroup has the 16 bytes at 16 t, a word for each 16 inputs; rows g and
//                g + 8 of its warp's operand are outputs 16 w + 2 g and the next one: a gate and its up. A word's values
//                are a[0] (row g, inputs 2 q and 2 q + 1), a[1] (row g + 8), a[2] and a[3] (8 inputs further), the even
//                inputs' in bits 0..15. The bits: sign, exponent and mantissa of a[0] at 15 and 8..6, of a[1] at 12 and
//                5..3, of a[2] at 9 and 2..0; of a[3], in the other half, the sign at 13, the exponent at 11 and 10, the
//                mantissa at 14. Then scales + 126 of outputs 2 g, 2 g + 1 of the warp at 4 (8 w + g): a byte for each of
//                the two outputs and the first 32 inputs, then for the rest (pack.py).
//     rows       [tile][chunk][row of the tile][128 bytes], of which 16 bytes p are at p ^ (row % 8): the swizzle of wgmma

namespace tiles {

struct Tile {
  int begin;      // of its rows, among all pairs
  Word expert_count_width;  // 16 bits; rows - 1, 8 bits; N / 8
  __device__ int Expert() const { return expert_count_width & 0xffff; }
  __device__ int Count() const { return (expert_count_width >> 16 & 0xff) + 1; }
  __device__ int Width() const { return (expert_count_width >> 24) * 8; }
};

// Where a pair's row goes. begin: of the tile; begin < 0: the pair has no expert.
struct Place {
  int begin;
  Word row_count;  // 16 bits; rows - 1
  __device__ int Row() const { return row_count & 0xffff; }
  __device__ int Count() const { return (row_count >> 16) + 1; }
};

// The eight values of a word, times 2^-126: the three low bits of a code become a bfloat16's last exponent bits and its
// first mantissa bit.
__device__ __forceinline__ void Expand(Word word, Word (&a)[4]) {
  constexpr Word kMask = 0x81c081c0u;
  a[0] = word & kMask;
  a[1] = (word << 3) & kMask;
  const Word turned = __funnelshift_l(word, word, 6);
  a[2] = turned & kMask;
  a[3] = ((turned & 0x001b001bu) * 0x1084u) & kMask;
}

__device__ inline float Activate(float gate, float up, float limit) {
  gate = fminf(gate, limit);
  up = fmaxf(fminf(up, limit), -limit);
  return __fdividef(gate, 1 + __expf(-1.702f * gate)) * (up + 1);
}

// A matrix of every expert, [outputs, kInputs], in the layout above, and its bias [experts, outputs].
struct Matrices {
  const unsigned char* weights;
  const Half* bias;
  int outputs;
};

struct Work {
  Matrices matrices;
  const unsigned char* rows;
  const Tile* tiles;
  const int* num_tiles;
  void* out;  // gate_up: rows, in their layout; down: float [pairs, outputs], in the order of tiles
  float limit;
};

// A consumer's registers live in the kernel, since the compiler serialises products whose operands it moves.
template <class C>
struct Registers {
  float sums[C::kWidest / 2];
  Word weights[C::kHeld][C::kSteps][4];
};

// One warpgroup's 64 outputs of a tile: `part` counts the groups of 64 kConsumers outputs.
template <class C, int N, bool gate_up>
__device__ __forceinline__ void Multiply(const Work& work, const Tile tile, int part, Word ring, Word barriers, Word& parity,
                                         Registers<C>& r) {
  constexpr int kGroups = 4 / C::kSteps;  // of products, per unit
  const int thread = threadIdx.x % 128, consumer = threadIdx.x / 128, warp = thread / 32;
  const int g = thread % 32 / 4, q = thread % 4, count = tile.Count();
  const int unit = part * C::kConsumers + consumer;
  const bool first_lane = thread % 32 == 0;
  const Word bias = __ldg(reinterpret_cast<const Word*>(
      work.matrices.bias + static_cast<long long>(tile.Expert()) * work.matrices.outputs + unit * 64 + 16 * warp + 2 * g));
  const Word own = ring + C::kRowBytes + consumer * kUnitBytes;
  const Word codes_at = own + thread * 16, scales_at = own + kCodeBytes + (warp * 8 + g) * 4;
  // of rows: 128-byte swizzle, 1024 bytes from eight rows to the next
  const unsigned long long descriptor =
      static_cast<unsigned long long>(ring >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;

  Wait(barriers, parity);
  uint4 codes = LoadShared16(codes_at);
  Word scales = LoadShared4(scales_at);
#pragma unroll 1
  for (int round = 0; round < C::kRounds; ++round) {
#pragma unroll
    for (int stage = 0; stage < C::kStages; ++stage)
#pragma unroll
      for (int chunk = 0; chunk < C::kChunksAStage; ++chunk) {
        uint4 next_codes = {};
        Word next_scales = 0;
        const auto read = [&](int at) {
          next_codes = LoadShared16(codes_at + at);
          next_scales = LoadShared4(scales_at + at);
        };
        if (chunk + 1 < C::kChunksAStage) {
          read(stage * C::kStageBytes + (chunk + 1) * C::kConsumers * kUnitBytes);
        } else if (stage + 1 < C::kStages) {
          Wait(barriers + (stage + 1) * 16, parity);
          read((stage + 1) * C::kStageBytes);
        } else if (round + 1 < C::kRounds) {
          Wait(barriers, parity ^ 1);
          read(0);
        }
        const Word words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const int in_stage = chunk * kGroups + group;
          const int slot = (stage * C::kChunksAStage * kGroups + in_stage) % C::kHeld;
          WaitForProducts<C::kHeld - 1>();
          if (in_stage == C::kHeld - 1 && first_lane) {  // the products of the stage before are done
            if (stage > 0)
              Arrive(barriers + (stage - 1) * 16 + 8);
            else if (round > 0)
              Arrive(barriers + (C::kStages - 1) * 16 + 8);
          }
#pragma unroll
          for (int step = 0; step < C::kSteps; ++step) {
            const int k = group * C::kSteps + step;
            // scales as bfloat16 twice: their exponents
            const Word low = (scales >> 16 * (k / 2) & 0xff) * 0x00800080u;
            const Word high = (scales >> (16 * (k / 2) + 8) & 0xff) * 0x00800080u;
            Word(&a)[4] = r.weights[slot][step];
#pragma unroll
            for (int i = 0; i < 4; ++i) Keep(a[i]);
            Expand(words[k], a);
            a[0] = MultiplyPairs(a[0], low);
            a[1] = MultiplyPairs(a[1], high);
            a[2] = MultiplyPairs(a[2], low);
            a[3] = MultiplyPairs(a[3], high);
          }
          ProductsFence();
#pragma unroll
          for (int step = 0; step < C::kSteps; ++step) {
            const int k = group * C::kSteps + step;
            const Word(&a)[4] = r.weights[slot][step];
            const int add = stage > 0 || chunk > 0 || k > 0 ? 1 : round > 0;
            Product<N>::Add(reinterpret_cast<float(&)[N / 2]>(r.sums), a[0], a[1], a[2], a[3],
                            descriptor + ((stage * C::kStageBytes + chunk * C::kWidest * 128) >> 4) + 2 * k, add);
          }
          CommitProducts();
        }
        codes = next_codes;
        scales = next_scales;
      }
    parity ^= 1;
  }
  WaitForProducts<0>();
#pragma unroll
  for (int i = 0; i < C::kWidest / 2; ++i) Keep(r.sums[i]);
#pragma unroll
  for (int i = 0; i < C::kHeld * C::kSteps * 4; ++i) Keep(r.weights[i / (4 * C::kSteps)][i / 4 % C::kSteps][i % 4]);
  if (first_lane) Arrive(barriers + (C::kStages - 1) * 16 + 8);

  const float low_bias = LowerFloat(bias), high_bias = UpperFloat(bias);
  if (gate_up) {
    unsigned char* out = static_cast<unsigned char*>(work.out) +
                         (static_cast<long long>(tile.begin) * kChunks + static_cast<long long>(unit / 2) * count) * 128 +
                         ((unit % 2 * 4 + warp) ^ g) * 16 + 4 * q;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      if (8 * j >= count) break;
      const float first = Activate(r.sums[4 * j] + low_bias, r.sums[4 * j + 2] + high_bias, work.limit);
      const float second = Activate(r.sums[4 * j + 1] + low_bias, r.sums[4 * j + 3] + high_bias, work.limit);
      const Word turned = Transpose(Pack(first, second));  // from rows 2 q, 2 q + 1 of output g to those outputs of row g
      const int row = 8 * j + g;
      if (row < count) *reinterpret_cast<Word*>(out + row * 128) = turned;
    }
  } else {
    float* out = static_cast<float*>(work.out) + static_cast<long long>(tile.begin) * work.matrices.outputs + unit * 64 +
                 16 * warp + 2 * g;
    const auto store = [&](int row, float low, float high) {
      if (row < count)
        *reinterpret_cast<float2*>(out + static_cast<long long>(row) * work.matrices.outputs) =
            make_float2(low + low_bias, high + high_bias);
    };
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      store(8 * j + 2 * q, r.sums[4 * j], r.sums[4 * j + 2]);
      store(8 * j + 2 * q + 1, r.sums[4 * j + 1], r.sums[4 * j + 3]);
    }
  }
}

template <class C, bool gate_up>
__device__ __forceinline__ void MultiplyTile(const Work& work, const Tile tile, int part, Word ring, Word barriers,
                                             Word& parity, Registers<C>& r) {
  constexpr Widths kWidths = C::kWidths;
  if (tile.Width() == kWidths.of[0])
    Multiply<C, kWidths.of[0], gate_up>(work, tile, part, ring, barriers, parity, r);
  else if (kWidths.count == 2 || tile.Width() == kWidths.of[1])
    Multiply<C, kWidths.of[1], gate_up>(work, tile, part, ring, barriers, parity, r);
  else
    Multiply<C, C::kWidest, gate_up>(work, tile, part, ring, barriers, parity, r);
}

// One thread loads the operands of the consumers, tile by tile. The weights of the first fills do not depend on the grid
// before, so `down` loads them while that grid still runs.
template <class C, bool gate_up>
__device__ __forceinline__ void Produce(const Work& work, const Tile* tiles, int num_tiles, int parts, Word ring,
                                        Word barriers) {
  const Policy once = ReadOnce(), again = ReadAgain();
  const int groups = work.matrices.outputs / (64 * kUnitsAGroup);
  int stage = 0;
  Word parity = 1;
  bool waited = gate_up;
  for (int i = blockIdx.x; i < num_tiles * parts; i += gridDim.x) {
    const Tile tile = tiles[i / parts];
    const int first_unit = i % parts * C::kConsumers, count = tile.Count();
    const unsigned char* weights =
        work.matrices.weights +
        (static_cast<long long>(tile.Expert()) * groups + first_unit / kUnitsAGroup) * (kChunks * kUnitsAGroup * kUnitBytes) +
        first_unit % kUnitsAGroup * kUnitBytes;
    const unsigned char* rows = work.rows + static_cast<long long>(tile.begin) * kChunks * 128;
    const Word bytes = C::kChunksAStage * (C::kConsumers * kUnitBytes + count * 128);
    const auto load_weights = [&](Word full, Word to, int fill) {
      if (C::kConsumers == kUnitsAGroup) {
        Copy(to + C::kRowBytes, weights + fill * (C::kChunksAStage * kUnitsAGroup * kUnitBytes),
             C::kChunksAStage * kUnitsAGroup * kUnitBytes, full, once);
      } else {
#pragma unroll
        for (int c = 0; c < C::kChunksAStage; ++c)
          Copy(to + C::kRowBytes + c * kUnitBytes, weights + (fill * C::kChunksAStage + c) * (kUnitsAGroup * kUnitBytes),
               kUnitBytes, full, once);
      }
    };
    const auto load_rows = [&](Word full, Word to, int fill) {
#pragma unroll
      for (int c = 0; c < C::kChunksAStage; ++c)
        Copy(to + c * (C::kWidest * 128), rows + (fill * C::kChunksAStage + c) * count * 128, count * 128, full, again);
    };
    int fill = 0;
    if (!waited) {
      waited = true;
      fill = C::kStages;
#pragma unroll 1
      for (int s = 0; s < C::kStages; ++s) {
        Expect(barriers + s * 16, bytes);
        load_weights(barriers + s * 16, ring + s * C::kStageBytes, s);
      }
      WaitForGrid();
      LetNextBegin();
#pragma unroll 1
      for (int s = 0; s < C::kStages; ++s) load_rows(barriers + s * 16, ring + s * C::kStageBytes, s);
      parity = 0;
    }
#pragma unroll 1
    for (; fill < C::kFills; ++fill) {
      const Word full = barriers + stage * 16, to = ring + stage * C::kStageBytes;
      Wait(full + 8, parity);
      Expect(full, bytes);
      load_weights(full, to, fill);
      load_rows(full, to, fill);
      if (++stage == C::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
  if (!waited) {
    WaitForGrid();
    LetNextBegin();
  }
}

template <class C, bool gate_up>
__device__ __forceinline__ void MultiplyTiles(const Work& work) {
  constexpr int kEntryRegisters = 512 / ((C::kConsumers + 1) * C::kBlocks) / 8 * 8, kProducerRegisters = 32;
  constexpr int kShare = (kEntryRegisters * (C::kConsumers + 1) - kProducerRegisters) / C::kConsumers / 8 * 8;
  constexpr int kConsumerRegisters = kShare > 240 ? 240 : kShare;
  unsigned char* shared = static_cast<unsigned char*>(DynamicBlock());
  const Word begin = SharedAddress(shared), ring = (begin + 1023) / 1024 * 1024;
  const Word barriers = ring + C::kStages * C::kStageBytes;  // of a stage, 16 bytes: full, empty
  Tile* tiles = reinterpret_cast<Tile*>(shared + (barriers - begin) + C::kStages * 16);
  if (threadIdx.x == 0) {
    for (int s = 0; s < C::kStages; ++s) {
      InitBarrier(barriers + s * 16, 1);
      InitBarrier(barriers + s * 16 + 8, 4 * C::kConsumers);
    }
    ShowBarriers();
  }
  if (gate_up) {  // `down` has the tiles of its gate_up, whose grid waited for them
    WaitForGrid();
    LetNextBegin();
  }
  const int num_tiles = __ldcg(work.num_tiles);
  // past the first-level cache, in which `down`, which has not waited, could find the tiles of the layer before
  for (int i = threadIdx.x; i < num_tiles; i += C::kThreads)
    tiles[i] = {__ldcg(&work.tiles[i].begin), __ldcg(&work.tiles[i].expert_count_width)};
  __syncthreads();
  const int parts = work.matrices.outputs / (64 * C::kConsumers);
  if (threadIdx.x >= C::kConsumers * 128) {
    GiveRegisters<kProducerRegisters>();
    if (threadIdx.x >= C::kConsumers * 128 + 32) return;
    if (IsElected()) Produce<C, gate_up>(work, tiles, num_tiles, parts, ring, barriers);
  } else {
    TakeRegisters<kConsumerRegisters>();
    if (!gate_up) {
      WaitForGrid();
      LetNextBegin();
    }
    Word parity = 0;
    Registers<C> r = {};
    for (int i = blockIdx.x; i < num_tiles * parts; i += gridDim.x)
      MultiplyTile<C, gate_up>(work, tiles[i / parts], i % parts, ring, barriers, parity, r);
  }
}

__device__ inline int Widest(const Widths& widths) { return widths.of[widths.count - 1]; }

__device__ inline int TilesOf(int count, int widest) { return (count + widest - 1) / widest; }

// The place of an expert's pair number `rank`, of `count` pairs from `begin` on, which are cut into equal tiles.
__device__ inline Place PlaceOf(int rank, int count, int begin, int widest) {
  const int num_tiles = TilesOf(count, widest), each = (count + num_tiles - 1) / num_tiles, tile = rank / each;
  return {begin + tile * each, static_cast<Word>(rank % each | (min(each, count - tile * each) - 1) << 16)};
}

__device__ inline void WriteTiles(int expert, int count, int begin, const Widths& widths, Tile* tiles) {
  const int num_tiles = TilesOf(count, Widest(widths));
  if (num_tiles == 0) return;
  const int each = (count + num_tiles - 1) / num_tiles;
  for (int i = 0; i < num_tiles; ++i) {
    const int own = min(each, count - i * each);
    int width = widths.of[0];
    for (int k = 1; k < widths.count && width < own; ++k) width = widths.of[k];
    tiles[i] = {begin + i * each, static_cast<Word>(expert | (own - 1) << 16 | width / 8 << 24)};
  }
}

// Of threads 0..127, one for each expert with `count` pairs: writes its tiles, and returns where its pairs begin.
// `partial` is shared memory for 8 values.
__device__ inline int WriteAllTiles(int expert, int count, const Widths& widths, Tile* tiles, int* num_tiles, int* partial) {
  const int lane = expert % 32, warp = expert / 32, own = TilesOf(count, Widest(widths));
  int pairs = count, all = own;  // of the experts up to this one
  for (int distance = 1; distance < 32; distance *= 2) {
    const int more_pairs = __shfl_up_sync(~0u, pairs, distance), more = __shfl_up_sync(~0u, all, distance);
    if (lane >= distance) {
      pairs += more_pairs;
      all += more;
    }
  }
  if (lane == 31) {
    partial[warp] = pairs;
    partial[4 + warp] = all;
  }
  WaitForFourWarps();
  for (int w = 0; w < warp; ++w) {
    pairs += partial[w];
    all += partial[4 + w];
  }
  WriteTiles(expert, count, pairs - count, widths, tiles + all - own);
  if (expert == kMostExperts - 1) *num_tiles = all;
  return pairs - count;
}

__device__ inline uint4 LoadPiece(const Half* row, int piece) { return reinterpret_cast<const uint4*>(row)[piece]; }

__device__ inline void Unpack(const uint4& values, float (&to)[8]) {
  const Word words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = LowerFloat(words[i]);
    to[2 * i + 1] = UpperFloat(words[i]);
  }
}

// Eight values of a row, times `scale` and the norm's weights.
__device__ inline uint4 Normalise(const uint4& values, const uint4& weights, float scale) {
  float x[8], w[8];
  Unpack(values, x);
  Unpack(weights, w);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = x[i] * scale * w[i];
  return {Pack(x[0], x[1]), Pack(x[2], x[3]), Pack(x[4], x[5]), Pack(x[6], x[7])};
}

// Writes 16 bytes of a row to its place.
__device__ inline void StorePiece(unsigned char* rows, const Place& place, int piece, const uint4& value) {
  const long long at = (static_cast<long long>(place.begin) * kChunks +
                        static_cast<long long>(piece / 8) * place.Count() + place.Row()) * 128;
  *reinterpret_cast<uint4*>(rows + at + (piece % 8 ^ place.Row() % 8) * 16) = value;
}

// A row's choices: the kTopK largest logits, of equal ones the lower index first, and their softmax.
struct Choice {
  int ids[kTopK];
  float weights[kTopK];
};

// Of a warp, for all its lanes.
__device__ inline Choice Choose(const float* logits, int num_experts) {
  constexpr int kEach = kMostExperts / 32;
  const int lane = threadIdx.x % 32;
  Word own[kEach];  // in the order of the logits; NaN comes first, so that its row's results are NaN
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    own[i] = 0;
    if (lane + 32 * i >= num_experts) continue;
    const Word bits = __float_as_uint(logits[lane + 32 * i]);
    own[i] = bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  Choice choice;
  float first = 0, sum = 0;
#pragma unroll
  for (int k = 0; k < kTopK; ++k) {
    Word best = own[0];
#pragma unroll
    for (int i = 1; i < kEach; ++i) best = max(best, own[i]);
    best = __reduce_max_sync(~0u, best);
    int at = kMostExperts;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
      const Word lanes = __ballot_sync(~0u, own[i] == best);
      if (lanes != 0) at = 32 * i + __ffs(lanes) - 1;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (lane + 32 * i == at) own[i] = 0;
    const float logit = __uint_as_float(best >> 31 ? best & 0x7fffffffu : ~best);
    if (k == 0) first = logit;
    choice.ids[k] = at;
    choice.weights[k] = expf(logit - first);
    sum += choice.weights[k];
  }
#pragma unroll
  for (int k = 0; k < kTopK; ++k) choice.weights[k] /= sum;
  return choice;
}

// The first of the experts that this device has; the grid before may have written it.
__device__ inline int FirstHere(const int* first) { return first == nullptr ? 0 : *first; }

__device__ inline bool IsHere(int id, int num_here) { return static_cast<Word>(id) < static_cast<Word>(num_here); }

}  // namespace tiles

// logits [T, E]: a row of x [T, kInputs], normalised, times the router [kInputs, E], and its bias [E]; scales [T]: what the row
// is multiplied by to have a mean square of 1. Blocks: (T / rows_a_block, rounded up; E / kExpertsABlock).
extern "C" __global__ void __launch_bounds__(tiles::kRouterThreads) peagle_router(
    const Half* x, const Half* norm, float epsilon, const Half* router, const Half* bias, int rows, int num_experts,
    int rows_a_block, float* logits, float* scales) {
  using namespace tiles;
  constexpr int kPieces = kInputs / 8, kEach = (kPieces + kRouterThreads - 1) / kRouterThreads, kSums = kExpertsABlock + 1;
  __shared__ float partial[2][kRouterThreads / 32][kSums];  // used alternately
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, first = blockIdx.y * kExpertsABlock;
  const int begin = blockIdx.x * rows_a_block, end = min(rows, begin + rows_a_block);
  uint4 matrix[kEach][8], norms[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int piece = thread + kRouterThreads * j;
    if (piece >= kPieces) continue;
    norms[j] = LoadPiece(norm, piece);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      matrix[j][i] = *reinterpret_cast<const uint4*>(router + static_cast<long long>(8 * piece + i) * num_experts + first);
  }
  WaitForGrid();
  LetNextBegin();
  for (int row = begin; row < end; ++row) {
    float sums[kSums] = {};
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int piece = thread + kRouterThreads * j;
      if (piece >= kPieces) continue;
      float values[8], scaled[8];
      Unpack(LoadPiece(x + static_cast<long long>(row) * kInputs, piece), values);
      Unpack(norms[j], scaled);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        sums[kExpertsABlock] += values[i] * values[i];
        float of_experts[8];
        Unpack(matrix[j][i], of_experts);
#pragma unroll
        for (int e = 0; e < kExpertsABlock; ++e) sums[e] += values[i] * scaled[i] * of_experts[e];
      }
    }
#pragma unroll
    for (int e = 0; e < kSums; ++e) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) sums[e] += __shfl_xor_sync(~0u, sums[e], distance);
      if (lane == 0) partial[row % 2][warp][e] = sums[e];
    }
    __syncthreads();
    if (thread < kExpertsABlock) {
      float sum = 0, squares = 0;
      for (int w = 0; w < kRouterThreads / 32; ++w) {
        sum += partial[row % 2][w][thread];
        squares += partial[row % 2][w][kExpertsABlock];
      }
      const float scale = rsqrtf(squares / kInputs + epsilon);
      logits[static_cast<long long>(row) * num_experts + first + thread] = sum * scale + ToFloat(bias[first + thread]);
      if (first + thread == 0) scales[row] = scale;
    }
  }
}

// ids and weights [T, 4]: what the rows choose by their logits [T, E]; ids count from expert `first` on (nullptr: 0). A row of
// negative position chooses nothing, -1. A warp for each row.
extern "C" __global__ void __launch_bounds__(tiles::kRouterThreads) peagle_choose(
    const float* logits, const int* positions, const int* first, int rows, int num_experts, int* ids, float* weights) {
  using namespace tiles;
  const int row = blockIdx.x * (kRouterThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  WaitForGrid();
  LetNextBegin();
  if (row >= rows) return;
  const Choice choice = Choose(logits + static_cast<long long>(row) * num_experts, num_experts);
  const bool active = positions == nullptr || positions[row] >= 0;
  const int first_here = FirstHere(first);
#pragma unroll
  for (int k = 0; k < kTopK; ++k)
    if (lane == k) {
      ids[row * kTopK + k] = active ? choice.ids[k] - first_here : -1;
      weights[row * kTopK + k] = choice.weights[k];
    }
}

// Up to kFewRowsRouted rows: their choices by their logits [T, E], as peagle_choose, without the ids; places [pairs] (-1: no
// expert of the num_here from `first` on), tiles and normalised rows. A block for each pair.
extern "C" __global__ void __launch_bounds__(tiles::kRouteFewThreads) peagle_route_few(
    const Half* x, const Half* norm, const float* scales, const float* logits, const int* positions, const int* first,
    int pairs, int num_experts, int num_here, tiles::Widths widths, float* weights, tiles::Tile* all_tiles, int* num_tiles,
    int* order, unsigned char* rows) {
  using namespace tiles;
  constexpr int kPieces = kInputs / 8, kNowhere = 1 << 30, kEach = (kPieces + kRouteFewThreads - 1) / kRouteFewThreads;
  __shared__ Place place;
  __shared__ int all[kTopK * kFewRowsRouted], partial[8];
  const int thread = threadIdx.x, pair = blockIdx.x, own_row = pair / kTopK, lane = thread % 32;
  uint4 norms[kEach], values[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (thread + kRouteFewThreads * j < kPieces) norms[j] = LoadPiece(norm, thread + kRouteFewThreads * j);
  WaitForGrid();
  LetNextBegin();
  const Half* source = x + static_cast<long long>(own_row) * kInputs;
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (thread + kRouteFewThreads * j < kPieces) values[j] = LoadPiece(source, thread + kRouteFewThreads * j);
  const float scale = scales[own_row];
  const int first_here = FirstHere(first);
#pragma unroll 1
  for (int row = thread / 32; row < pairs / kTopK; row += kRouteFewThreads / 32) {
    const Choice choice = Choose(logits + static_cast<long long>(row) * num_experts, num_experts);
    const bool active = positions == nullptr || positions[row] >= 0;
#pragma unroll
    for (int k = 0; k < kTopK; ++k)
      if (lane == k) {
        const int id = choice.ids[k] - first_here;
        all[row * kTopK + k] = active && IsHere(id, num_here) ? id : kNowhere;
        if (row * kTopK + k == pair) weights[pair] = choice.weights[k];
      }
  }
  __syncthreads();
  const int mine = all[pair];
  const bool wanted = mine != kNowhere;
  if (thread < 32) {
    int rank = 0, count = 0, begin = 0;
    for (int from = 0; from < pairs; from += 32) {
      const int other = from + lane, id = other < pairs ? all[other] : kNowhere;
      const unsigned same = __ballot_sync(~0u, id == mine);
      count += __popc(same);
      rank += __popc(__ballot_sync(~0u, id == mine && other < pair));
      begin += __popc(__ballot_sync(~0u, id < mine));
    }
    if (lane == 0 && wanted) place = PlaceOf(rank, count, begin, Widest(widths));
    if (lane == 0) order[pair] = wanted ? place.begin + place.Row() : -1;
  }
  __syncthreads();
  if (wanted) {
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (thread + kRouteFewThreads * j < kPieces)
        StorePiece(rows, place, thread + kRouteFewThreads * j, Normalise(values[j], norms[j], scale));
  }
  if (pair != 0) return;
  int count = 0;
  for (int i = 0; i < pairs; ++i) count += all[i] == thread;
  WriteAllTiles(thread, count, widths, all_tiles, num_tiles, partial);
}

// Many rows: as peagle_route_few, but for the rows, and by ids that count from the first expert here. One block.
extern "C" __global__ void __launch_bounds__(tiles::kRouteManyThreads) peagle_route_many(
    const int* ids, int pairs, int num_here, tiles::Widths widths, tiles::Tile* all_tiles, int* num_tiles, int* order,
    tiles::Place* places) {
  using namespace tiles;
  constexpr int kTurns = kMostRows / kRouteManyThreads;
  __shared__ int count[kMostExperts], begin[kMostExperts], partial[8];
  const int thread = threadIdx.x;
  if (thread < kMostExperts) count[thread] = 0;
  WaitForGrid();
  LetNextBegin();
  __syncthreads();
  int4 id[kTurns];
  int rank[kTurns][kTopK];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int row = thread + kRouteManyThreads * turn;
    if (row < pairs / kTopK) id[turn] = reinterpret_cast<const int4*>(ids)[row];
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    if (thread + kRouteManyThreads * turn >= pairs / kTopK) continue;
    const int of[kTopK] = {id[turn].x, id[turn].y, id[turn].z, id[turn].w};
#pragma unroll
    for (int k = 0; k < kTopK; ++k)
      rank[turn][k] = IsHere(of[k], num_here) ? atomicAdd(&count[of[k]], 1) : -1;
  }
  __syncthreads();
  if (thread < kMostExperts) begin[thread] = WriteAllTiles(thread, count[thread], widths, all_tiles, num_tiles, partial);
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int row = thread + kRouteManyThreads * turn;
    if (row >= pairs / kTopK) continue;
    const int of[kTopK] = {id[turn].x, id[turn].y, id[turn].z, id[turn].w};
#pragma unroll
    for (int k = 0; k < kTopK; ++k) {
      Place place = {-1, 0};
      if (rank[turn][k] >= 0) place = PlaceOf(rank[turn][k], count[of[k]], begin[of[k]], Widest(widths));
      order[row * kTopK + k] = place.begin < 0 ? -1 : place.begin + place.Row();
      places[row * kTopK + k] = place;
    }
  }
}

// rows = each row of x [T, kInputs], normalised, at the places of its four pairs. A block for each row.
extern "C" __global__ void __launch_bounds__(tiles::kGatherThreads) peagle_gather(
    const Half* x, const Half* norm, const float* scales, const tiles::Place* places, unsigned char* rows) {
  using namespace tiles;
  constexpr int kEach = kInputs / 8 / kGatherThreads;
  const int row = blockIdx.x, thread = threadIdx.x;
  uint4 norms[kEach], values[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) norms[j] = LoadPiece(norm, thread + kGatherThreads * j);
  WaitForGrid();
  LetNextBegin();
  const float scale = scales[row];
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    values[j] = Normalise(LoadPiece(x + static_cast<long long>(row) * kInputs, thread + kGatherThreads * j), norms[j], scale);
#pragma unroll
  for (int k = 0; k < kTopK; ++k) {
    const Place place = places[row * kTopK + k];
    if (place.begin < 0) continue;
#pragma unroll
    for (int j = 0; j < kEach; ++j) StorePiece(rows, place, thread + kGatherThreads * j, values[j]);
  }
}

// out [T, kInputs] = x + the sum over a row's pairs of their weights times their outputs, `order` among y [pairs, kInputs];
// normalised [T, kInputs]: out by the next norm, if there is one. Without x (nullptr) out is the sum alone, in float32. A block
// for each row.
extern "C" __global__ void __launch_bounds__(tiles::kCombineThreads) peagle_combine_experts(
    const Half* x, const float* y, const int* order, const float* weights, const Half* next_norm, float epsilon, void* out,
    Half* normalised) {
  using namespace tiles;
  constexpr int kAllWarps = (kCombineThreads + 31) / 32;
  __shared__ float partial[kAllWarps];
  const int row = blockIdx.x, thread = threadIdx.x, column = thread * 4;
  const long long at = static_cast<long long>(row) * kInputs + column;
  const bool there = column < kInputs;
  uint2 norm = {};
  if (there && next_norm != nullptr) norm = *reinterpret_cast<const uint2*>(next_norm + column);
  WaitForGrid();
  LetNextBegin();
  float sums[4] = {};
  if (there) {
    uint2 before = {};
    if (x != nullptr) before = *reinterpret_cast<const uint2*>(x + at);
#pragma unroll
    for (int k = 0; k < kTopK; ++k) {
      const int place = order[row * kTopK + k];
      if (place < 0) continue;
      const float weight = weights[row * kTopK + k];
      const float4 value = *reinterpret_cast<const float4*>(y + static_cast<long long>(place) * kInputs + column);
      sums[0] += weight * value.x;
      sums[1] += weight * value.y;
      sums[2] += weight * value.z;
      sums[3] += weight * value.w;
    }
    if (x == nullptr) {
      *reinterpret_cast<float4*>(static_cast<float*>(out) + at) = {sums[0], sums[1], sums[2], sums[3]};
      return;
    }
    const uint2 all = {Pack(sums[0] + LowerFloat(before.x), sums[1] + UpperFloat(before.x)),
                       Pack(sums[2] + LowerFloat(before.y), sums[3] + UpperFloat(before.y))};
    *reinterpret_cast<uint2*>(static_cast<Half*>(out) + at) = all;
    sums[0] = LowerFloat(all.x);
    sums[1] = UpperFloat(all.x);
    sums[2] = LowerFloat(all.y);
    sums[3] = UpperFloat(all.y);
  }
  if (next_norm == nullptr) return;
  float squares = sums[0] * sums[0] + sums[1] * sums[1] + sums[2] * sums[2] + sums[3] * sums[3];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
  if (thread % 32 == 0) partial[thread / 32] = squares;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kAllWarps; ++w) total += partial[w];
  const float scale = rsqrtf(total / kInputs + epsilon);
  if (there)
    *reinterpret_cast<uint2*>(normalised + at) = {
        Pack(sums[0] * scale * LowerFloat(norm.x), sums[1] * scale * UpperFloat(norm.x)),
        Pack(sums[2] * scale * LowerFloat(norm.y), sums[3] * scale * UpperFloat(norm.y))};
}

// Blocks: as many as run together; of Config::kThreads, with Config::kSharedBytes of shared memory.
#define PEAGLE_TILES(name, config)                                                                                        \
  extern "C" __global__ void __launch_bounds__(tiles::config::kThreads, tiles::config::kBlocks) peagle_tiles_gate_up_##name( \
      const unsigned char* weights, const Half* bias, int outputs, const unsigned char* rows, const tiles::Tile* all_tiles, \
      const int* num_tiles, float limit, void* out) {                                                                      \
    tiles::MultiplyTiles<tiles::config, true>({{weights, bias, outputs}, rows, all_tiles, num_tiles, out, limit});          \
  }                                                                                                                       \
  extern "C" __global__ void __launch_bounds__(tiles::config::kThreads, tiles::config::kBlocks) peagle_tiles_down_##name(    \
      const unsigned char* weights, const Half* bias, int outputs, const unsigned char* rows, const tiles::Tile* all_tiles, \
      const int* num_tiles, float limit, void* out) {                                                                      \
    tiles::MultiplyTiles<tiles::config, false>({{weights, bias, outputs}, rows, all_tiles, num_tiles, out, limit});         \
  }

PEAGLE_TILES(0, UpTo16)
PEAGLE_TILES(1, UpTo48)
PEAGLE_TILES(2, UpTo90)
PEAGLE_TILES(3, Beyond)
