// Instances of the prefill kernel that runs on all architectures.
#include "cuda_launch.h"
#include "cuda_prefill.cuh"

namespace kiln::cuda {
namespace {

template <typename T, int kHeadDim>
cudaError_t launch_head(const PagedAttention& call, const Device& device, cudaStream_t stream) {
  using Layout = PrefillLayout<kHeadDim>;
  return launch(prefill_kernel<T, kHeadDim>, most_tiles(call, Layout::kRows) * call.kv_heads, Layout::kThreads,
                Layout::kBytes, stream, device.major >= 9, call);
}

template <typename T>
cudaError_t launch_type(const PagedAttention& call, const Device& device, cudaStream_t stream) {
  switch (call.head_dim) {
    case 64:
      return launch_head<T, 64>(call, device, stream);
    case 96:
      return launch_head<T, 96>(call, device, stream);
    case 128:
      return launch_head<T, 128>(call, device, stream);
  }
  return launch_head<T, 256>(call, device, stream);
}

}  // namespace

cudaError_t launch_prefill(const PagedAttention& call, const Device& device, cudaStream_t stream) {
  return call.element == Element::kFloat16 ? launch_type<__half>(call, device, stream)
                                           : launch_type<__nv_bfloat16>(call, device, stream);
}

}  // namespace kiln::cuda
