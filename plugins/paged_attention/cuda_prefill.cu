// Instances of the prefill kernel that runs on all architectures.
#include "cuda_launch.h"
#include "cuda_prefill.cuh"

namespace kiln::cuda {
namespace {

template <typename T, int kHeadDim>
cudaError_t launch_head(const PagedAttention& call, cudaStream_t stream) {
  using Layout = PrefillLayout<kHeadDim>;
  const int blocks = most_tiles(call, Layout::kRows) * call.kv_heads;
  return is_quantised(call) ? launch_large(prefill_kernel<T, kHeadDim, true>, blocks, Layout::kThreads,
                                           Layout::kQuantisedBytes, stream, call)
                            : launch_large(prefill_kernel<T, kHeadDim, false>, blocks, Layout::kThreads, Layout::kBytes,
                                           stream, call);
}

template <typename T>
cudaError_t launch_type(const PagedAttention& call, cudaStream_t stream) {
  switch (call.head_dim) {
    case 64:
      return launch_head<T, 64>(call, stream);
    case 96:
      return launch_head<T, 96>(call, stream);
    case 128:
      return launch_head<T, 128>(call, stream);
  }
  return launch_head<T, 256>(call, stream);
}

}  // namespace

cudaError_t launch_prefill(const PagedAttention& call, cudaStream_t stream) {
  return call.element == Element::kFloat16 ? launch_type<__half>(call, stream)
                                           : launch_type<__nv_bfloat16>(call, stream);
}

}  // namespace kiln::cuda
