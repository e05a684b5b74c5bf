// Launches the portable product.
#include "cuda_portable.cuh"

#include "cuda_kernels.cuh"

namespace kiln::cuda {
namespace {

struct LaunchPortable {
  const Linear& call;
  const LinearWork& work;
  cudaStream_t stream;

  template <typename T, int kRows, bool kSwiGlu>
  cudaError_t run() const {
    constexpr size_t kBytes = PortableRing<T, kRows, kSwiGlu>::kSharedBytes;
    const auto kernel = linear_portable<T, kRows, kSwiGlu>;
    if (const cudaError_t error = allow_shared(kernel, kBytes); error != cudaSuccess) return error;
    const PortableOperands operands = {call.x, call.weight, static_cast<int>(call.depth)};
    return launch(kernel, dim3(work.blocks), dim3(kConsumers * kWarp), kBytes, stream, operands, work);
  }
};

}  // namespace

cudaError_t launch_portable(const Linear& call, const LinearWork& work, cudaStream_t stream) {
  return dispatch(call, LaunchPortable{call, work, stream});
}

}  // namespace kiln::cuda
