// Launches the portable product.
#include "cuda_portable.cuh"

#include <algorithm>

#include "cuda_kernels.cuh"

namespace kiln::cuda {
namespace {

struct LaunchPortable {
  const Linear& call;
  const LinearWork& work;
  cudaStream_t stream;

  template <typename T, int kRows, bool kSwiGlu>
  cudaError_t run() const {
    // At least half of a multiprocessor's shared memory: two blocks of a launch would take twice as long there.
    const size_t half = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / 2;
    const size_t bytes = std::max(PortableRing<T, kRows, kSwiGlu>::kSharedBytes, half);
    const auto kernel = linear_portable<T, kRows, kSwiGlu>;
    if (const cudaError_t error = allow_shared(kernel, bytes); error != cudaSuccess) return error;
    const PortableOperands operands = {call.x, call.weight, static_cast<int>(call.depth)};
    return launch(kernel, dim3(work.blocks), dim3(kConsumers * kWarp), bytes, stream, operands, work);
  }
};

}  // namespace

cudaError_t launch_portable(const Linear& call, const LinearWork& work, cudaStream_t stream) {
  return dispatch(call, LaunchPortable{call, work, stream});
}

}  // namespace kiln::cuda
