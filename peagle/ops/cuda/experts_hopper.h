// Shapes of the Hopper kernels of experts: what the kernels (experts_hopper.cu) and their launcher (launch.cc) must agree on.

namespace tiles {

constexpr int kInputs = 2880;  // of both matrices
constexpr int kChunks = kInputs / 64;
constexpr int kCodeBytes = 2048, kUnitBytes = kCodeBytes + 128;  // of 64 outputs by 64 inputs: codes, then scales
constexpr int kUnitsAGroup = 3;                                  // whose chunks alternate in memory
constexpr int kTopK = 4, kMostExperts = 128, kMostTiles = 384, kMostRows = 4096;
constexpr int kFewRowsRouted = 64;  // routed by a block for each pair
constexpr int kRouterThreads = 128, kExpertsABlock = 8;
constexpr int kRouteFewThreads = 128, kRouteManyThreads = 1024, kGatherThreads = 120, kCombineThreads = 736;

// The rows of an expert are cut into equal tiles of at most the largest of `widths`.
struct Widths {
  int count, of[3];
};

// A kernel for tiles of some widths. A block has a producer, which loads chunks of weights and rows into a ring of kStages
// stages of kChunksAStage chunks, and kConsumers warpgroups of 64 outputs each. kBlocks blocks share a multiprocessor.
// A consumer issues its products kSteps steps of 16 inputs at a time, and holds the weights of kHeld such groups.
template <int consumers, int chunks_a_stage, int stages, int blocks, int steps, int held, int... widths>
struct Config {
  static constexpr int kConsumers = consumers, kChunksAStage = chunks_a_stage, kStages = stages, kBlocks = blocks;
  static constexpr int kSteps = steps, kHeld = held;
  static constexpr Widths kWidths = {sizeof...(widths), {widths...}};
  static constexpr int kWidest = kWidths.of[kWidths.count - 1];
  static constexpr int kRowBytes = kChunksAStage * kWidest * 128;  // of a stage
  static constexpr int kStageBytes = (kRowBytes + kConsumers * kChunksAStage * kUnitBytes + 1023) / 1024 * 1024;
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kStages * 16 + kMostTiles * 8;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kFills = kChunks / kChunksAStage, kRounds = kFills / kStages;  // of a stage; of the ring
  static_assert(kRounds * kStages * kChunksAStage == kChunks, "addresses are constants only if the ring divides the inputs");
  static_assert(kConsumers == 1 || kConsumers == kUnitsAGroup, "a stage holds one unit or a group");
  static_assert((kSharedBytes + 1024) * kBlocks <= 233472, "blocks that share a multiprocessor share its memory");
};

// By the most rows of an expert that are to be expected.
using UpTo16 = Config<1, 3, 3, 4, 2, 2, 8, 16>;
using UpTo48 = Config<3, 3, 5, 1, 2, 2, 16, 32, 48>;
using UpTo90 = Config<3, 3, 3, 1, 1, 4, 32, 64, 80>;
using Beyond = Config<3, 1, 5, 1, 2, 2, 48, 96, 144>;

}  // namespace tiles
