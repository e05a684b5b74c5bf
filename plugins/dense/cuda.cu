// Chooses a kernel for a product: Hopper's own on compute capability 9.0, else the portable one.
#include "cuda.h"

#include <algorithm>

#include "cuda_kernels.cuh"

namespace kiln::cuda {
namespace {

constexpr int kMostBlocks = 1024;

int block_count() { return std::min(device_attribute(cudaDevAttrMultiProcessorCount), kMostBlocks); }

LinearWork work_of(const Linear& call) {
  LinearWork work = {};
  work.bias = call.bias;
  work.y = call.y;
  work.partial = static_cast<float4*>(call.scratch);
  work.rows = static_cast<int>(call.rows);
  work.width = static_cast<int>(call.width);
  const int64_t weight_rows = call.swiglu ? 2 * call.width : call.width;
  work.tiles = static_cast<int>((weight_rows + kTileRows - 1) / kTileRows);
  work.steps = static_cast<int>((call.depth + kStep - 1) / kStep);
  work.blocks = static_cast<int>(std::min<int64_t>(block_count(), static_cast<int64_t>(work.tiles) * work.steps));
  return work;
}

bool is_empty(const Linear& call) { return call.rows == 0 || call.width == 0; }

bool is_hopper() {
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

}  // namespace

size_t linear_scratch_bytes() {
  constexpr size_t kMostPartial = 2 * sizeof(float) * kTileRows * kLinearRows;
  return block_count() * kMostPartial;
}

const char* unsupported(const Linear& call) {
  const auto misaligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; };
  constexpr int64_t kMost = int64_t{1} << 31;
  if (call.rows < 0 || call.rows > kLinearRows) return "rows: expected 0 to 32";
  if (call.depth <= 0 || call.depth % kVector) return "depth: expected a multiple of 8";
  if (call.swiglu && call.width % kVector) return "width: expected a multiple of 8 with SwiGLU";
  if (call.width < 0 || (call.width + kTileRows) / kTileRows * 2 * ((call.depth + kStep) / kStep) >= kMost)
    return "the weight has too many elements: expected fewer than 2^43";
  if (misaligned(call.x) || misaligned(call.weight) || misaligned(call.y) || misaligned(call.scratch))
    return "an operand is not aligned to 16 bytes";
  return nullptr;
}

cudaError_t run(const Linear& call, cudaStream_t stream) {
  if (!is_hopper()) return run_portable(call, stream);
  return is_empty(call) ? cudaSuccess : launch_hopper(call, work_of(call), stream);
}

cudaError_t run_portable(const Linear& call, cudaStream_t stream) {
  return is_empty(call) ? cudaSuccess : launch_portable(call, work_of(call), stream);
}

}  // namespace kiln::cuda

// For callers without C++: the address of a call, a stream; a cudaError_t. The call must be supported.
extern "C" __attribute__((visibility("default"))) int kiln_cuda_linear(const kiln::cuda::Linear* call, void* stream) {
  return kiln::cuda::run(*call, static_cast<cudaStream_t>(stream));
}
extern "C" __attribute__((visibility("default"))) int kiln_cuda_linear_portable(const kiln::cuda::Linear* call,
                                                                                void* stream) {
  return kiln::cuda::run_portable(*call, static_cast<cudaStream_t>(stream));
}
extern "C" __attribute__((visibility("default"))) const char* kiln_cuda_linear_unsupported(
    const kiln::cuda::Linear* call) {
  return kiln::cuda::unsupported(*call);
}
extern "C" __attribute__((visibility("default"))) size_t kiln_cuda_linear_scratch_bytes() {
  return kiln::cuda::linear_scratch_bytes();
}
