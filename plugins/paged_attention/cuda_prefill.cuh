// Attention of sequences with many new tokens, with the tensor instructions that all architectures from sm_80 on have
// (FlashAttention-2, arXiv 2307.08691). sm_90a has a faster kernel, cuda_hopper.cuh.
//
// A CTA takes 64 query rows of one KV head: 4 warps of 16, each over all keys that its tile sees. Keys and values pass
// through two shared-memory stages. Caches of int8 take the same way: see cuda_int8.cuh.
#pragma once

#include "cuda_int8.cuh"

namespace kiln::cuda {

template <int kHeadDim>
struct PrefillLayout {
  static constexpr int kRows = 64, kThreads = 128;
  static constexpr int kKeys = kHeadDim <= 128 ? 64 : 16;  // positions of a stage; 99 KB must hold it all (sm_86, 89)
  static constexpr int kRow = kHeadDim * 2 + 16, kByteRow = kHeadDim + 16;
  static constexpr int kStage = 2 * kKeys * kRow;        // keys, then values
  static constexpr int kScales = 2 * kKeys * 4;          // of a stage, where a cache is int8
  static constexpr int kBytes = kRows * kRow + 2 * kStage;
  static constexpr int kQuantisedBytes = kBytes + 2 * kScales;
};

template <typename T, int kHeadDim, bool kQuantised>
struct Prefiller {
  using Layout = PrefillLayout<kHeadDim>;
  static constexpr int kSteps = kHeadDim / 16, kRow = Layout::kRow, kKeys = Layout::kKeys, kVectors = kHeadDim / 8;

  const PagedAttention& call;
  const Scores scores;
  const Tile tile;
  const int head, group, lane, warp;
  const uint32_t queries, stages, scales;

  __device__ __forceinline__ int token_of(int row) const { return min((tile.row + row) / group, tile.of.count - 1); }

  __device__ __forceinline__ void load_queries() const {
#pragma unroll 4
    for (int i = threadIdx.x; i < Layout::kRows * kVectors; i += Layout::kThreads) {
      const int row = i / kVectors, dim = i % kVectors * 8, token = token_of(row);
      const T* from = static_cast<const T*>(call.query) + (tile.of.first + token) * call.query_stride +
                      (head * group + (tile.row + row) % group) * kHeadDim;
      const uint4 vector = rotated_vector(call, from, dim, tile.of.past + token);
      if (byte_keys()) store_query(queries + row * kRow, dim / 8, vector);
      else store_shared(queries + row * kRow + dim * 2, vector);
    }
  }

  __device__ __forceinline__ bool byte_keys() const { return kQuantised && call.key_scale; }
  __device__ __forceinline__ bool byte_values() const { return kQuantised && call.value_scale; }

  // Slot of a position in the caches.
  __device__ __forceinline__ int64_t slot_of(int position) const {
    return static_cast<int64_t>(block_of(call, tile.seq, position)) * call.block_size + position % call.block_size;
  }

  template <int kSize>
  __device__ __forceinline__ void fetch_rows(const void* cache, int position, uint32_t to) const {
    constexpr int kBytes = kHeadDim * kSize, kEach = kBytes / 16;
    for (int i = threadIdx.x; i < kKeys * kEach; i += Layout::kThreads) {
      const int row = i / kEach, vector = i % kEach, at = position + row;
      const bool seen = at < tile.of.end;
      const int64_t from = ((seen ? slot_of(at) : 0) * call.kv_heads + head) * kBytes + vector * 16;
      copy_async(to + row * (kBytes + 16) + vector * 16, static_cast<const char*>(cache) + from, seen ? 16 : 0);
    }
  }

  __device__ __forceinline__ void fetch(int position, int stage) const {
    const uint32_t keys = stages + stage * Layout::kStage, values = keys + kKeys * kRow;
    if (byte_keys()) fetch_rows<1>(call.key_cache, position, keys);
    else fetch_rows<2>(call.key_cache, position, keys);
    if (byte_values()) fetch_rows<1>(call.value_cache, position, values);
    else fetch_rows<2>(call.value_cache, position, values);
    if constexpr (kQuantised) {
      for (int i = threadIdx.x; i < 2 * kKeys; i += Layout::kThreads) {
        const float* of = i < kKeys ? call.key_scale : call.value_scale;
        const int at = position + i % kKeys;
        const bool seen = at < tile.of.end;
        const int64_t from = (seen ? slot_of(at) : 0) * call.kv_heads + head;
        if (of) copy_word_async(scales + stage * Layout::kScales + i * 4, of + from, seen);
      }
    }
    commit_copies();
  }

  __device__ __forceinline__ void score(uint32_t keys, uint32_t key_scales, float (&s)[kKeys / 8][4]) const {
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
      uint32_t a[4], b[4];
      load_matrices(a, queries + (warp * 16 + (lane & 15)) * kRow + (k * 2 + (lane >> 4)) * 16);
#pragma unroll
      for (int n = 0; n < kKeys / 16; n++) {
        if (byte_keys()) {
          const uint32_t word = keys + (n * 16 + lane / 4) * Layout::kByteRow + k * 16 + lane % 4 * 4;
          expand<T>(load_word(word), b[0], b[1]);
          expand<T>(load_word(word + 8 * Layout::kByteRow), b[2], b[3]);
        } else {
          load_matrices(b, keys + (n * 16 + (lane & 7) + (lane >> 4) * 8) * kRow + (k * 2 + (lane >> 3 & 1)) * 16);
        }
        Numbers<T>::multiply(s[2 * n], a, b[0], b[1]);
        Numbers<T>::multiply(s[2 * n + 1], a, b[2], b[3]);
      }
    }
    if (!byte_keys()) return;
#pragma unroll
    for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] *= load_float(key_scales + (n * 8 + lane % 4 * 2 + (i & 1)) * 4);
  }

  // Adds weights [row, key] times values to o; l gets the sums of the weights.
  __device__ __forceinline__ void add_values(uint32_t values, const float (&s)[kKeys / 8][4],
                                             float (&o)[2 * kSteps][4], float (&l)[2]) const {
#pragma unroll
    for (int k = 0; k < kKeys / 16; k++) {
      uint32_t a[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* pair = s[2 * k + i / 2] + i % 2 * 2;
        a[i] = Numbers<T>::pack(pair[0], pair[1]);
        const float2 rounded = Numbers<T>::unpack(a[i]);  // the sum of what is multiplied: errors of weights cancel
        l[i % 2] += rounded.x + rounded.y;
      }
#pragma unroll
      for (int d = 0; d < kSteps; d++) {
        load_transposed(b, values + (k * 16 + (lane & 15)) * kRow + (d * 2 + (lane >> 4)) * 16);
        Numbers<T>::multiply(o[2 * d], a, b[0], b[1]);
        Numbers<T>::multiply(o[2 * d + 1], a, b[2], b[3]);
      }
    }
  }

  // The same with values of int8: accumulator i of four belongs to every fourth dimension, see `write`.
  __device__ __forceinline__ void add_byte_values(uint32_t values, uint32_t value_scales,
                                                  const float (&s)[kKeys / 8][4], float (&o)[2 * kSteps][4],
                                                  float (&l)[2]) const {
    using Wide = Numbers<__nv_bfloat16>;
#pragma unroll
    for (int k = 0; k < kKeys / 16; k++) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* pair = s[2 * k + i / 2] + i % 2 * 2;
        const uint32_t scale = value_scales + (k * 16 + i / 2 * 8 + lane % 4 * 2) * 4;
        const SplitPair scaled(scaled_weight(pair[0], load_float(scale)),
                               scaled_weight(pair[1], load_float(scale + 4)));
        high[i] = scaled.high, low[i] = scaled.low;
        l[i % 2] += pair[0] + pair[1];
      }
#pragma unroll
      for (int d = 0; d < 2 * kSteps; d += 4) {
        uint32_t first[4], second[4];
        expand_columns<__nv_bfloat16>(values + k * 16 * Layout::kByteRow + d * 8 + lane / 4 * 4, Layout::kByteRow, lane,
                                      first, second);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          Wide::multiply(o[d + i], high, first[i], second[i]);
          Wide::multiply(o[d + i], low, first[i], second[i]);
        }
      }
    }
  }

  // Adds a stage to this warp's rows lane / 4 and lane / 4 + 8.
  __device__ __forceinline__ void attend(int position, int stage, float (&o)[2 * kSteps][4], float (&m)[2],
                                         float (&l)[2]) const {
    const uint32_t keys = stages + stage * Layout::kStage, values = keys + kKeys * kRow;
    const uint32_t key_scales = scales + stage * Layout::kScales;
    float s[kKeys / 8][4] = {};
    score(keys, key_scales, s);
    float kept[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int own = tile.of.past + token_of(warp * 16 + lane / 4 + j * 8);
      float top = m[j];
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
        for (int i = 2 * j; i < 2 * j + 2; i++) {
          const int at = position + n * 8 + lane % 4 * 2 + (i & 1);
          const bool seen = at <= own && (call.window == 0 || at > own - call.window);
          s[n][i] = seen ? scores(s[n][i]) : -kInfinity;
          top = fmaxf(top, s[n][i]);
        }
      top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
      const float base = top == -kInfinity ? 0 : top;
      kept[j] = exp2_fast(m[j] - base);
      m[j] = top;
      l[j] *= kept[j];
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
        for (int i = 2 * j; i < 2 * j + 2; i++) s[n][i] = exp2_fast(s[n][i] - base);
    }
#pragma unroll
    for (int d = 0; d < 2 * kSteps; d++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[d][i] *= kept[i / 2];
    if (byte_values()) add_byte_values(values, key_scales + kKeys * 4, s, o, l);
    else add_values(values, s, o, l);
  }

  __device__ __forceinline__ void write(float (&o)[2 * kSteps][4], float (&l)[2]) const {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      l[j] += __shfl_xor_sync(kAll, l[j], 1);
      l[j] += __shfl_xor_sync(kAll, l[j], 2);
      const int row = tile.row + warp * 16 + lane / 4 + j * 8;
      if (row >= tile.of.count * group) continue;
      const int64_t token = tile.of.first + row / group;
      T* of_row =
          static_cast<T*>(call.output) + (token * call.heads + head * group + row % group) * kHeadDim;
      if (byte_values()) {
#pragma unroll
        for (int d = 0; d < 2 * kSteps; d += 4) {
          auto pair = [&](int i, int column) {
            return Numbers<T>::pack(o[d + i][2 * j + column] / l[j], o[d + i + 1][2 * j + column] / l[j]);
          };
          *reinterpret_cast<uint4*>(of_row + d * 8 + lane % 4 * 8) = {pair(0, 0), pair(2, 0), pair(0, 1), pair(2, 1)};
        }
        continue;
      }
      uint32_t* to = reinterpret_cast<uint32_t*>(of_row) + lane % 4;
#pragma unroll
      for (int d = 0; d < 2 * kSteps; d++) to[d * 4] = Numbers<T>::pack(o[d][2 * j] / l[j], o[d][2 * j + 1] / l[j]);
    }
  }
};

template <typename T, int kHeadDim, bool kQuantised>
__global__ void __launch_bounds__(128) prefill_kernel(const __grid_constant__ PagedAttention call) {
  using Layout = PrefillLayout<kHeadDim>;
  extern __shared__ __align__(16) char shared[];
  let_next_start();
  const Tile tile = tile_from_end(call, Layout::kRows, blockIdx.x / call.kv_heads);
  if (tile.seq < 0) {
    wait_for_previous();  // whatever follows takes the end of this kernel for the end of all before it
    return;
  }
  const uint32_t queries = shared_address(shared);
  const Prefiller<T, kHeadDim, kQuantised> prefiller{call,
                                                     Scores(call),
                                                     tile,
                                                     static_cast<int>(blockIdx.x % call.kv_heads),
                                                     call.heads / call.kv_heads,
                                                     static_cast<int>(threadIdx.x % 32),
                                                     static_cast<int>(threadIdx.x / 32),
                                                     queries,
                                                     queries + Layout::kRows * Layout::kRow,
                                                     queries + Layout::kBytes};
  wait_for_previous();
  const int begin = tile.of.begin(call, prefiller.token_of(0));
  const int end = tile.of.past + prefiller.token_of(Layout::kRows - 1) + 1;
  prefiller.fetch(begin, 0);
  prefiller.load_queries();
  float o[kHeadDim / 8][4] = {}, m[2] = {-kInfinity, -kInfinity}, l[2] = {};
  for (int position = begin, stage = 0; position < end; position += Layout::kKeys, stage ^= 1) {
    if (position + Layout::kKeys < end) {
      prefiller.fetch(position + Layout::kKeys, stage ^ 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    prefiller.attend(position, stage, o, m, l);
    __syncthreads();
  }
  prefiller.write(o, l);
}

}  // namespace kiln::cuda
