// wgmma (sm_90a) with the first operand in registers: d[64, kRows] += a[64, 16] b[kRows, 16]^T. Descriptors, fences and
// waits are in dense/cuda_wgmma.cuh. Knows no kernel.
#pragma once

#include "../dense/cuda_wgmma.cuh"

namespace kiln::cuda {

template <typename T, int kRows>
struct WgmmaOfRegisters;

#define KILN_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KILN_F16(i) KILN_F4(i), KILN_F4(i + 4), KILN_F4(i + 8), KILN_F4(i + 12)
#define KILN_D8 "%0, %1, %2, %3"
#define KILN_D16 KILN_D8 ", %4, %5, %6, %7"
#define KILN_D32 KILN_D16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KILN_D64 KILN_D32 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

#define KILN_WGMMA(T, NAME, ROWS, REST, P, ...)                                                                      \
  template <>                                                                                                        \
  struct WgmmaOfRegisters<T, ROWS> {                                                                                 \
    static __device__ void run(float (&d)[ROWS / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {          \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #ROWS "k16.f32." NAME \
                   "." NAME " {" KILN_D##ROWS "}, " REST ", p, 1, 1, 0;}"                                            \
                   : __VA_ARGS__                                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));         \
    }                                                                                                                \
  };
#define KILN_WGMMA_BOTH(ROWS, REST, P, ...)             \
  KILN_WGMMA(__half, "f16", ROWS, REST, P, __VA_ARGS__) \
  KILN_WGMMA(__nv_bfloat16, "bf16", ROWS, REST, P, __VA_ARGS__)
KILN_WGMMA_BOTH(8, "{%4, %5, %6, %7}, %8", "%9", KILN_F4(0))
KILN_WGMMA_BOTH(16, "{%8, %9, %10, %11}, %12", "%13", KILN_F4(0), KILN_F4(4))
KILN_WGMMA_BOTH(32, "{%16, %17, %18, %19}, %20", "%21", KILN_F16(0))
KILN_WGMMA_BOTH(64, "{%32, %33, %34, %35}, %36", "%37", KILN_F16(0), KILN_F16(16))

#undef KILN_WGMMA_BOTH
#undef KILN_WGMMA
#undef KILN_D8
#undef KILN_D16
#undef KILN_D32
#undef KILN_D64
#undef KILN_F16
#undef KILN_F4

}  // namespace kiln::cuda
