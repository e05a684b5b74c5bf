// Attention of sequences with many new tokens on sm_90a (FlashAttention-3, arXiv 2407.08608, on pages).
//
// A tile is 128 query rows of one KV head. A CTA takes tile after tile, of those that none has taken. One warp copies
// pages of keys, 16 positions a box, and another one values, into stages of 128 positions; two more rotate the next
// tile's queries into the other of two buffers; all of these run ahead. Two warpgroups of 64 rows multiply: one's next
// scores are computed while it adds up the values of the ones before, and the other one's weights meanwhile. Pages of
// int8 are turned into the 16-bit type by four warps on their way (cuda_hopper_int8.cuh); a CTA then takes one tile.
#pragma once

#include "cuda_int8.cuh"
#include "cuda_wgmma.cuh"

namespace kiln::cuda {

constexpr int kKeyStages = 2, kValueStages = 3;  // values are needed longer than keys

template <int kHeadDim>
struct HopperLayout {
  static constexpr int kRows = 128, kThreads = 384, kPage = 16;
  static constexpr int kKeys = kHeadDim <= 128 ? 128 : 64;   // positions of a stage
  static constexpr int kChunks = (kHeadDim + 63) / 64;       // of 64 columns: 128 bytes, swizzled
  static constexpr int kQueryBytes = kChunks * kRows * 128;
  static constexpr int kQueryBuffers = kHeadDim <= 128 ? 2 : 1;
  static constexpr int kTileBytes = kChunks * kKeys * 128;
  static constexpr int kBoxBytes = kPage * 128;
  static constexpr int kBytes =
      kQueryBuffers * kQueryBytes + (kKeyStages + kValueStages) * kTileBytes + 1024;  // to align by hand
  static constexpr int kLoaders = 64;  // threads that rotate the next tile's queries
};

struct HopperBarriers {
  uint64_t keys_full[kKeyStages], keys_empty[kKeyStages], values_full[kValueStages], values_empty[kValueStages];
  uint64_t queries_full[2], queries_empty[2], tiles_full[2], tiles_empty[2];
};

// A CTA's tile and the one after it.
struct HopperTiles {
  static constexpr int kReaders = 12;  // all warps

  Tile tiles[2];
  int heads[2];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// By a warp that is done with what the barrier guards.
__device__ __forceinline__ void release(uint64_t& barrier) {
  if (threadIdx.x % 32 == 0) arrive(shared_address(&barrier));
}

// Stages of keys, or of values. Numbers count them from the CTA's first on.
template <int kStages>
struct HopperStages {
  uint32_t address;
  uint64_t (&full)[kStages], (&empty)[kStages];

  __device__ __forceinline__ void wait_full(int number) const {
    wait_barrier(shared_address(&full[number % kStages]), number / kStages % 2);
  }
  __device__ __forceinline__ void wait_empty(int number) const {
    wait_barrier(shared_address(&empty[number % kStages]), number / kStages % 2 ^ 1);
  }
};

// What both kinds of warps know of a tile's work.
struct HopperWork {
  const PagedAttention& call;
  const Tile tile;
  const int head, group, begin, end;  // positions that the tile's rows see
  const uint32_t queries, keys, values;
  HopperBarriers& barriers;

  // `buffer` is that of the queries.
  template <typename Layout>
  __device__ __forceinline__ static HopperWork of(const PagedAttention& call, const Tile& tile, int head, int buffer,
                                                  uint32_t base, HopperBarriers& barriers) {
    const int group = call.heads / call.kv_heads, rows = tile.of.count * group;
    const uint32_t stages = base + Layout::kQueryBuffers * Layout::kQueryBytes;
    return {call,
            tile,
            head,
            group,
            tile.of.begin(call, tile.row / group),
            min(tile.of.past + (min(tile.row + Layout::kRows, rows) - 1) / group + 1, tile.of.end),
            base + buffer * Layout::kQueryBytes,
            stages,
            stages + kKeyStages * Layout::kTileBytes,
            barriers};
  }

  __device__ __forceinline__ HopperStages<kKeyStages> key_stages() const {
    return {keys, barriers.keys_full, barriers.keys_empty};
  }
  __device__ __forceinline__ HopperStages<kValueStages> value_stages() const {
    return {values, barriers.values_full, barriers.values_empty};
  }
  __device__ __forceinline__ int token_of(int row) const { return min((tile.row + row) / group, tile.of.count - 1); }
};

// The block that this lane of a copying warp copies from, of the pages from `position` on; -1: it copies nothing.
template <int kHeadDim>
__device__ __forceinline__ int block_to_copy(const HopperWork& work, int position) {
  using Layout = HopperLayout<kHeadDim>;
  const int page = threadIdx.x % 32 / Layout::kChunks, at = position + page * Layout::kPage;
  return page < Layout::kKeys / Layout::kPage && at < work.end ? block_of(work.call, work.tile.seq, at) : -1;
}

// One warp copies the pages of a stage when the stage before in its place is no longer needed.
template <int kHeadDim, int kStages>
__device__ __forceinline__ void copy_stage(const HopperWork& work, const CUtensorMap* map,
                                           const HopperStages<kStages>& stages, int position, int number, int block) {
  using Layout = HopperLayout<kHeadDim>;
  const int lane = threadIdx.x % 32, page = lane / Layout::kChunks, chunk = lane % Layout::kChunks;
  const int stage = number % kStages;
  const int row = block * work.call.block_size + (position + page * Layout::kPage) % work.call.block_size;
  const int boxes = __popc(__ballot_sync(kAll, block >= 0));
  const uint32_t to =
      stages.address + stage * Layout::kTileBytes + (chunk * Layout::kKeys + page * Layout::kPage) * 128;
  const uint32_t barrier = shared_address(&stages.full[stage]);
  stages.wait_empty(number);
  if (lane == 0) arrive_expecting(barrier, boxes * Layout::kBoxBytes);
  __syncwarp();
  if (block >= 0) copy_box(to, map, chunk * 64, work.head, row, barrier);
}

// All stages of a tile, from a number on, by one warp, which looks up a stage's blocks before it waits for the place of
// the one before.
template <int kHeadDim, int kStages>
__device__ __forceinline__ void copy_pages(const HopperWork& work, const CUtensorMap* map,
                                           const HopperStages<kStages>& stages, int& number) {
  constexpr int kKeys = HopperLayout<kHeadDim>::kKeys;
  int block = block_to_copy<kHeadDim>(work, work.begin);
  for (int position = work.begin; position < work.end; position += kKeys, number++) {
    const int next = block_to_copy<kHeadDim>(work, position + kKeys);
    copy_stage<kHeadDim>(work, map, stages, position, number, block);
    block = next;
  }
}

template <int kRows>
__device__ __forceinline__ uint32_t query_offset(int row, int dim) {
  return (dim / 64 * kRows + row) * 128 + ((dim / 8 % 8 ^ row % 8) * 16) + dim % 8 * 2;
}

// A tile's queries, rotated, by so many threads, of which `thread` is one. Where a head's halves turn each other, a
// thread waits when all of its vectors are on their way, and rotates them where they lie; it takes a vector of a token
// and its counterpart for all heads, so that what turns them is loaded once.
template <typename T, int kHeadDim, int kThreads>
__device__ __forceinline__ void load_queries(const HopperWork& work, int thread) {
  constexpr int kRows = HopperLayout<kHeadDim>::kRows, kVectors = kHeadDim / 8, kPairs = kVectors / 2;
  const PagedAttention& call = work.call;
  const Tile& tile = work.tile;
  const int group = work.group, half = call.rotary_half;
  const auto query = [&](int token) {
    return static_cast<const T*>(call.query) + (tile.of.first + token) * call.query_stride +
           work.head * group * kHeadDim;
  };
  const auto address = [&](int row, int dim) { return work.queries + query_offset<kRows>(row, dim); };
  if (half > 0 && (call.interleaved || half != kHeadDim / 2)) {
#pragma unroll 1
    for (int i = thread; i < kRows * kVectors; i += kThreads) {
      const int row = i / kVectors, dim = i % kVectors * 8, token = work.token_of(row);
      const T* from = query(token) + (tile.row + row) % group * kHeadDim;
      store_shared(address(row, dim), rotated_vector(call, from, dim, tile.of.past + token));
    }
    publish_stores();
    return;
  }
  const int first = tile.row / group, before = tile.row % group;  // heads of the first token in the tile before
  const int pairs = ((before + kRows - 1) / group + 1) * kPairs;
  const auto for_rows = [&](int token, auto run) {
    const int end = min(group, kRows + before - token * group);
    for (int head = token == 0 ? before : 0; head < end; head++) run(token * group + head - before, head);
  };
  for (int i = thread; i < pairs; i += kThreads) {
    const int token = i / kPairs, dim = i % kPairs * 8, bytes = first + token < tile.of.count ? 16 : 0;  // 0: zeros
    const T* from = query(min(first + token, tile.of.count - 1)) + dim;
    for_rows(token, [&](int row, int head) {
      copy_async(address(row, dim), from + head * kHeadDim, bytes);
      copy_async(address(row, dim + kHeadDim / 2), from + head * kHeadDim + kHeadDim / 2, bytes);
    });
  }
  commit_copies();
  if (half > 0) {
    Unrotated<T> pair, next;
    const auto load_turn = [&](Unrotated<T>& to, int i) {
      to.load_turn(call, i % kPairs * 8, tile.of.past + first + min(i, pairs - 1) / kPairs);
    };
    load_turn(next, thread);
    wait_copies<0>();
    for (int i = thread; i < pairs; i += kThreads) {
      const int dim = i % kPairs * 8;
      pair = next;
      pair.sign = -1;
      load_turn(next, i + kThreads);
      for_rows(i / kPairs, [&](int row, int) {
        pair.x = load_shared(address(row, dim)), pair.y = load_shared(address(row, dim + kHeadDim / 2));
        store_shared(address(row, dim), pair.rotated());
        store_shared(address(row, dim + kHeadDim / 2), pair.other());
      });
    }
  } else {
    wait_copies<0>();
  }
  publish_stores();
}

// One warpgroup's 64 rows; this thread's are `own_row` and 8 more.
template <typename T, int kHeadDim>
struct HopperRows {
  using Layout = HopperLayout<kHeadDim>;
  static constexpr int kKeys = Layout::kKeys, kSteps = kHeadDim / 16;
  static constexpr int kPart = kHeadDim == 64 ? 32 : 64, kParts = kHeadDim == 256 ? 2 : 1;

  const Scores scores;
  const int window, warpgroup, lane;
  const uint32_t queries, keys, values;  // the first: of this warpgroup
  int own[2];                            // positions
  float s[kKeys / 2], o[kParts][kPart], m[2], l[2], kept[2];
  uint32_t p[kKeys / 4];

  __device__ __forceinline__ HopperRows(const HopperWork& work, int warpgroup)
      : scores(work.call),
        window(work.call.window),
        warpgroup(warpgroup),
        lane(threadIdx.x % 32),
        queries(work.queries + warpgroup * 64 * 128),
        keys(work.keys),
        values(work.values) {}

  __device__ __forceinline__ uint32_t query_address(int row, int dim) const {
    return queries + query_offset<Layout::kRows>(row, dim);
  }

  __device__ __forceinline__ int own_row(int j) const { return (threadIdx.x / 32 - 4) * 16 + lane / 4 + 8 * j; }

  __device__ __forceinline__ void start_scores(int stage) {
    const Matrix rows(queries, 1024), columns(keys + stage * Layout::kTileBytes, 1024);
#pragma unroll
    for (int k = 0; k < kSteps; k++)
      Products<T>::run(s, rows.after(k / 4 * Layout::kRows * 128 + k % 4 * 32),
                       columns.after(k / 4 * kKeys * 128 + k % 4 * 32), k > 0);
    commit_products();
  }

  // Of a stage's first positions.
  template <int kPositions = kKeys>
  __device__ __forceinline__ void start_values(int stage) {
    const Matrix columns(values + stage * Layout::kTileBytes, 1024, kKeys * 128);
#pragma unroll
    for (int k = 0; k < kPositions / 16; k++)
#pragma unroll
      for (int part = 0; part < kParts; part++)
        Products<T>::run(o[part], p + 4 * k, columns.after(part * 2 * kKeys * 128 + k * 2048));
    commit_products();
  }

  __device__ __forceinline__ void mask(int position) {
    const bool ends = position + kKeys - 1 > own[0], begins = window > 0 && position <= own[1] - window;
    if (!ends && !begins) return;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int high = own[j] - position - lane % 4 * 2;
      hide([=](int at) { return at > high; }, j);
      if (begins) hide([=](int at) { return at <= high - window; }, j);
    }
  }
  template <typename Hidden>
  __device__ __forceinline__ void hide(Hidden hidden, int j) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (hidden(n * 8 + i)) s[n * 4 + j * 2 + i] = -kInfinity;
  }

  // Scores become weights; `kept` is what the sums so far are to be multiplied by, seldom other than 1: what was the
  // largest score stays what weights are relative to until one exceeds it by so much that its weight is over 2^kSlack.
  __device__ __forceinline__ void soften(int position) {
    constexpr float kSlack = 6;
    if (scores.capped()) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; i++) s[i] = scores(s[i]);
    }
    mask(position);
    const float factor = scores.capped() ? 1 : scores.factor;
    float base[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float top = m[j];
#pragma unroll
      for (int n = 0; n < kKeys / 8; n++) top = fmaxf(top, fmaxf(s[n * 4 + 2 * j], s[n * 4 + 2 * j + 1]));
      top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
      if ((top - m[j]) * factor <= kSlack) top = m[j];
      base[j] = top == -kInfinity ? 0 : top * factor;
      kept[j] = exp2_fast(m[j] * factor - base[j]);
      m[j] = top;
      l[j] *= kept[j];
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; i++) s[i] = exp2_fast(fmaf(s[i], factor, -base[i / 2 % 2]));
  }

  __device__ __forceinline__ void take_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; i++) {
      p[i] = Numbers<T>::pack(s[2 * i], s[2 * i + 1]);
      const float2 rounded = Numbers<T>::unpack(p[i]);  // the sum of what is multiplied: errors of weights cancel
      l[i % 2] += rounded.x + rounded.y;
    }
  }

  __device__ __forceinline__ void rescale() {
    if (!__any_sync(kAll, kept[0] != 1 || kept[1] != 1)) return;
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

  // Values between `seen` and `end` of a stage, which no row of the tile sees: 0 times what is there may be NaN.
  __device__ __forceinline__ void clear_values(int stage, int seen, int end) const {
    constexpr int kVectors = Layout::kChunks * 8;
    if (seen >= end) return;
    const int thread = threadIdx.x - 128, vector = thread % kVectors;
    const uint32_t to = values + stage * Layout::kTileBytes + vector / 8 * kKeys * 128 + vector % 8 * 16;
    for (int row = seen + thread / kVectors; row < end; row += 256 / kVectors) store_shared(to + row * 128, {});
    publish_stores();
    sync_threads<256>(3);
  }

  // The values of the last stage, where they are done with after so many positions.
  template <int kPositions>
  __device__ __forceinline__ void finish_stage(int stage, int seen) {
    clear_values(stage, seen, kPositions);
    begin_products();
    start_values<kPositions>(stage);
    finish_values();
  }

  // `number`: of the tile's first stage, then of the next tile's.
  __device__ __forceinline__ void attend(const HopperWork& work, int& number) {
#pragma unroll
    for (int j = 0; j < 2; j++) own[j] = work.tile.of.past + work.token_of(own_row(j));
    m[0] = m[1] = -kInfinity;
    l[0] = l[1] = 0;
#pragma unroll
    for (int part = 0; part < kParts; part++)
#pragma unroll
      for (int i = 0; i < kPart; i++) o[part][i] = 0;
    const auto key_stages = work.key_stages();
    const auto value_stages = work.value_stages();
    const int end = work.end;
    int position = work.begin, i = number;
    key_stages.wait_full(i);
    begin_products();
    start_scores(i % kKeyStages);
    wait_products<0>();
    pin(s);
    release(key_stages.empty[i % kKeyStages]);
    soften(position);
    take_weights();
    value_stages.wait_full(i);
    for (; position + kKeys < end; i++) {
      key_stages.wait_full(i + 1);
      pin(s);
      begin_products();
      start_scores((i + 1) % kKeyStages);
      start_values(i % kValueStages);
      wait_products<1>();
      pin(s);
      release(key_stages.empty[(i + 1) % kKeyStages]);
      soften(position += kKeys);
      value_stages.wait_full(i + 1);
      finish_values();
      release(value_stages.empty[i % kValueStages]);
      rescale();
      take_weights();
    }
    const int seen = end - position;
    if (seen <= kKeys / 2) finish_stage<kKeys / 2>(i % kValueStages, seen);
    else finish_stage<kKeys>(i % kValueStages, seen);
    release(value_stages.empty[i % kValueStages]);
    number = i + 1;
  }

  // Through shared memory, where the queries were, so that stores are of 16 bytes.
  __device__ __forceinline__ void write(const HopperWork& work) {
    sync_threads<128>(1 + warpgroup);
    const int row = own_row(0) - warpgroup * 64;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      l[j] += __shfl_xor_sync(kAll, l[j], 1);
      l[j] += __shfl_xor_sync(kAll, l[j], 2);
      const float share = 1 / l[j];
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; n++) {
        const float* pair = o[n / 16] + n % 16 * 4 + j * 2;
        const uint32_t address = query_address(row + 8 * j, n * 8 + lane % 4 * 2);
        const uint32_t packed = Numbers<T>::pack(pair[0] * share, pair[1] * share);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(packed) : "memory");
      }
    }
    __syncwarp();
    constexpr int kVectors = kHeadDim / 8;
    for (int i = lane; i < 16 * kVectors; i += 32) {
      const int of_warp = row - lane / 4 + i / kVectors, vector = i % kVectors;
      const int in_sequence = work.tile.row + warpgroup * 64 + of_warp;
      if (in_sequence >= work.tile.of.count * work.group) continue;
      T* to = static_cast<T*>(work.call.output) +
              (static_cast<int64_t>(work.tile.of.first + in_sequence / work.group) * work.call.heads +
               work.head * work.group + in_sequence % work.group) * kHeadDim + vector * 8;
      *reinterpret_cast<uint4*>(to) = load_shared(query_address(of_warp, vector * 8));
    }
  }
};
#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace kiln::cuda
