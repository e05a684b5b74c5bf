// How kernels follow one another: programmatic dependent launch (compute capability 9.0 on), where a kernel may start
// while the one before drains, fetches what that one does not write, and then waits for it. Knows no kernel.
//
// Rules for a kernel that uses it. It calls let_next_start() once, early: it costs nothing, the next one waits anyway.
// Every block calls wait_for_previous() before it reads what an earlier kernel wrote and before it writes anything:
// so all that came before is complete when this kernel is, also for a next one that starts early.
#pragma once

#include <cuda_runtime.h>

namespace kiln::cuda {

#ifdef __CUDACC__
__device__ inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

// An attribute of the current device; 0 if it cannot be read.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : 0;
}

// Launches a kernel so that it may start early. `shared_bytes` of dynamic shared memory must have been allowed.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   const Arguments&... arguments) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace kiln::cuda
