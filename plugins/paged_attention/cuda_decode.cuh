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
// Caches of int8 take the same way: see cuda_int8.cuh. Which of the two caches are, is told at run time, so that one
// kernel does for all of them. Their rows are not padded: fewer requests to the L2, and bank conflicts that are hidden.
//
// How rounds are cut depends on the lengths of all sequences of the call, so the last bits of a result do, too.
#pragma once

#include <type_traits>

#include "cuda_decode_work.cuh"
#include "cuda_int8.cuh"

namespace kiln::cuda {

template <typename T, int kHeadDim, int kColumns, bool kQuantised>
struct Decoder {
  using Layout = DecodeLayout<kHeadDim>;
  static constexpr int kSteps = kHeadDim / 16, kRow = Layout::kRow, kRows = 8 * kColumns;
  static constexpr int kVectors = kHeadDim / 8, kRegisters = Layout::kRegisters, kPart = Layout::kPart;
  // Where registers suffice, queries are turned only when they are needed.
  using Held = std::conditional_t<kColumns == 1, Unrotated<T>, uint4>;
  static constexpr bool kWideKeys = kHeadDim % 64 == 0;  // keys of int8 are loaded 16 bytes at a time
  static constexpr int kHeld = (kRows * kVectors + Layout::kMinThreads - 1) / Layout::kMinThreads;

  const PagedAttention& call;
  const Scores scores;
  const int warps, stages, warp, lane, group, head;
  const uint32_t buffers;  // this warp's: [stages][keys, values, scales]
  float* merging;
  // Block table entries for this warp's tiles: a lane has that of round first_entry + lane. `later` are those of the
  // first rounds of the cursor's later sequence, if contexts begin at 0.
  int entries, later_entries, first_entry;

  __device__ __forceinline__ void load_entries(const DecodeCursor& cursor) {
    first_entry = cursor.round;
    entries = block_entry(call, cursor.seq, cursor.begin + ((first_entry + lane) * warps + warp) * 16);
  }
  __device__ __forceinline__ void load_later_entries(const DecodeCursor& cursor) {
    if (cursor.later_seq < call.seqs && call.window == 0)
      later_entries = block_entry(call, cursor.later_seq, (lane * warps + warp) * 16);
  }
  // Moves on to the round after the cursor's, and has its entries ready or on their way.
  __device__ __forceinline__ void advance(DecodeCursor& cursor) {
    if (++cursor.round < cursor.rounds) {
      if (cursor.round == first_entry + 32) load_entries(cursor);
      return;
    }
    const int seq = cursor.seq;
    cursor.next_item();
    if (cursor.seq == seq) {
      if (first_entry != 0) load_entries(cursor);
    } else if (call.window == 0) {
      first_entry = 0;
      entries = later_entries;
      load_later_entries(cursor);
    } else {
      load_entries(cursor);
    }
  }

  __device__ __forceinline__ bool byte_keys() const { return kQuantised && call.key_scale; }
  __device__ __forceinline__ bool byte_values() const { return kQuantised && call.value_scale; }
  __device__ __forceinline__ int key_bytes() const { return 16 * (byte_keys() ? Layout::kByteRow : kRow); }
  __device__ __forceinline__ int stage_bytes() const {
    return kQuantised ? Layout::stage_bytes(call) : 2 * 16 * kRow;
  }

  // Starts copying 16 rows of a cache from element `at` on.
  template <int kSize>
  __device__ __forceinline__ void fetch_cache(const void* cache, int64_t at, uint32_t to, int seen) const {
    const char* from = static_cast<const char*>(cache) + at * kSize;
    fetch_rows<kHeadDim, kSize>(from, call.kv_heads * kHeadDim * kSize, to, seen);
  }

  // Starts copying this warp's tile of the cursor's round.
  __device__ __forceinline__ void fetch(const DecodeCursor& cursor, int stage) const {
    const int position = cursor.begin + (cursor.round * warps + warp) * 16;
    const int block = block_of(call, __shfl_sync(kAll, entries, cursor.round - first_entry));
    if (position >= cursor.of.end) return;
    const int64_t slot = static_cast<int64_t>(block) * call.block_size + position % call.block_size;
    const int64_t at = slot * call.kv_heads * kHeadDim + head * kHeadDim;
    const uint32_t to = buffers + stage * stage_bytes();
    const int seen = cursor.of.end - position;
    if (byte_keys()) fetch_cache<1>(call.key_cache, at, to, seen);
    else fetch_cache<2>(call.key_cache, at, to, seen);
    if (byte_values()) fetch_cache<1>(call.value_cache, at, to + key_bytes(), seen);
    else fetch_cache<2>(call.value_cache, at, to + key_bytes(), seen);
    if constexpr (kQuantised) {
      const float* scales = lane < 16 ? call.key_scale : call.value_scale;
      const int row = lane % 16;
      const int64_t from = (slot + (row < seen ? row : 0)) * call.kv_heads + head;
      if (scales) copy_word_async(to + stage_bytes() - 128 + lane * 4, scales + from, row < seen);
    }
  }

  // This thread's vectors of the query rows `row` on, rotated: on their way while other things are done.
  __device__ __forceinline__ void load_query(const Sequence& of, int row, Held (&held)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      const int e = threadIdx.x + i * blockDim.x;
      if (e >= kRows * kVectors) break;
      const int r = min(row + e / kVectors, of.count * group - 1), token = r / group;
      const T* from = static_cast<const T*>(call.query) + (of.first + token) * call.query_stride +
                      (head * group + r % group) * kHeadDim;
      const Unrotated<T> loaded(call, from, e % kVectors * 8, of.past + token);
      if constexpr (kColumns == 1) held[i] = loaded;
      else held[i] = loaded.rotated();
    }
  }

  // Passes them through shared memory: each lane gets its parts of the B operand.
  __device__ __forceinline__ void share_query(const Held (&held)[kHeld], uint32_t (&q)[kColumns][kSteps][2]) const {
    const uint32_t rows = shared_address(merging);
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      const int e = threadIdx.x + i * blockDim.x;
      if (e >= kRows * kVectors) break;
      uint4 vector;
      if constexpr (kColumns == 1) vector = held[i].rotated();
      else vector = held[i];
      if (byte_keys() && kWideKeys) store_wide_query(rows + e / kVectors * kRow, e % kVectors, vector);
      else if (byte_keys()) store_query(rows + e / kVectors * kRow, e % kVectors, vector);
      else store_shared(rows + e / kVectors * kRow + e % kVectors * 16, vector);
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

  // Scores of 16 keys, but for the factor.
  __device__ __forceinline__ void score(uint32_t stage, const uint32_t (&q)[kColumns][kSteps][2],
                                        float (&s)[kColumns][4]) const {
    if (byte_keys()) {
      const uint32_t row = stage + lane / 4 * Layout::kByteRow;
      uint32_t low[4], high[4], a[4];
#pragma unroll
      for (int k = 0; k < kSteps; k++) {
        if (!kWideKeys) {
          low[k % 4] = load_word(row + k * 16 + lane % 4 * 4);
          high[k % 4] = load_word(row + 8 * Layout::kByteRow + k * 16 + lane % 4 * 4);
        } else if (k % 4 == 0) {
          load_words(low, row + (k + lane % 4) * 16);
          load_words(high, row + 8 * Layout::kByteRow + (k + lane % 4) * 16);
        }
        expand<T>(low[k % 4], a[0], a[2]);
        expand<T>(high[k % 4], a[1], a[3]);
#pragma unroll
        for (int n = 0; n < kColumns; n++) Numbers<T>::multiply(s[n], a, q[n][k][0], q[n][k][1]);
      }
      const uint32_t scale = stage + stage_bytes() - 128 + lane / 4 * 4;
      const float upper = load_float(scale), lower = load_float(scale + 32);
#pragma unroll
      for (int n = 0; n < kColumns; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] *= i < 2 ? upper : lower;
      return;
    }
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
      uint32_t a[4];
      load_matrices(a, stage + (lane & 15) * kRow + (k * 2 + (lane >> 4)) * 16);
#pragma unroll
      for (int n = 0; n < kColumns; n++) Numbers<T>::multiply(s[n], a, q[n][k][0], q[n][k][1]);
    }
  }

  using Accumulators = float[kColumns][kSteps][4];
  using Kept = float[kColumns][2];
  static __device__ __forceinline__ void keep(float (&o)[4], const float (&kept)[2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) o[i] *= kept[i & 1];
  }

  // o = o * kept + weights times the stage's values.
  __device__ __forceinline__ void add_values(uint32_t stage, const float (&s)[kColumns][4], const Kept& kept,
                                             Accumulators& o) const {
    const uint32_t values = stage + key_bytes();
    uint32_t p[kColumns][2], rest[kColumns][2];
#pragma unroll
    for (int n = 0; n < kColumns; n++)
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
    for (int d = 0; d < kSteps; d++) {
      uint32_t a[4];
      load_transposed(a, values + ((lane & 7) + (lane >> 4) * 8) * kRow + (d * 2 + (lane >> 3 & 1)) * 16);
#pragma unroll
      for (int n = 0; n < kColumns; n++) {
        keep(o[n][d], kept[n]);
        Numbers<T>::multiply(o[n][d], a, p[n][0], p[n][1]);
        if (Numbers<T>::kSplitWeights) Numbers<T>::multiply(o[n][d], a, rest[n][0], rest[n][1]);
      }
    }
  }

  // The same with values of int8; `dim_of` knows which dimensions the accumulators then have.
  __device__ __forceinline__ void add_byte_values(uint32_t stage, const float (&s)[kColumns][4], const Kept& kept,
                                                  Accumulators& o) const {
    using Wide = Numbers<__nv_bfloat16>;
    const uint32_t values = stage + key_bytes(), scale = stage + stage_bytes() - 64 + lane / 4 * 4;
    uint32_t p[kColumns][2], rest[kColumns][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float scaled = load_float(scale + i * 32);
#pragma unroll
      for (int n = 0; n < kColumns; n++) {
        const SplitPair pair(scaled_weight(s[n][2 * i], scaled), scaled_weight(s[n][2 * i + 1], scaled));
        p[n][i] = transposed(pair.high);
        rest[n][i] = transposed(pair.low);
      }
    }
#pragma unroll
    for (int d = 0; d < kSteps; d += 2) {
      uint32_t first[4], second[4];
      expand_columns<__nv_bfloat16>(values + d * 16 + lane / 4 * 4, Layout::kByteRow, lane, first, second);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint32_t a[] = {first[2 * j], first[2 * j + 1], second[2 * j], second[2 * j + 1]};
#pragma unroll
        for (int n = 0; n < kColumns; n++) {
          keep(o[n][d + j], kept[n]);
          Wide::multiply(o[n][d + j], a, p[n][0], p[n][1]);
          Wide::multiply(o[n][d + j], a, rest[n][0], rest[n][1]);
        }
      }
    }
  }

  // Attends to the 16 positions in a stage.
  __device__ __forceinline__ void attend(const DecodeCursor& cursor, int stage_number,
                                         const uint32_t (&q)[kColumns][kSteps][2],
                                         DecodeResult<T, kHeadDim, kColumns>& result) const {
    const Sequence& of = cursor.of;
    const int first = cursor.begin + (cursor.round * warps + warp) * 16;
    const uint32_t stage = buffers + stage_number * stage_bytes();
    float s[kColumns][4] = {};
    score(stage, q, s);
    const int low_token = cursor.row / group;
    const bool whole = first + 15 <= of.past + low_token && (call.window == 0 || first >= of.end - call.window);
    Kept kept;
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
      for (int j = 0; j < 2; j++) result.l[n][j] = result.l[n][j] * kept[n][j] + sum[j];
    }
    if (byte_values()) add_byte_values(stage, s, kept, result.o);
    else add_values(stage, s, kept, result.o);
  }

  // Merges all warps' results and hands the merged accumulators out: `take(n, register, x, m, l)` in each thread for
  // its share of column n, whose rows have the maximum m and the sum l. Registers of a thread belong to one row.
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

  __device__ __forceinline__ int dim_of(int reg) const {
    const int step = reg / 4, upper = reg >> 1 & 1;
    if (byte_values()) return step / 2 * 32 + lane / 4 * 4 + step % 2 * 2 + upper;
    return step * 16 + lane / 4 + upper * 8;
  }

  // Where an accumulator of column n goes; null beyond the item's rows.
  __device__ __forceinline__ T* output(const Sequence& of, int first_row, int n, int reg) const {
    const int row = first_row + n * 8 + lane % 4 * 2 + (reg & 1);
    if (row >= of.count * group) return nullptr;
    return static_cast<T*>(call.output) +
           (static_cast<int64_t>(of.first + row / group) * call.heads + head * group + row % group) * kHeadDim +
           dim_of(reg);
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
          if (r + j * warps < kRegisters)
            *output(of, first_row, n, r + j * warps) = Numbers<T>::from(sums[j] / totals[row]);
      }
    }
    __syncthreads();
  }
};

}  // namespace kiln::cuda
