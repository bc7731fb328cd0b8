// Memory for an op's intermediate results.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace peagle {

// Memory that lives as long as its Scratch. Scratches of a thread nest: the inner one ends first, and only the innermost
// takes memory. An op takes a dozen pieces, and malloc would cost more than the work on small ones, so each thread keeps
// room for those. Every piece starts on a cache line.
class Scratch {
 public:
  Scratch() : begin_(used_), outer_(innermost_) { innermost_ = this; }
  ~Scratch() {
    used_ = begin_;
    innermost_ = outer_;
  }
  Scratch(const Scratch&) = delete;

  template <class T>
  T* Take(int64_t count) {
    static_assert(alignof(T) <= kLine);
    if (innermost_ != this) __builtin_trap();  // an inner Scratch may hold the memory it would take
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T)), padded = (bytes + kLine - 1) / kLine * kLine;
    if (padded > kRoom - used_) {
      large_.push_back(Allocate(bytes));
      return reinterpret_cast<T*>(large_.back().get());
    }
    if (room_ == nullptr) room_ = Allocate(kRoom);
    used_ += padded;
    return reinterpret_cast<T*>(room_.get() + used_ - padded);
  }

 private:
  static constexpr int64_t kLine = 64;
#if defined(PEAGLE_SANITIZED)
  static constexpr int64_t kRoom = 0;  // the sanitizer finds overruns only of pieces allocated one by one
#else
  static constexpr int64_t kRoom = 1 << 18;
#endif

  struct Free {
    void operator()(char* piece) const { ::operator delete[](piece, std::align_val_t{kLine}); }
  };
  using Piece = std::unique_ptr<char[], Free>;
  static Piece Allocate(int64_t bytes) {
    return Piece(static_cast<char*>(::operator new[](static_cast<size_t>(bytes), std::align_val_t{kLine})));
  }

  static inline thread_local Piece room_;
  static inline thread_local int64_t used_ = 0;
  static inline thread_local Scratch* innermost_ = nullptr;
  const int64_t begin_;
  Scratch* const outer_;
  std::vector<Piece> large_;
};

}  // namespace peagle
