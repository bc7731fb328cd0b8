// Runs jobs of all sizes from several callers at once: each chunk must run once, within its job, and some by helpers.
// Runs for SECONDS, and on until a helper has run a chunk, which may take a while on a busy machine.
//     stress CALLERS THREADS SECONDS
#include "thread_team.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

constexpr int64_t kWork = 2'000'000;  // worth waking helpers for
std::atomic<int64_t> by_others{0};

void Expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::abort();
}

struct Job {
  std::vector<int> runs;  // by chunk; no atomics, so that a thread sanitizer finds concurrent runs
  peagle::Parallel& parallel;
  std::thread::id caller;
  bool nested, alive = true;

  void Run(int64_t chunk) {
    Expect(alive && chunk >= 0 && chunk < static_cast<int64_t>(runs.size()), "a chunk of a job that is over, or of none");
    ++runs[chunk];
    if (std::this_thread::get_id() != caller) by_others.fetch_add(1, std::memory_order_relaxed);
    if (!nested || chunk > 1) return;
    int inner[5] = {};
    peagle::ForEach(parallel, 5, kWork, [&](int64_t i) { ++inner[i]; });
    for (int count : inner) Expect(count == 1, "a chunk of a job within a job was not run once");
  }
};

int64_t Size(std::mt19937& random) {
  switch (random() % 200) {
    case 0: return 65'535;
    case 1: return 65'536;
    case 2: return 65'530 + random() % 140'000;
    default: return 1 + random() % 40;
  }
}

void Call(xla::ffi::ThreadPool& pool, unsigned seed, int64_t end) {
  std::mt19937 random(seed);
  peagle::PoolParallel parallel(pool);
  while (peagle::Now() < end || by_others.load() == 0) {
    Job job{std::vector<int>(Size(random)), parallel, std::this_thread::get_id(), random() % 7 == 0};
    parallel.Run(
        static_cast<int64_t>(job.runs.size()), random() % 3 == 0 ? kWork : peagle::kWorthAThread,
        [](void* job, int64_t chunk) { static_cast<Job*>(job)->Run(chunk); }, &job);
    job.alive = false;
    for (int count : job.runs) Expect(count == 1, "a chunk was not run once");
    if (random() % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));  // helpers leave
  }
}

}  // namespace

int main(int, char** arguments) {
  xla::ffi::ThreadPool pool(std::atoi(arguments[2]));
  const int64_t end = peagle::Now() + 1'000'000LL * std::atoi(arguments[3]);
  std::vector<std::thread> callers;
  for (int i = 0; i < std::atoi(arguments[1]); ++i) callers.emplace_back([&pool, i, end] { Call(pool, i, end); });
  for (std::thread& caller : callers) caller.join();
  return 0;
}
