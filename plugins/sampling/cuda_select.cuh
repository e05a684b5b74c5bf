// What the sampling kernel is made of, for one block of kThreads threads with one row: reading it, sums over the block,
// and the search for the smallest distance at which a running count or weight reaches a goal.
//
// Distances are compared as the bits of floats, which have the same order, as none is negative or NaN. Sums are of
// integers: their order does not matter, so atomics are as good as any.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../cuda_numbers.cuh"
#include "numbers.h"

namespace kiln::cuda {

constexpr int kWarp = 32, kThreads = 1024, kWarps = kThreads / kWarp;
constexpr int kBins = kThreads;  // a thread has one in scans
constexpr uint32_t kEveryKey = 0x7f800001u;  // above the distance infinity

__device__ inline float to_float(float x) { return x; }

// Never -0, which the difference of zeros may be: its bits would make it the largest key.
__device__ inline float distance_of(float best, float logit) { return (best - logit) + 0.0f; }

// Calls body(id, logit) for every id of [begin, end) in one of `threads` threads, of which this one is number `thread`:
// whole vectors of 16 bytes at a time where the row is aligned, which `begin` must be then.
template <typename T, typename Body>
__device__ void for_range(const T* row, int vocabulary, int begin, int end, int thread, int threads, Body body) {
  constexpr int kEach = 16 / sizeof(T), kAhead = 4;
  struct alignas(16) Vector {
    T of[kEach];
  };
  if (reinterpret_cast<uintptr_t>(row) % 16 || vocabulary % kEach) {
#pragma unroll 4
    for (int i = begin + thread; i < end; i += threads) body(i, to_float(row[i]));
    return;
  }
  const Vector* vectors = reinterpret_cast<const Vector*>(row);
  const int count = end / kEach;
  for (int first = begin / kEach + thread; first < count; first += kAhead * threads) {
    Vector ahead[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; j++)
      if (first + j * threads < count) ahead[j] = vectors[first + j * threads];
#pragma unroll
    for (int j = 0; j < kAhead; j++) {
      const int at = first + j * threads;
      if (at >= count) continue;
#pragma unroll
      for (int i = 0; i < kEach; i++) body(at * kEach + i, to_float(ahead[j].of[i]));
    }
  }
}

// The whole row, by the block.
template <typename T, typename Body>
__device__ void for_each(const T* row, int vocabulary, Body body) {
  for_range(row, vocabulary, 0, vocabulary, static_cast<int>(threadIdx.x), kThreads, body);
}

struct Best {
  float logit;
  int id;
};

// The lowest id of the highest logit, the same in every thread; `finite` is false with a NaN or an infinite maximum.
template <typename T>
__device__ Best best_of(const T* row, int vocabulary, bool* finite) {
  __shared__ Best of_warp[kWarps];
  Best best = {-INFINITY, vocabulary};
  bool nan = false;
  const auto take = [&best](float logit, int id) {
    if (logit > best.logit || (logit == best.logit && id < best.id)) best = {logit, id};
  };
  for_each(row, vocabulary, [&](int id, float logit) {
    nan |= logit != logit;
    take(logit, id);
  });
  const auto reduce = [&take, &best] {
#pragma unroll
    for (int d = kWarp / 2; d > 0; d /= 2) {
      const float logit = __shfl_xor_sync(~0u, best.logit, d);
      const int id = __shfl_xor_sync(~0u, best.id, d);
      take(logit, id);
    }
  };
  reduce();
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = best;
  nan = __syncthreads_or(nan);
  best = of_warp[threadIdx.x % kWarp];
  reduce();
  *finite = !nan && isfinite(best.logit);
  __syncthreads();  // of_warp may be written again
  return best;
}

// Sum of the values of the threads before this one; the block's in *total.
__device__ inline uint64_t scan_block(uint64_t value, uint64_t* total) {
  __shared__ uint64_t of_warp[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto scan = [lane](uint64_t sum) {
#pragma unroll
    for (int d = 1; d < kWarp; d *= 2) {
      const uint64_t before = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += before;
    }
    return sum;
  };
  const uint64_t inclusive = scan(value);
  if (lane == kWarp - 1) of_warp[warp] = inclusive;
  __syncthreads();
  const uint64_t warps = scan(of_warp[lane]);
  *total = __shfl_sync(~0u, warps, kWarps - 1);
  const uint64_t before = __shfl_sync(~0u, warps, max(warp - 1, 0));
  __syncthreads();
  return inclusive - value + (warp ? before : 0);
}

// The distances [0, end) with how many tokens they are and what these weigh. With `ties` > 0, so many of the tokens at
// distance `end` belong to them, too, those of the lowest ids.
struct Kept {
  uint32_t end = kEveryKey;
  uint64_t ties = 0;
};

// Weights are sums of 64 bits in two halves: adding to those takes no loop, as 64 bits in shared memory would.
struct Bins {
  uint32_t count[kBins], low[kBins], high[kBins];

  __device__ uint64_t weight(int bin) const { return static_cast<uint64_t>(high[bin]) << 32 | low[bin]; }

  __device__ void add(int bin, uint64_t weight) {
    atomicAdd(&count[bin], 1u);
    const uint32_t half = static_cast<uint32_t>(weight);
    uint32_t rest = static_cast<uint32_t>(weight >> 32);
    if (half) rest += atomicAdd(&low[bin], half) > ~half;  // it has wrapped around: exactly one who adds sees that
    if (rest) atomicAdd(&high[bin], rest);
  }
};

// One level of a search: the bins of keys in [low, end), and what lies below low.
struct Level {
  uint32_t low, end;
  uint64_t count, weight;
};

// The first level's bins: a sixteenth of a logit each, whatever the temperature, and the rest in the last one.
constexpr float kFinest = 16.0f;
__device__ inline int first_bin(float distance) {
  return distance < kBins / kFinest ? static_cast<int>(distance * kFinest) : kBins - 1;
}
__device__ inline uint32_t first_key(int bin) { return bin < kBins ? __float_as_uint(bin / kFinest) : kEveryKey; }

__device__ inline void clear(Bins& bins) {
  bins.count[threadIdx.x] = 0;
  bins.low[threadIdx.x] = 0;
  bins.high[threadIdx.x] = 0;
  __syncthreads();
}

// A scale of `kNoWeights` leaves weights out.
constexpr float kNoWeights = -1.0f;
__device__ inline uint64_t weight_or_none(float distance, float scale) {
  return scale == kNoWeights ? 0 : sampling::weight_of(distance, scale);
}

template <typename T>
__device__ void fill_first(const T* row, int vocabulary, float best, float scale, Bins& bins) {
  clear(bins);
  for_each(row, vocabulary, [&](int, float logit) {
    const float distance = distance_of(best, logit);
    bins.add(first_bin(distance), weight_or_none(distance, scale));
  });
  __syncthreads();
}

// Bins of equal width, a power of two: as narrow as there are bins for.
__device__ inline int shift_of(const Level& level) {
  int shift = 0;
  while ((level.end - 1 - level.low) >> shift >= kBins) shift++;
  return shift;
}

template <typename T>
__device__ void fill(const T* row, int vocabulary, float best, float scale, const Level& level, Bins& bins) {
  const int shift = shift_of(level);
  clear(bins);
  for_each(row, vocabulary, [&](int, float logit) {
    const float distance = distance_of(best, logit);
    const uint32_t key = __float_as_uint(distance);
    if (key < level.low || key >= level.end) return;
    bins.add((key - level.low) >> shift, weight_or_none(distance, scale));
  });
  __syncthreads();
}

// The bin in which the running sum of counts, or of weights, first reaches the goal, which all bins together do; sets
// the level to that bin's keys, and says what is in it.
template <bool kByWeight, typename FirstKey>
__device__ void narrow(const Bins& bins, uint64_t goal, FirstKey first_key, Level& level, uint64_t* count,
                       uint64_t* weight) {
  __shared__ Level found;
  __shared__ uint64_t inside[2];
  uint64_t total;
  const uint64_t counts = level.count + scan_block(bins.count[threadIdx.x], &total);
  const uint64_t weights = level.weight + scan_block(bins.weight(threadIdx.x), &total);
  const uint64_t before = kByWeight ? weights : counts;
  const uint64_t own = kByWeight ? bins.weight(threadIdx.x) : bins.count[threadIdx.x];
  // A goal of 0 is reached by the first token: then bin 0 must win, which holds the best one.
  if (goal <= before + own && (goal > before || threadIdx.x == 0)) {
    found = {max(level.low, first_key(static_cast<int>(threadIdx.x))),
             min(level.end, first_key(static_cast<int>(threadIdx.x) + 1)), counts, weights};
    inside[0] = bins.count[threadIdx.x];
    inside[1] = bins.weight(threadIdx.x);
  }
  __syncthreads();
  level = found;
  *count = inside[0];
  *weight = inside[1];
  __syncthreads();
}

}  // namespace kiln::cuda
