// The product on Hopper (sm_90a): dense/cuda_hopper.cuh's ring and producer, 128 bytes of each weight row a stage.
// The consumers turn them into 16-bit fragments in registers. Up to 32 rows these go to mma.sync, which needs no
// waiting for a group of products (H200, 1 row of width 128256, depth 4096: 134 us against 158), beyond to wgmma, which
// reads x once for four warps.
#pragma once

#include "../dense/cuda_hopper.cuh"
#include "../dense/cuda_portable.cuh"
#include "cuda_fragments.cuh"
#include "cuda_wgmma.cuh"

namespace kiln::cuda {

template <WeightFormat kFormat, int kRows>
struct QuantRing {
  static constexpr int kRowBytes = 128, kUnits = kRowBytes / kUnitBytes<kFormat>, kStep = kUnits * kUnit;
  static constexpr int kWeightBytes = kTileRows * kRowBytes, kBoxes = kStep / 64, kBoxBytes = kRows * 128;
  static constexpr int kBytes = kWeightBytes + kBoxes * kBoxBytes;
  static constexpr int kStages = 200 * 1024 / kBytes;
  static constexpr size_t kSharedBytes = kStages * kBytes + kSharedAlignment;
};

// The one thread that feeds the ring with the block's steps.
template <typename Shape, bool kSwiGlu>
__device__ void produce_quantised(const LinearWork& work, const CUtensorMap& weight, const CUtensorMap& x,
                                  uint32_t ring, uint64_t* full, uint64_t* empty) {
  const int from = work.begin(blockIdx.x), to = work.begin(blockIdx.x + 1);
  const uint64_t policy = read_once_policy();
  asm volatile("prefetch.tensormap [%0];" ::"l"(&weight) : "memory");
  asm volatile("prefetch.tensormap [%0];" ::"l"(&x) : "memory");
  auto load_weight = [&](int step, int stage) {
    const int tile = step / work.steps, byte = (step - tile * work.steps) * Shape::kRowBytes;
    const uint32_t at = ring + stage * Shape::kBytes;
    barrier_expect(full + stage, Shape::kBytes);
    if constexpr (kSwiGlu) copy_interleaved_box(at, weight, byte, tile * kSlabs, full + stage, policy);
    else copy_box(at, weight, byte, tile * kTileRows, full + stage, policy);
  };
  auto load_x = [&](int step, int stage) {
    const int depth = step % work.steps * Shape::kStep;
    const uint32_t at = ring + stage * Shape::kBytes + Shape::kWeightBytes;
#pragma unroll
    for (int i = 0; i < Shape::kBoxes; i++) copy_box(at + i * Shape::kBoxBytes, x, depth + i * 64, full + stage);
  };
  // Weights are nobody's output: the first ones need not wait.
  const int early = min(Shape::kStages, to - from);
  for (int i = 0; i < early; i++) load_weight(from + i, i);
  wait_for_previous();
  for (int i = 0; i < early; i++) load_x(from + i, i);
  Stage stage;
  for (int step = from + early; step < to; step++) {
    barrier_wait(empty + stage.index, stage.parity);
    load_weight(step, stage.index);
    load_x(step, stage.index);
    stage.next(Shape::kStages);
  }
}

// The consumers' side of the ring.
template <typename T, WeightFormat kFormat, int kRows, bool kSwiGlu>
struct QuantConsumer {
  using Shape = QuantRing<kFormat, kRows>;

  const QuantWork& work;
  const uint32_t ring;
  uint64_t* const full;
  uint64_t* const empty;
  int step;  // the block's next one
  Stage stage;

  // This thread's fragments of the weights of a unit of a stage.
  __device__ __forceinline__ void load(uint32_t at, int unit, uint32_t (&a)[kUnitProducts][4]) const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, row = warp * kSlab + lane / 4;
    constexpr int kChunks = kUnitBytes<kFormat> / 16;
    load_fragments<T, kFormat>(
        [&](int half, int chunk) {
          const int swizzled = (unit * kChunks + chunk) ^ (lane / 4);  // rows 8 apart share it
          return load_word(at + (row + 8 * half) * Shape::kRowBytes + swizzled * 16 + lane % 4 * 4);
        },
        a);
  }

  // part (+)= weights x^T over a unit of a stage.
  __device__ __forceinline__ void multiply_unit(uint32_t at, int unit, bool accumulate,
                                                float (&part)[kRows / 2]) const {
    uint32_t a[kUnitProducts][4];
    load(at, unit, a);
    const uint32_t x = at + Shape::kWeightBytes + unit * 2 * Shape::kBoxBytes;
    if constexpr (kRows <= kEqualRows) {
      multiply_warp(x, a, accumulate, part);
    } else {
      const uint64_t b = matrix_descriptor(x);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < kUnitProducts; k++)
        WgmmaOfRegisters<T, kRows>::run(part, a[k], b + k / 4 * (Shape::kBoxBytes / 16) + k % 4 * kNextDepth,
                                        accumulate || k > 0);
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int j = 0; j < kRows / 2; j++) asm volatile("" : "+f"(part[j])::"memory");  // no use before the wait
    }
  }

  // The same by mma.sync; x is at `x`, in boxes of 64 columns, swizzled. Two sums each, so that products overlap.
  __device__ __forceinline__ void multiply_warp(uint32_t x, const uint32_t (&a)[kUnitProducts][4], bool accumulate,
                                                float (&part)[kRows / 2]) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int g = 0; g < kRows / kGroup; g++) {
      float even[4] = {}, odd[4] = {};
#pragma unroll
      for (int k = 0; k < kUnitProducts; k += 2) {
        const int chunk = k % 4 * 2 + lane / 8;  // the matrices of two products
        uint32_t b[4];
        load_matrices(b, x + k / 4 * Shape::kBoxBytes + (g * kGroup + lane % 8) * 128 + (chunk ^ lane % 8) * 16);
        mma<T>(even, a[k], b[0], b[1]);
        mma<T>(odd, a[k + 1], b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) part[4 * g + i] = (accumulate ? part[4 * g + i] : 0) + even[i] + odd[i];
    }
  }

  // Sums of the block's next `count` steps, all of one tile.
  __device__ __forceinline__ void operator()(int count, float (&sums)[kRows / 2]) {
    const int tile = step / work.linear.steps;
    GroupWalk<kSwiGlu> group(work, tile, (step - tile * work.linear.steps) * Shape::kUnits);
    float part[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows / 2; i++) sums[i] = 0;
    bool fresh = true;  // nothing is in `part`
    for (int i = 0; i < count; i++) {
      barrier_wait(full + stage.index, stage.parity);
      const uint32_t at = ring + stage.index * Shape::kBytes;
#pragma unroll
      for (int u = 0; u < Shape::kUnits; u++) {
        multiply_unit(at, u, !fresh, part);
        fresh = group.ends();
        if (fresh) group.template add<kRows>(part, sums);
      }
      if (threadIdx.x % kWarp == 0) barrier_arrive(empty + stage.index);
      stage.next(Shape::kStages);
    }
    if (!fresh) group.template add<kRows>(part, sums);
    step += count;
  }
};

template <typename T, WeightFormat kFormat, int kRows, bool kSwiGlu>
__global__ void __launch_bounds__(kHopperThreads, 1)
    quant_linear_hopper(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,
                        const __grid_constant__ QuantWork work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = QuantRing<kFormat, kRows>;
  extern __shared__ uint8_t dynamic[];
  __shared__ uint64_t full[Shape::kStages], empty[Shape::kStages];
  const uint32_t ring = (shared_address(dynamic) + kSharedAlignment - 1) & ~(kSharedAlignment - 1);
  let_next_start();
  if (threadIdx.x == 0) init_ring(full, empty, Shape::kStages);
  __syncthreads();
  if (threadIdx.x >= kConsumers * kWarp) {
    if (threadIdx.x == kConsumers * kWarp)
      produce_quantised<Shape, kSwiGlu>(work.linear, weight, x, ring, full, empty);
    return;
  }
  wait_for_previous();
  QuantConsumer<T, kFormat, kRows, kSwiGlu> consumer{work, ring, full, empty, work.linear.begin(blockIdx.x), Stage()};
  consume<T, kRows, kSwiGlu>(work.linear, consumer);
#else
  __trap();  // the launch is for compute capability 9.0 alone
#endif
}

}  // namespace kiln::cuda
