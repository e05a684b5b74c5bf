// Binds the kernel to ONNX Runtime as the custom operator kiln::PagedAttention (schema.py has the contract).
//
// One OrtCustomOp per pair of cache types. Checks ranks and shapes, copies the caches where the outputs are not the
// input buffers themselves, and lends ONNX Runtime's thread pool to the kernel. Knows nothing of how attention works.
#include "ort_operands.h"

#include <cstring>
#include <string>
#include <vector>

#include "../operators.h"
#include "cpu.h"

namespace {

using namespace kiln;
using namespace kiln::ort;

// dst = src in pieces of 1 MiB over the pool.
void copy(Pool& pool, void* dst, const void* src, size_t bytes) {
  struct Copy {
    char* dst;
    const char* src;
    size_t bytes;
  } job{static_cast<char*>(dst), static_cast<const char*>(src), bytes};
  constexpr size_t kPiece = size_t{1} << 20;
  if (bytes == 0) return;
  pool.run((bytes + kPiece - 1) / kPiece,
           [](void* user, size_t i) {
             const Copy& job = *static_cast<const Copy*>(user);
             const size_t begin = i * kPiece, left = job.bytes - begin;
             std::memcpy(job.dst + begin, job.src + begin, left < kPiece ? left : kPiece);
           },
           &job);
}

struct Kernel {
  static constexpr const char* kName = "PagedAttention";

  OrtApi api;
  Attributes attributes;
  CacheType key_type, value_type;

  void compute(OrtKernelContext* context) const;

 private:
  PagedAttention call_from(const Tensor (&inputs)[kInputs]) const;
  void* updated(OrtKernelContext* context, Pool& pool, const Tensor& input, Output output, size_t itemsize) const;
};

PagedAttention Kernel::call_from(const Tensor (&in)[kInputs]) const {
  PagedAttention call = {};
  static_cast<Geometry&>(call) = geometry_from(in, attributes);
  expect_scale(in, kKeyScale, kKeyCache, key_type == CacheType::kInt8);
  expect_scale(in, kValueScale, kValueCache, value_type == CacheType::kInt8);
  if (attributes.rotary) {
    call.cos = static_cast<const float*>(in[kCos].data);
    call.sin = static_cast<const float*>(in[kSin].data);
  }
  const bool packed = is_packed(in);
  call.query = static_cast<const float*>(in[kQuery].data);
  call.key = packed ? call.query + call.heads * call.head_dim : static_cast<const float*>(in[kKey].data);
  call.value = packed ? call.key + call.kv_heads * call.head_dim : static_cast<const float*>(in[kValue].data);
  call.cumulative = static_cast<const int32_t*>(in[kCumulative].data);
  call.past = static_cast<const int32_t*>(in[kPast].data);
  call.block_table = static_cast<const int32_t*>(in[kTable].data);
  call.slots = static_cast<const int32_t*>(in[kSlots].data);
  call.key_type = key_type;
  call.value_type = value_type;
  call.bfloat16 = attributes.bfloat16;
  return call;
}

// The buffer of an output that continues an input. The runtime binds both to one buffer; anyone else gets a functional
// operator at the price of a copy.
void* Kernel::updated(OrtKernelContext* context, Pool& pool, const Tensor& input, Output output,
                      size_t itemsize) const {
  void* data = output_data(api, context, output, input.shape);
  if (!data) fail(kOutputNames[output], " is missing: expected an output of the node, since its cache is int8");
  size_t elements = 1;
  for (int64_t size : input.shape) elements *= static_cast<size_t>(size);
  if (data != input.data) copy(pool, data, input.data, elements * itemsize);
  return data;
}

void Kernel::compute(OrtKernelContext* context) const {
  Tensor inputs[kInputs];
  size_t given = 0;
  require(api, KernelContextGetInputCount::of(api)(context, &given));
  for (size_t i = 0; i < kInputs && i < given; i++) inputs[i] = input_tensor(api, context, i);
  PagedAttention call = call_from(inputs);
  const std::string problem = check(call);
  if (!problem.empty()) fail(problem);

  Pool pool(api, context);
  call.output = static_cast<float*>(output_data(api, context, kOutput, {call.tokens, call.heads * call.head_dim}));
  call.key_cache = updated(context, pool, inputs[kKeyCache], kKeyCacheOut, cache_itemsize(key_type));
  call.value_cache = updated(context, pool, inputs[kValueCache], kValueCacheOut, cache_itemsize(value_type));
  if (key_type == CacheType::kInt8)
    call.key_scale = static_cast<float*>(updated(context, pool, inputs[kKeyScale], kKeyScaleOut, sizeof(float)));
  if (value_type == CacheType::kInt8)
    call.value_scale = static_cast<float*>(updated(context, pool, inputs[kValueScale], kValueScaleOut, sizeof(float)));
  const std::string failure = kiln::run(call, pool);
  if (!failure.empty()) fail(failure);
}

// The operator for one pair of cache types. OrtCustomOp comes first: ONNX Runtime hands back its address.
struct Operator : OrtCustomOp {
  int key_element, value_element;
};

CacheType cache_type(int element) {
  switch (element) {
    case kFloat:
      return CacheType::kFloat32;
    case kFloat16:
      return CacheType::kFloat16;
    case kBfloat16:
      return CacheType::kBfloat16;
  }
  return CacheType::kInt8;
}

OrtStatus* create_kernel(const OrtCustomOp* base, OrtApi api, const OrtKernelInfo* info, void** kernel) {
  return guarded(api, Kernel::kName, [&] {
    const Operator& op = *static_cast<const Operator*>(base);
    *kernel = new Kernel{api, Attributes(api, info), cache_type(op.key_element), cache_type(op.value_element)};
  });
}

Operator make_operator(int key_element, int value_element) {
  Operator op = {};
  fill_common<Kernel>(op);
  op.key_element = key_element;
  op.value_element = value_element;
  op.GetInputTypeCount = [](const OrtCustomOp*) { return size_t{kInputs}; };
  op.GetInputType = [](const OrtCustomOp* base, size_t i) -> int {
    const Operator& op = *static_cast<const Operator*>(base);
    if (i == kKeyCache) return op.key_element;
    if (i == kValueCache) return op.value_element;
    if (is_index(i)) return kInt32;
    return kFloat;
  };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{kOutputs}; };
  op.GetOutputType = [](const OrtCustomOp* base, size_t i) -> int {
    const Operator& op = *static_cast<const Operator*>(base);
    return i == kKeyCacheOut ? op.key_element : i == kValueCacheOut ? op.value_element : int{kFloat};
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
    return is_optional(i) ? kOptional : kRequired;
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
    return i == kKeyScaleOut || i == kValueScaleOut ? kOptional : kRequired;
  };
  op.CreateKernelV2 = create_kernel;
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> kiln::ort::paged_attention_operators() {
  static const std::vector<Operator> operators = [] {
    std::vector<Operator> all;
    for (int key : {kFloat, kFloat16, kBfloat16, kInt8})
      for (int value : {kFloat, kFloat16, kBfloat16, kInt8}) all.push_back(make_operator(key, value));
    return all;
  }();
  std::vector<const OrtCustomOp*> pointers;
  for (const Operator& op : operators) pointers.push_back(&op);
  return pointers;
}
