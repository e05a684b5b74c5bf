// Instances of the prefill kernel for sm_90a, and the tensor maps through which it copies pages.
#include "cuda_hopper.cuh"
#include "cuda_launch.h"

namespace kiln::cuda {
namespace {

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

// A cache as [positions, kv_heads, head_dim], read in boxes of 16 positions, one head and 64 columns.
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
  CUtensorMap keys, values;
  cudaError_t error = map_cache(call, call.key_cache, &keys);
  if (error == cudaSuccess) error = map_cache(call, call.value_cache, &values);
  if (error != cudaSuccess) return error;
  return launch_large(hopper_kernel<T, kHeadDim>, most_tiles(call, Layout::kRows) * call.kv_heads, Layout::kThreads,
                      Layout::kBytes, stream, call, keys, values);
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
