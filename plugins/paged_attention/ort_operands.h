// The operator's operands and attributes as ONNX Runtime hands them over: order, names, and the checks of ranks and
// shapes that hold on every device. Looks at no data.
#pragma once

#include "../ort_binding.h"

#include <cmath>
#include <vector>

#include "geometry.h"

namespace kiln::ort {

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

inline bool is_index(size_t input) {
  return input == kCumulative || input == kPast || input == kTable || input == kSlots;
}

inline bool is_optional(size_t input) {
  return input == kKey || input == kValue || input == kCos || input == kSin || input == kKeyScale ||
         input == kValueScale;
}

inline void expect_shape(const Tensor& tensor, Input input, const std::vector<int64_t>& expected) {
  expect_shape(tensor, kInputNames[input], expected);
}

inline void expect_rank(const Tensor& tensor, Input input, size_t rank, const char* expected) {
  if (!tensor.present) fail(kInputNames[input], " is missing: expected ", expected);
  if (tensor.shape.size() != rank)
    fail(kInputNames[input], " has the wrong rank: found ", text(tensor.shape), ", expected ", expected);
}

// INT8 caches have scales, others none.
inline void expect_scale(const Tensor (&in)[kInputs], Input scale, Input cache, bool is_int8) {
  const std::vector<int64_t>& shape = in[cache].shape;
  if (!is_int8 && in[scale].present)
    fail(kInputNames[scale], " is given, but ", kInputNames[cache], " is not int8: leave it out");
  if (!is_int8) return;
  if (!in[scale].present)
    fail(kInputNames[scale], " is missing: expected [blocks, block_size, kv_num_heads], because ", kInputNames[cache],
         " is int8");
  expect_shape(in[scale], scale, {shape[0], shape[1], shape[2]});
}

struct Attributes {
  int64_t heads, kv_heads, window;
  bool rotary, interleaved, bfloat16;
  float scale, softcap;

  Attributes(OrtApi api, const OrtKernelInfo* info) {
    heads = attribute(api, info, "num_heads", int64_t{0});
    kv_heads = attribute(api, info, "kv_num_heads", int64_t{0});
    const int64_t last = attribute(api, info, "local_window_size", int64_t{-1});
    window = last > 0 ? last : 0;
    rotary = attribute(api, info, "do_rotary", int64_t{0}) != 0;
    interleaved = attribute(api, info, "rotary_interleaved", int64_t{0}) != 0;
    scale = attribute(api, info, "scale", 0.0f);
    softcap = attribute(api, info, "softcap", 0.0f);
    if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0)
      fail("num_heads must be a positive multiple of kv_num_heads: found num_heads ", heads, ", kv_num_heads ",
           kv_heads);
    if (last == 0 || last < -1) fail("local_window_size must be -1 or positive: found ", last);
    if (!(softcap >= 0) || !std::isfinite(softcap)) fail("softcap must be 0 or positive: found ", softcap);
    const int64_t compute = attribute(api, info, "compute_dtype", int64_t{0});
    if (compute != 0 && compute != 1) fail("compute_dtype must be 0 (float32) or 1 (bfloat16): found ", compute);
    bfloat16 = compute == 1;
    if (!std::isfinite(scale)) fail("scale must be finite: found ", scale);
  }
};

// Query, key and value side by side in the first input.
inline bool is_packed(const Tensor (&in)[kInputs]) { return !in[kKey].present && !in[kValue].present; }

// Checks ranks and shapes of all operands but the scales.
inline Geometry geometry_from(const Tensor (&in)[kInputs], const Attributes& attributes) {
  expect_rank(in[kQuery], kQuery, 2, "[tokens, num_heads*head_dim]");
  expect_rank(in[kKeyCache], kKeyCache, 4, "[blocks, block_size, kv_num_heads, head_dim]");
  expect_rank(in[kPast], kPast, 1, "[seqs]");
  expect_rank(in[kTable], kTable, 2, "[seqs, max_blocks]");
  for (Input input : {kValueCache, kCumulative, kSlots})
    if (!in[input].present) fail(kInputNames[input], " is missing");
  const bool packed = is_packed(in);
  for (Input input : {kKey, kValue})
    if (!packed && !in[input].present)
      fail(kInputNames[input], " is missing: expected key and value, or neither where query holds all three");
  Geometry sizes = {};
  sizes.heads = attributes.heads;
  sizes.kv_heads = attributes.kv_heads;
  sizes.tokens = in[kQuery].shape[0];
  sizes.blocks = in[kKeyCache].shape[0];
  sizes.block_size = in[kKeyCache].shape[1];
  sizes.head_dim = in[kKeyCache].shape[3];
  sizes.seqs = in[kPast].shape[0];
  sizes.max_blocks = in[kTable].shape[1];
  if (sizes.head_dim < 1 || sizes.block_size < 1)
    fail("key_cache is empty: found ", text(in[kKeyCache].shape),
         ", expected a block size and head size of at least 1");
  expect_shape(in[kKeyCache], kKeyCache, {sizes.blocks, sizes.block_size, sizes.kv_heads, sizes.head_dim});
  expect_shape(in[kValueCache], kValueCache, in[kKeyCache].shape);
  const int64_t query_size = sizes.heads * sizes.head_dim, key_size = sizes.kv_heads * sizes.head_dim;
  sizes.query_stride = packed ? query_size + 2 * key_size : query_size;
  sizes.key_stride = sizes.value_stride = packed ? sizes.query_stride : key_size;
  expect_shape(in[kQuery], kQuery, {sizes.tokens, sizes.query_stride});
  if (!packed) {
    expect_shape(in[kKey], kKey, {sizes.tokens, key_size});
    expect_shape(in[kValue], kValue, {sizes.tokens, key_size});
  }
  expect_shape(in[kCumulative], kCumulative, {sizes.seqs + 1});
  expect_shape(in[kTable], kTable, {sizes.seqs, sizes.max_blocks});
  expect_shape(in[kSlots], kSlots, {sizes.tokens});
  if (attributes.rotary) {
    expect_rank(in[kCos], kCos, 2, "[positions, rotary_dim/2], because do_rotary is 1");
    expect_rank(in[kSin], kSin, 2, "[positions, rotary_dim/2], because do_rotary is 1");
    expect_shape(in[kSin], kSin, in[kCos].shape);
    sizes.positions = in[kCos].shape[0];
    sizes.rotary_half = in[kCos].shape[1];
    if (sizes.rotary_half < 1 || 2 * sizes.rotary_half > sizes.head_dim)
      fail("cos_cache has the wrong width: found ", text(in[kCos].shape), ", expected 1 to ", sizes.head_dim / 2,
           " columns for a head size of ", sizes.head_dim);
  }
  sizes.interleaved = attributes.interleaved;
  sizes.window = attributes.window;
  sizes.scale = attributes.scale != 0 ? attributes.scale : 1 / std::sqrt(static_cast<float>(sizes.head_dim));
  sizes.softcap = attributes.softcap;
  return sizes;
}

}  // namespace kiln::ort
