// Describes operands to the bulk tensor copy engine of sm_90 and later. Knows no kernel.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "../cuda_element.h"

namespace kiln::cuda {

// The driver's function, without linking against the driver: the library also loads where there is none.
using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess)
      found = nullptr;
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return function;
}

inline CUtensorMapDataType data_type(Element element) {
  return element == Element::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Describes a tensor of elements of so many bytes for the bulk copy engine, fastest dimension first; strides count rows
// of that dimension, which take 128 bytes of a box. What a box has outside is zero.
template <int kRank>
cudaError_t describe(CUtensorMap* map, CUtensorMapDataType type, int element_bytes, const void* data,
                     const cuuint64_t (&sizes)[kRank], const cuuint64_t (&row_strides)[kRank - 1],
                     const cuuint32_t (&box)[kRank]) {
  cuuint64_t bytes[kRank - 1];
  cuuint32_t ones[kRank];
  for (int i = 0; i < kRank - 1; i++) bytes[i] = row_strides[i] * sizes[0] * element_bytes;
  for (int i = 0; i < kRank; i++) ones[i] = 1;
  const EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  const CUresult result = encode(map, type, kRank, const_cast<void*>(data), sizes, bytes, box, ones,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace kiln::cuda
