// The prefill kernel for sm_90a, and the tensor maps through which it copies pages.
#include <algorithm>

#include "cuda_hopper_int8.cuh"
#include "cuda_launch.h"

namespace kiln::cuda {
namespace {

// `next_tile` counts the tiles that CTAs took after their first ones: 0 when the kernel before ends.
template <typename T, int kHeadDim, bool kQuantised>
__global__ void __launch_bounds__(384, 1)
    hopper_kernel(const __grid_constant__ PagedAttention call, const __grid_constant__ CUtensorMap key_map,
                  const __grid_constant__ CUtensorMap value_map, int* next_tile) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Layout = HopperLayout<kHeadDim>;
  constexpr int kBuffers = kQuantised ? 1 : Layout::kQueryBuffers;
  extern __shared__ char shared[];
  __shared__ HopperBarriers barriers;
  __shared__ HopperTiles taken;
  let_next_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, warpgroup = threadIdx.x / 128 - 1;
  // Tile `index` of all KV heads becomes the CTA's i-th. By one warp.
  const auto take = [&](int i, int index) {
    const Tile tile = tile_from_end(call, Layout::kRows, index / call.kv_heads);
    if (lane == 0) taken.tiles[i % 2] = tile, taken.heads[i % 2] = index % call.kv_heads;
    return tile.seq >= 0;
  };
  int found = 0;
  if (threadIdx.x < 32) found = take(0, blockIdx.x);
  if (threadIdx.x == 0) {
    const auto init_all = [](auto& of_kind, int arrivals) {
      for (uint64_t& barrier : of_kind) init_barrier(shared_address(&barrier), arrivals);
    };
    init_all(barriers.keys_full, kQuantised && call.key_scale ? 128 : 1);
    init_all(barriers.values_full, kQuantised && call.value_scale ? 128 : 1);
    init_all(barriers.queries_full, Layout::kLoaders);
    init_all(barriers.tiles_full, 1);
    init_all(barriers.keys_empty, 8);
    init_all(barriers.values_empty, 8);
    init_all(barriers.queries_empty, 8);
    init_all(barriers.tiles_empty, HopperTiles::kReaders);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (!__syncthreads_or(found)) {
    wait_for_previous();  // whatever follows takes the end of this kernel for the end of all before it
    return;
  }
  const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  const auto exists = [&](int i) { return taken.tiles[i % 2].seq >= 0; };
  const auto work_of = [&](int i) {
    return HopperWork::of<Layout>(call, taken.tiles[i % 2], taken.heads[i % 2], i % kBuffers, base, barriers);
  };
  const auto release_together = [&](uint64_t& barrier) {
    __syncwarp();
    release(barrier);
  };
  const auto wait_tile = [&](int i) { wait_barrier(shared_address(&barriers.tiles_full[i % 2]), (i - 1) / 2 % 2); };
  if (warpgroup >= 0) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    load_queries<T, kHeadDim, 256>(work_of(0), threadIdx.x - 128);
    sync_threads<256>(3);
    int number = 0;
    for (int i = 0; exists(i);) {
      HopperRows<T, kHeadDim> rows(work_of(i), warpgroup);
      rows.attend(work_of(i), number);
      rows.write(work_of(i));  // read anew: registers are scarce
      if constexpr (kQuantised) break;
      release_together(barriers.queries_empty[i % kBuffers]);
      release_together(barriers.tiles_empty[i % 2]);
      i++;
      wait_barrier(shared_address(&barriers.queries_full[i % kBuffers]), (i - 1) / kBuffers % 2);
    }
    return;
  }
  asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
  if constexpr (kQuantised) {
    wait_for_previous();
    restore_pages<T, kHeadDim>(work_of(0), &key_map, &value_map);
  } else if (warp < 2) {
    wait_for_previous();
    for (int i = 0, number = 0; exists(i);) {
      const HopperWork work = work_of(i);
      if (warp == 0) copy_pages<kHeadDim>(work, &key_map, work.key_stages(), number);
      else copy_pages<kHeadDim>(work, &value_map, work.value_stages(), number);
      release_together(barriers.tiles_empty[i % 2]);
      wait_tile(++i);
    }
  } else {
    wait_for_previous();
    release_together(barriers.tiles_empty[0]);  // the first tile's queries are not theirs to rotate
    for (int i = 1;; i++) {
      if (warp == 2) {
        wait_barrier(shared_address(&barriers.tiles_empty[i % 2]), i / 2 % 2 ^ 1);
        take(i, gridDim.x + __shfl_sync(kAll, lane == 0 ? atomicAdd(next_tile, 1) : 0, 0));
        if (lane == 0) arrive(shared_address(&barriers.tiles_full[i % 2]));
      }
      wait_tile(i);
      wait_barrier(shared_address(&barriers.queries_empty[i % kBuffers]), i / kBuffers % 2 ^ 1);
      if (exists(i)) load_queries<T, kHeadDim, Layout::kLoaders>(work_of(i), threadIdx.x - 64);
      arrive(shared_address(&barriers.queries_full[i % kBuffers]));
      if (!exists(i)) return;
      release_together(barriers.tiles_empty[i % 2]);
    }
  }
#endif
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, looked up in the driver that is loaded: nothing here links against it.
Encode encoder() {
  static const Encode found = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(address) : nullptr;
  }();
  return found;
}

// A cache of the element type as [positions, kv_heads, head_dim], read in boxes of 16 positions, one head and 64
// columns.
cudaError_t map_cache(const PagedAttention& call, void* cache, CUtensorMap* map) {
  if (!encoder()) return cudaErrorNotSupported;
  const cuuint64_t row = static_cast<cuuint64_t>(call.head_dim) * 2;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(call.head_dim), static_cast<cuuint64_t>(call.kv_heads),
                              static_cast<cuuint64_t>(call.blocks) * static_cast<cuuint64_t>(call.block_size)};
  const cuuint64_t strides[] = {row, row * static_cast<cuuint64_t>(call.kv_heads)};
  const cuuint32_t box[] = {64, 1, 16}, steps[] = {1, 1, 1};
  const CUtensorMapDataType type =
      call.element == Element::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result = encoder()(map, type, 3, cache, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                    CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <typename T, int kHeadDim>
cudaError_t launch_head(const PagedAttention& call, const Device& device, int* next_tile, cudaStream_t stream) {
  using Layout = HopperLayout<kHeadDim>;
  CUtensorMap keys = {}, values = {};  // of a cache of int8 there is none
  cudaError_t error = call.key_scale ? cudaSuccess : map_cache(call, call.key_cache, &keys);
  if (error == cudaSuccess && !call.value_scale) error = map_cache(call, call.value_cache, &values);
  if (error != cudaSuccess) return error;
  const auto kernel = is_quantised(call) ? hopper_kernel<T, kHeadDim, true> : hopper_kernel<T, kHeadDim, false>;
  const int tiles = most_tiles(call, Layout::kRows) * call.kv_heads;
  const int blocks = is_quantised(call) ? tiles : std::min(tiles, device.multiprocessors);
  return launch_large(kernel, blocks, Layout::kThreads, Layout::kBytes, stream, call, keys, values, next_tile);
}

template <typename T>
cudaError_t launch_type(const PagedAttention& call, const Device& device, int* next_tile, cudaStream_t stream) {
  switch (call.head_dim) {
    case 64:
      return launch_head<T, 64>(call, device, next_tile, stream);
    case 96:
      return launch_head<T, 96>(call, device, next_tile, stream);
    case 128:
      return launch_head<T, 128>(call, device, next_tile, stream);
  }
  return launch_head<T, 256>(call, device, next_tile, stream);
}

}  // namespace

cudaError_t launch_hopper(const PagedAttention& call, const Device& device, int* next_tile, cudaStream_t stream) {
  return call.element == Element::kFloat16 ? launch_type<__half>(call, device, next_tile, stream)
                                           : launch_type<__nv_bfloat16>(call, device, next_tile, stream);
}

}  // namespace kiln::cuda
