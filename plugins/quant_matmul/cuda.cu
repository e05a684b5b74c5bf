// Chooses a kernel for a product with weights of 8 or 4 bits, and cuts calls of many rows into pieces.
#include "cuda.h"

#include "cuda_kernels.cuh"

namespace kiln::cuda {
namespace {

bool is_hopper() {
  return device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
}

template <typename Launch>
cudaError_t in_pieces(const QuantLinear& call, cudaStream_t stream, Launch launch_piece) {
  if (call.width == 0) return cudaSuccess;
  for (int64_t row = 0; row < call.rows; row += kQuantLinearRows) {
    QuantLinear piece = call;
    piece.rows = std::min(kQuantLinearRows, call.rows - row);
    piece.x = static_cast<const char*>(call.x) + row * call.depth * 2;
    piece.y = static_cast<char*>(call.y) + row * call.width * 2;
    if (const cudaError_t error = launch_piece(piece, stream); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

size_t quant_linear_scratch_bytes() {
  constexpr size_t kMostPartial = 2 * sizeof(float) * kTileRows * kQuantLinearRows;
  return block_count() * kMostPartial;
}

const char* unsupported(const QuantLinear& call) {
  const auto misaligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; };
  constexpr int64_t kMost = int64_t{1} << 31;
  const bool nibbles = call.format == WeightFormat::kInt4;
  if (call.rows < 0) return "rows: expected 0 or more";
  if (call.depth <= 0 || call.depth % (nibbles ? 32 : 16))
    return nibbles ? "depth: expected a multiple of 32" : "depth: expected a multiple of 16";
  if (call.few_rows < 0 || call.few_rows > kFewRows) return "few_rows: expected 0 to 4";
  if (call.group < 0 || call.group % kUnit) return "group: expected 0 or a multiple of 128";
  if (call.swiglu && call.width % kVector) return "width: expected a multiple of 8 with SwiGLU";
  if (call.width < 0 || (call.width + kTileRows) / kTileRows * 2 * (call.depth / kUnit + 1) >= kMost)
    return "the weight has too many elements: expected fewer than 2^44";
  if (misaligned(call.x) || misaligned(call.weight) || misaligned(call.y) || misaligned(call.scratch))
    return "an operand is not aligned to 16 bytes";
  return nullptr;
}

cudaError_t run(const QuantLinear& call, cudaStream_t stream) {
  return is_hopper() ? in_pieces(call, stream, [](auto& piece, auto stream) { return launch_hopper(piece, stream); })
                     : run_portable(call, stream);
}

cudaError_t run_portable(const QuantLinear& call, cudaStream_t stream) {
  return in_pieces(call, stream, [](auto& piece, auto stream) { return launch_portable(piece, stream); });
}

}  // namespace kiln::cuda

// For callers without C++: the address of a call, a stream; a cudaError_t. The call must be supported.
#define KILN_EXPORT extern "C" __attribute__((visibility("default")))

KILN_EXPORT int kiln_cuda_quant_linear(const kiln::cuda::QuantLinear* call, void* stream) {
  return kiln::cuda::run(*call, static_cast<cudaStream_t>(stream));
}
KILN_EXPORT int kiln_cuda_quant_linear_portable(const kiln::cuda::QuantLinear* call, void* stream) {
  return kiln::cuda::run_portable(*call, static_cast<cudaStream_t>(stream));
}
KILN_EXPORT size_t kiln_cuda_quant_linear_scratch_bytes() { return kiln::cuda::quant_linear_scratch_bytes(); }
KILN_EXPORT const char* kiln_cuda_quant_linear_unsupported(const kiln::cuda::QuantLinear* call) {
  return kiln::cuda::unsupported(*call);
}
