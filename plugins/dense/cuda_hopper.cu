// Launches the product on Hopper: describes the operands to the bulk copy engine.
#include "cuda_hopper.cuh"

#include "cuda_kernels.cuh"
#include "cuda_tensor_map.h"

namespace kiln::cuda {
namespace {

cudaError_t describe_weight(CUtensorMap* map, const Linear& call) {
  const cuuint64_t depth = call.depth, width = call.width;
  const CUtensorMapDataType type = data_type(call.element);
  if (!call.swiglu)
    return describe<2>(map, type, 2, call.weight, {depth, width}, {1}, {kStep, kTileRows});
  // [width / 8][gate, up][8][depth]: the box has the rows of a tile as finish() expects them.
  return describe<4>(map, type, 2, call.weight, {depth, 8, 2, width / 8}, {1, width, 8}, {kStep, 8, 2, kSlabs});
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
        describe<2>(&x, data_type(call.element), 2, call.x,
                    {static_cast<cuuint64_t>(call.depth), static_cast<cuuint64_t>(call.rows)}, {1}, {kStep, kRows});
    if (error != cudaSuccess) return error;
    return launch(kernel, dim3(work.blocks), dim3(kHopperThreads), kBytes, stream, weight, x, work);
  }
};

}  // namespace

cudaError_t launch_hopper(const Linear& call, const LinearWork& work, cudaStream_t stream) {
  return dispatch(call, LaunchHopper{call, work, stream});
}

}  // namespace kiln::cuda
