// Sharing an op's work among threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace peagle {

// Work, in multiplications and bytes of weights, below which a second thread costs more than it gains: a thread that polls
// for work, and one that has to be woken.
constexpr int64_t kWorthAThread = 50'000, kWorthWaking = 1'000'000;

// Runs body(context, 0) .. body(context, chunks - 1), on one thread or several, and returns when all are done. `work` is the
// work of all chunks together.
class Parallel {
 public:
  virtual void Run(int64_t chunks, int64_t work, void (*body)(void*, int64_t), void* context) = 0;

  // The number of threads.
  virtual int64_t threads() const = 0;

 protected:
  ~Parallel() = default;
};

// The number of chunks for that much work: one per thread, each with at least half of kWorthAThread.
inline int64_t Shares(int64_t work, const Parallel& parallel) {
  return std::clamp<int64_t>(2 * work / kWorthAThread, 1, parallel.threads());
}

// Runs body(chunk) for chunks 0 .. chunks - 1.
template <class Body>
void ForEach(Parallel& parallel, int64_t chunks, int64_t work, const Body& body) {
  parallel.Run(
      chunks, work, [](void* context, int64_t chunk) { (*static_cast<const Body*>(context))(chunk); },
      const_cast<Body*>(&body));
}

}  // namespace peagle
