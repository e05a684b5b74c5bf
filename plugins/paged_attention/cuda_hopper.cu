// The prefill kernel for sm_90a, and the tensor maps through which it copies pages.
#include "cuda_hopper_int8.cuh"
#include "cuda_launch.h"

namespace kiln::cuda {
namespace {

template <typename T, int kHeadDim, bool kQuantised>
__global__ void __launch_bounds__(384, 1)
    hopper_kernel(const __grid_constant__ PagedAttention call, const __grid_constant__ CUtensorMap key_map,
                  const __grid_constant__ CUtensorMap value_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Layout = HopperLayout<kHeadDim>;
  extern __shared__ char shared[];
  __shared__ HopperBarriers barriers;
  let_next_start();
  const Tile tile = tile_from_end(call, Layout::kRows, blockIdx.x / call.kv_heads);
  if (tile.seq < 0) {
    wait_for_previous();  // whatever follows takes the end of this kernel for the end of all before it
    return;
  }
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < 2; stage++) {
      init_barrier(shared_address(&barriers.keys_full[stage]), kQuantised && call.key_scale ? 128 : 1);
      init_barrier(shared_address(&barriers.values_full[stage]), kQuantised && call.value_scale ? 128 : 1);
      init_barrier(shared_address(&barriers.keys_empty[stage]), 8);
      init_barrier(shared_address(&barriers.values_empty[stage]), 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const int group = call.heads / call.kv_heads, rows = tile.of.count * group;
  const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  const HopperWork work{call,
                        tile,
                        static_cast<int>(blockIdx.x % call.kv_heads),
                        group,
                        tile.of.begin(call, tile.row / group),
                        min(tile.of.past + (min(tile.row + Layout::kRows, rows) - 1) / group + 1, tile.of.end),
                        base,
                        base + Layout::kQueryBytes,
                        base + Layout::kQueryBytes + 2 * Layout::kTileBytes,
                        barriers};
  const int warpgroup = threadIdx.x / 128 - 1;
  if (warpgroup < 0) {
    if constexpr (kQuantised) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
      wait_for_previous();
      restore_pages<T, kHeadDim>(work, &key_map, &value_map);
    } else {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
      if (threadIdx.x < 32) {
        wait_for_previous();
        copy_pages<kHeadDim>(work, &key_map, &value_map);
      }
    }
  } else {
    if constexpr (kQuantised) asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    HopperRows<T, kHeadDim> consumer{work,
                                     Scores(call),
                                     warpgroup,
                                     lane,
                                     warpgroup * 64 + warp * 16 + lane / 4,
                                     work.queries + warpgroup * 64 * 128};
    consumer.load_queries();
    consumer.attend();
    consumer.write();
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
cudaError_t launch_head(const PagedAttention& call, cudaStream_t stream) {
  using Layout = HopperLayout<kHeadDim>;
  CUtensorMap keys = {}, values = {};  // of a cache of int8 there is none
  cudaError_t error = call.key_scale ? cudaSuccess : map_cache(call, call.key_cache, &keys);
  if (error == cudaSuccess && !call.value_scale) error = map_cache(call, call.value_cache, &values);
  if (error != cudaSuccess) return error;
  const auto kernel = is_quantised(call) ? hopper_kernel<T, kHeadDim, true> : hopper_kernel<T, kHeadDim, false>;
  return launch_large(kernel, most_tiles(call, Layout::kRows) * call.kv_heads, Layout::kThreads, Layout::kBytes, stream,
                      call, keys, values);
}

template <typename T>
cudaError_t launch_type(const PagedAttention& call, cudaStream_t stream) {
  switch (call.head_dim) {
    case 64:
      return launch_head<T, 64>(call, stream);
    case 96:
      return launch_head<T, 96>(call, stream);
    case 128:
      return launch_head<T, 128>(call, stream);
  }
  return launch_head<T, 256>(call, stream);
}

}  // namespace

cudaError_t launch_hopper(const PagedAttention& call, cudaStream_t stream) {
  return call.element == Element::kFloat16 ? launch_type<__half>(call, stream)
                                           : launch_type<__nv_bfloat16>(call, stream);
}

}  // namespace kiln::cuda
