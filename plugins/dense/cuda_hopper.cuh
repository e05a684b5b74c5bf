// The product on Hopper (sm_90a): one warp feeds a ring of shared-memory stages through the bulk tensor copy engine,
// two warpgroups multiply with wgmma. The weight's rows are the 64 rows of wgmma, so that a few rows of x waste
// nothing, and x is its narrow operand. Knows nothing of how the work is divided (cuda_work.cuh).
//
// The ring takes most of a multiprocessor's shared memory, for two reasons. It hides what lies between one product's
// last byte and the next one's first: blocks of the next launch start where blocks of this one end, and fill their
// rings while they wait. And no two blocks of a launch can meet on one multiprocessor, which would then take twice as
// long as the others: rings of 100 KB did that wherever a launch found some of the multiprocessors taken, by attention
// say.
#pragma once

#include <cuda.h>

#include "cuda_wgmma.cuh"
#include "cuda_work.cuh"

namespace kiln::cuda {

constexpr int kStepBytes = kStep * 2, kWarpgroupRows = 64, kSharedAlignment = 1024;
constexpr int kHopperThreads = (kConsumers + 1) * kWarp;

template <int kRows>
struct Ring {
  static constexpr int kWeightBytes = kTileRows * kStepBytes, kBytes = kWeightBytes + kRows * kStepBytes;
  static constexpr int kStages = 200 * 1024 / kBytes;
  static constexpr size_t kSharedBytes = kStages * kBytes + kSharedAlignment;
};

struct Stage {
  int index = 0;
  uint32_t parity = 0;
  __device__ void next(int stages) {
    if (++index == stages) {
      index = 0;
      parity ^= 1;
    }
  }
};

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ inline void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ inline void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ inline void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

// By one thread, before the others are let on: the stages are empty.
__device__ inline void init_ring(uint64_t* full, uint64_t* empty, int stages) {
  for (int i = 0; i < stages; i++) {
    barrier_init(full + i, 1);
    barrier_init(empty + i, kConsumers);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline uint64_t read_once_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Weights, which a step reads once.
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, int depth, int row, uint64_t* barrier,
                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}],"
      " [%4], %5;" ::"r"(to),
      "l"(&map), "r"(depth), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// The same of a packed gate and up projection: 8 rows of the one, 8 of the other, and so on.
__device__ inline void copy_interleaved_box(uint32_t to, const CUtensorMap& map, int depth, int eight_rows,
                                            uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(depth), "r"(0), "r"(eight_rows), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Rows of x, which every block reads.
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, int depth, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(&map), "r"(depth), "r"(0), "r"(shared_address(barrier))
      : "memory");
}

// The one thread that feeds the ring with the block's steps.
template <int kRows, bool kSwiGlu>
__device__ void produce(const LinearWork& work, const CUtensorMap& weight, const CUtensorMap& x, uint32_t ring,
                        uint64_t* full, uint64_t* empty) {
  using Shape = Ring<kRows>;
  const int from = work.begin(blockIdx.x), to = work.begin(blockIdx.x + 1);
  const uint64_t policy = read_once_policy();
  asm volatile("prefetch.tensormap [%0];" ::"l"(&weight) : "memory");
  asm volatile("prefetch.tensormap [%0];" ::"l"(&x) : "memory");
  auto load_weight = [&](int step, int stage) {
    const int tile = step / work.steps, depth = (step - tile * work.steps) * kStep;
    const uint32_t at = ring + stage * Shape::kBytes;
    barrier_expect(full + stage, Shape::kBytes);
    if constexpr (kSwiGlu) copy_interleaved_box(at, weight, depth, tile * kSlabs, full + stage, policy);
    else copy_box(at, weight, depth, tile * kTileRows, full + stage, policy);
  };
  auto load_x = [&](int step, int stage) {
    copy_box(ring + stage * Shape::kBytes + Shape::kWeightBytes, x, step % work.steps * kStep, full + stage);
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

// Sums of `count` steps out of the ring. Called by all consumers.
template <typename T, int kRows>
__device__ void multiply_steps(int count, uint32_t ring, uint64_t* full, uint64_t* empty, Stage& stage,
                               float (&sums)[kRows / 2]) {
  using Shape = Ring<kRows>;
  const int warpgroup = threadIdx.x / (4 * kWarp);
  for (int i = 0; i < count; i++) {
    barrier_wait(full + stage.index, stage.parity);
    const uint32_t at = ring + stage.index * Shape::kBytes;
    const uint64_t a = matrix_descriptor(at + warpgroup * kWarpgroupRows * kStepBytes);
    const uint64_t b = matrix_descriptor(at + Shape::kWeightBytes);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kStep / 16; k++)
      Wgmma<T, kRows>::run(sums, a + k * kNextDepth, b + k * kNextDepth, i > 0 || k > 0);
    wgmma_commit();
    wgmma_wait<0>();  // so short a product is not worth a stage that waits for the next one
#pragma unroll
    for (int j = 0; j < kRows / 2; j++) asm volatile("" : "+f"(sums[j])::"memory");  // no use before the wait
    if (threadIdx.x % kWarp == 0) barrier_arrive(empty + stage.index);
    stage.next(Shape::kStages);
  }
}

template <typename T, int kRows, bool kSwiGlu>
__global__ void __launch_bounds__(kHopperThreads, 1)
    linear_hopper(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,
                  const __grid_constant__ LinearWork work) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kStages = Ring<kRows>::kStages;
  extern __shared__ uint8_t dynamic[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const uint32_t ring = (shared_address(dynamic) + kSharedAlignment - 1) & ~(kSharedAlignment - 1);
  let_next_start();
  if (threadIdx.x == 0) init_ring(full, empty, kStages);
  __syncthreads();
  if (threadIdx.x >= kConsumers * kWarp) {
    if (threadIdx.x == kConsumers * kWarp) produce<kRows, kSwiGlu>(work, weight, x, ring, full, empty);
    return;
  }
  wait_for_previous();
  Stage stage;
  consume<T, kRows, kSwiGlu>(work, [&](int count, float (&sums)[kRows / 2]) {
    multiply_steps<T, kRows>(count, ring, full, empty, stage, sums);
  });
#else
  __trap();  // the launch is for compute capability 9.0 alone
#endif
}

}  // namespace kiln::cuda
