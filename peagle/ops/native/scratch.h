// Memory for what an op computes on its way.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace peagle {

// Memory for as long as a Scratch lives, the latest first to end. An op takes a dozen pieces, and malloc is slower than
// what small ones are needed for; so each thread keeps room for those.
class Scratch {
 public:
  Scratch() : begin_(used_) {}
  ~Scratch() { used_ = begin_; }
  Scratch(const Scratch&) = delete;

  template <class T>
  T* Take(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T)), padded = (bytes + 63) / 64 * 64;
    if (padded > kRoom - used_) {
      large_.push_back(std::make_unique_for_overwrite<char[]>(bytes));
      return reinterpret_cast<T*>(large_.back().get());
    }
    if (room_ == nullptr) room_ = std::make_unique_for_overwrite<char[]>(kRoom);
    used_ += padded;
    return reinterpret_cast<T*>(room_.get() + used_ - padded);
  }

 private:
#if defined(PEAGLE_SANITIZED)
  static constexpr int64_t kRoom = 0;  // the sanitizer knows the ends of pieces that malloc gave
#else
  static constexpr int64_t kRoom = 1 << 18;
#endif
  static inline thread_local std::unique_ptr<char[]> room_;
  static inline thread_local int64_t used_ = 0;
  const int64_t begin_;
  std::vector<std::unique_ptr<char[]>> large_;
};

}  // namespace peagle
