// Launches the portable product.
#include "cuda_portable.cuh"

#include "cuda_kernels.cuh"

namespace kiln::cuda {
namespace {

struct LaunchPortable {
  const QuantLinear& call;
  cudaStream_t stream;

  template <typename T, WeightFormat kFormat, int kRows, bool kSwiGlu>
  cudaError_t run() const {
    // At least half of a multiprocessor's shared memory: two blocks of a launch would take twice as long there.
    const size_t half = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / 2;
    const size_t bytes = std::max(QuantPortableRing<T, kFormat, kRows, kSwiGlu>::kSharedBytes, half);
    const auto kernel = quant_linear_portable<T, kFormat, kRows, kSwiGlu>;
    if (const cudaError_t error = allow_shared(kernel, bytes); error != cudaSuccess) return error;
    const QuantOperands operands = {call.x, call.weight, static_cast<int>(call.depth),
                                    static_cast<int>(row_bytes(call))};
    const QuantWork work = work_of(call, kUnit);
    return launch(kernel, dim3(work.linear.blocks), dim3(kConsumers * kWarp), bytes, stream, operands, work);
  }
};

}  // namespace

cudaError_t launch_portable(const QuantLinear& call, cudaStream_t stream) {
  return dispatch(call, LaunchPortable{call, stream});
}

}  // namespace kiln::cuda
