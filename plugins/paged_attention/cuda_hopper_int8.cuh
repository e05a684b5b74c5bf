// Pages of int8 on their way into the prefill kernel of sm_90a: four warps load them, restore the 16-bit numbers that
// they stand for, and store these where and as the bulk copy engine would.
#pragma once

#include "cuda_hopper.cuh"

namespace kiln::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Four integers times a scale, rounded to the element type. 0x4700xx00 is 32768 + xx; `offset` is what takes this and
// the sign's 128 away again, times the scale.
template <typename T>
__device__ __forceinline__ uint2 restored(uint32_t bytes, float scale, float offset) {
  const uint32_t shifted = bytes ^ 0x80808080u;
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    x[i] = fmaf(__uint_as_float(__byte_perm(shifted, 0x4700u, 0x5404u | i << 4)), scale, offset);
  return {Numbers<T>::pack(x[0], x[1]), Numbers<T>::pack(x[2], x[3])};
}

struct ByteCache {
  const int8_t* levels;
  const float* scales;
};

// Tiles of caches, each vector of 16 integers by one thread. What a thread has taken out of its registers it replaces
// at once by what it needs of the next tile.
template <typename T, int kHeadDim>
struct TileRestorer {
  using Layout = HopperLayout<kHeadDim>;
  static constexpr int kVectors = kHeadDim / 16, kHeld = Layout::kKeys * kVectors / 128;

  const HopperWork& work;
  uint4 held[kHeld];
  float scale[kHeld];

  __device__ __forceinline__ void load(const ByteCache& cache, int position, int i) {
    const int e = i * 128 + threadIdx.x, at = position + e / kVectors;
    held[i] = {};
    scale[i] = 0;
    if (at >= work.end) return;  // zeros: 0 times what is there may be NaN
    const PagedAttention& call = work.call;
    const int64_t block = block_of(call, work.tile.seq, at), slot = block * call.block_size + at % call.block_size;
    const int64_t row = slot * call.kv_heads + work.head;
    held[i] = __ldcg(reinterpret_cast<const uint4*>(cache.levels + row * kHeadDim) + e % kVectors);
    scale[i] = __ldcg(cache.scales + row);
  }
  __device__ __forceinline__ void load(const ByteCache& cache, int position) {
#pragma unroll
    for (int i = 0; i < kHeld; i++) load(cache, position, i);
  }
  // Stores the tile that was loaded to its stage, and loads another one.
  template <int kStages>
  __device__ __forceinline__ void store(const HopperStages<kStages>& stages, int number, const ByteCache& next,
                                        int next_position) {
    const uint32_t tile = stages.address + number % kStages * Layout::kTileBytes;
    stages.wait_empty(number);
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      const int e = i * 128 + threadIdx.x, row = e / kVectors, vector = e % kVectors, chunk = vector % 4 * 2;
      const uint32_t to = tile + (vector / 4 * Layout::kKeys + row) * 128;
      const float own = scale[i], offset = -32896.0f * own;
      const uint2 a = restored<T>(held[i].x, own, offset), b = restored<T>(held[i].y, own, offset);
      const uint2 c = restored<T>(held[i].z, own, offset), d = restored<T>(held[i].w, own, offset);
      store_shared(to + (chunk ^ row % 8) * 16, {a.x, a.y, b.x, b.y});
      store_shared(to + ((chunk + 1) ^ row % 8) * 16, {c.x, c.y, d.x, d.y});
      load(next, next_position, i);
    }
    publish_stores();
    arrive(shared_address(&stages.full[number % kStages]));
  }
};

// Feeds the stages of both caches, of which at least one is int8; the other one's are copied as they are.
template <typename T, int kHeadDim>
__device__ __forceinline__ void restore_pages(const HopperWork& work, const CUtensorMap* key_map,
                                              const CUtensorMap* value_map) {
  constexpr int kKeys = HopperLayout<kHeadDim>::kKeys;
  const PagedAttention& call = work.call;
  const auto key_stages = work.key_stages();
  const auto value_stages = work.value_stages();
  const ByteCache keys = {static_cast<const int8_t*>(call.key_cache), call.key_scale};
  const ByteCache values = {static_cast<const int8_t*>(call.value_cache), call.value_scale};
  const bool byte_keys = keys.scales, byte_values = values.scales;
  TileRestorer<T, kHeadDim> tiles{work, {}, {}};
  tiles.load(byte_keys ? keys : values, work.begin);
  for (int position = work.begin, i = 0; position < work.end; position += kKeys, i++) {
    const int next = position + kKeys;
    if (byte_keys)
      tiles.store(key_stages, i, byte_values ? values : keys, byte_values ? position : next);
    else if (threadIdx.x < 32)
      copy_stage<kHeadDim>(work, key_map, key_stages, position, i, block_to_copy<kHeadDim>(work, position));
    if (byte_values)
      tiles.store(value_stages, i, byte_keys ? keys : values, next);
    else if (threadIdx.x < 32)
      copy_stage<kHeadDim>(work, value_map, value_stages, position, i, block_to_copy<kHeadDim>(work, position));
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace kiln::cuda
