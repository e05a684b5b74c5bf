// Between the files of the product's kernels: their launches, and how one is chosen by element type, rows and epilogue.
#pragma once

#include "cuda_work.cuh"

namespace kiln::cuda {

cudaError_t launch_hopper(const Linear& call, const LinearWork& work, cudaStream_t stream);
cudaError_t launch_portable(const Linear& call, const LinearWork& work, cudaStream_t stream);

// Kernels with more than 48 KB of shared memory need leave for it, on every device.
template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// Calls launch.run<T, kRows, kSwiGlu>(): rows of x are padded to 8, 16 or 32.
template <typename T, typename Launch>
cudaError_t dispatch_rows(const Linear& call, Launch launch) {
  if (call.rows <= 8) return call.swiglu ? launch.template run<T, 8, true>() : launch.template run<T, 8, false>();
  if (call.rows <= 16) return call.swiglu ? launch.template run<T, 16, true>() : launch.template run<T, 16, false>();
  return call.swiglu ? launch.template run<T, 32, true>() : launch.template run<T, 32, false>();
}

template <typename Launch>
cudaError_t dispatch(const Linear& call, Launch launch) {
  return call.element == Element::kFloat16 ? dispatch_rows<__half>(call, launch)
                                           : dispatch_rows<__nv_bfloat16>(call, launch);
}

}  // namespace kiln::cuda
