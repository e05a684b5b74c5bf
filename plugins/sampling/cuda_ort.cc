// Binds the CUDA kernels to ONNX Runtime as the custom operators kiln::Sample and kiln::FeedTokens (schema.py has the
// contract), for CUDAExecutionProvider: checks shapes and launches on the session's stream. Knows nothing of how the
// kernels work.
#include <iterator>
#include <limits>
#include <type_traits>

#include "../cuda_binding.h"
#include "cuda.h"

namespace {

using namespace kiln;
using namespace kiln::ort;

template <typename T>
const T* values(const Tensor& tensor) {
  return static_cast<const T*>(tensor.data);
}

struct SampleKernel {
  static constexpr const char* kName = "Sample";
  static constexpr int kInputTypes[] = {kFloat, kFloat, kInt32, kFloat, kFloat, kInt64, kInt32};
  static constexpr size_t kInputs = std::size(kInputTypes), kOutputs = 1;

  OrtApi api;
  cuda::LogitType type;

  SampleKernel(OrtApi api, const OrtKernelInfo*, int logits)
      : api(api),
        type(logits == kFloat     ? cuda::LogitType::kFloat32
             : logits == kFloat16 ? cuda::LogitType::kFloat16
                                  : cuda::LogitType::kBfloat16) {}

  void compute(OrtKernelContext* context) const {
    const Tensor logits = input_tensor(api, context, 0);
    if (logits.shape.size() != 2)
      fail("logits has the wrong rank: found ", text(logits.shape), ", expected [rows, vocabulary]");
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - (1 << 20);  // the kernel counts in int32
    if (logits.shape[1] < 1 || logits.shape[1] > kMost)
      fail("logits has the wrong shape: found ", text(logits.shape), ", expected a vocabulary of 1 to ", kMost);
    constexpr const char* kNames[] = {"temperature", "top_k", "top_p", "min_p", "seed", "sample_position"};
    Tensor row[6];
    for (size_t i = 0; i < 6; i++) {
      row[i] = input_tensor(api, context, i + 1);
      expect_shape(row[i], kNames[i], {logits.shape[0]});
    }
    cuda::Sample call = {};
    call.logits = logits.data;
    call.temperature = values<float>(row[0]);
    call.top_k = values<int32_t>(row[1]);
    call.top_p = values<float>(row[2]);
    call.min_p = values<float>(row[3]);
    call.seed = values<int64_t>(row[4]);
    call.position = values<int32_t>(row[5]);
    call.rows = logits.shape[0];
    call.vocabulary = logits.shape[1];
    call.tokens = static_cast<int32_t*>(output_data(api, context, 0, {call.rows}));
    call.type = type;
    require_cuda(cuda::run(call, stream_of(api, context)), "the kernel cannot be launched");
  }
};

struct FeedTokensKernel {
  static constexpr const char* kName = "FeedTokens";
  static constexpr int kInputTypes[] = {kInt32, kInt32, kInt32};
  static constexpr size_t kInputs = std::size(kInputTypes), kOutputs = 1;

  OrtApi api;

  FeedTokensKernel(OrtApi api, const OrtKernelInfo*, int) : api(api) {}

  void compute(OrtKernelContext* context) const {
    const Tensor ids = input_tensor(api, context, 0), feed = input_tensor(api, context, 1);
    const Tensor previous = input_tensor(api, context, 2);
    if (ids.shape.size() != 1 || previous.shape.size() != 1)
      fail("input_ids and previous_tokens have the wrong rank: found ", text(ids.shape), " and ", text(previous.shape),
           ", expected [tokens] and [max_rows]");
    expect_shape(feed, "feed", ids.shape);
    cuda::FeedTokens call = {};
    call.ids = values<int32_t>(ids);
    call.feed = values<int32_t>(feed);
    call.previous = values<int32_t>(previous);
    call.tokens = ids.shape[0];
    call.max_rows = previous.shape[0];
    call.fed = static_cast<int32_t*>(output_data(api, context, 0, ids.shape));
    require_cuda(cuda::run(call, stream_of(api, context)), "the kernel cannot be launched");
  }
};

// For one type of logits.
template <typename Kernel>
TypedOperator make_operator(int type) {
  TypedOperator op = typed_operator<Kernel>(type);
  op.GetInputType = [](const OrtCustomOp* base, size_t i) -> int {
    const bool is_logits = i == 0 && std::is_same_v<Kernel, SampleKernel>;
    return is_logits ? type_of(base) : Kernel::kInputTypes[i];
  };
  op.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return kInt32; };
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> kiln::ort::cuda_sampling_operators() {
  static const TypedOperator operators[] = {
      make_operator<SampleKernel>(kFloat), make_operator<SampleKernel>(kFloat16),
      make_operator<SampleKernel>(kBfloat16), make_operator<FeedTokensKernel>(kFloat)};
  return {&operators[0], &operators[1], &operators[2], &operators[3]};
}
