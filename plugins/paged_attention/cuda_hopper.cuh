// Attention of sequences with many new tokens on sm_90a (FlashAttention-3, arXiv 2407.08608, on pages).
//
// A CTA takes 128 query rows of one KV head. One warp copies pages of keys and values, 16 positions a box, into two
// stages each; two warpgroups of 64 rows multiply. A warpgroup's next scores are computed while it adds up the values
// of the ones before, and softmax runs under both. Pages of int8 are turned into the 16-bit type by four warps on their
// way (cuda_hopper_int8.cuh).
#pragma once

#include "cuda_int8.cuh"
#include "cuda_wgmma.cuh"

namespace kiln::cuda {

template <int kHeadDim>
struct HopperLayout {
  static constexpr int kRows = 128, kThreads = 384, kStages = 2, kPage = 16;
  static constexpr int kKeys = kHeadDim <= 128 ? 128 : 64;   // positions of a stage
  static constexpr int kChunks = (kHeadDim + 63) / 64;       // of 64 columns: 128 bytes, swizzled
  static constexpr int kQueryBytes = kChunks * kRows * 128;
  static constexpr int kTileBytes = kChunks * kKeys * 128;
  static constexpr int kBoxBytes = kPage * 128;
  static constexpr int kBytes = kQueryBytes + 2 * kStages * kTileBytes + 1024;  // to align by hand
};

struct HopperBarriers {
  uint64_t keys_full[2], values_full[2], keys_empty[2], values_empty[2];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// What both kinds of warps know of the CTA's work.
struct HopperWork {
  const PagedAttention& call;
  const Tile tile;
  const int head, group, begin, end;  // positions that the tile's rows see
  const uint32_t queries, keys, values;
  HopperBarriers& barriers;

  __device__ __forceinline__ int token_of(int row) const { return min((tile.row + row) / group, tile.of.count - 1); }
};

// One warp copies the pages of a stage, of keys or of values, when the stage before in its place is no longer needed.
template <int kHeadDim>
__device__ __forceinline__ void copy_stage(const HopperWork& work, const CUtensorMap* map, uint32_t stages,
                                           int position, int number, uint64_t (&full)[2], uint64_t (&empty)[2]) {
  using Layout = HopperLayout<kHeadDim>;
  const int lane = threadIdx.x % 32, page = lane / Layout::kChunks, chunk = lane % Layout::kChunks, stage = number % 2;
  const int pages = min(Layout::kKeys, work.end - position + Layout::kPage - 1) / Layout::kPage;
  const int boxes = pages * Layout::kChunks, at = position + page * Layout::kPage;
  const int block = lane < boxes ? block_of(work.call, work.tile.seq, at) : 0;
  const int row = block * work.call.block_size + at % work.call.block_size;
  const uint32_t to = stages + stage * Layout::kTileBytes + (chunk * Layout::kKeys + page * Layout::kPage) * 128;
  const uint32_t barrier = shared_address(&full[stage]);
  wait_barrier(shared_address(&empty[stage]), number / 2 % 2 ^ 1);
  if (lane == 0) arrive_expecting(barrier, boxes * Layout::kBoxBytes);
  __syncwarp();
  if (lane < boxes) copy_box(to, map, chunk * 64, work.head, row, barrier);
}

template <int kHeadDim>
__device__ __forceinline__ void copy_pages(const HopperWork& work, const CUtensorMap* key_map,
                                           const CUtensorMap* value_map) {
  HopperBarriers& barriers = work.barriers;
  for (int position = work.begin, i = 0; position < work.end; position += HopperLayout<kHeadDim>::kKeys, i++) {
    copy_stage<kHeadDim>(work, key_map, work.keys, position, i, barriers.keys_full, barriers.keys_empty);
    copy_stage<kHeadDim>(work, value_map, work.values, position, i, barriers.values_full, barriers.values_empty);
  }
}

// One warpgroup's 64 rows; this thread's are `own_row` and 8 more.
template <typename T, int kHeadDim>
struct HopperRows {
  using Layout = HopperLayout<kHeadDim>;
  static constexpr int kKeys = Layout::kKeys, kSteps = kHeadDim / 16;
  static constexpr int kPart = kHeadDim == 64 ? 32 : 64, kParts = kHeadDim == 256 ? 2 : 1;

  const HopperWork& work;
  const Scores scores;
  const int warpgroup, lane, own_row;
  const uint32_t queries;  // of this warpgroup
  float s[kKeys / 2], o[kParts][kPart], m[2], l[2], kept[2];
  uint32_t p[kKeys / 4];

  __device__ __forceinline__ uint32_t query_address(int row, int dim) const {
    return queries + (dim / 64 * Layout::kRows + row) * 128 + ((dim / 8 % 8 ^ row % 8) * 16) + dim % 8 * 2;
  }

  __device__ __forceinline__ void load_queries() const {
    constexpr int kVectors = kHeadDim / 8;
#pragma unroll 4
    for (int i = threadIdx.x % 128; i < 64 * kVectors; i += 128) {
      const int row = i / kVectors, dim = i % kVectors * 8;
      const int in_tile = warpgroup * 64 + row, token = work.token_of(in_tile);
      const T* from = static_cast<const T*>(work.call.query) + (work.tile.of.first + token) * work.call.query_stride +
                      (work.head * work.group + (work.tile.row + in_tile) % work.group) * kHeadDim;
      store_shared(query_address(row, dim), rotated_vector(work.call, from, dim, work.tile.of.past + token));
    }
    publish_stores();
    sync_threads<128>(1 + warpgroup);
  }

  __device__ __forceinline__ void start_scores(int stage) {
    const uint32_t keys = work.keys + stage * Layout::kTileBytes;
#pragma unroll
    for (int k = 0; k < kSteps; k++)
      Products<T>::run(s, matrix(queries + k / 4 * Layout::kRows * 128 + k % 4 * 32, 1024),
                       matrix(keys + k / 4 * kKeys * 128 + k % 4 * 32, 1024), k > 0);
    commit_products();
  }

  __device__ __forceinline__ void start_values(int stage) {
    const uint32_t values = work.values + stage * Layout::kTileBytes;
#pragma unroll
    for (int k = 0; k < kKeys / 16; k++)
#pragma unroll
      for (int part = 0; part < kParts; part++)
        Products<T>::run(o[part], p + 4 * k, matrix(values + part * 2 * kKeys * 128 + k * 2048, 1024, kKeys * 128));
    commit_products();
  }

  __device__ __forceinline__ void release(uint64_t& barrier) const {
    if (lane == 0) arrive(shared_address(&barrier));
  }

  __device__ __forceinline__ void mask(int position) {
    const int window = work.call.window;
    const int first = work.tile.of.past + work.token_of(warpgroup * 64);
    const int last = work.tile.of.past + work.token_of(warpgroup * 64 + 63);
    if (position + kKeys - 1 <= first && (window == 0 || position > last - window)) return;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int own = work.tile.of.past + work.token_of(own_row + 8 * j);
      const int high = own - position - lane % 4 * 2, low = window > 0 ? high - window : -1 << 20;
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          if (n * 8 + i > high || n * 8 + i <= low) s[n * 4 + j * 2 + i] = -kInfinity;
    }
  }

  // Scores become weights; `kept` is what the sums so far are to be multiplied by.
  __device__ __forceinline__ void soften(int position) {
    if (scores.capped()) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; i++) s[i] = scores(s[i]);
    }
    mask(position);
    const float factor = scores.capped() ? 1 : scores.factor;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float top = m[j];
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++) top = fmaxf(top, fmaxf(s[n * 4 + 2 * j], s[n * 4 + 2 * j + 1]));
      top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
      const float base = top == -kInfinity ? 0 : top * factor;
      kept[j] = exp2_fast(m[j] * factor - base);
      m[j] = top;
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
        for (int i = n * 4 + 2 * j; i < n * 4 + 2 * j + 2; i++) s[i] = exp2_fast(fmaf(s[i], factor, -base));
    }
  }

  __device__ __forceinline__ void take_weights() {
#pragma unroll
    for (int j = 0; j < 2; j++) l[j] *= kept[j];
#pragma unroll
    for (int i = 0; i < kKeys / 4; i++) {
      p[i] = Numbers<T>::pack(s[2 * i], s[2 * i + 1]);
      const float2 rounded = Numbers<T>::unpack(p[i]);  // the sum of what is multiplied: errors of weights cancel
      l[i % 2] += rounded.x + rounded.y;
    }
  }

  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int part = 0; part < kParts; part++)
#pragma unroll
      for (int i = 0; i < kPart; i++) o[part][i] *= kept[i / 2 % 2];
  }

  __device__ __forceinline__ void finish_values() {
    wait_products<0>();
#pragma unroll
    for (int part = 0; part < kParts; part++) pin(o[part]);
  }

  // Values that no row of the tile sees: 0 times what is there may be NaN.
  __device__ __forceinline__ void clear_values(int position, int stage) const {
    const int seen = work.end - position, rows = kKeys - seen;
    if (rows <= 0) return;
    const uint32_t values = work.values + stage * Layout::kTileBytes;
    for (int i = threadIdx.x - 128; i < rows * Layout::kChunks * 8; i += 256) {
      const int row = seen + i / 8 % rows, chunk = i / 8 / rows;
      store_shared(values + (chunk * kKeys + row) * 128 + i % 8 * 16, {});
    }
    publish_stores();
    sync_threads<256>(3);
  }

  __device__ __forceinline__ void attend() {
    m[0] = m[1] = -kInfinity;
    l[0] = l[1] = 0;
#pragma unroll
    for (int part = 0; part < kParts; part++)
#pragma unroll
      for (int i = 0; i < kPart; i++) o[part][i] = 0;
    HopperBarriers& barriers = work.barriers;
    wait_barrier(shared_address(&barriers.keys_full[0]), 0);
    begin_products();
    start_scores(0);
    wait_products<0>();
    pin(s);
    release(barriers.keys_empty[0]);
    soften(work.begin);
    take_weights();
    int position = work.begin, i = 0;
    while (position + kKeys < work.end) {
      const int stage = i % 2, phase = i / 2 % 2, next = (i + 1) % 2, next_phase = (i + 1) / 2 % 2;
      wait_barrier(shared_address(&barriers.keys_full[next]), next_phase);
      pin(s);
      begin_products();
      start_scores(next);
      wait_barrier(shared_address(&barriers.values_full[stage]), phase);
      start_values(stage);
      wait_products<1>();
      pin(s);
      release(barriers.keys_empty[next]);
      position += kKeys;
      i++;
      soften(position);
      finish_values();
      release(barriers.values_empty[stage]);
      rescale();
      take_weights();
    }
    wait_barrier(shared_address(&barriers.values_full[i % 2]), i / 2 % 2);
    clear_values(position, i % 2);
    begin_products();
    start_values(i % 2);
    finish_values();
  }

  // Through shared memory, where the queries were, so that stores are of 16 bytes.
  __device__ __forceinline__ void write() {
    sync_threads<128>(1 + warpgroup);
    const int row = own_row - warpgroup * 64;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      l[j] += __shfl_xor_sync(kAll, l[j], 1);
      l[j] += __shfl_xor_sync(kAll, l[j], 2);
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n++) {
        const float* pair = o[n / 16] + n % 16 * 4 + j * 2;
        const uint32_t address = query_address(row + 8 * j, n * 8 + lane % 4 * 2);
        const uint32_t packed = Numbers<T>::pack(pair[0] / l[j], pair[1] / l[j]);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(packed) : "memory");
      }
    }
    __syncwarp();
    constexpr int kVectors = kHeadDim / 8;
    for (int i = lane; i < 16 * kVectors; i += 32) {
      const int of_warp = row - lane / 4 + i / kVectors, vector = i % kVectors;
      const int in_sequence = work.tile.row + warpgroup * 64 + of_warp;
      if (in_sequence >= work.tile.of.count * work.group) continue;
      uint4 data;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(data.x), "=r"(data.y), "=r"(data.z), "=r"(data.w)
                   : "r"(query_address(of_warp, vector * 8)));
      T* to = static_cast<T*>(work.call.output) +
              (static_cast<int64_t>(work.tile.of.first + in_sequence / work.group) * work.call.heads +
               work.head * work.group + in_sequence % work.group) * kHeadDim + vector * 8;
      *reinterpret_cast<uint4*>(to) = data;
    }
  }
};
#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace kiln::cuda
