// Binds the CUDA kernels to ONNX Runtime as the custom operator kiln::PagedAttention (schema.py has the contract).
//
// One OrtCustomOp per 16-bit type and pair of cache types (that type or int8), for CUDAExecutionProvider: all operands
// are on the device, launches go to its stream, and nothing waits. Checks ranks and shapes; values in the index tensors
// cannot be checked here. Copies the caches where the outputs are not the input buffers themselves. Knows nothing of
// how attention works.
#include <algorithm>
#include <limits>

#include "../cuda_binding.h"
#include "cuda_attention.h"
#include "ort_operands.h"

namespace {

using namespace kiln;
using namespace kiln::ort;

struct Kernel {
  static constexpr const char* kName = "PagedAttention";

  OrtApi api;
  Attributes attributes;
  cuda::Element element;
  bool byte_keys, byte_values;  // caches of int8

  void compute(OrtKernelContext* context) const;

 private:
  cuda::PagedAttention call_from(const Tensor (&inputs)[kInputs]) const;
  void* updated(OrtKernelContext* context, cudaStream_t stream, const Tensor& input, Output output,
                size_t itemsize) const;
};

int32_t narrow(int64_t size, const char* name) {
  if (size > std::numeric_limits<int32_t>::max())
    fail(name, " is too large: found ", size, ", expected at most 2^31 - 1");
  return static_cast<int32_t>(size);
}

cuda::PagedAttention Kernel::call_from(const Tensor (&in)[kInputs]) const {
  const Geometry sizes = geometry_from(in, attributes);
  expect_scale(in, kKeyScale, kKeyCache, byte_keys);
  expect_scale(in, kValueScale, kValueCache, byte_values);
  cuda::PagedAttention call = {};
  const bool packed = is_packed(in);
  const int64_t itemsize = 2, query_size = sizes.heads * sizes.head_dim, key_size = sizes.kv_heads * sizes.head_dim;
  call.query = in[kQuery].data;
  call.key = packed ? static_cast<const char*>(call.query) + query_size * itemsize : in[kKey].data;
  call.value = packed ? static_cast<const char*>(call.key) + key_size * itemsize : in[kValue].data;
  call.cumulative = static_cast<const int32_t*>(in[kCumulative].data);
  call.past = static_cast<const int32_t*>(in[kPast].data);
  call.block_table = static_cast<const int32_t*>(in[kTable].data);
  call.slots = static_cast<const int32_t*>(in[kSlots].data);
  if (attributes.rotary) {
    call.cos = static_cast<const float*>(in[kCos].data);
    call.sin = static_cast<const float*>(in[kSin].data);
  }
  call.query_stride = sizes.query_stride;
  call.key_stride = sizes.key_stride;
  call.value_stride = sizes.value_stride;
  call.tokens = narrow(sizes.tokens, "the number of tokens");
  call.seqs = narrow(sizes.seqs, "the number of sequences");
  call.blocks = narrow(sizes.blocks, "the number of blocks");
  call.block_size = narrow(sizes.block_size, "the block size");
  call.max_blocks = narrow(sizes.max_blocks, "the width of block_table");
  call.heads = narrow(sizes.heads, "num_heads");
  call.kv_heads = narrow(sizes.kv_heads, "kv_num_heads");
  call.head_dim = narrow(sizes.head_dim, "the head size");
  call.positions = narrow(sizes.positions, "the number of positions");
  call.rotary_half = narrow(sizes.rotary_half, "the rotated part");
  call.window = static_cast<int32_t>(std::min<int64_t>(sizes.window, std::numeric_limits<int32_t>::max() / 2));
  call.decode_rows = cuda::kMeasured;
  call.scale = sizes.scale;
  call.softcap = sizes.softcap;
  call.element = element;
  call.interleaved = sizes.interleaved;
  if (const char* problem = cuda::unsupported(call)) fail(problem);
  return call;
}

// The buffer of an output that continues an input. The runtime binds both to one buffer; anyone else gets a functional
// operator at the price of a copy.
void* Kernel::updated(OrtKernelContext* context, cudaStream_t stream, const Tensor& input, Output output,
                      size_t itemsize) const {
  void* data = output_data(api, context, output, input.shape);
  if (!data) fail(kOutputNames[output], " is missing: expected an output of the node, since its cache is int8");
  const size_t bytes = static_cast<size_t>(elements(input.shape)) * itemsize;
  if (data != input.data && bytes > 0)
    require_cuda(cudaMemcpyAsync(data, input.data, bytes, cudaMemcpyDeviceToDevice, stream),
                 "the cache cannot be copied");
  return data;
}

void Kernel::compute(OrtKernelContext* context) const {
  Tensor inputs[kInputs];
  size_t given = 0;
  require(api, KernelContextGetInputCount::of(api)(context, &given));
  for (size_t i = 0; i < kInputs && i < given; i++) inputs[i] = input_tensor(api, context, i);
  cuda::PagedAttention call = call_from(inputs);
  const cudaStream_t stream = stream_of(api, context);
  call.output = output_data(api, context, kOutput, {call.tokens, int64_t{call.heads} * call.head_dim});
  call.key_cache = updated(context, stream, inputs[kKeyCache], kKeyCacheOut, byte_keys ? 1 : 2);
  call.value_cache = updated(context, stream, inputs[kValueCache], kValueCacheOut, byte_values ? 1 : 2);
  if (byte_keys) call.key_scale = static_cast<float*>(updated(context, stream, inputs[kKeyScale], kKeyScaleOut, 4));
  if (byte_values)
    call.value_scale = static_cast<float*>(updated(context, stream, inputs[kValueScale], kValueScaleOut, 4));
  call.scratch = scratch_of(stream, kName, cuda::scratch_bytes());
  require_cuda(cuda::run(call, stream), "the kernels cannot be launched");
}

// The operator for one element type and pair of cache types. OrtCustomOp comes first: ONNX Runtime hands back its
// address.
struct Operator : OrtCustomOp {
  int element, key_element, value_element;
};

const Operator& of(const OrtCustomOp* base) { return *static_cast<const Operator*>(base); }

OrtStatus* create_kernel(const OrtCustomOp* base, OrtApi api, const OrtKernelInfo* info, void** kernel) {
  return guarded(api, Kernel::kName, [&] {
    const Operator& op = of(base);
    *kernel = new Kernel{api, Attributes(api, info), element_of(op.element), op.key_element == kInt8,
                         op.value_element == kInt8};
  });
}

Operator make_operator(int element, int key_element, int value_element) {
  Operator op = {};
  fill_common<Kernel>(op);
  op.element = element;
  op.key_element = key_element;
  op.value_element = value_element;
  op.GetExecutionProviderType = [](const OrtCustomOp*) { return "CUDAExecutionProvider"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) { return size_t{kInputs}; };
  op.GetInputType = [](const OrtCustomOp* base, size_t i) -> int {
    if (is_index(i)) return kInt32;
    if (i == kKeyCache) return of(base).key_element;
    if (i == kValueCache) return of(base).value_element;
    const bool is_float = i == kCos || i == kSin || i == kKeyScale || i == kValueScale;
    return is_float ? int{kFloat} : of(base).element;
  };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{kOutputs}; };
  op.GetOutputType = [](const OrtCustomOp* base, size_t i) -> int {
    if (i == kKeyScaleOut || i == kValueScaleOut) return kFloat;
    return i == kKeyCacheOut ? of(base).key_element : i == kValueCacheOut ? of(base).value_element : of(base).element;
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

std::vector<const OrtCustomOp*> kiln::ort::cuda_paged_attention_operators() {
  static const std::vector<Operator> operators = [] {
    std::vector<Operator> all;
    for (int element : {kFloat16, kBfloat16})
      for (int key : {element, int{kInt8}})
        for (int value : {element, int{kInt8}}) all.push_back(make_operator(element, key, value));
    return all;
  }();
  std::vector<const OrtCustomOp*> pointers;
  for (const Operator& op : operators) pointers.push_back(&op);
  return pointers;
}
