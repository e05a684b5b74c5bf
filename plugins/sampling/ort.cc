// Binds the sampler to ONNX Runtime as the custom operators kiln::Sample and kiln::FeedTokens (schema.py has the
// contract): checks shapes and indices, lends ONNX Runtime's thread pool. Knows nothing of how tokens are chosen.
#include "../ort_binding.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <vector>

#include "../operators.h"
#include "cpu.h"

namespace {

using namespace kiln;
using namespace kiln::ort;

template <typename T>
const T* values(const Tensor& tensor) {
  return static_cast<const T*>(tensor.data);
}

void expect_vector(const Tensor& tensor, const char* name) {
  if (tensor.shape.size() != 1) fail(name, " has the wrong rank: found ", text(tensor.shape), ", expected [size]");
}

// Operands in schema.py's order.
struct SampleKernel {
  static constexpr const char* kName = "Sample";
  static constexpr int kInputTypes[] = {kFloat, kFloat, kInt32, kFloat, kFloat, kInt64, kInt32};

  OrtApi api;

  explicit SampleKernel(OrtApi api) : api(api) {}

  void compute(OrtKernelContext* context) const {
    const Tensor logits = input_tensor(api, context, 0);
    if (logits.shape.size() != 2)
      fail("logits has the wrong rank: found ", text(logits.shape), ", expected [rows, vocabulary]");
    if (logits.shape[1] < 1 || logits.shape[1] > std::numeric_limits<int32_t>::max())
      fail("logits has the wrong shape: found ", text(logits.shape), ", expected a vocabulary of 1 to 2^31 - 1");
    constexpr const char* kNames[] = {"temperature", "top_k", "top_p", "min_p", "seed", "sample_position"};
    Tensor row[6];
    for (size_t i = 0; i < 6; i++) {
      row[i] = input_tensor(api, context, i + 1);
      expect_shape(row[i], kNames[i], {logits.shape[0]});
    }
    Sample call = {};
    call.logits = values<float>(logits);
    call.temperature = values<float>(row[0]);
    call.top_k = values<int32_t>(row[1]);
    call.top_p = values<float>(row[2]);
    call.min_p = values<float>(row[3]);
    call.seed = values<int64_t>(row[4]);
    call.position = values<int32_t>(row[5]);
    call.rows = logits.shape[0];
    call.vocabulary = logits.shape[1];
    call.tokens = static_cast<int32_t*>(output_data(api, context, 0, {call.rows}));
    if (!call.rows) return;
    Pool pool(api, context);
    kiln::run(call, pool);
  }
};

struct FeedTokensKernel {
  static constexpr const char* kName = "FeedTokens";
  static constexpr int kInputTypes[] = {kInt32, kInt32, kInt32};

  OrtApi api;

  explicit FeedTokensKernel(OrtApi api) : api(api) {}

  void compute(OrtKernelContext* context) const {
    const Tensor ids = input_tensor(api, context, 0), feed = input_tensor(api, context, 1);
    const Tensor previous = input_tensor(api, context, 2);
    expect_vector(ids, "input_ids");
    expect_vector(previous, "previous_tokens");
    expect_shape(feed, "feed", ids.shape);
    int32_t* fed = static_cast<int32_t*>(output_data(api, context, 0, ids.shape));
    for (int64_t i = 0; i < ids.shape[0]; i++) {
      const int32_t from = values<int32_t>(feed)[i];
      if (from >= previous.shape[0])
        fail("feed is out of range: found ", from, " at token ", i, ", expected less than ", previous.shape[0]);
      fed[i] = from < 0 ? values<int32_t>(ids)[i] : std::max(values<int32_t>(previous)[from], 0);
    }
  }
};

template <typename Kernel>
OrtCustomOp make_operator() {
  OrtCustomOp op = {};
  fill_common<Kernel>(op);
  op.GetInputTypeCount = [](const OrtCustomOp*) { return std::size(Kernel::kInputTypes); };
  op.GetInputType = [](const OrtCustomOp*, size_t i) -> int { return Kernel::kInputTypes[i]; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) -> int { return kInt32; };
  op.CreateKernelV2 = [](const OrtCustomOp*, OrtApi api, const OrtKernelInfo*, void** kernel) {
    return guarded(api, Kernel::kName, [&] { *kernel = new Kernel(api); });
  };
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> kiln::ort::sampling_operators() {
  static const OrtCustomOp operators[] = {make_operator<SampleKernel>(), make_operator<FeedTokensKernel>()};
  return {&operators[0], &operators[1]};
}
