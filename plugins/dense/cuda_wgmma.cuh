// wgmma (sm_90a): d[64, kRows] += a[64, 16] b[kRows, 16]^T, both operands in shared memory as rows of 64 values with
// the 128-byte swizzle, sums in registers of a warpgroup. Knows no kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kiln::cuda {

// Describes rows of 128 bytes, swizzled, 8 of them 1024 bytes apart from the next 8 (PTX ISA, "matrix descriptor").
__device__ inline uint64_t matrix_descriptor(uint32_t shared_address) {
  constexpr uint64_t kLeading = 1ull << 16, kStride = (1024ull / 16) << 32, kSwizzle128 = 1ull << 62;
  return kLeading | kStride | kSwizzle128 | ((shared_address & 0x3ffff) >> 4);
}

// By how much a descriptor moves for the next 16 values of depth.
constexpr uint64_t kNextDepth = 32 / 16;

template <typename T, int kRows>
struct Wgmma;

#define KILN_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KILN_F16(i) KILN_F4(i), KILN_F4(i + 4), KILN_F4(i + 8), KILN_F4(i + 12)
#define KILN_D8 \
  "%0, %1, %2, %3"
#define KILN_D16 \
  "%0, %1, %2, %3, %4, %5, %6, %7"
#define KILN_D32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"

#define KILN_WGMMA(T, NAME, ROWS, A, B, P, ...)                                                                     \
  template <>                                                                                                       \
  struct Wgmma<T, ROWS> {                                                                                           \
    static __device__ void run(float (&d)[ROWS / 2], uint64_t a, uint64_t b, bool accumulate) {                     \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32." NAME \
                   "." NAME " {" KILN_D##ROWS "}, " A ", " B ", p, 1, 1, 0, 0;}"                                    \
                   : __VA_ARGS__                                                                                    \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                            \
    }                                                                                                               \
  };
#define KILN_WGMMA_BOTH(ROWS, A, B, P, ...)                      \
  KILN_WGMMA(__half, "f16", ROWS, A, B, P, __VA_ARGS__)          \
  KILN_WGMMA(__nv_bfloat16, "bf16", ROWS, A, B, P, __VA_ARGS__)
KILN_WGMMA_BOTH(8, "%4", "%5", "%6", KILN_F4(0))
KILN_WGMMA_BOTH(16, "%8", "%9", "%10", KILN_F4(0), KILN_F4(4))
KILN_WGMMA_BOTH(32, "%16", "%17", "%18", KILN_F16(0))

#undef KILN_WGMMA_BOTH
#undef KILN_WGMMA
#undef KILN_D8
#undef KILN_D16
#undef KILN_D32
#undef KILN_F16
#undef KILN_F4

__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

}  // namespace kiln::cuda
