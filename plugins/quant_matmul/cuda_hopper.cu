// Launches the product on Hopper: describes the operands to the bulk copy engine.
#include "cuda_hopper.cuh"

#include "../dense/cuda_tensor_map.h"
#include "cuda_kernels.cuh"

namespace kiln::cuda {
namespace {

cudaError_t describe_weight(CUtensorMap* map, const QuantLinear& call) {
  const cuuint64_t bytes = row_bytes(call), width = call.width;
  constexpr CUtensorMapDataType kBytes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (!call.swiglu) return describe<2>(map, kBytes, 1, call.weight, {bytes, width}, {1}, {128, kTileRows});
  // [width / 8][gate, up][8][bytes]: the box has the rows of a tile as finish() expects them.
  return describe<4>(map, kBytes, 1, call.weight, {bytes, 8, 2, width / 8}, {1, width, 8}, {128, 8, 2, kSlabs});
}

struct LaunchHopper {
  const QuantLinear& call;
  cudaStream_t stream;

  template <typename T, WeightFormat kFormat, int kRows, bool kSwiGlu>
  cudaError_t run() const {
    using Shape = QuantRing<kFormat, kRows>;
    const auto kernel = quant_linear_hopper<T, kFormat, kRows, kSwiGlu>;
    if (const cudaError_t error = allow_shared(kernel, Shape::kSharedBytes); error != cudaSuccess) return error;
    CUtensorMap weight, x;
    if (const cudaError_t error = describe_weight(&weight, call); error != cudaSuccess) return error;
    const cudaError_t error =
        describe<2>(&x, data_type(call.element), 2, call.x,
                    {static_cast<cuuint64_t>(call.depth), static_cast<cuuint64_t>(call.rows)}, {1}, {64, kRows});
    if (error != cudaSuccess) return error;
    const QuantWork work = work_of(call, Shape::kStep);
    return launch(kernel, dim3(work.linear.blocks), dim3(kHopperThreads), Shape::kSharedBytes, stream, weight, x, work);
  }
};

}  // namespace

cudaError_t launch_hopper(const QuantLinear& call, cudaStream_t stream) {
  return dispatch(call, LaunchHopper{call, stream});
}

}  // namespace kiln::cuda
