// Attention of sequences with many new tokens, with the tensor instructions that all architectures from sm_80 on have
// (FlashAttention-2, arXiv 2307.08691). sm_90a has a faster kernel, cuda_hopper.cuh.
//
// A CTA takes 64 query rows of one KV head: 4 warps of 16, each over all keys that its tile sees. Keys and values pass
// through two shared-memory stages.
#pragma once

#include "cuda_device.cuh"

namespace kiln::cuda {

template <int kHeadDim>
struct PrefillLayout {
  static constexpr int kRows = 64, kThreads = 128;
  static constexpr int kKeys = kHeadDim <= 128 ? 64 : 16;  // positions of a stage; 99 KB must hold it all (sm_86, 89)
  static constexpr int kRow = kHeadDim * 2 + 16;
  static constexpr int kBytes = (kRows + 4 * kKeys) * kRow;
};

template <typename T, int kHeadDim>
struct Prefiller {
  using Layout = PrefillLayout<kHeadDim>;
  static constexpr int kSteps = kHeadDim / 16, kRow = Layout::kRow, kKeys = Layout::kKeys, kVectors = kHeadDim / 8;

  const PagedAttention& call;
  const Scores scores;
  const Tile tile;
  const int head, group, lane, warp;
  const uint32_t queries, stages;

  __device__ __forceinline__ int token_of(int row) const { return min((tile.row + row) / group, tile.of.count - 1); }

  __device__ __forceinline__ void load_queries() const {
#pragma unroll 4
    for (int i = threadIdx.x; i < Layout::kRows * kVectors; i += Layout::kThreads) {
      const int row = i / kVectors, dim = i % kVectors * 8, token = token_of(row);
      const T* from = static_cast<const T*>(call.query) + (tile.of.first + token) * call.query_stride +
                      (head * group + (tile.row + row) % group) * kHeadDim;
      store_shared(queries + row * kRow + dim * 2, rotated_vector(call, from, dim, tile.of.past + token));
    }
  }

  __device__ __forceinline__ void fetch(int position, int stage) const {
    const int stride = call.kv_heads * kHeadDim;
    const uint32_t to = stages + stage * 2 * kKeys * kRow;
    for (int i = threadIdx.x; i < kKeys * kVectors; i += Layout::kThreads) {
      const int row = i / kVectors, vector = i % kVectors, at = position + row;
      const int bytes = at < tile.of.end ? 16 : 0;
      const int block = bytes ? block_of(call, tile.seq, at) : 0;
      const int64_t from = (static_cast<int64_t>(block) * call.block_size + at % call.block_size) * stride +
                           head * kHeadDim + vector * 8;
      copy_async(to + row * kRow + vector * 16, static_cast<const T*>(call.key_cache) + from, bytes);
      copy_async(to + (kKeys + row) * kRow + vector * 16, static_cast<const T*>(call.value_cache) + from, bytes);
    }
    commit_copies();
  }

  // Adds a stage to this warp's rows lane / 4 and lane / 4 + 8.
  __device__ __forceinline__ void attend(int position, int stage, float (&o)[2 * kSteps][4], float (&m)[2],
                                         float (&l)[2]) const {
    const uint32_t keys = stages + stage * 2 * kKeys * kRow, values = keys + kKeys * kRow;
    float s[kKeys / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
      uint32_t a[4], b[4];
      load_matrices(a, queries + (warp * 16 + (lane & 15)) * kRow + (k * 2 + (lane >> 4)) * 16);
#pragma unroll
      for (int n = 0; n < kKeys / 16; n++) {
        load_matrices(b, keys + (n * 16 + (lane & 7) + (lane >> 4) * 8) * kRow + (k * 2 + (lane >> 3 & 1)) * 16);
        Numbers<T>::multiply(s[2 * n], a, b[0], b[1]);
        Numbers<T>::multiply(s[2 * n + 1], a, b[2], b[3]);
      }
    }
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

  __device__ __forceinline__ void write(float (&o)[2 * kSteps][4], float (&l)[2]) const {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      l[j] += __shfl_xor_sync(kAll, l[j], 1);
      l[j] += __shfl_xor_sync(kAll, l[j], 2);
      const int row = tile.row + warp * 16 + lane / 4 + j * 8;
      if (row >= tile.of.count * group) continue;
      uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<T*>(call.output) +
                                                 (static_cast<int64_t>(tile.of.first + row / group) * call.heads +
                                                  head * group + row % group) * kHeadDim) + lane % 4;
#pragma unroll
      for (int d = 0; d < 2 * kSteps; d++) to[d * 4] = Numbers<T>::pack(o[d][2 * j] / l[j], o[d][2 * j + 1] / l[j]);
    }
  }
};

template <typename T, int kHeadDim>
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
  const Prefiller<T, kHeadDim> prefiller{call,
                                         Scores(call),
                                         tile,
                                         static_cast<int>(blockIdx.x % call.kv_heads),
                                         call.heads / call.kv_heads,
                                         static_cast<int>(threadIdx.x % 32),
                                         static_cast<int>(threadIdx.x / 32),
                                         queries,
                                         queries + Layout::kRows * Layout::kRow};
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
