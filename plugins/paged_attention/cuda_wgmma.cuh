// Instructions that only sm_90a has: warpgroup matrix products, tensor copies, and the barriers that they complete on.
// Knows no kernel. Include it where __CUDA_ARCH_FEAT_SM90_ALL guards the use.
#pragma once

#include <cuda.h>

#include "cuda_device.cuh"

namespace kiln::cuda {

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_barrier(uint32_t barrier, int phase) {
  uint32_t done;
  do asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
  while (!done);
}

// Copies a box of a tensor to shared memory; its bytes complete on the barrier.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      ::"r"(to), "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// What ordinary stores put into shared memory becomes visible to tensor instructions.
__device__ __forceinline__ void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kThreads>
__device__ __forceinline__ void sync_threads(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler may not move what reads or writes these registers across this.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(registers[i])::"memory");
}

// Descriptor of a matrix in shared memory, in atoms of 8 rows of 128 swizzled bytes. `row_step`: bytes from one 8 rows
// to the next. `chunk_step`: bytes from one 64 columns to the next, where those are the product's outer dimension. What
// differs among the matrices of a product is added to `low`, so that it takes one instruction.
struct Matrix {
  uint32_t low, high;

  __device__ __forceinline__ Matrix(uint32_t address, int row_step, int chunk_step = 16)
      : low((address >> 4 & 0x3fff) | static_cast<uint32_t>(chunk_step >> 4) << 16), high(row_step >> 4 | 1u << 30) {
    low = __shfl_sync(kAll, low, 0);  // so that it is known to be the same in all lanes
    asm volatile("" : "+r"(low));     // and its sums are not kept in registers
  }
  __device__ __forceinline__ uint64_t after(int bytes) const {
    return static_cast<uint64_t>(high) << 32 | (low + (bytes >> 4));
  }
};

#define KILN_F8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define KILN_F32(d, i) KILN_F8(d, i), KILN_F8(d, i + 8), KILN_F8(d, i + 16), KILN_F8(d, i + 24)
#define KILN_R32                                                                                                     \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
  "%31"
#define KILN_R64                                                                                                      \
  KILN_R32                                                                                                            \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"

// d[64, n] = a[64, 16] b, with `accumulate` added to what d holds; n is twice the size of d. a is in shared memory (b
// is then [n, 16]) or in registers, as accumulators of a product before (b is then [16, n]).
template <typename T>
struct Products;

#define KILN_PRODUCTS(T, TYPE)                                                                                      \
  template <>                                                                                                       \
  struct Products<T> {                                                                                              \
    static __device__ void run(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {                            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" KILN_R32                        \
                   "}, %32, %33, p, 1, 1, 0, 0;\n}"                                                                 \
                   : KILN_F32(d, 0)                                                                                 \
                   : "l"(a), "l"(b), "r"(accumulate));                                                              \
    }                                                                                                               \
    static __device__ void run(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {                            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" KILN_R64                       \
                   "}, %64, %65, p, 1, 1, 0, 0;\n}"                                                                 \
                   : KILN_F32(d, 0), KILN_F32(d, 32)                                                                \
                   : "l"(a), "l"(b), "r"(accumulate));                                                              \
    }                                                                                                               \
    static __device__ void run(float (&d)[32], const uint32_t* a, uint64_t b) {                                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                       \
                   "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" KILN_R32                        \
                   "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"                                                   \
                   : KILN_F32(d, 0)                                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                           \
    }                                                                                                               \
    static __device__ void run(float (&d)[64], const uint32_t* a, uint64_t b) {                                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                       \
                   "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" KILN_R64                       \
                   "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"                                                   \
                   : KILN_F32(d, 0), KILN_F32(d, 32)                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                           \
    }                                                                                                               \
  };
KILN_PRODUCTS(__half, "f16")
KILN_PRODUCTS(__nv_bfloat16, "bf16")
#undef KILN_PRODUCTS
#undef KILN_R64
#undef KILN_R32
#undef KILN_F32
#undef KILN_F8

}  // namespace kiln::cuda
