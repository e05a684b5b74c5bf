// Instances of the decode kernel, and how each uses the device.
#include "cuda_decode_kernel.cuh"
#include "cuda_launch.h"

namespace kiln::cuda {
namespace {

int ranges_of(const PagedAttention& call, const Device& device) {
  const int ranges = device.multiprocessors / call.kv_heads;
  return ranges > 0 ? ranges : 1;
}

template <int kHeadDim>
bool find_plan(const PagedAttention& call, const Device& device, int columns, DecodePlan* plan) {
  constexpr int kStatic = 256;  // what the kernel has of its own besides, at most
  for (const DecodePlan& one : kPlans) {
    if (one.warps * 32 < DecodeLayout<kHeadDim>::kMinThreads) break;
    *plan = one;
    const int bytes = DecodeLayout<kHeadDim>::bytes(one, call, columns, ranges_of(call, device));
    if (bytes + kStatic <= device.shared_bytes) return true;
  }
  return false;
}

template <typename T, int kHeadDim, int kColumns>
cudaError_t launch_columns(const PagedAttention& call, const Device& device, cudaStream_t stream) {
  DecodePlan plan;
  if (!find_plan<kHeadDim>(call, device, kColumns, &plan)) return cudaErrorInvalidConfiguration;
  const int ranges = ranges_of(call, device);
  const int bytes = DecodeLayout<kHeadDim>::bytes(plan, call, kColumns, ranges);
  int* counters = static_cast<int*>(call.scratch);
  float* parts = reinterpret_cast<float*>(counters + (device.multiprocessors + 31) / 32 * 32);
  const auto kernel = is_quantised(call) ? decode_kernel<T, kHeadDim, kColumns, true>
                                         : decode_kernel<T, kHeadDim, kColumns, false>;
  return launch_large(kernel, ranges * call.kv_heads, plan.warps * 32, bytes, stream, call, plan, parts, counters);
}

template <typename T, int kHeadDim>
cudaError_t launch_head(const PagedAttention& call, const Device& device, cudaStream_t stream) {
  if constexpr (kHeadDim <= 128) {
    // Sixteen rows share a reading of the cache where sequences have more than eight.
    const int group = call.heads / call.kv_heads;
    const bool all_decode = call.decode_rows > (1 << 30);
    if (group > 8 || (all_decode && static_cast<int64_t>(call.tokens) * group > int64_t{8} * call.seqs))
      return launch_columns<T, kHeadDim, 2>(call, device, stream);
  }
  return launch_columns<T, kHeadDim, 1>(call, device, stream);
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

size_t decode_scratch_bytes(const Device& device) {
  const int ctas = device.multiprocessors;  // with more KV heads than that, no sequence is split
  const size_t widest = decode_scratch_floats<256, 1>(ctas), most = decode_scratch_floats<128, 2>(ctas);
  return (static_cast<size_t>(ctas + 31) / 32 * 32 + (widest > most ? widest : most)) * 4;
}

bool decode_fits(const PagedAttention& call, const Device& device) {
  DecodePlan plan;
  switch (call.head_dim) {
    case 64:
      return find_plan<64>(call, device, 2, &plan);
    case 96:
      return find_plan<96>(call, device, 2, &plan);
    case 128:
      return find_plan<128>(call, device, 2, &plan);
  }
  return find_plan<256>(call, device, 1, &plan);
}

cudaError_t launch_decode(const PagedAttention& call, const Device& device, cudaStream_t stream) {
  return call.element == Element::kFloat16 ? launch_type<__half>(call, device, stream)
                                           : launch_type<__nv_bfloat16>(call, device, stream);
}

}  // namespace kiln::cuda
