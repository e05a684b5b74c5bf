// From weights of 8 or 4 bits in shared memory to the operands of 16-bit tensor products. Knows no kernel.
//
// Work goes in units of 128 values of depth, eight products of 16. In a unit, a thread has rows l / 4 and l / 4 + 8 of
// its warp's slab, and of each chunk of 16 bytes the word l % 4: cuda_packing.py has put there the values that this
// thread holds in the fragments of mma.sync and wgmma.
#pragma once

#include "../cuda_bytes.cuh"
#include "../dense/cuda_work.cuh"
#include "cuda.h"

namespace kiln::cuda {

constexpr int kUnit = 128, kUnitProducts = kUnit / 16;

template <WeightFormat kFormat>
constexpr int kUnitBytes = kFormat == WeightFormat::kInt4 ? kUnit / 2 : kUnit;

struct QuantWork {
  LinearWork linear;  // its steps are the kernel's own
  const float* scale;
  int weight_rows, groups, group_units;  // group_units: units that share a scale
};

// `word(half, chunk)` is this thread's word of a chunk of row l / 4 + 8 * half.
template <typename T, WeightFormat kFormat, typename Word>
__device__ __forceinline__ void load_fragments(Word word, uint32_t (&a)[kUnitProducts][4]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if constexpr (kFormat == WeightFormat::kInt4) {
#pragma unroll
      for (int k = 0; k < kUnitProducts; k += 2) {
        uint32_t pairs[4];
        expand_nibbles<T>(word(half, k / 2), pairs);
        a[k][half] = pairs[0], a[k][half + 2] = pairs[1];
        a[k + 1][half] = pairs[2], a[k + 1][half + 2] = pairs[3];
      }
    } else {
#pragma unroll
      for (int k = 0; k < kUnitProducts; k++) {
        if constexpr (kFormat == WeightFormat::kInt8) expand<T>(word(half, k), a[k][half], a[k][half + 2]);
        else expand_float8<T>(word(half, k), a[k][half], a[k][half + 2]);
      }
    }
  }
}

// A block's walk over the groups of a tile's depth, with the scales of this thread's two weight rows. The next group's
// are on their way while it is multiplied.
template <bool kSwiGlu>
struct GroupWalk {
  const QuantWork& work;
  int upper, lower, group, unit;  // unit: of the group
  float2 scales;

  __device__ __forceinline__ GroupWalk(const QuantWork& work, int tile, int first_unit) : work(work) {
    const int slab = tile * kSlabs + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    upper = slab * (kSwiGlu ? kSlab / 2 : kSlab) + lane / 4;
    lower = upper + (kSwiGlu ? work.linear.width : 8);
    const int end = kSwiGlu ? work.linear.width : work.weight_rows;
    if (upper >= end) upper = 0;  // such rows are of no use, but must not be read
    if (lower >= work.weight_rows) lower = 0;
    group = first_unit / work.group_units;
    unit = first_unit - group * work.group_units;
    load();
  }
  // Counts a unit that was multiplied; whether its group is complete.
  __device__ __forceinline__ bool ends() { return ++unit == work.group_units; }

  // sums += scales * part, in fragments; goes on to the next group.
  template <int kRows>
  __device__ __forceinline__ void add(const float (&part)[kRows / 2], float (&sums)[kRows / 2]) {
#pragma unroll
    for (int i = 0; i < kRows / 2; i++) sums[i] += (i & 2 ? scales.y : scales.x) * part[i];
    unit = 0;
    group = min(group + 1, work.groups - 1);
    load();
  }

 private:
  __device__ __forceinline__ void load() {
    const float* from = work.scale + static_cast<int64_t>(group) * work.weight_rows;
    scales = {__ldg(from + upper), __ldg(from + lower)};
  }
};

}  // namespace kiln::cuda
