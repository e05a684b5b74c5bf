// What prefill and decode share: which positions a token sees, where they lie in the cache, and query rows.
//
// A query row is one (token, head) pair. Scores are kept in base 2 (the factor log2(e) is folded into the query), so
// that the softmax is 2^(s - max).
#pragma once

#include "kernels.h"
#include "int8.h"

namespace kiln::KILN_ISA {

constexpr float kLog2E = 1.4426950408889634f;
// Start of a running maximum. Finite, so that a row that sees nothing yet gives 2^(-inf + 1e30) = 0 and not NaN.
constexpr float kNoMaximum = -1e30f;
// Alignment slack of the parts of a scratch area, in floats (64 bytes).
constexpr int64_t kAlign = 16;

KILN_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
KILN_INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
KILN_INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// Head size with room for whole vectors. The padding of accumulators and queries is zero.
KILN_INLINE int64_t padded_dim(const PagedAttention& call) { return round_up(call.head_dim, kWidth); }

// Positions [begin, end) that the token at `position` attends to.
struct Range {
  int64_t begin, end;
};
KILN_INLINE Range visible(const PagedAttention& call, int64_t position) {
  int64_t end = position + 1;
  return {call.window > 0 ? at_least(0, end - call.window) : 0, end};
}

// rows[i] = address in `cache` of position first + i (all KV heads, row_size elements) of a sequence, for i < count.
template <typename T>
KILN_INLINE void find_rows(const PagedAttention& call, int64_t seq, const T* cache, int64_t row_size, int64_t first,
                           int64_t count, const T** rows) {
  const int32_t* table = call.block_table + seq * call.max_blocks;
  int64_t block = first / call.block_size, offset = first % call.block_size;
  for (int64_t i = 0; i < count;) {
    const T* row = cache + (static_cast<int64_t>(table[block]) * call.block_size + offset) * row_size;
    int64_t end = at_most(count, i + call.block_size - offset);
    for (; i < end; i++, row += row_size) rows[i] = row;
    block++;
    offset = 0;
  }
}

// dst[head_dim] = the head src, rotated for `position` (as it is without rotation).
KILN_INLINE void rotate(const PagedAttention& call, int64_t position, const float* src, float* dst) {
  const int64_t half = call.rotary_half;
  const float* cos = call.cos + position * half;
  const float* sin = call.sin + position * half;
  if (call.interleaved) {
    for (int64_t i = 0; i < half; i++) {
      float x = src[2 * i], y = src[2 * i + 1];
      dst[2 * i] = x * cos[i] - y * sin[i];
      dst[2 * i + 1] = y * cos[i] + x * sin[i];
    }
  } else {
    for (int64_t i = 0; i < half; i++) {
      float x = src[i], y = src[half + i];
      dst[i] = x * cos[i] - y * sin[i];
      dst[half + i] = y * cos[i] + x * sin[i];
    }
  }
  for (int64_t i = 2 * half; i < call.head_dim; i++) dst[i] = src[i];
}

// dst[padded_dim] = query of the sequence's new token `token` and `head`, rotated, scaled and padded with zeros.
KILN_INLINE void take_query(const PagedAttention& call, int64_t seq, int64_t token, int64_t head, float* dst) {
  const float factor = call.softcap > 0 ? call.scale / call.softcap : call.scale * kLog2E;
  const float* src = call.query + (call.cumulative[seq] + token) * call.query_stride + head * call.head_dim;
  rotate(call, call.past[seq] + token, src, dst);
  for (int64_t i = 0; i < call.head_dim; i++) dst[i] *= factor;
  for (int64_t i = call.head_dim; i < padded_dim(call); i++) dst[i] = 0;
}

// Softcap of raw products q.k / softcap, into base 2.
KILN_INLINE Vec cap(Vec x, float softcap) { return tanh(x) * broadcast(softcap * kLog2E); }

// Lanes whose position first + lane lies outside `range` become -infinity.
KILN_INLINE Vec mask(Vec scores, int64_t first, Range range) {
  // Positions relative to the vector, cut to what a float holds exactly.
  const float begin = static_cast<float>(at_most(at_least(range.begin - first, 0), kWidth));
  const float end = static_cast<float>(at_most(at_least(range.end - first, 0), kWidth));
  const Vec lane = iota();
  const Vec hidden = broadcast(-__builtin_inff());
  return ((lane >= broadcast(begin)) & (lane < broadcast(end))) ? scores : hidden;
}

}  // namespace kiln::KILN_ISA
