// Binds the kernel to ONNX Runtime as the custom operator kiln::PagedAttention (schema.py has the contract).
//
// One OrtCustomOp per pair of cache types. Checks ranks and shapes, copies the caches where the outputs are not the
// input buffers themselves, and lends ONNX Runtime's thread pool to the kernel. Knows nothing of how attention works.
#include "../ort_binding.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "../operators.h"
#include "cpu.h"

namespace {

using namespace kiln;
using namespace kiln::ort;

// In schema.py's order.
enum Input {
  kQuery,
  kKey,
  kValue,
  kKeyCache,
  kValueCache,
  kCumulative,
  kPast,
  kTable,
  kCos,
  kSin,
  kSlots,
  kKeyScale,
  kValueScale,
  kInputs
};
constexpr const char* kInputNames[kInputs] = {"query",
                                              "key",
                                              "value",
                                              "key_cache",
                                              "value_cache",
                                              "cumulative_sequence_length",
                                              "past_seqlens",
                                              "block_table",
                                              "cos_cache",
                                              "sin_cache",
                                              "slot_mapping",
                                              "k_scale",
                                              "v_scale"};
enum Output { kOutput, kKeyCacheOut, kValueCacheOut, kKeyScaleOut, kValueScaleOut, kOutputs };
constexpr const char* kOutputNames[kOutputs] = {"output", "key_cache_out", "value_cache_out", "k_scale_out",
                                                "v_scale_out"};

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
  CacheType key_type, value_type;
  int64_t heads, kv_heads, window;
  bool rotary, interleaved, bfloat16;
  float scale, softcap;

  void compute(OrtKernelContext* context) const;

 private:
  PagedAttention call_from(const Tensor (&inputs)[kInputs]) const;
  void* updated(OrtKernelContext* context, Pool& pool, const Tensor& input, Output output, size_t itemsize) const;
};

void expect_shape(const Tensor& tensor, Input input, const std::vector<int64_t>& expected) {
  kiln::ort::expect_shape(tensor, kInputNames[input], expected);
}

void expect_rank(const Tensor& tensor, Input input, size_t rank, const char* expected) {
  if (!tensor.present) fail(kInputNames[input], " is missing: expected ", expected);
  if (tensor.shape.size() != rank)
    fail(kInputNames[input], " has the wrong rank: found ", text(tensor.shape), ", expected ", expected);
}

// INT8 caches have scales, others none.
void expect_scale(const Tensor (&in)[kInputs], Input scale, Input cache, CacheType type) {
  const std::vector<int64_t>& shape = in[cache].shape;
  if (type != CacheType::kInt8 && in[scale].present)
    fail(kInputNames[scale], " is given, but ", kInputNames[cache], " is not int8: leave it out");
  if (type != CacheType::kInt8) return;
  if (!in[scale].present)
    fail(kInputNames[scale], " is missing: expected [blocks, block_size, kv_num_heads], because ", kInputNames[cache],
         " is int8");
  expect_shape(in[scale], scale, {shape[0], shape[1], shape[2]});
}

PagedAttention Kernel::call_from(const Tensor (&in)[kInputs]) const {
  expect_rank(in[kQuery], kQuery, 2, "[tokens, num_heads*head_dim]");
  expect_rank(in[kKeyCache], kKeyCache, 4, "[blocks, block_size, kv_num_heads, head_dim]");
  expect_rank(in[kPast], kPast, 1, "[seqs]");
  expect_rank(in[kTable], kTable, 2, "[seqs, max_blocks]");
  for (Input input : {kValueCache, kCumulative, kSlots})
    if (!in[input].present) fail(kInputNames[input], " is missing");
  const bool packed = !in[kKey].present && !in[kValue].present;
  for (Input input : {kKey, kValue})
    if (!packed && !in[input].present)
      fail(kInputNames[input], " is missing: expected key and value, or neither where query holds all three");
  PagedAttention call = {};
  call.heads = heads;
  call.kv_heads = kv_heads;
  call.tokens = in[kQuery].shape[0];
  call.blocks = in[kKeyCache].shape[0];
  call.block_size = in[kKeyCache].shape[1];
  call.head_dim = in[kKeyCache].shape[3];
  call.seqs = in[kPast].shape[0];
  call.max_blocks = in[kTable].shape[1];
  if (call.head_dim < 1 || call.block_size < 1)
    fail("key_cache is empty: found ", text(in[kKeyCache].shape),
         ", expected a block size and head size of at least 1");
  expect_shape(in[kKeyCache], kKeyCache, {call.blocks, call.block_size, kv_heads, call.head_dim});
  expect_shape(in[kValueCache], kValueCache, in[kKeyCache].shape);
  expect_scale(in, kKeyScale, kKeyCache, key_type);
  expect_scale(in, kValueScale, kValueCache, value_type);
  const int64_t query_size = heads * call.head_dim, key_size = kv_heads * call.head_dim;
  call.query_stride = packed ? query_size + 2 * key_size : query_size;
  call.key_stride = call.value_stride = packed ? call.query_stride : key_size;
  expect_shape(in[kQuery], kQuery, {call.tokens, call.query_stride});
  if (!packed) {
    expect_shape(in[kKey], kKey, {call.tokens, key_size});
    expect_shape(in[kValue], kValue, {call.tokens, key_size});
  }
  expect_shape(in[kCumulative], kCumulative, {call.seqs + 1});
  expect_shape(in[kTable], kTable, {call.seqs, call.max_blocks});
  expect_shape(in[kSlots], kSlots, {call.tokens});
  if (rotary) {
    expect_rank(in[kCos], kCos, 2, "[positions, rotary_dim/2], because do_rotary is 1");
    expect_rank(in[kSin], kSin, 2, "[positions, rotary_dim/2], because do_rotary is 1");
    expect_shape(in[kSin], kSin, in[kCos].shape);
    call.positions = in[kCos].shape[0];
    call.rotary_half = in[kCos].shape[1];
    if (call.rotary_half < 1 || 2 * call.rotary_half > call.head_dim)
      fail("cos_cache has the wrong width: found ", text(in[kCos].shape), ", expected 1 to ", call.head_dim / 2,
           " columns for a head size of ", call.head_dim);
    call.cos = static_cast<const float*>(in[kCos].data);
    call.sin = static_cast<const float*>(in[kSin].data);
  }
  call.query = static_cast<const float*>(in[kQuery].data);
  call.key = packed ? call.query + query_size : static_cast<const float*>(in[kKey].data);
  call.value = packed ? call.key + key_size : static_cast<const float*>(in[kValue].data);
  call.cumulative = static_cast<const int32_t*>(in[kCumulative].data);
  call.past = static_cast<const int32_t*>(in[kPast].data);
  call.block_table = static_cast<const int32_t*>(in[kTable].data);
  call.slots = static_cast<const int32_t*>(in[kSlots].data);
  call.key_type = key_type;
  call.value_type = value_type;
  call.interleaved = interleaved;
  call.window = window;
  call.scale = scale != 0 ? scale : 1 / std::sqrt(static_cast<float>(call.head_dim));
  call.softcap = softcap;
  call.bfloat16 = bfloat16;
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
  call.output = static_cast<float*>(output_data(api, context, kOutput, {call.tokens, heads * call.head_dim}));
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
    Kernel k = {};
    k.api = api;
    k.key_type = cache_type(op.key_element);
    k.value_type = cache_type(op.value_element);
    k.heads = attribute(api, info, "num_heads", int64_t{0});
    k.kv_heads = attribute(api, info, "kv_num_heads", int64_t{0});
    const int64_t window = attribute(api, info, "local_window_size", int64_t{-1});
    k.window = window > 0 ? window : 0;
    k.rotary = attribute(api, info, "do_rotary", int64_t{0}) != 0;
    k.interleaved = attribute(api, info, "rotary_interleaved", int64_t{0}) != 0;
    k.scale = attribute(api, info, "scale", 0.0f);
    k.softcap = attribute(api, info, "softcap", 0.0f);
    if (k.heads < 1 || k.kv_heads < 1 || k.heads % k.kv_heads != 0)
      fail("num_heads must be a positive multiple of kv_num_heads: found num_heads ", k.heads, ", kv_num_heads ",
           k.kv_heads);
    if (window == 0 || window < -1) fail("local_window_size must be -1 or positive: found ", window);
    if (!(k.softcap >= 0) || !std::isfinite(k.softcap)) fail("softcap must be 0 or positive: found ", k.softcap);
    const int64_t compute = attribute(api, info, "compute_dtype", int64_t{0});
    if (compute != 0 && compute != 1) fail("compute_dtype must be 0 (float32) or 1 (bfloat16): found ", compute);
    k.bfloat16 = compute == 1;
    if (!std::isfinite(k.scale)) fail("scale must be finite: found ", k.scale);
    *kernel = new Kernel(k);
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
    switch (i) {
      case kKeyCache:
        return op.key_element;
      case kValueCache:
        return op.value_element;
      case kCumulative:
      case kPast:
      case kTable:
      case kSlots:
        return kInt32;
    }
    return kFloat;
  };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{kOutputs}; };
  op.GetOutputType = [](const OrtCustomOp* base, size_t i) -> int {
    const Operator& op = *static_cast<const Operator*>(base);
    return i == kKeyCacheOut ? op.key_element : i == kValueCacheOut ? op.value_element : int{kFloat};
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) -> int {
    switch (i) {
      case kKey:
      case kValue:
      case kCos:
      case kSin:
      case kKeyScale:
      case kValueScale:
        return kOptional;
    }
    return kRequired;
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
