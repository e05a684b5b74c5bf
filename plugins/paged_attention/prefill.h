// Attention of many new tokens: query tiles against key tiles, bound by arithmetic.
//
// A task is one KV head and a run of new tokens; its rows are (token, head of the group), token-major, so every
// packed key serves the whole group. For each tile of kTile positions, keys are packed transposed and values
// contiguous, then for every few rows: products with the keys, online softmax, products with the values, all while the
// scores sit in L1. No score matrix exists in memory. All operands have one format (element.h): FP32, or bfloat16 where
// the call asks for it.
//
// In tiles that causality or the window cuts, a hidden position has the weight 0. Where its value is not finite, that
// is not enough, and every token gets the tile packed anew without what is hidden from it: whatever stands in other
// slots, NaN included, cannot leak.
#pragma once

#include "pack.h"
#include "product.h"

namespace kiln::KILN_ISA {

template <typename F>
struct PrefillState {
  typename F::Element *q, *keys, *values;  // [rows, padded], [dim, kTile], [kTile, padded], all with F::kPer per element
  float *acc, *maximum, *sum;              // [rows, padded], [rows], [rows, kAlign] (lanes apart)
  float *scores;                           // [kBlockRows, kTile]
  float *row;                              // [padded]: one query
};

// Numbers of a query row: whole vectors of elements.
template <typename F>
static int64_t query_size(const PagedAttention& call) {
  return round_up(call.head_dim, F::kPer * kWidth);
}

template <typename F>
static PrefillState<F> prefill_parts(const PagedAttention& call, int64_t count, float* scratch, size_t* total) {
  typedef typename F::Element Element;
  static_assert(sizeof(Element) == sizeof(float));
  const int64_t rows = call.heads / call.kv_heads * count, padded = padded_dim(call);
  float* p = scratch;
  auto take = [&](int64_t floats) {
    float* part = p;
    p += round_up(floats, kAlign);
    return part;
  };
  PrefillState<F> state;
  state.q = reinterpret_cast<Element*>(take(rows * query_size<F>(call) / F::kPer));
  state.acc = take(rows * padded);
  state.keys = reinterpret_cast<Element*>(take((call.head_dim + F::kPer - 1) / F::kPer * kTile));
  state.values = reinterpret_cast<Element*>(take(kTile / F::kPer * padded));
  state.scores = take(kBlockRows * kTile);
  state.maximum = take(rows);
  state.sum = take(rows * kAlign);
  state.row = take(query_size<F>(call));
  *total = static_cast<size_t>(p - scratch);
  return state;
}

static size_t prefill_scratch(const PagedAttention& call, int64_t max_count) {
  size_t total;
  if (call.bfloat16)
    prefill_parts<Bfloat16>(call, max_count, nullptr, &total);
  else
    prefill_parts<Exact>(call, max_count, nullptr, &total);
  return total;
}

// Softmax weights, as operands, in place of one row's scores; the running maximum and sum, and the accumulator, follow.
// The maximum is rounded up to an integer: a power of two scales weights without rounding them anew, so that a weight's
// bfloat16 form does not depend on where tiles begin.
template <typename F>
KILN_INLINE void weigh_tile_row(float* scores, int64_t vecs, float* maximum, float* sum, float* acc, int64_t padded) {
  Vec top = load(scores);
  for (int64_t v = 1; v < vecs; v++) top = larger(load(scores + v * kWidth), top);
  const float highest = max_of(top);
  if (highest > *maximum) {
    const float raised = __builtin_ceilf(highest);
    const Vec shrink = exp2(broadcast(*maximum - raised));
    *maximum = raised;
    store(sum, load(sum) * shrink);
    for (int64_t d = 0; d < padded; d += kWidth) store(acc + d, load(acc + d) * shrink);
  }
  store(sum, load(sum) + F::weigh(scores, vecs, *maximum));
}

// One tile's products of weights and values for rows of `state.scores`, whose positions [begin, end) count.
template <typename F>
static void add_values(const PrefillState<F>& state, int64_t scores_row, int64_t row, int64_t rows, int64_t padded,
                       int64_t begin, int64_t end) {
  typedef typename F::Element Element;
  const int64_t from = begin / F::kPer, to = (end + F::kPer - 1) / F::kPer;
  const Element* weights = reinterpret_cast<const Element*>(state.scores + scores_row * kTile);
  multiply<F, true>(rows, weights + from, kTile, state.values + from * padded, padded, state.acc + row * padded, padded,
                    to - from, padded / kWidth);
}

// Rows [row, row + rows) of the task, rows <= kBlockRows, against the packed tile `span`, of finite values or not.
template <typename F>
static void attend_block(const PagedAttention& call, const Task& task, const PrefillState<F>& state, int64_t row,
                         int64_t rows, const Span& span, bool finite) {
  const int64_t group = call.heads / call.kv_heads, padded = padded_dim(call);
  const int64_t first = span.first, count = span.count;
  const int64_t position = call.past[task.seq] + task.token;
  const Range top = visible(call, position + row / group), bottom = visible(call, position + (row + rows - 1) / group);
  if (bottom.end <= first || top.begin >= first + count) return;
  // The first row has the earliest end, the last row the latest begin.
  const bool whole = bottom.begin <= first && top.end >= first + count && count % kWidth == 0;
  const int64_t used = at_most(bottom.end - first, count), vecs = (used + kWidth - 1) / kWidth;

  const int64_t stride = query_size<F>(call) / F::kPer;
  multiply<F, false>(rows, state.q + row * stride, stride, state.keys, kTile, state.scores, kTile,
                     (call.head_dim + F::kPer - 1) / F::kPer, vecs);
  for (int64_t r = 0; r < rows; r++) {
    float* scores = state.scores + r * kTile;
    if (call.softcap > 0)
      for (int64_t v = 0; v < vecs; v++) store(scores + v * kWidth, cap(load(scores + v * kWidth), call.softcap));
    if (!whole) {
      const Range range = visible(call, position + (row + r) / group);
      const Range valid = {range.begin, at_most(range.end, first + count)};
      for (int64_t v = 0; v < vecs; v++)
        store(scores + v * kWidth, mask(load(scores + v * kWidth), first + v * kWidth, valid));
    }
    weigh_tile_row<F>(scores, vecs, state.maximum + row + r, state.sum + (row + r) * kAlign,
                      state.acc + (row + r) * padded, padded);
  }
  if (whole || finite) return add_values(state, 0, row, rows, padded, at_least(top.begin - first, 0), used);
  for (int64_t r = 0; r < rows;) {
    const int64_t token = (row + r) / group;
    const int64_t same = at_most(rows - r, (token + 1) * group - (row + r));  // rows of this token
    pack_values<F>(call, span, visible(call, position + token), state.values);
    add_values(state, r, row + r, same, padded, 0, used);
    r += same;
  }
  pack_values<F>(call, span, {first, first + count}, state.values);
}

template <typename F>
static void take_queries(const PagedAttention& call, const Task& task, const PrefillState<F>& state) {
  const int64_t group = call.heads / call.kv_heads, size = query_size<F>(call);
  for (int64_t d = padded_dim(call); d < size; d++) state.row[d] = 0;
  for (int64_t token = 0; token < task.count; token++) {
    for (int64_t r = token * group; r < (token + 1) * group; r++) {
      take_query(call, task.seq, task.token + token, task.kv_head * group + r % group, state.row);
      for (int64_t d = 0; d < size; d += F::kPer * kWidth)
        store(state.q + (r * size + d) / F::kPer, F::take(state.row + d, F::kPer * kWidth));
    }
  }
}

// output = accumulator / sum, and everything is written.
template <typename F>
static void give_results(const PagedAttention& call, const Task& task, const PrefillState<F>& state) {
  const int64_t group = call.heads / call.kv_heads, dim = call.head_dim, padded = padded_dim(call);
  for (int64_t r = 0; r < group * task.count; r++) {
    const int64_t packed = call.cumulative[task.seq] + task.token + r / group;
    float* out = call.output + (packed * call.heads + task.kv_head * group + r % group) * dim;
    const float* acc = state.acc + r * padded;
    const float sum = sum_of(load(state.sum + r * kAlign));
    for (int64_t d = 0; d < dim; d++) out[d] = acc[d] / sum;
  }
}

template <typename F>
static void prefill_as(const PagedAttention& call, const Task& task, float* scratch) {
  const int64_t rows = call.heads / call.kv_heads * task.count, padded = padded_dim(call);
  const int64_t position = call.past[task.seq] + task.token, end = position + task.count;
  size_t unused;
  const PrefillState<F> state = prefill_parts<F>(call, task.count, scratch, &unused);
  take_queries(call, task, state);
  for (int64_t r = 0; r < rows; r++) state.maximum[r] = kNoMaximum;
  __builtin_memset(state.sum, 0, sizeof(float) * rows * kAlign);
  __builtin_memset(state.acc, 0, sizeof(float) * rows * padded);

  for (int64_t first = visible(call, position).begin; first < end; first += kTile) {
    const Span span = {task.seq, task.kv_head, first, at_most(kTile, end - first)};
    pack_keys<F>(call, span, state.keys);
    const bool finite = pack_values<F>(call, span, {first, first + span.count}, state.values);
    for (int64_t row = 0; row < rows; row += kBlockRows)
      attend_block(call, task, state, row, at_most(kBlockRows, rows - row), span, finite);
  }
  give_results(call, task, state);
}

static void prefill(const PagedAttention& call, const Task& task, float* scratch) {
  if (call.bfloat16)
    prefill_as<Bfloat16>(call, task, scratch);
  else
    prefill_as<Exact>(call, task, scratch);
}

}  // namespace kiln::KILN_ISA
