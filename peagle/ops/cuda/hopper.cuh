// The instructions of Hopper GPUs that experts_hopper.cu uses. The tests compile its kernels for the CPU, with their own
// functions in place of those under __CUDACC_RTC__.

namespace tiles {

using Word = unsigned;
using Policy = unsigned long long;

#if defined(__CUDACC_RTC__)

// A grid launched with programmatic serialisation begins while the grid before still runs. WaitForGrid: waits until all
// grids before are done and their results are visible. LetNextBegin: the next grid may begin.
__device__ inline void WaitForGrid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void LetNextBegin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ inline Word SharedAddress(const void* at) { return static_cast<Word>(__cvta_generic_to_shared(at)); }

// Barriers in shared memory: a fill is complete when its arrivals and its bytes have arrived.
__device__ inline void InitBarrier(Word barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ inline void Expect(Word barrier, Word bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void Arrive(Word barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void Wait(Word barrier, Word parity) {
  Word done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}
__device__ inline void Copy(Word to, const void* from, Word bytes, Word barrier, Policy policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ inline void ProductsFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int left>
__device__ inline void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

__device__ inline uint4 LoadShared16(Word from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}
__device__ inline Word LoadShared4(Word from) {
  Word v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
  return v;
}

// Of copies: data that nothing reads again, and data that other blocks read.
__device__ inline Policy ReadOnce() {
  Policy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline Policy ReadAgain() {
  Policy policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Lets other threads and copies see the barriers that this thread has made.
__device__ inline void ShowBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Of a warpgroup: has so many registers a thread from here on.
template <int count>
__device__ inline void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ inline void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// Whether this is the one thread of its warp that issues copies. With this instruction the compiler makes no loop of them.
__device__ inline bool IsElected() {
  Word elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected;
}

// Keeps a register where products that still run may read or write it.
__device__ inline void Keep(Word& value) { asm volatile("" : "+r"(value)::"memory"); }
__device__ inline void Keep(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// Of a warp: transposes a matrix of 8 by 8 halves, of which lane 4 i + j has columns 2 j and 2 j + 1 of row i.
__device__ inline Word Transpose(Word pair) {
  Word turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// A barrier for threads 0..127 of a block.
__device__ inline void WaitForFourWarps() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

#endif

}  // namespace tiles
