// The product on any device from compute capability 8.0 on: every warp copies with cp.async into a ring of padded rows
// and multiplies its slab with mma.sync, one unit of depth at a time.
#pragma once

#include "../dense/cuda_portable.cuh"
#include "cuda_fragments.cuh"

namespace kiln::cuda {

struct QuantOperands {
  const void* x;
  const void* weight;
  int depth, row_bytes;
};

template <typename T, WeightFormat kFormat, int kRows, bool kSwiGlu>
struct QuantPortableRing {
  static constexpr int kThreads = kConsumers * kWarp, kRowBytes = kUnitBytes<kFormat>, kWeightRow = kRowBytes + 16;
  static constexpr int kXRow = kUnit * 2 + 16;  // padded: a row's neighbours lie in other banks
  static constexpr int kWeightBytes = kTileRows * kWeightRow, kBytes = kWeightBytes + kRows * kXRow;
  static constexpr int kFitting = 96 * 1024 / kBytes, kStages = kFitting < 4 ? kFitting : 4;  // blocks may have 99 KB
  static constexpr size_t kSharedBytes = kStages * kBytes;
  static_assert(kStages >= 2);

  const QuantOperands& operands;
  const QuantWork& work;
  uint32_t base;
  int step, fetched, to, stage = 0;

  // Weight rows stand in a tile as finish() expects them.
  __device__ const char* weight_row(int tile, int row) const {
    int64_t at = static_cast<int64_t>(tile) * kTileRows + row;
    if constexpr (kSwiGlu) at = static_cast<int64_t>(tile * kSlabs + row / kSlab) * (kSlab / 2) + row % 8;
    if (at >= work.linear.width) return nullptr;
    if (kSwiGlu && row % kSlab >= 8) at += work.linear.width;
    return static_cast<const char*>(operands.weight) + at * operands.row_bytes;
  }

  __device__ void fetch_weight(int number, int into) const {
    constexpr int kVectors = kRowBytes / 16;
    const int tile = number / work.linear.steps, byte = (number - tile * work.linear.steps) * kRowBytes;
#pragma unroll
    for (int i = 0; i < kTileRows * kVectors / kThreads; i++) {
      const int at = threadIdx.x + i * kThreads, row = at / kVectors, vector = at % kVectors * 16;
      const char* from = weight_row(tile, row);
      const bool inside = from && byte + vector < operands.row_bytes;
      copy_vector(base + into * kBytes + row * kWeightRow + vector, inside ? from + byte + vector : operands.weight,
                  inside);
    }
  }

  __device__ void fetch_x(int number, int into) const {
    constexpr int kVectors = kUnit / kVector;
    const int depth = number % work.linear.steps * kUnit;
    for (int at = threadIdx.x; at < kRows * kVectors; at += kThreads) {
      const int row = at / kVectors, vector = at % kVectors;
      const bool inside = row < work.linear.rows && depth + vector * kVector < operands.depth;
      const T* x = static_cast<const T*>(operands.x);
      copy_vector(base + into * kBytes + kWeightBytes + row * kXRow + vector * 16,
                  inside ? x + static_cast<int64_t>(row) * operands.depth + depth + vector * kVector : x, inside);
    }
  }

  __device__ static void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

  __device__ void begin() {
    for (int i = 0; i < kStages - 1; i++)
      if (step + i < to) fetch_weight(step + i, i);
    wait_for_previous();
    for (int i = 0; i < kStages - 1; i++) {
      if (step + i < to) fetch_x(step + i, i);
      commit();
    }
    fetched = step + kStages - 1;
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

  // part += a stage's weights x^T, in fragments.
  __device__ __forceinline__ void multiply_unit(float (&part)[kRows / 2]) const {
    const int lane = threadIdx.x % kWarp, slab = threadIdx.x / kWarp;
    const uint32_t at = base + stage * kBytes, weights = at + (slab * kSlab + lane / 4) * kWeightRow + lane % 4 * 4;
    const uint32_t x = at + kWeightBytes + lane % 8 * kXRow + lane / 8 * 16;
    uint32_t a[kUnitProducts][4];
    load_fragments<T, kFormat>(
        [&](int half, int chunk) { return load_word(weights + 8 * half * kWeightRow + chunk * 16); }, a);
#pragma unroll
    for (int g = 0; g < kRows / kGroup; g++) {
      float d[4] = {part[4 * g], part[4 * g + 1], part[4 * g + 2], part[4 * g + 3]};
#pragma unroll
      for (int k = 0; k < kUnitProducts; k += 2) {
        uint32_t b[4];
        load_matrices(b, x + g * kGroup * kXRow + k * 32);
        mma<T>(d, a[k], b[0], b[1]);
        mma<T>(d, a[k + 1], b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) part[4 * g + i] = d[i];
    }
  }

  // Sums of the block's next `count` steps, all of one tile.
  __device__ void operator()(int count, float (&sums)[kRows / 2]) {
    const int tile = step / work.linear.steps;
    GroupWalk<kSwiGlu> group(work, tile, step - tile * work.linear.steps);
    float part[kRows / 2] = {};
#pragma unroll
    for (int i = 0; i < kRows / 2; i++) sums[i] = 0;
    for (int i = 0; i < count; i++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
      __syncthreads();
      multiply_unit(part);
      next();
      if (!group.ends() && i + 1 < count) continue;
      group.template add<kRows>(part, sums);
#pragma unroll
      for (int j = 0; j < kRows / 2; j++) part[j] = 0;
    }
    step += count;
  }
};

template <typename T, WeightFormat kFormat, int kRows, bool kSwiGlu>
__global__ void __launch_bounds__(kConsumers* kWarp)
    quant_linear_portable(const __grid_constant__ QuantOperands operands, const __grid_constant__ QuantWork work) {
  extern __shared__ uint4 dynamic_vectors[];
  let_next_start();
  QuantPortableRing<T, kFormat, kRows, kSwiGlu> ring{operands,
                                                     work,
                                                     static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_vectors)),
                                                     work.linear.begin(blockIdx.x),
                                                     0,
                                                     work.linear.begin(blockIdx.x + 1)};
  ring.begin();
  consume<T, kRows, kSwiGlu>(work.linear, ring);
}

}  // namespace kiln::cuda
