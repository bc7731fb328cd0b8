// Shared by the CUDA kernels. For NVIDIA GPUs with bfloat16 tensor cores: compute capability 8.0 and newer.
//
// NVRTC compiles these sources together at run time, for the GPU at hand. The tests compile them for the CPU, with their own
// functions in place of those under __CUDACC_RTC__.

#if defined(__CUDACC_RTC__)

struct alignas(16) Words {
  unsigned of[4];
};

// Loads data that is read once: bypasses the first-level cache, and prefetches the 128 bytes around it, which hold this row's
// next chunk.
__device__ inline Words LoadOnce(const void* from) {
  Words words;
  asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(words.of[0]), "=r"(words.of[1]), "=r"(words.of[2]), "=r"(words.of[3])
      : "l"(from));
  return words;
}

// Loads, or gives zeros, without a branch, so that many loads are in flight together. Only for data that this kernel does
// not write.
__device__ inline Words LoadIf(bool wanted, const void* from) {
  Words words = {};
  asm("{ .reg .pred wanted; setp.ne.s32 wanted, %5, 0; @wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(words.of[0]), "+r"(words.of[1]), "+r"(words.of[2]), "+r"(words.of[3])
      : "l"(from), "r"(static_cast<int>(wanted)));
  return words;
}

// Loads 16 or 8 bytes that nothing reads again, or gives zeros.
__device__ inline void LoadStream(unsigned (&to)[4], bool wanted, const void* from) {
  to[0] = to[1] = to[2] = to[3] = 0;
  asm volatile(
      "{ .reg .pred wanted; setp.ne.s32 wanted, %5, 0; @wanted ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
      : "l"(from), "r"(static_cast<int>(wanted)));
}
__device__ inline void LoadStream(unsigned (&to)[2], bool wanted, const void* from) {
  to[0] = to[1] = 0;
  asm volatile("{ .reg .pred wanted; setp.ne.s32 wanted, %3, 0; @wanted ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2]; }"
               : "+r"(to[0]), "+r"(to[1])
               : "l"(from), "r"(static_cast<int>(wanted)));
}

// Loads 8 bytes, or gives zeros.
__device__ inline void LoadTwo(unsigned* to, bool wanted, const void* from) {
  to[0] = to[1] = 0;
  asm volatile("{ .reg .pred wanted; setp.ne.s32 wanted, %3, 0; @wanted ld.global.v2.u32 {%0, %1}, [%2]; }"
               : "+r"(to[0]), "+r"(to[1])
               : "l"(from), "r"(static_cast<int>(wanted)));
}

// Copies 16 bytes to shared memory, or writes zeros; WaitForCopies: until all but the last `left` commits of this thread are
// there.
__device__ inline void CopyAsync(Words* to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(wanted ? 16 : 0)
               : "memory");
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int left>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

// Four matrices of 8 rows of 16 bytes; lane l gives the address of row l % 8 of matrix l / 8. Of each, lane (group, quarter)
// gets values 2 quarter, 2 quarter + 1 of row `group`, or transposed of rows 2 quarter, 2 quarter + 1 value `group`.
__device__ inline void LoadMatrices(unsigned (&to)[4], const Words* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ inline void LoadMatricesTransposed(unsigned (&to)[4], const Words* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
               : "memory");
}

// The shared memory of a block beyond that of its variables.
__device__ inline void* DynamicBlock() {
  extern __shared__ __align__(128) Words dynamic_block[];
  return dynamic_block;
}

// Two bfloat16, to the nearest.
__device__ inline unsigned Pack(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two bfloat16 products; exact if representable, denormal ones too. The addend is -0.
__device__ inline unsigned MultiplyPairs(unsigned a, unsigned b) {
  unsigned product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

// sums [16, 8] += a [16, 16] b [16, 8], bfloat16 factors, float32 sums. PTX ISA, matrix fragments for mma.m16n8k16: with
// lane = 4 group + quarter, a is rows group and group + 8 at inputs 2 quarter and 2 quarter + 1, then the same at inputs
// 8 further; b is column group at these inputs; sums are rows group and group + 8 at columns 2 quarter, 2 quarter + 1.
__device__ inline void MultiplyAdd(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

namespace {

using Bytes = const unsigned char*;
using Half = unsigned short;  // the bits of a bfloat16

constexpr int kWarps = 4;  // per block
constexpr int kThreads = 32 * kWarps;

__device__ inline float ToFloat(Half bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }

// The first, or the second, of a pair.
__device__ inline float LowerFloat(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ inline float UpperFloat(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// To the nearest, ties to even.
__device__ inline Half ToHalf(float value) {
  const unsigned bits = __float_as_uint(value);
  if (value != value) return 0x7fc0;
  return static_cast<Half>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

__device__ inline unsigned Twice(unsigned half) { return half | half << 16; }

// The bits 0-15, or 16-31, of two words.
__device__ inline unsigned Lower(unsigned first, unsigned second) { return (first & 0xffffu) | second << 16; }
__device__ inline unsigned Upper(unsigned first, unsigned second) { return first >> 16 | (second & 0xffff0000u); }

}  // namespace
