// How a product is divided over the blocks of a launch, and what becomes of the sums: shared by all kernels.
//
// The weight is cut into tiles of 128 rows, a tile into steps of 64 values of depth. All steps in a line are dealt out
// evenly, so that every block streams the same number of bytes ("Stream-K", Osama et al., 2023). A tile that several
// blocks share is summed by all of them: each leaves its partial sums in scratch memory, waits for the others', and
// finishes its share of the tile. The division depends on the weight's shape and the device alone and parts are added
// in order: a row's result is the same to the bit in any batch. All blocks of a launch must be resident at a time.
//
// Sums are in fragments, the accumulators of mma.sync and wgmma: of 16 weight rows (a slab) by 8 rows of x (a group),
// lane l has weight rows l / 4 and l / 4 + 8 and rows 2 * (l % 4) and + 1 of x.
#pragma once

#include <cstdint>

#include "../cuda_launch.cuh"
#include "../cuda_numbers.cuh"
#include "cuda.h"

namespace kiln::cuda {

constexpr int kTileRows = 128, kStep = 64, kSlab = 16, kSlabs = kTileRows / kSlab, kGroup = 8, kWarp = 32;
constexpr int kConsumers = kSlabs;  // warps that multiply and sum, one slab each

struct LinearWork {
  const void* bias;
  void* y;
  float4* partial;  // [blocks][2: a block's first tile, its last][groups][slabs][lanes]
  int rows, width;
  int tiles, steps, blocks;

  __device__ int begin(int block) const { return static_cast<int64_t>(tiles) * steps * block / blocks; }
  // The block that has a step.
  __device__ int owner(int step) const {
    return static_cast<int>((static_cast<int64_t>(step + 1) * blocks - 1) / (static_cast<int64_t>(tiles) * steps));
  }
};

// The blocks that share a tile.
struct Sharers {
  int tile, first, count, first_slot;
  __device__ Sharers(const LinearWork& work, int tile) : tile(tile) {
    const int step = tile * work.steps;
    first = work.owner(step);
    count = work.owner(step + work.steps - 1) - first + 1;
    first_slot = work.begin(first) != step;  // that block has begun with an earlier tile
  }
};

__device__ inline uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Stores two neighbours of a row of y, of which any may lie outside.
template <typename T>
__device__ void store_pair(const LinearWork& work, int row, int column, uint32_t pair) {
  if (row >= work.rows || column >= work.width) return;
  T* y = static_cast<T*>(work.y) + static_cast<int64_t>(row) * work.width + column;
  if (work.width % 2 == 0) {
    *reinterpret_cast<uint32_t*>(y) = pair;
  } else {
    const T* both = reinterpret_cast<const T*>(&pair);
    y[0] = both[0];
    if (column + 1 < work.width) y[1] = both[1];
  }
}

template <typename T>
__device__ float bias_of(const LinearWork& work, int column, int size) {
  return work.bias && column < size ? to_float(__ldg(static_cast<const T*>(work.bias) + column)) : 0.0f;
}

// Complete sums become results. Called by whole warps.
template <typename T, bool kSwiGlu>
__device__ void finish(const LinearWork& work, int tile, int group, int slab, float4 sum) {
  const int lane = threadIdx.x % kWarp, row = group * kGroup + lane / 4, pair = 2 * (lane % 4);
  if constexpr (kSwiGlu) {  // a slab is 8 rows of the gate, then the same 8 of the up projection
    const int first = (tile * kSlabs + slab) * (kSlab / 2), column = first + lane / 4;
    const float gate = bias_of<T>(work, column, work.width);
    const float up = work.bias ? bias_of<T>(work, work.width + column, 2 * work.width) : 0.0f;
    const float low = swiglu(sum.x + gate, sum.z + up), high = swiglu(sum.y + gate, sum.w + up);
    store_pair<T>(work, row, first + pair, transposed(pack_pair<T>(low, high)));
  } else {
    const int first = (tile * kSlabs + slab) * kSlab, column = first + lane / 4;
    const float upper = bias_of<T>(work, column, work.width), lower = bias_of<T>(work, column + 8, work.width);
    store_pair<T>(work, row, first + pair, transposed(pack_pair<T>(sum.x + upper, sum.y + upper)));
    store_pair<T>(work, row, first + 8 + pair, transposed(pack_pair<T>(sum.z + lower, sum.w + lower)));
  }
}

// Partial sums tell by themselves whether they are there: scratch memory is zero until they come, and zero again when
// they have been read; a sum of zero is sent as -0, which adds to any sum without a trace. So blocks meet without
// fences, counters and barriers: one store and one load.
__device__ inline float sent(float x) { return x == 0.0f ? -0.0f : x; }
__device__ inline bool has_come(float x) { return __float_as_uint(x) != 0; }

__device__ inline void send(float4* to, float4 x) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
}

__device__ inline float4 look(const float4* from) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// Called by all consumers with their sums of a part of a tile's depth; `slot` is 0 for the block's first tile.
template <int kRows>
__device__ void leave_partial(const LinearWork& work, int slot, const float (&sums)[kRows / 2]) {
  constexpr int kGroups = kRows / kGroup;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float4* to = work.partial + (static_cast<int64_t>(blockIdx.x) * 2 + slot) * kGroups * kSlabs * kWarp;
#pragma unroll
  for (int g = 0; g < kGroups; g++)
    send(to + (g * kSlabs + warp) * kWarp + lane, {sent(sums[4 * g]), sent(sums[4 * g + 1]), sent(sums[4 * g + 2]),
                                                   sent(sums[4 * g + 3])});
}

// Finishes this block's share of a tile whose depth several blocks divide.
template <typename T, int kRows, bool kSwiGlu>
__device__ void finish_share(const LinearWork& work, int tile) {
  constexpr int kFragments = kRows / kGroup * kSlabs, kAtOnce = 4;
  const Sharers sharers(work, tile);
  const int mine = blockIdx.x - sharers.first, lane = threadIdx.x % kWarp;
  const int end = kFragments * (mine + 1) / sharers.count;
  for (int at = kFragments * mine / sharers.count + threadIdx.x / kWarp; at < end; at += kConsumers) {
    auto place = [&](int part) {
      const int slot = (sharers.first + part) * 2 + (part == 0 ? sharers.first_slot : 0);
      return work.partial + (static_cast<int64_t>(slot) * kFragments + at) * kWarp + lane;
    };
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int first = 0; first < sharers.count; first += kAtOnce) {
      float4 x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++)
        if (first + i < sharers.count) x[i] = look(place(first + i));
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        if (first + i >= sharers.count) break;
        while (!(has_come(x[i].x) && has_come(x[i].y) && has_come(x[i].z) && has_come(x[i].w)))
          x[i] = look(place(first + i));
        send(place(first + i), {0.0f, 0.0f, 0.0f, 0.0f});
        sum = {sum.x + x[i].x, sum.y + x[i].y, sum.z + x[i].z, sum.w + x[i].w};
      }
    }
    __syncwarp();
    finish<T, kSwiGlu>(work, tile, at / kSlabs, at % kSlabs, sum);
  }
}

// The consumers' walk over the block's steps. `multiply(count, sums)` sums the block's next `count` steps, all of one
// tile, afresh.
template <typename T, int kRows, bool kSwiGlu, typename Multiply>
__device__ void consume(const LinearWork& work, Multiply multiply) {
  const int from = work.begin(blockIdx.x), to = work.begin(blockIdx.x + 1);
  int shared[2], shares = 0;
  for (int step = from; step < to;) {
    const int tile = step / work.steps, end = min((tile + 1) * work.steps, to);
    float sums[kRows / 2];
    multiply(end - step, sums);
    if (end - step == work.steps) {
#pragma unroll
      for (int g = 0; g < kRows / kGroup; g++)
        finish<T, kSwiGlu>(work, tile, g, threadIdx.x / kWarp,
                           make_float4(sums[4 * g], sums[4 * g + 1], sums[4 * g + 2], sums[4 * g + 3]));
    } else {
      leave_partial<kRows>(work, step != from, sums);
      if (shares == 0) shared[0] = tile;
      else shared[1] = tile;
      shares++;
    }
    step = end;
  }
  if (shares > 0) finish_share<T, kRows, kSwiGlu>(work, shared[0]);
  if (shares > 1) finish_share<T, kRows, kSwiGlu>(work, shared[1]);
}

}  // namespace kiln::cuda
