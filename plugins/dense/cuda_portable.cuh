// The product on any device from compute capability 8.0 on: every warp copies with cp.async into a ring of padded rows
// and multiplies its slab with mma.sync. Knows nothing of how the work is divided (cuda_work.cuh).
#pragma once

#include "cuda_work.cuh"

namespace kiln::cuda {

template <typename T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ inline void mma<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Copies 16 bytes, or zeros.
__device__ inline void copy_vector(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}

struct PortableOperands {
  const void* x;
  const void* weight;
  int depth;
};

template <typename T, int kRows, bool kSwiGlu>
struct PortableRing {
  static constexpr int kStages = 4;  // at most 92 KB; the smallest of these devices give a block 99 KB
  static constexpr int kRowBytes = kStep * 2 + 16;  // padded: a row's neighbours lie in other banks
  static constexpr int kBytes = (kTileRows + kRows) * kRowBytes, kVectors = kStep / kVector;
  static constexpr size_t kSharedBytes = kStages * kBytes;
  static constexpr int kThreads = kConsumers * kWarp;

  const PortableOperands& operands;
  const LinearWork& work;
  uint32_t base;
  int fetched, to, stage = 0;

  // Weight rows stand in a tile as finish() expects them.
  __device__ const T* weight_row(int tile, int row) const {
    int64_t at = static_cast<int64_t>(tile) * kTileRows + row;
    bool inside = at < work.width;
    if constexpr (kSwiGlu) {
      at = static_cast<int64_t>(tile * kSlabs + row / kSlab) * (kSlab / 2) + row % 8;
      inside = at < work.width;
      if (row % kSlab >= 8) at += work.width;
    }
    return inside ? static_cast<const T*>(operands.weight) + at * operands.depth : nullptr;
  }

  __device__ void fetch_weight(int step, int into) const {
    const int tile = step / work.steps, depth = (step - tile * work.steps) * kStep;
#pragma unroll
    for (int i = 0; i < kTileRows * kVectors / kThreads; i++) {
      const int at = threadIdx.x + i * kThreads, row = at / kVectors, vector = at % kVectors;
      const T* from = weight_row(tile, row);
      const bool inside = from && depth + vector * kVector < operands.depth;
      copy_vector(base + into * kBytes + row * kRowBytes + vector * 16,
                  inside ? from + depth + vector * kVector : operands.weight, inside);
    }
  }

  __device__ void fetch_x(int step, int into) const {
    const int depth = step % work.steps * kStep;
    for (int at = threadIdx.x; at < kRows * kVectors; at += kThreads) {
      const int row = at / kVectors, vector = at % kVectors;
      const bool inside = row < work.rows && depth + vector * kVector < operands.depth;
      const T* x = static_cast<const T*>(operands.x);
      copy_vector(base + into * kBytes + (kTileRows + row) * kRowBytes + vector * 16,
                  inside ? x + static_cast<int64_t>(row) * operands.depth + depth + vector * kVector : x, inside);
    }
  }

  __device__ static void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

  __device__ void begin(int from) {
    for (int i = 0; i < kStages - 1; i++)
      if (from + i < to) fetch_weight(from + i, i);
    wait_for_previous();
    for (int i = 0; i < kStages - 1; i++) {
      if (from + i < to) fetch_x(from + i, i);
      commit();
    }
    fetched = from + kStages - 1;
  }

  __device__ void next() {
    const int into = stage == 0 ? kStages - 1 : stage - 1;
    if (fetched < to) {
      fetch_weight(fetched, into);
      fetch_x(fetched, into);
    }
    commit();
    fetched++;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  __device__ void multiply(int count, float (&sums)[kRows / 2]) {
    const int lane = threadIdx.x % kWarp, slab = threadIdx.x / kWarp;
    float d[kRows / kGroup][4] = {};
    for (int i = 0; i < count; i++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
      __syncthreads();
      const uint32_t at = base + stage * kBytes;
      const uint32_t a_row = at + (slab * kSlab + lane % 16) * kRowBytes + lane / 16 * 16;
      const uint32_t b_row = at + (kTileRows + lane % 8) * kRowBytes + lane / 8 * 16;
#pragma unroll
      for (int k = 0; k < kStep / 32; k++) {
        uint32_t a[2][4];
        load_matrices(a[0], a_row + k * 64);
        load_matrices(a[1], a_row + k * 64 + 32);
#pragma unroll
        for (int g = 0; g < kRows / kGroup; g++) {
          uint32_t b[4];
          load_matrices(b, b_row + g * kGroup * kRowBytes + k * 64);
          mma<T>(d[g], a[0], b[0], b[1]);
          mma<T>(d[g], a[1], b[2], b[3]);
        }
      }
      next();
    }
#pragma unroll
    for (int i = 0; i < kRows / 2; i++) sums[i] = d[i / 4][i % 4];
  }
};

template <typename T, int kRows, bool kSwiGlu>
__global__ void __launch_bounds__(kConsumers* kWarp)
    linear_portable(const __grid_constant__ PortableOperands operands, const __grid_constant__ LinearWork work) {
  extern __shared__ uint4 dynamic_vectors[];
  let_next_start();
  const int from = work.begin(blockIdx.x);
  PortableRing<T, kRows, kSwiGlu> ring{operands, work,
                                       static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_vectors)), from,
                                       work.begin(blockIdx.x + 1)};
  ring.begin(from);
  consume<T, kRows, kSwiGlu>(work, [&](int count, float (&sums)[kRows / 2]) { ring.multiply(count, sums); });
}

}  // namespace kiln::cuda
