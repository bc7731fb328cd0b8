// A stand-in for the part of XLA's FFI that thread_team.h uses: a thread pool.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace xla::ffi {

class ThreadPool {
 public:
  explicit ThreadPool(int64_t threads) {
    for (int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~ThreadPool() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    come_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void Schedule(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    come_.notify_one();
  }

  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }

 private:
  void Work() {
    while (true) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        come_.wait(lock, [this] { return ended_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable come_;
  std::deque<std::function<void()>> tasks_;
  bool ended_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace xla::ffi
