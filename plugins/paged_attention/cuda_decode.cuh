// Attention of sequences with few new tokens: reading the cache is what takes the time, so the work is cut evenly
// over the context.
//
// A CTA takes one KV head and a range of the rounds of all sequences; a round is 16 positions for each warp. Each warp
// streams its own tiles of 16 positions through cp.async, with no CTA barrier until a sequence is complete, and goes on
// fetching the next sequence meanwhile. S^T = K Q^T and O^T = V^T P^T (m16n8k16) put query rows into the 8 columns, so
// that up to 8 kColumns rows share one reading of the cache. The parts of a sequence that several CTAs computed are
// joined by the CTA that finishes last.
//
// Rows in shared memory are padded by 16 bytes, not swizzled: with swizzled targets cp.async splits into requests of
// 32 bytes, and the L2's rate of requests is then the limit (H200, 64 sequences of 4096: 299 us against 265).
//
// How rounds are cut depends on the lengths of all sequences of the call, so the last bits of a result do, too.
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
  static constexpr int kTile = 16 * kRow;               // of 16 keys or values
  static constexpr int kRegisters = kHeadDim / 4;       // accumulators of a thread for 8 query rows
  static constexpr int kPart = (kRegisters + 4) * 32;   // floats of one warp's result: accumulators, two m, two l
  static constexpr int kMinThreads = kHeadDim == 256 ? 64 : 128;
  static int bytes(DecodePlan plan, int seqs, int columns, int parts) {
    const int merge = plan.warps / 2 * kPart * 4, join = parts * columns * 8 * 4;
    return plan.warps * plan.stages * 2 * kTile + (merge > join ? merge : join) + (seqs + 1) * 4;
  }
};

// Floats of scratch: for each CTA the part that ends in it and the one that begins in it.
template <int kHeadDim, int kColumns>
constexpr size_t decode_scratch_floats(int ctas) {
  return static_cast<size_t>(ctas) * 2 * kColumns * DecodeLayout<kHeadDim>::kPart;
}

// Walks over the rounds of a range: sequence, row tile, round. `starts` has the first round of each sequence.
struct DecodeCursor {
  const PagedAttention& call;
  const int* starts;
  int rows_per_tile, round_positions;
  Sequence of;
  int seq, round, rounds, row, begin;

  static __device__ __forceinline__ int rounds_of(const PagedAttention& call, const Sequence& of, int round_positions) {
    return (of.end - of.begin(call, 0) + round_positions - 1) / round_positions;
  }
  __device__ __forceinline__ void enter() {
    of = Sequence(call, seq);
    begin = of.begin(call, 0);
    rounds = rounds_of(call, of, round_positions);
  }
  __device__ __forceinline__ void start(int at) {
    int low = 0, high = call.seqs;  // the last sequence that starts at or before `at`; empty ones start where it does
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (starts[middle] <= at ? low : high) = middle;
    }
    seq = low;
    enter();
    row = (at - starts[seq]) / rounds * rows_per_tile;
    round = (at - starts[seq]) % rounds;
  }
  __device__ __forceinline__ int item_start() const { return starts[seq] + row / rows_per_tile * rounds; }
  // True where a new item begins: other rows or another sequence. Not to be called on the last round of all.
  __device__ __forceinline__ bool next() {
    if (++round < rounds) return false;
    round = 0;
    row += rows_per_tile;
    if (item_start() < starts[seq + 1]) return true;
    row = 0;
    do seq++;
    while (seq + 1 < call.seqs && starts[seq + 1] == starts[seq]);
    if (seq < call.seqs) enter();
    return true;
  }
};

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

template <typename T, int kHeadDim, int kColumns>
struct Decoder {
  using Layout = DecodeLayout<kHeadDim>;
  static constexpr int kSteps = kHeadDim / 16, kRow = Layout::kRow, kTile = Layout::kTile, kRows = 8 * kColumns;
  static constexpr int kVectors = kHeadDim / 8, kRegisters = Layout::kRegisters, kPart = Layout::kPart;
  static constexpr int kHeld = (kRows * kVectors + Layout::kMinThreads - 1) / Layout::kMinThreads;

  const PagedAttention& call;
  const Scores scores;
  const int warps, stages, warp, lane, group, head;
  const uint32_t buffers;  // this warp's: [stages][keys, values][16][kRow]
  float* merging;
  int block_ids, first_id;

  // Starts copying this warp's tile of the cursor's round.
  __device__ __forceinline__ void fetch(const DecodeCursor& cursor, int stage) {
    if (cursor.round < first_id || cursor.round >= first_id + 32) {
      first_id = cursor.round;
      const int position = cursor.begin + ((first_id + lane) * warps + warp) * 16;
      block_ids = position < cursor.of.end ? block_of(call, cursor.seq, position) : 0;
    }
    const int position = cursor.begin + (cursor.round * warps + warp) * 16;
    const int block = __shfl_sync(kAll, block_ids, cursor.round - first_id);
    if (position >= cursor.of.end) return;
    const int stride = call.kv_heads * kHeadDim;
    const int64_t at =
        (static_cast<int64_t>(block) * call.block_size + position % call.block_size) * stride + head * kHeadDim;
    const T* keys = static_cast<const T*>(call.key_cache) + at;
    const T* values = static_cast<const T*>(call.value_cache) + at;
    const uint32_t to = buffers + stage * 2 * kTile;
    const int seen = cursor.of.end - position;  // rows beyond are no one's: zeros, since 0 times what is there may be NaN
#pragma unroll
    for (int i = 0; i < kVectors / 2; i++) {
      const int row = (i * 32 + lane) / kVectors, vector = (i * 32 + lane) % kVectors;
      copy_async(to + row * kRow + vector * 16, keys + row * stride + vector * 8, row < seen ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < kVectors / 2; i++) {
      const int row = (i * 32 + lane) / kVectors, vector = (i * 32 + lane) % kVectors;
      copy_async(to + kTile + row * kRow + vector * 16, values + row * stride + vector * 8, row < seen ? 16 : 0);
    }
  }

  // This thread's vectors of the query rows `row` on, rotated: on their way while other things are done.
  __device__ __forceinline__ void load_query(const Sequence& of, int row, uint4 (&held)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      const int e = threadIdx.x + i * blockDim.x;
      if (e >= kRows * kVectors) break;
      const int r = min(row + e / kVectors, of.count * group - 1), token = r / group;
      const T* from = static_cast<const T*>(call.query) + (of.first + token) * call.query_stride +
                      (head * group + r % group) * kHeadDim;
      held[i] = rotated_vector(call, from, e % kVectors * 8, of.past + token);
    }
  }

  // Passes them through shared memory: each lane gets its parts of the B operand.
  __device__ __forceinline__ void share_query(const uint4 (&held)[kHeld], uint32_t (&q)[kColumns][kSteps][2]) const {
    const uint32_t rows = shared_address(merging);
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      const int e = threadIdx.x + i * blockDim.x;
      if (e < kRows * kVectors) store_shared(rows + e / kVectors * kRow + e % kVectors * 16, held[i]);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kColumns; n++)
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        uint32_t r[4];
        load_matrices(r, rows + (n * 8 + lane % 8) * kRow + (k * 2 + lane / 8) * 16);
        q[n][k][0] = r[0], q[n][k][1] = r[1], q[n][k + 1][0] = r[2], q[n][k + 1][1] = r[3];
      }
    __syncthreads();
  }

  // Attends to the 16 positions in a stage.
  __device__ __forceinline__ void attend(const DecodeCursor& cursor, int stage, const uint32_t (&q)[kColumns][kSteps][2],
                         DecodeResult<T, kHeadDim, kColumns>& result) const {
    const Sequence& of = cursor.of;
    const int first = cursor.begin + (cursor.round * warps + warp) * 16;
    const uint32_t keys = buffers + stage * 2 * kTile, values = keys + kTile;
    float s[kColumns][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
      uint32_t a[4];
      load_matrices(a, keys + (lane & 15) * kRow + (k * 2 + (lane >> 4)) * 16);
#pragma unroll
      for (int n = 0; n < kColumns; n++) Numbers<T>::multiply(s[n], a, q[n][k][0], q[n][k][1]);
    }
    const int low_token = cursor.row / group;
    const bool whole = first + 15 <= of.past + low_token && (call.window == 0 || first >= of.end - call.window);
    uint32_t p[kColumns][2], rest[kColumns][2];
    float kept[kColumns][2];
#pragma unroll
    for (int n = 0; n < kColumns; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[n][i] = scores(s[n][i]);
        if (!whole) {
          const int row = cursor.row + n * 8 + lane % 4 * 2 + (i & 1), position = first + lane / 4 + (i & 2) * 4;
          const int own = of.past + min(row / group, of.count - 1);
          if (position > own || (call.window > 0 && position <= own - call.window)) s[n][i] = -kInfinity;
        }
      }
      float sum[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float top = fmaxf(s[n][j], s[n][j + 2]);
#pragma unroll
        for (int x = 4; x < 32; x *= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, x));
        top = fmaxf(top, result.m[n][j]);
        const float base = top == -kInfinity ? 0 : top;  // nothing seen yet
        kept[n][j] = exp2_fast(result.m[n][j] - base);
        result.m[n][j] = top;
        s[n][j] = exp2_fast(s[n][j] - base);
        s[n][j + 2] = exp2_fast(s[n][j + 2] - base);
        sum[j] = s[n][j] + s[n][j + 2];
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32_t pair = Numbers<T>::pack(s[n][2 * i], s[n][2 * i + 1]);
        p[n][i] = transposed(pair);
        if (Numbers<T>::kSplitWeights) {
          const float2 rounded = Numbers<T>::unpack(pair);
          rest[n][i] = transposed(Numbers<T>::pack(s[n][2 * i] - rounded.x, s[n][2 * i + 1] - rounded.y));
        }
      }
#pragma unroll
      for (int j = 0; j < 2; j++) result.l[n][j] = result.l[n][j] * kept[n][j] + sum[j];
    }
#pragma unroll
    for (int d = 0; d < kSteps; d++) {
      uint32_t a[4];
      load_transposed(a, values + ((lane & 7) + (lane >> 4) * 8) * kRow + (d * 2 + (lane >> 3 & 1)) * 16);
#pragma unroll
      for (int n = 0; n < kColumns; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) result.o[n][d][i] *= kept[n][i & 1];
        Numbers<T>::multiply(result.o[n][d], a, p[n][0], p[n][1]);
        if (Numbers<T>::kSplitWeights) Numbers<T>::multiply(result.o[n][d], a, rest[n][0], rest[n][1]);
      }
    }
  }

  // Merges all warps' results and hands the merged accumulators out: `take(n, register, x, m, l)` in each thread for its
  // share of column n, whose rows have the maximum m and the sum l. Registers of a thread belong to one row.
  template <typename Take>
  __device__ __forceinline__ void merge_warps(DecodeResult<T, kHeadDim, kColumns>& result, Take take) const {
    result.sum_lanes();
    const int half = warps / 2;
    float* own = merging + warp % half * kPart + lane;
#pragma unroll
    for (int n = 0; n < kColumns; n++) {
      if (warp >= half) result.store(n, [&](int r, float x) { own[r * 32] = x; });
      __syncthreads();
      if (warp < half) {
        result.merge(n, [&](int r) { return own[r * 32]; });
        result.store(n, [&](int r, float x) { own[r * 32] = x; });
      }
      __syncthreads();
      const float* of_row = merging + (kRegisters + warp % 2) * 32 + lane;
      float top = -kInfinity, total = 0, weights[4];
#pragma unroll
      for (int w = 0; w < 4; w++)
        if (w < half) top = fmaxf(top, of_row[w * kPart]);
#pragma unroll
      for (int w = 0; w < 4; w++) {
        weights[w] = w < half && top != -kInfinity ? exp2_fast(of_row[w * kPart] - top) : 0;
        if (w < half) total += weights[w] * of_row[w * kPart + 64];
      }
      for (int r = warp; r < kRegisters; r += warps) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < 4; w++)
          if (w < half) sum += weights[w] * merging[w * kPart + r * 32 + lane];
        take(n, r, sum, top, total);
      }
      __syncthreads();
    }
  }

  // Where an accumulator of column n goes; null beyond the item's rows.
  __device__ __forceinline__ T* output(const Sequence& of, int first_row, int n, int reg) const {
    const int row = first_row + n * 8 + lane % 4 * 2 + (reg & 1);
    if (row >= of.count * group) return nullptr;
    return static_cast<T*>(call.output) +
           (static_cast<int64_t>(of.first + row / group) * call.heads + head * group + row % group) * kHeadDim +
           reg / 4 * 16 + lane / 4 + (reg & 2) * 4;
  }

  // Joins what several CTAs left in scratch. `part(i)` is the i-th CTA's.
  template <typename Part>
  __device__ __forceinline__ void join(const Sequence& of, int first_row, int parts, Part part) const {
    __shared__ float totals[kRows];
    float* weights = merging;  // [parts][kRows]
    for (int row = warp; row < kRows; row += warps) {
      const int at = row / 8 * kPart + (kRegisters + row % 2) * 32 + row % 8 / 2;  // of m; l is two registers on
      float top = -kInfinity, total = 0;
      for (int i = lane; i < parts; i += 32) {
        const float m = __ldcg(part(i) + at), l = __ldcg(part(i) + at + 64), higher = fmaxf(top, m);
        weights[i * kRows + row] = m;
        if (higher == -kInfinity) continue;
        total = total * exp2_fast(top - higher) + l * exp2_fast(m - higher);
        top = higher;
      }
      float most = top;
      for (int x = 1; x < 32; x *= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, x));
      total *= most == -kInfinity ? 0 : exp2_fast(top - most);
      for (int x = 1; x < 32; x *= 2) total += __shfl_xor_sync(kAll, total, x);
      for (int i = lane; i < parts; i += 32)
        weights[i * kRows + row] = most == -kInfinity ? 0 : exp2_fast(weights[i * kRows + row] - most);
      if (lane == 0) totals[row] = total;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kColumns; n++) {
      const int row = n * 8 + lane % 4 * 2 + warp % 2;
      if (first_row + row >= of.count * group) continue;
      for (int r = warp; r < kRegisters; r += 4 * warps) {
        float sums[4] = {};
#pragma unroll 8
        for (int i = 0; i < parts; i++) {
          const float weight = weights[i * kRows + row];
          const float* from = part(i) + n * kPart + lane;
#pragma unroll
          for (int j = 0; j < 4; j++)
            if (r + j * warps < kRegisters) sums[j] += weight * __ldcg(from + (r + j * warps) * 32);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (r + j * warps < kRegisters) *output(of, first_row, n, r + j * warps) = Numbers<T>::from(sums[j] / totals[row]);
      }
    }
    __syncthreads();
  }
};

// First round of each sequence, and the number of all, for sequences that take this path.
__device__ __forceinline__ void count_rounds(const PagedAttention& call, int rows_per_tile, int round_positions, int* starts) {
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
__global__ void __launch_bounds__(256, 1)
    decode_kernel(const __grid_constant__ PagedAttention call, const DecodePlan plan, float* parts, int* counters) {
  using Layout = DecodeLayout<kHeadDim>;
  extern __shared__ __align__(16) char shared[];
  constexpr int kRows = 8 * kColumns, kMinRounds = 2;  // a CTA that joins in must have something to do
  const int warps = plan.warps, stages = plan.stages, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int ranges_max = gridDim.x / call.kv_heads, tiles_bytes = warps * stages * 2 * Layout::kTile;
  const int merge_floats = max(warps / 2 * Layout::kPart, ranges_max * kRows);
  float* merging = reinterpret_cast<float*>(shared + tiles_bytes);
  int* starts = reinterpret_cast<int*>(merging + merge_floats);
  Decoder<T, kHeadDim, kColumns> decoder{call,
                                         Scores(call),
                                         warps,
                                         stages,
                                         warp,
                                         lane,
                                         call.heads / call.kv_heads,
                                         static_cast<int>(blockIdx.x % call.kv_heads),
                                         shared_address(shared + warp * stages * 2 * Layout::kTile),
                                         merging,
                                         0,
                                         1 << 30};
  let_next_start();
  count_rounds(call, kRows, 16 * warps, starts);
  wait_for_previous();
  const int total = starts[call.seqs], mine = blockIdx.x / call.kv_heads;
  const int ranges = max(1, min(ranges_max, total / kMinRounds));
  if (mine >= ranges || total == 0) return;
  auto begin_of = [&](int range) { return static_cast<int>(static_cast<int64_t>(total) * range / ranges); };
  const int from = begin_of(mine), to = begin_of(mine + 1);
  auto part_of = [&](int range, bool begins_there) {
    return parts + ((static_cast<size_t>(range) * call.kv_heads + decoder.head) * 2 + begins_there) * kColumns * Layout::kPart;
  };

  DecodeCursor cursor{call, starts, kRows, 16 * warps};
  cursor.start(from);
  DecodeCursor ahead = cursor;
  int fetched = from, fetch_stage = 0;
  auto fetch_next = [&] {
    if (fetched < to) {
      decoder.fetch(ahead, fetch_stage);
      if (++fetched < to && ahead.next()) decoder.first_id = 1 << 30;
    }
    commit_copies();
    fetch_stage = fetch_stage + 1 == stages ? 0 : fetch_stage + 1;
  };
  for (int i = 0; i < stages - 1; i++) fetch_next();

  uint32_t q[kColumns][kHeadDim / 16][2];
  uint4 held[Decoder<T, kHeadDim, kColumns>::kHeld];
  DecodeResult<T, kHeadDim, kColumns> result;
  decoder.load_query(cursor.of, cursor.row, held);
  decoder.share_query(held, q);
  result.clear();
  for (int at = from, stage = 0, item_from = from; at < to; at++) {
    if (stages == 2) wait_copies<0>();
    else if (stages == 3) wait_copies<1>();
    else wait_copies<2>();
    __syncwarp();
    if (cursor.begin + (cursor.round * warps + warp) * 16 < cursor.of.end) decoder.attend(cursor, stage, q, result);
    __syncwarp();
    fetch_next();
    stage = stage + 1 == stages ? 0 : stage + 1;
    const bool last = cursor.round + 1 == cursor.rounds, more = at + 1 < to;
    if (!last && more) {
      cursor.round++;
      continue;
    }
    const Sequence of = cursor.of;
    const int row = cursor.row, start = cursor.item_start(), end = start + cursor.rounds;
    const bool begins_here = item_from == start;
    if (more) {
      cursor.next();
      decoder.load_query(cursor.of, cursor.row, held);
    }
    if (begins_here && last) {
      decoder.merge_warps(result, [&](int n, int reg, float x, float, float total) {
        T* p = decoder.output(of, row, n, reg);
        if (p) *p = Numbers<T>::from(x / total);
      });
    } else {
      __shared__ int finished;
      float* part = part_of(mine, begins_here) + lane;
      decoder.merge_warps(result, [&](int n, int reg, float x, float top, float total) {
        float* column = part + n * Layout::kPart;
        __stcg(column + reg * 32, x);
        if (reg < 2) __stcg(column + (Layout::kRegisters + reg) * 32, top), __stcg(column + (Layout::kRegisters + 2 + reg) * 32, total);
      });
      auto range_of = [&](int round) {
        int range = static_cast<int>(static_cast<int64_t>(round) * ranges / total);
        while (begin_of(range) > round) range--;
        while (begin_of(range + 1) <= round) range++;
        return range;
      };
      const int first = range_of(start), count = range_of(end - 1) - first + 1;
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        // The range that an item begins in has no other that goes on beyond it, so it names the counter.
        int* counter = counters + first * call.kv_heads + decoder.head;
        finished = atomicAdd(counter, 1) == count - 1;
        if (finished) *counter = 0;
        __threadfence();
      }
      __syncthreads();
      if (finished) decoder.join(of, row, count, [&](int i) { return part_of(first + i, i == 0); });
    }
    if (more) {
      decoder.share_query(held, q);
      result.clear();
      item_from = at + 1;
    }
  }
  wait_copies<0>();
}

}  // namespace kiln::cuda
