// XLA's own threads at an op's work: Parallel (parallel.h) as the handlers of ffi.cc have it.
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

// A thread waits by asking again; after a while so that another may have its core.
inline void Pause(int64_t spins) {
  if (spins > 2'000) {
    std::this_thread::yield();
    return;
  }
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// The threads of XLA's pool that help. Ops follow each other by the microsecond, and going through the pool's queue takes
// several; so a thread that has come stays for a while and looks out for the next job, which reaches it in a fraction of
// one. It is the pool's again kStay after the last.
//
// A job is taken chunk by chunk, by the caller and by helpers alike, and the caller waits for those chunks alone that
// somebody has begun: a pool whose threads are all waiting in handlers of their own cannot lock up. There is room for one
// job on the board; who finds it taken works alone until it is free.
class Crew {
 public:
  // Whether a job came within kStay, so that another may: worth calling helpers for.
  static bool Busy() { return Now() - last_job_.load(std::memory_order_relaxed) < kStay; }

  // body(context, chunk) is done for all chunks, with those helpers that are there; `called`, so many are in any case, or
  // on their way.
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
  static constexpr int64_t kSpins = 128;  // between looks at the clock
  static constexpr int64_t kSeats = 64;

  // The job, in one cache line. The word is its number, how many chunks it has (16 bits), and how many of them are taken
  // (16 bits). Whoever takes one has read the rest before: it stays as it is while chunks are left.
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

  // Chunks of the job are done, as long as any were left; whether there was one.
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

  // A helper's seat: the lowest that was free. Those of high seats leave small jobs to the others.
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
        std::this_thread::yield();  // it may have the caller's own core
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

// How many threads an op runs on changes its time, never its bits.
class PoolParallel final : public Parallel {
 public:
  explicit PoolParallel(xla::ffi::ThreadPool& pool) : pool_(pool), threads_(pool.num_threads()) {}

  void Run(int64_t chunks, int64_t work, void (*body)(void*, int64_t), void* context) override {
    const int64_t helpers = std::min(threads_, chunks) - 1;
    if (helpers < 1 || work < kWorthAThread) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) body(context, chunk);
      return;
    }
    const bool call = work >= kWorthWaking || Crew::Busy();
    Crew::Run(pool_, call ? helpers : 0, chunks, body, context);
  }

  int64_t threads() const override { return threads_; }

 private:
  xla::ffi::ThreadPool& pool_;
  const int64_t threads_;
};

}  // namespace peagle
