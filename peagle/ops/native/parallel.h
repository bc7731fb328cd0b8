// How an op's work is shared among threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace peagle {

// Work, in multiplications and bytes of weights, below which a second thread costs more than it brings: one that waits
// for work, and one that has to be woken.
constexpr int64_t kWorthAThread = 50'000, kWorthWaking = 1'000'000;

// Runs body(context, 0) .. body(context, chunks - 1), on several threads if it likes, and returns when all are done. `work`
// is that of all chunks together.
class Parallel {
 public:
  virtual void Run(int64_t chunks, int64_t work, void (*body)(void*, int64_t), void* context) = 0;

  // How many threads there are.
  virtual int64_t threads() const = 0;

 protected:
  ~Parallel() = default;
};

// How many chunks to make of that much work: one for each thread, none of them less than half of what is worth one.
inline int64_t Shares(int64_t work, const Parallel& parallel) {
  return std::clamp<int64_t>(2 * work / kWorthAThread, 1, parallel.threads());
}

// body(chunk) for chunks 0 .. chunks - 1.
template <class Body>
void ForEach(Parallel& parallel, int64_t chunks, int64_t work, const Body& body) {
  parallel.Run(
      chunks, work, [](void* context, int64_t chunk) { (*static_cast<const Body*>(context))(chunk); },
      const_cast<Body*>(&body));
}

}  // namespace peagle
