// Runs the CUDA kernels on buffers without slack, for AddressSanitizer.
// First on whole ones; then for each buffer in turn, in a process of its own, on one that is an element too short, after
// its number on standard error.

#include "driver.cc"

#include <sys/wait.h>
#include <unistd.h>

#include <type_traits>

namespace {

constexpr int kBatch = 2, kHeads = 4, kKvHeads = 2;
constexpr int kRowCount = 9, kTopK = 2, kExpertCount = 3, kWidth = 160, kExpertWidth = 32;

int buffers = 0, shorter = -1;
const void* shorter_buffer = nullptr;

// Never freed, so that no other buffer takes its memory.
template <typename T>
T* Make(size_t count, T value) {
  const bool cut = buffers++ == shorter;
  T* values = static_cast<T*>(std::malloc((count - (cut ? 1 : 0)) * sizeof(T)));
  if (cut) shorter_buffer = values;
  for (size_t i = 0; i + 1 < count; ++i) values[i] = value;
  return values;
}

template <typename T>
bool IsShorter(T value) {
  if constexpr (std::is_pointer_v<T>) return static_cast<const void*>(value) == shorter_buffer;
  return false;
}

// Kernels without the buffer that is shorter need not run, but that which makes others' indices.
template <typename... T>
void Launch(void (*)(T...), const char* name, int x, int y, int threads, T... values) {
  const bool wanted = shorter_buffer == nullptr ? shorter < 0 : (... || IsShorter(values));
  if (!wanted && std::strcmp(name, "peagle_sort") != 0) return;
  CUfunc_st* kernel;
  if (cuModuleGetFunction(&kernel, &module, name) != 0) std::abort();
  void* arguments[] = {&values...};
  const LaunchConfig config = {{unsigned(x), unsigned(y), 1}, {unsigned(threads), 1, 1}, 0, nullptr, nullptr, 0};
  cuLaunchKernelEx(&config, kernel, arguments, nullptr);
}

// A pass over pages of which the last is full, by chunks and by queries.
void Attend() {
  constexpr int kPages = 5, kTableWidth = 2, kRowsOf = 3, kMany = 17;
  const int all = kHeads + 2 * kKvHeads, queries = kRowsOf * kHeads / kKvHeads, parts = kBatch * kKvHeads * queries;
  const Half one = 0x3f80;
  const Half* qkv = Make<Half>(kBatch * kMany * all * kHead, one);
  const Half* cosine = Make<Half>(kBatch * kMany * kHalf, one);
  const Half* sine = Make<Half>(kBatch * kMany * kHalf, one);
  Half* key = Make<Half>(kPages * kSlots * kKvHeads * kHead, one);
  Half* value = Make<Half>(kPages * kSlots * kKvHeads * kHead, one);
  auto fill = [](int* values, int count, bool whole, auto value) {
    for (int i = 0; i < count - !whole; ++i) values[i] = value(i);
    return static_cast<const int*>(values);
  };
  const int from = buffers;
  const int* table = fill(Make<int>(kBatch * kTableWidth, 0), kBatch * kTableWidth, shorter != from,
                          [](int i) { return kPages - 1 - i % 2; });
  auto rows = [&](auto value) {
    const bool whole = shorter != buffers;
    return fill(Make<int>(kBatch * kMany, 0), kBatch * kMany, whole, value);
  };
  const int* write = rows([](int i) { return 2 * kSlots - kMany + i % kMany; });
  const int* first = rows([](int) { return 0; });
  const int* last = rows([](int i) { return 2 * kSlots - kMany + i % kMany; });
  const Half* sinks = Make<Half>(kHeads, one);
  Half* query = Make<Half>(kBatch * kMany * kHeads * kHead, one);
  float* partial = Make<float>(parts * kHead, 0);
  float* peaks = Make<float>(parts, 0);
  float* totals = Make<float>(parts, 0);
  Half* out = Make<Half>(kBatch * kMany * kHeads * kHead, one);
  Launch(peagle_rotate, "peagle_rotate", kBatch * kMany, (all * kHalf + kThreads - 1) / kThreads, kThreads, qkv,
         cosine, sine, key, value, table, write, kMany, kTableWidth, kHeads, kKvHeads, query);
  Launch(peagle_prompt, "peagle_prompt", (kMany * kHeads / kKvHeads + kTileQueries - 1) / kTileQueries, kBatch * kKvHeads,
         kThreads, static_cast<const Half*>(query), key, value, table, first, last, sinks, kMany, kTableWidth, kHeads,
         kKvHeads, out);
  Launch(peagle_attend, "peagle_attend", 1, kBatch * kKvHeads, kThreads, qkv, cosine, sine, key, value, table, write, first,
         last, sinks, kRowsOf, kTableWidth, kHeads, kKvHeads, 1, partial, peaks, totals, out);
}

void RunAll() {
  const Half one = 0x3f80;
  const Half* x = Make<Half>(kRowCount * kWidth, one);
  int* ids = Make<int>(kRowCount * kTopK, 0);
  for (int i = 0; i + 1 < kRowCount * kTopK; ++i) ids[i] = (i / kTopK + i % kTopK) % kExpertCount;
  Bytes gate_up = Make<unsigned char>(kExpertCount * 2 * kExpertWidth * kWidth / 2, 0x22);
  Bytes gate_up_scales = Make<unsigned char>(kExpertCount * 2 * kExpertWidth * kWidth / 32, 120);
  const Half* gate_up_bias = Make<Half>(kExpertCount * 2 * kExpertWidth, one);
  Bytes down = Make<unsigned char>(kExpertCount * kWidth * kExpertWidth / 2, 0x22);
  Bytes down_scales = Make<unsigned char>(kExpertCount * kWidth * kExpertWidth / 32, 120);
  const Half* down_bias = Make<Half>(kExpertCount * kWidth, one);
  Half* hidden = Make<Half>(kRowCount * kTopK * kExpertWidth, one);
  float* out = Make<float>(kRowCount * kTopK * kWidth, 0);
  // the last elements of these are not yet written
  if (shorter != 1) ids[kRowCount * kTopK - 1] = 0;
  Launch(peagle_gate_up_2, "peagle_gate_up_2", 2 * kExpertWidth / kOutputs, kExpertCount, kThreads, x,
         static_cast<const int*>(ids), kRowCount, kTopK, kExpertCount, gate_up, gate_up_scales, gate_up_bias,
         2 * kExpertWidth, kWidth, 7.0f, hidden);
  Launch(peagle_down_2, "peagle_down_2", kWidth / kOutputs, kExpertCount, kThreads, static_cast<const Half*>(hidden),
         static_cast<const int*>(ids), kRowCount, kTopK, kExpertCount, down, down_scales, down_bias, kWidth, kExpertWidth,
         out);
  const int pairs = kRowCount * kTopK, num_tiles = pairs / kTileRows + kExpertCount;
  int* sorted = Make<int>(pairs, 0);
  Tile* tiles = Make<Tile>(num_tiles, {});
  Launch(peagle_sort, "peagle_sort", 1, 1, kSortThreads, static_cast<const int*>(ids), pairs, kExpertCount, num_tiles,
         sorted, tiles);
  Launch(peagle_gate_up_many, "peagle_gate_up_many", 1, num_tiles, kThreads, x, static_cast<const int*>(sorted),
         static_cast<const Tile*>(tiles), kTopK, gate_up, gate_up_scales, gate_up_bias, 2 * kExpertWidth, kWidth, 7.0f,
         hidden);
  Launch(peagle_down_many, "peagle_down_many", (kWidth + kPanel - 1) / kPanel, num_tiles, kThreads,
         static_cast<const Half*>(hidden), static_cast<const int*>(sorted), static_cast<const Tile*>(tiles), down,
         down_scales, down_bias, kWidth, kExpertWidth, out);
  Attend();
}

}  // namespace

int main() {
  RunAll();
  std::printf("%d buffers\n", buffers);
  std::fflush(stdout);
  const int all = buffers;
  for (shorter = 0; shorter < all; ++shorter) {
    std::fprintf(stderr, "buffer %d\n", shorter);
    const pid_t child = fork();
    if (child == 0) {
      buffers = 0;
      RunAll();
      _exit(0);
    }
    if (child < 0 || waitpid(child, nullptr, 0) != child) return 1;
  }
}
