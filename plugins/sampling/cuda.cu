// One block for each row. Greedy rows are read once. Others are read once for their best, twice or more to find the
// distances that top_k and top_p keep (by counts and weights in bins of ever finer distance, never by sorting), and once
// to draw; a 32nd of the row is then read again to find the token.
#include "cuda.h"

#include "../cuda_launch.cuh"
#include "cuda_select.cuh"

namespace kiln::cuda {
namespace {

using sampling::Choice;

constexpr int kFeedThreads = 256;
constexpr int kDeepest = 4;  // a level has 2^10 bins, keys have 31 bits: never reached, and no loop goes on for ever

// One row as its block sees it.
template <typename T>
struct Row {
  const T* logits;
  int vocabulary;
  float best;
  Choice choice;

  // What the filters weigh: nothing where only top_k does.
  __device__ float filter_scale() const { return choice.top_p == sampling::kAll ? kNoWeights : choice.scale; }
};

// The smallest distance at which the kept tokens are `goal` many, or weigh `goal`, among those below `end`. `first` has
// the row's first level of bins. *weight is what the kept ones weigh.
template <bool kByWeight, typename T>
__device__ Kept search(const Row<T>& row, uint32_t end, uint64_t goal, const Bins& first, Bins& bins,
                       uint64_t* weight) {
  Level level = {0, end, 0, 0};
  uint64_t count, inside;
  narrow<kByWeight>(first, goal, first_key, level, &count, &inside);
  for (int depth = 0;; depth++) {
    const bool whole = kByWeight ? count == 1 : level.count + count == goal;
    const bool one_key = level.end - level.low == 1;
    if (whole || (one_key && kByWeight) || depth == kDeepest) {
      *weight = level.weight + inside;
      return {level.end, 0};
    }
    if (one_key) {
      const uint64_t ties = goal - level.count;
      *weight = level.weight + ties * weight_or_none(__uint_as_float(level.low), row.filter_scale());
      return {level.low, ties};
    }
    const uint32_t low = level.low;
    const int shift = shift_of(level);
    fill(row.logits, row.vocabulary, row.best, row.filter_scale(), level, bins);
    const auto key_of_bin = [low, shift](int bin) {
      const uint64_t key = low + (static_cast<uint64_t>(bin) << shift);
      return key < kEveryKey ? static_cast<uint32_t>(key) : kEveryKey;
    };
    narrow<kByWeight>(bins, goal, key_of_bin, level, &count, &inside);
  }
}

// What top_k and top_p leave.
template <typename T>
__device__ Kept filtered(const Row<T>& row) {
  __shared__ Bins first, bins;
  const Choice& choice = row.choice;
  const bool few = choice.top_k && choice.top_k < row.vocabulary;
  Kept kept;
  if (!few && choice.top_p == sampling::kAll) return kept;
  fill_first(row.logits, row.vocabulary, row.best, row.filter_scale(), first);
  uint64_t weight;
  if (few) {
    kept = search<false>(row, kEveryKey, static_cast<uint64_t>(choice.top_k), first, bins, &weight);
  } else {
    scan_block(first.weight(threadIdx.x), &weight);
  }
  if (choice.top_p == sampling::kAll) return kept;
  const uint64_t target = sampling::share_of(weight, choice.top_p);
  const uint64_t of_ties = kept.ties ? kept.ties * sampling::weight_of(__uint_as_float(kept.end), choice.scale) : 0;
  if (kept.end == 0 || target > weight - of_ties) return kept;  // reached by the ties, which stay together
  return search<true>(row, kept.end, target, first, bins, &weight);
}

// The first id at which the running sum of value(id, logit) exceeds target(the sum of all), in every thread. Each warp
// sums a stretch of ids; the one that has the target is then read again by the block.
template <typename T, typename Value, typename Target>
__device__ int locate(const Row<T>& row, Value value, Target target) {
  __shared__ int stretch, found;
  __shared__ uint64_t rest;
  constexpr int kEven = kWarps * 16;  // ids: stretches are of whole vectors
  const int length = (row.vocabulary + kEven - 1) / kEven * (kEven / kWarps);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int begin = min(row.vocabulary, warp * length), end = min(row.vocabulary, begin + length);
  uint64_t sum = 0;
  for_range(row.logits, row.vocabulary, begin, end, lane, kWarp, [&](int id, float logit) { sum += value(id, logit); });
  uint64_t total, of_warp = sum;
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) of_warp += __shfl_xor_sync(~0u, of_warp, d);
  const uint64_t before = scan_block(sum, &total), goal = target(total);
  if (lane == 0 && before <= goal && goal < before + of_warp) {
    stretch = begin;
    rest = goal - before;
  }
  __syncthreads();
  uint64_t left = rest;
  const int last = min(row.vocabulary, stretch + length);
  for (int first = stretch; first < last; first += kThreads) {
    const int id = first + static_cast<int>(threadIdx.x);
    const uint64_t own = id < last ? value(id, to_float(row.logits[id])) : 0;
    const uint64_t sum_before = scan_block(own, &total);
    if (sum_before <= left && left < sum_before + own) found = id;
    if (left < total) break;
    left -= total;
  }
  __syncthreads();
  const int result = found;
  __syncthreads();
  return result;
}

template <typename T>
__device__ int drawn(const Row<T>& row, uint64_t random) {
  const Kept kept = filtered(row);
  int last_tie = -1;
  if (kept.ties) {
    const auto is_tie = [&](int, float logit) -> uint64_t {
      return __float_as_uint(distance_of(row.best, logit)) == kept.end;
    };
    last_tie = locate(row, is_tie, [&](uint64_t) { return kept.ties - 1; });
  }
  const auto weight = [&](int id, float logit) -> uint64_t {
    const float distance = distance_of(row.best, logit);
    const uint32_t key = __float_as_uint(distance);
    if (key >= kept.end && !(key == kept.end && id <= last_tie)) return 0;
    const uint64_t weight = sampling::weight_of(distance, row.choice.scale);
    return weight >= row.choice.min_weight ? weight : 0;
  };
  return locate(row, weight, [&](uint64_t total) { return sampling::multiply_high(random, total); });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sample_rows(Sample call) {
  let_next_start();
  wait_for_previous();
  const int64_t at = blockIdx.x;
  const T* logits = static_cast<const T*>(call.logits) + at * call.vocabulary;
  const int vocabulary = static_cast<int>(call.vocabulary);
  const float temperature = call.temperature[at];
  bool finite;
  const Best best = best_of(logits, vocabulary, &finite);
  int token = finite ? best.id : sampling::kNoToken;
  if (finite && temperature > 0) {
    const Choice choice = sampling::choice_of(temperature, call.top_k[at], call.top_p[at], call.min_p[at]);
    const uint64_t random =
        sampling::random_bits(static_cast<uint64_t>(call.seed[at]), static_cast<uint32_t>(call.position[at]));
    token = drawn(Row<T>{logits, vocabulary, best.logit, choice}, random);
  }
  if (threadIdx.x == 0) call.tokens[at] = token;
}

__global__ void __launch_bounds__(kFeedThreads) feed_tokens(FeedTokens call) {
  let_next_start();
  wait_for_previous();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kFeedThreads + threadIdx.x;
  if (at >= call.tokens) return;
  const int32_t from = call.feed[at];
  call.fed[at] = from >= 0 && from < call.max_rows ? max(call.previous[from], 0) : call.ids[at];
}

}  // namespace

cudaError_t run(const Sample& call, cudaStream_t stream) {
  if (call.rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(call.rows)), block(kThreads);
  switch (call.type) {
    case LogitType::kFloat16:
      return launch(sample_rows<__half>, grid, block, 0, stream, call);
    case LogitType::kBfloat16:
      return launch(sample_rows<__nv_bfloat16>, grid, block, 0, stream, call);
    default:
      return launch(sample_rows<float>, grid, block, 0, stream, call);
  }
}

cudaError_t run(const FeedTokens& call, cudaStream_t stream) {
  if (call.tokens == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((call.tokens + kFeedThreads - 1) / kFeedThreads));
  return launch(feed_tokens, grid, dim3(kFeedThreads), 0, stream, call);
}

}  // namespace kiln::cuda

// For callers without C++: the address of a call, a stream; a cudaError_t.
extern "C" __attribute__((visibility("default"))) int kiln_cuda_sample(const kiln::cuda::Sample* call, void* stream) {
  return kiln::cuda::run(*call, static_cast<cudaStream_t>(stream));
}
extern "C" __attribute__((visibility("default"))) int kiln_cuda_feed_tokens(const kiln::cuda::FeedTokens* call,
                                                                            void* stream) {
  return kiln::cuda::run(*call, static_cast<cudaStream_t>(stream));
}
