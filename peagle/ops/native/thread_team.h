// The thread team: shares an op's work among XLA's own threads (Parallel in parallel.h, for the handlers of ffi.cc).
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace peagle {

inline int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One round of a spinning wait; after a while yield the core to another thread.
inline void Pause(int64_t spins) {
  if (spins > 2'000) {
    std::this_thread::yield();
    return;
  }
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Helpers from XLA's thread pool. Ops follow each other within microseconds, and the pool's queue takes several. So a helper
// stays and polls for the next job, which reaches it in a fraction of a microsecond. It returns to the pool kStay after its
// last job.
//
// The caller and the helpers take a job's chunks one by one, and the caller waits only for chunks that a helper has begun.
// So a pool whose threads all wait in their own handlers cannot deadlock. The board has room for one job; a caller that
// finds it taken works alone until it is free.
class ThreadTeam {
 public:
  // Whether a job came within kStay: another is likely to follow, so calling helpers pays.
  static bool Busy() { return Now() - last_job_.load(std::memory_order_relaxed) < kStay; }

  // Runs body(context, chunk) for all chunks with the helpers present, after calling more if fewer than `called` are.
  static void Run(xla::ffi::ThreadPool& pool, int64_t called, int64_t chunks, void (*body)(void*, int64_t),
                  void* context) noexcept {
    int64_t first = 0;
    for (; first < chunks && taken_.test_and_set(std::memory_order_acquire); ++first) body(context, first);
    if (first == chunks) return;
    Call(pool, called);
    for (; first < chunks; first += kMostChunks) {
      const int64_t count = std::min(kMostChunks, chunks - first);
      board_.body.store(body, std::memory_order_relaxed);
      board_.context.store(context, std::memory_order_relaxed);
      board_.first.store(first, std::memory_order_relaxed);
      done_.store(0, std::memory_order_relaxed);
      const uint64_t number = (board_.word.load(std::memory_order_relaxed) >> 32) + 1;
      board_.word.store(number << 32 | static_cast<uint64_t>(count) << 16, std::memory_order_release);
      Take();
      for (int64_t spins = 0; done_.load(std::memory_order_acquire) < count; ++spins) Pause(spins);
    }
    last_job_.store(Now(), std::memory_order_relaxed);
    taken_.clear(std::memory_order_release);
  }

 private:
  static constexpr int64_t kStay = 50'000;  // ns
  static constexpr int64_t kMostChunks = 65'535;  // of a job on the board
  static constexpr int64_t kSpins = 128;  // between reads of the clock
  static constexpr int64_t kSeats = 64;

  // The job, in one cache line. The word holds its number, its count of chunks (16 bits), and how many are taken (16 bits).
  // A thread reads the other fields before it takes a chunk: they do not change while chunks are left.
  struct alignas(64) Board {
    std::atomic<uint64_t> word;
    std::atomic<void (*)(void*, int64_t)> body;
    std::atomic<void*> context;
    std::atomic<int64_t> first;
  };

  static void Call(xla::ffi::ThreadPool& pool, int64_t helpers) {
    for (int64_t size = size_.load(std::memory_order_relaxed); size < helpers;) {
      if (!size_.compare_exchange_weak(size, size + 1, std::memory_order_relaxed)) continue;
      pool.Schedule([] { Help(); });
      ++size;
    }
  }

  static int64_t Chunks(uint64_t word) { return static_cast<int64_t>(word >> 16 & 0xffff); }
  static int64_t Left(uint64_t word) { return Chunks(word) - static_cast<int64_t>(word & 0xffff); }

  // Runs chunks of the job until none are left; returns whether there was one.
  static bool Take() noexcept {
    int64_t count = 0;
    for (uint64_t word = board_.word.load(std::memory_order_acquire); Left(word) > 0;) {
      const auto body = board_.body.load(std::memory_order_relaxed);
      void* const context = board_.context.load(std::memory_order_relaxed);
      const int64_t chunk = board_.first.load(std::memory_order_relaxed) + static_cast<int64_t>(word & 0xffff);
      if (!board_.word.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      body(context, chunk);
      ++count;
      word = board_.word.load(std::memory_order_acquire);
    }
    if (count > 0) done_.fetch_add(count, std::memory_order_release);
    return count > 0;
  }

  // Takes the lowest free seat. Helpers in high seats leave small jobs to the others.
  static int64_t Sit() {
    for (uint64_t seats = seats_.load(std::memory_order_relaxed);;) {
      const int64_t seat = std::countr_one(seats);
      if (seat == kSeats || seats_.compare_exchange_weak(seats, seats | uint64_t{1} << seat, std::memory_order_relaxed))
        return seat;
    }
  }

  static void Help() noexcept {
    const int64_t seat = Sit();
    int64_t since = Now();
    for (int64_t spins = 1;; ++spins) {
      const uint64_t word = board_.word.load(std::memory_order_relaxed);
      if (Left(word) > 0 && seat < Chunks(word) - 1) {
        if (Take()) since = Now();
      } else if (spins % kSpins == 0) {
        if (Now() - since > kStay) break;
        std::this_thread::yield();  // it may run on the caller's core
      } else {
        Pause(0);
      }
    }
    if (seat < kSeats) seats_.fetch_and(~(uint64_t{1} << seat), std::memory_order_relaxed);
    size_.fetch_sub(1, std::memory_order_relaxed);
  }

  static inline Board board_;
  alignas(64) static inline std::atomic<int64_t> done_{0};
  alignas(64) static inline std::atomic_flag taken_;
  static inline std::atomic<int64_t> size_{0}, last_job_{0};
  static inline std::atomic<uint64_t> seats_{0};
};

// The number of threads changes an op's time, never its bits.
class PoolParallel final : public Parallel {
 public:
  explicit PoolParallel(xla::ffi::ThreadPool& pool) : pool_(pool), threads_(pool.num_threads()) {}

  void Run(int64_t chunks, int64_t work, void (*body)(void*, int64_t), void* context) override {
    const int64_t helpers = std::min(threads_, chunks) - 1;
    if (helpers < 1 || work < kWorthAThread) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) body(context, chunk);
      return;
    }
    const bool call = work >= kWorthWaking || ThreadTeam::Busy();
    ThreadTeam::Run(pool_, call ? helpers : 0, chunks, body, context);
  }

  int64_t threads() const override { return threads_; }

 private:
  xla::ffi::ThreadPool& pool_;
  const int64_t threads_;
};

}  // namespace peagle
