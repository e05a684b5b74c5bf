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
enum Input { kQuery, kKey, kValue, kKeyCache, kValueCache, kCumulative, kPast, kTable, kCos, kSin, kSlots, kInputs };
constexpr const char* kInputNames[kInputs] = {
    "query",        "key",         "value",     "key_cache", "value_cache", "cumulative_sequence_length",
    "past_seqlens", "block_table", "cos_cache", "sin_cache", "slot_mapping"};
enum Output { kOutput, kKeyCacheOut, kValueCacheOut, kOutputs };

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
};

void expect_shape(const Tensor& tensor, Input input, const std::vector<int64_t>& expected) {
  kiln::ort::expect_shape(tensor, kInputNames[input], expected);
}

void expect_rank(const Tensor& tensor, Input input, size_t rank, const char* expected) {
  if (!tensor.present) fail(kInputNames[input], " is missing: expected ", expected);
  if (tensor.shape.size() != rank)
    fail(kInputNames[input], " has the wrong rank: found ", text(tensor.shape), ", expected ", expected);
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
  call.key_cache = output_data(api, context, kKeyCacheOut, inputs[kKeyCache].shape);
  call.value_cache = output_data(api, context, kValueCacheOut, inputs[kKeyCache].shape);
  // The runtime binds both to one buffer; anyone else gets a functional operator at the price of a copy.
  const size_t elements = call.blocks * call.block_size * call.kv_heads * call.head_dim;
  if (call.key_cache != inputs[kKeyCache].data)
    copy(pool, call.key_cache, inputs[kKeyCache].data, elements * cache_itemsize(key_type));
  if (call.value_cache != inputs[kValueCache].data)
    copy(pool, call.value_cache, inputs[kValueCache].data, elements * cache_itemsize(value_type));
  const std::string failure = kiln::run(call, pool);
  if (!failure.empty()) fail(failure);
}

// The operator for one pair of cache types. OrtCustomOp comes first: ONNX Runtime hands back its address.
struct Operator : OrtCustomOp {
  int key_element, value_element;
};

CacheType cache_type(int element) {
  return element == kFloat ? CacheType::kFloat32 : element == kFloat16 ? CacheType::kFloat16 : CacheType::kBfloat16;
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
    return i == kKey || i == kValue || i == kCos || i == kSin ? kOptional : kRequired;
  };
  op.CreateKernelV2 = create_kernel;
  return op;
}

}  // namespace

std::vector<const OrtCustomOp*> kiln::ort::paged_attention_operators() {
  static const std::vector<Operator> operators = [] {
    std::vector<Operator> all;
    for (int key : {kFloat, kFloat16, kBfloat16})
      for (int value : {kFloat, kFloat16, kBfloat16}) all.push_back(make_operator(key, value));
    return all;
  }();
  std::vector<const OrtCustomOp*> pointers;
  for (const Operator& op : operators) pointers.push_back(&op);
  return pointers;
}
