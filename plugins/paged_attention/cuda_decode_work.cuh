// What a CTA of the decode kernel works on: its shared memory, the rounds of all sequences, the walk over a range of
// them, and the result of one item. How it attends is in cuda_decode.cuh.
#pragma once

#include "cuda_device.cuh"

namespace kiln::cuda {

// How a kernel uses a device; cuda.cu chooses.
struct DecodePlan {
  int warps, stages;
};

template <int kHeadDim>
struct DecodeLayout {
  static constexpr int kRow = kHeadDim * 2 + 16;        // bytes of a padded row
  static constexpr int kByteRow = kHeadDim;             // of one of int8
  static constexpr int kRegisters = kHeadDim / 4;       // accumulators of a thread for 8 query rows
  static constexpr int kPart = (kRegisters + 4) * 32;   // floats of one warp's result: accumulators, two m, two l
  static constexpr int kMinThreads = kHeadDim == 256 ? 64 : 128;
  // Bytes of 16 keys with their values; where some are int8, with room for scales.
  static __host__ __device__ __forceinline__ int stage_bytes(const PagedAttention& call) {
    const bool keys = call.key_scale, values = call.value_scale;
    return 16 * ((keys ? kByteRow : kRow) + (values ? kByteRow : kRow)) + (keys || values ? 2 * 16 * 4 : 0);
  }
  static int bytes(DecodePlan plan, const PagedAttention& call, int columns, int parts) {
    const int merge = plan.warps / 2 * kPart * 4, join = parts * columns * 8 * 4;
    return plan.warps * plan.stages * stage_bytes(call) + (merge > join ? merge : join) + (call.seqs + 1) * 4;
  }
};

// Starts copying 16 rows of a cache, one head of kSize bytes an element, `stride` bytes apart. What lies beyond the
// first `seen` becomes zeros: 0 times what is there may be NaN. Called by whole warps.
template <int kHeadDim, int kSize>
__device__ __forceinline__ void fetch_rows(const char* from, int stride, uint32_t to, int seen) {
  constexpr int kEach = kHeadDim * kSize / 16;
  constexpr int kTo = kSize == 1 ? DecodeLayout<kHeadDim>::kByteRow : DecodeLayout<kHeadDim>::kRow;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kEach / 2; i++) {
    const int row = (i * 32 + lane) / kEach, vector = (i * 32 + lane) % kEach;
    copy_async(to + row * kTo + vector * 16, from + row * stride + vector * 16, row < seen ? 16 : 0);
  }
}

// Floats of scratch: for each CTA the part that ends in it and the one that begins in it.
template <int kHeadDim, int kColumns>
constexpr size_t decode_scratch_floats(int ctas) {
  return static_cast<size_t>(ctas) * 2 * kColumns * DecodeLayout<kHeadDim>::kPart;
}

// Walks over the rounds of a range: sequence, row tile, round. `starts` has the first round of each sequence. Loads
// what the index tensors say of a sequence while the one before it is worked on.
struct DecodeCursor {
  const PagedAttention& call;
  const int* starts;
  int rows_per_tile, round_positions;
  Sequence of;
  Lengths later;  // of later_seq, the next sequence with rounds
  int seq, later_seq, round, rounds, row, begin;

  static __device__ __forceinline__ int rounds_of(const PagedAttention& call, const Sequence& of, int round_positions) {
    return (of.end - of.begin(call, 0) + round_positions - 1) / round_positions;
  }
  __device__ __forceinline__ void enter(const Lengths& lengths) {
    of = Sequence(call, lengths);
    begin = of.begin(call, 0);
    rounds = rounds_of(call, of, round_positions);
    later_seq = seq + 1;
    while (later_seq < call.seqs && starts[later_seq + 1] == starts[later_seq]) later_seq++;
    if (later_seq < call.seqs) later = Lengths(call, later_seq);
  }
  __device__ __forceinline__ void start(int at) {
    int low = 0, high = call.seqs;  // the last sequence that starts at or before `at`; empty ones start where it does
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (starts[middle] <= at ? low : high) = middle;
    }
    seq = low;
    enter(Lengths(call, seq));
    row = (at - starts[seq]) / rounds * rows_per_tile;
    round = (at - starts[seq]) % rounds;
  }
  __device__ __forceinline__ int item_start() const { return starts[seq] + row / rows_per_tile * rounds; }
  // Goes on to the next item's first round: other rows, or another sequence. There must be one.
  __device__ __forceinline__ void next_item() {
    round = 0;
    row += rows_per_tile;
    if (item_start() < starts[seq + 1]) return;
    row = 0;
    seq = later_seq;
    enter(later);
  }
};

// First round of each sequence, and the number of all, for sequences that take this path.
__device__ __forceinline__ void count_rounds(const PagedAttention& call, int rows_per_tile, int round_positions,
                                             int* starts) {
  const int group = call.heads / call.kv_heads;
  for (int seq = threadIdx.x; seq < call.seqs; seq += blockDim.x) {
    const Sequence of(call, seq);
    const int rows = of.count * group;
    const bool here = rows > 0 && rows <= call.decode_rows;
    starts[seq + 1] = here ? DecodeCursor::rounds_of(call, of, round_positions) *
                                 ((rows + rows_per_tile - 1) / rows_per_tile)
                           : 0;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) starts[0] = 0;
    for (int from = 0, carried = 0; from < call.seqs; from += 32) {
      const int seq = from + threadIdx.x;
      int sum = seq < call.seqs ? starts[seq + 1] : 0;
      for (int d = 1; d < 32; d *= 2) {
        const int below = __shfl_up_sync(kAll, sum, d);
        if (threadIdx.x >= d) sum += below;
      }
      sum += carried;
      if (seq < call.seqs) starts[seq + 1] = sum;
      carried = __shfl_sync(kAll, sum, 31);
    }
  }
  __syncthreads();
}

template <typename T, int kHeadDim, int kColumns>
struct DecodeResult {
  static constexpr int kSteps = kHeadDim / 16;
  float o[kColumns][kSteps][4];  // [dim, row] in the accumulator layout
  float m[kColumns][2], l[kColumns][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kColumns; n++) {
#pragma unroll
      for (int d = 0; d < kSteps; d++) o[n][d][0] = o[n][d][1] = o[n][d][2] = o[n][d][3] = 0;
      m[n][0] = m[n][1] = -kInfinity;
      l[n][0] = l[n][1] = 0;
    }
  }
  // Adds up what the lanes of a row summed.
  __device__ __forceinline__ void sum_lanes() {
#pragma unroll
    for (int n = 0; n < kColumns; n++)
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int x = 4; x < 32; x *= 2) l[n][j] += __shfl_xor_sync(kAll, l[n][j], x);
  }
  template <typename Store>
  __device__ __forceinline__ void store(int n, Store store) const {
#pragma unroll
    for (int d = 0; d < kSteps; d++)
#pragma unroll
      for (int i = 0; i < 4; i++) store(d * 4 + i, o[n][d][i]);
#pragma unroll
    for (int j = 0; j < 2; j++) store(kSteps * 4 + j, m[n][j]), store(kSteps * 4 + 2 + j, l[n][j]);
  }
  template <typename Load>
  __device__ __forceinline__ void merge(int n, Load load) {
    float mine[2], other[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float theirs = load(kSteps * 4 + j), top = fmaxf(m[n][j], theirs);
      mine[j] = top == -kInfinity ? 0 : exp2_fast(m[n][j] - top);
      other[j] = top == -kInfinity ? 0 : exp2_fast(theirs - top);
      m[n][j] = top;
      l[n][j] = l[n][j] * mine[j] + load(kSteps * 4 + 2 + j) * other[j];
    }
#pragma unroll
    for (int d = 0; d < kSteps; d++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[n][d][i] = o[n][d][i] * mine[i & 1] + load(d * 4 + i) * other[i & 1];
  }
};

}  // namespace kiln::cuda
