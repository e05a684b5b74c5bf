// Launches the product on Hopper: describes the operands to the bulk copy engine.
#include "cuda_hopper.cuh"

#include "cuda_kernels.cuh"

namespace kiln::cuda {
namespace {

// The driver's function, without linking against the driver: the library also loads where there is none.
using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

EncodeTiled encode_tiled() {
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

// Describes a tensor for the bulk copy engine, fastest dimension first; what a box has outside is zero.
template <int kRank>
cudaError_t describe(CUtensorMap* map, Element element, const void* data, const cuuint64_t (&sizes)[kRank],
                     const cuuint64_t (&row_strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  cuuint64_t bytes[kRank - 1];
  cuuint32_t ones[kRank];
  for (int i = 0; i < kRank - 1; i++) bytes[i] = row_strides[i] * sizes[0] * 2;
  for (int i = 0; i < kRank; i++) ones[i] = 1;
  const EncodeTiled encode = encode_tiled();
  if (!encode) return cudaErrorNotSupported;
  const CUresult result =
      encode(map, element == Element::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             kRank, const_cast<void*>(data), sizes, bytes, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t describe_weight(CUtensorMap* map, const Linear& call) {
  const cuuint64_t depth = call.depth, width = call.width;
  if (!call.swiglu)
    return describe<2>(map, call.element, call.weight, {depth, width}, {1}, {kStep, kTileRows});
  // [width / 8][gate, up][8][depth]: the box has the rows of a tile as finish() expects them.
  return describe<4>(map, call.element, call.weight, {depth, 8, 2, width / 8}, {1, width, 8}, {kStep, 8, 2, kSlabs});
}

struct LaunchHopper {
  const Linear& call;
  const LinearWork& work;
  cudaStream_t stream;

  template <typename T, int kRows, bool kSwiGlu>
  cudaError_t run() const {
    constexpr size_t kBytes = Ring<kRows>::kSharedBytes;
    const auto kernel = linear_hopper<T, kRows, kSwiGlu>;
    if (const cudaError_t error = allow_shared(kernel, kBytes); error != cudaSuccess) return error;
    CUtensorMap weight, x;
    if (const cudaError_t error = describe_weight(&weight, call); error != cudaSuccess) return error;
    const cudaError_t error =
        describe<2>(&x, call.element, call.x, {static_cast<cuuint64_t>(call.depth), static_cast<cuuint64_t>(call.rows)},
                    {1}, {kStep, kRows});
    if (error != cudaSuccess) return error;
    return launch(kernel, dim3(work.blocks), dim3(kHopperThreads), kBytes, stream, weight, x, work);
  }
};

}  // namespace

cudaError_t launch_hopper(const Linear& call, const LinearWork& work, cudaStream_t stream) {
  return dispatch(call, LaunchHopper{call, work, stream});
}

}  // namespace kiln::cuda
