// Attention of a few new tokens over a span of the context: bound by reading the cache.
//
// Positions are taken sixteen at a time in cache order, for all KV heads and all query rows of each, so that the
// cache streams through once; the next sixteen are prefetched meanwhile, because the next block may lie anywhere.
// Query rows are ordered [kv head][token][head within the group]; rows of one KV head share every key and value load.
//
// A row reads only values that it may attend to: whatever stands in other slots, NaN included, cannot leak.
//
// Of INT8 caches the integers are multiplied; a key's scale then goes into its score, a value's into its weight.
#pragma once

#include "rows.h"

namespace kiln::KILN_ISA {

constexpr int kStep = 16;  // positions per step
// Query rows per register tile: four positions x rows accumulators must fit the registers.
constexpr int kRowTile = kWidth == 16 ? 4 : 3;

KILN_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// scores[r * kStep + i] = q[r] . keys[i][offset ..], for kRows rows of q and kStep positions. With kAhead, asks for the
// same part of the rows `next` line by line meanwhile: evenly spread requests do not fill the miss queue in bursts.
template <int kRows, bool kAhead, typename K>
KILN_INLINE void score_rows(const K* const* keys, const K* const* next, int64_t offset, const float* q, int64_t dim,
                            int64_t padded, float* scores) {
  Vec quads[kRows][4];
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; quad++) {
    Vec sums[kRows][4] = {};
    const K* k0 = keys[4 * quad] + offset;
    const K* k1 = keys[4 * quad + 1] + offset;
    const K* k2 = keys[4 * quad + 2] + offset;
    const K* k3 = keys[4 * quad + 3] + offset;
    auto add = [&](int64_t d, Vec a, Vec b, Vec c, Vec e) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r++) {
        Vec x = load(q + r * padded + d);
        sums[r][0] += x * a;
        sums[r][1] += x * b;
        sums[r][2] += x * c;
        sums[r][3] += x * e;
      }
    };
    int64_t d = 0;
    for (; d + kWidth <= dim; d += kWidth) {
      if (kAhead && (sizeof(K) > 1 || d % 64 == 0)) {  // one vector of bytes is a fraction of a line
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) prefetch(next[4 * quad + i] + offset + d);
      }
      add(d, load(k0 + d), load(k1 + d), load(k2 + d), load(k3 + d));
    }
    if (d < dim) {
      const int n = static_cast<int>(dim - d);
      add(d, load_part(k0 + d, n), load_part(k1 + d, n), load_part(k2 + d, n), load_part(k3 + d, n));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) quads[r][quad] = sums_of_four(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++) store_sixteen(scores + r * kStep, quads[r][0], quads[r][1], quads[r][2], quads[r][3]);
}

// acc[r][d .. d + kVecs * kWidth) += sum over i in [begin, end) of p[r * kStep + i] * values[i][offset + d ..].
template <int kRows, int kVecs, bool kPart, bool kAhead, typename V>
KILN_INLINE void add_values_at(const V* const* values, const V* const* next, int64_t offset, int begin, int end,
                               const float* p, float* acc, int64_t padded, int part) {
  Vec sums[kRows][kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; c++) sums[r][c] = load(acc + r * padded + c * kWidth);
  for (int i = begin; i < end; i++) {
    const V* value = values[i] + offset;
    if (kAhead) {
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; c += kWidth * sizeof(V) <= 64 / kVecs ? kVecs : 1)
        prefetch(next[i] + offset + c * kWidth);
    }
    Vec v[kVecs];
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; c++) v[c] = kPart ? load_part(value, part) : load(value + c * kWidth);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
      Vec weight = broadcast(p[r * kStep + i]);
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; c++) sums[r][c] += weight * v[c];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int c = 0; c < kVecs; c++) store(acc + r * padded + c * kWidth, sums[r][c]);
}

template <int kRows, bool kAhead, typename V>
KILN_INLINE void add_values(const V* const* values, const V* const* next, int64_t offset, int begin, int end,
                            const float* p, float* acc, int64_t dim, int64_t padded) {
  int64_t d = 0;
  for (; d + 4 * kWidth <= dim; d += 4 * kWidth)
    add_values_at<kRows, 4, false, kAhead>(values, next, offset + d, begin, end, p, acc + d, padded, 0);
  for (; d + kWidth <= dim; d += kWidth)
    add_values_at<kRows, 1, false, kAhead>(values, next, offset + d, begin, end, p, acc + d, padded, 0);
  if (d < dim)
    add_values_at<kRows, 1, true, false>(values, next, offset + d, begin, end, p, acc + d, padded,
                                         static_cast<int>(dim - d));
}

// `next` null: nothing to ask for. Only the first register tile asks.
template <typename K>
static void score_any(int rows, const K* const* keys, const K* const* next, int64_t offset, const float* q, int64_t dim,
                      int64_t padded, float* scores) {
  while (rows > 0) {
    const int n = rows < kRowTile ? rows : kRowTile;
    switch (n + (next ? 4 : 0)) {
      case 8:
        score_rows<kRowTile, true>(keys, next, offset, q, dim, padded, scores);
        break;
      case 7:
        score_rows<3, true>(keys, next, offset, q, dim, padded, scores);
        break;
      case 6:
        score_rows<2, true>(keys, next, offset, q, dim, padded, scores);
        break;
      case 5:
        score_rows<1, true>(keys, next, offset, q, dim, padded, scores);
        break;
      case 4:
        score_rows<kRowTile, false>(keys, next, offset, q, dim, padded, scores);
        break;
      case 3:
        score_rows<3, false>(keys, next, offset, q, dim, padded, scores);
        break;
      case 2:
        score_rows<2, false>(keys, next, offset, q, dim, padded, scores);
        break;
      case 1:
        score_rows<1, false>(keys, next, offset, q, dim, padded, scores);
        break;
    }
    rows -= n, q += n * padded, scores += n * kStep, next = nullptr;
  }
}

template <typename V>
static void add_any(int rows, const V* const* values, const V* const* next, int64_t offset, int begin, int end,
                    const float* p, float* acc, int64_t dim, int64_t padded) {
  while (rows > 0) {
    const int n = rows < kRowTile ? rows : kRowTile;
    switch (n + (next ? 4 : 0)) {
      case 8:
        add_values<kRowTile, true>(values, next, offset, begin, end, p, acc, dim, padded);
        break;
      case 7:
        add_values<3, true>(values, next, offset, begin, end, p, acc, dim, padded);
        break;
      case 6:
        add_values<2, true>(values, next, offset, begin, end, p, acc, dim, padded);
        break;
      case 5:
        add_values<1, true>(values, next, offset, begin, end, p, acc, dim, padded);
        break;
      case 4:
        add_values<kRowTile, false>(values, next, offset, begin, end, p, acc, dim, padded);
        break;
      case 3:
        add_values<3, false>(values, next, offset, begin, end, p, acc, dim, padded);
        break;
      case 2:
        add_values<2, false>(values, next, offset, begin, end, p, acc, dim, padded);
        break;
      case 1:
        add_values<1, false>(values, next, offset, begin, end, p, acc, dim, padded);
        break;
    }
    rows -= n, p += n * kStep, acc += n * padded, next = nullptr;
  }
}

// One sequence's running state: maximum [rows], sum [rows, kWidth] (lanes apart), accumulator [rows, padded].
struct DecodeState {
  float *q, *maximum, *sum, *acc, *scores;
};

// Scores in, softmax weights relative to the running maximum out; sums and accumulators follow the maximum.
KILN_INLINE void weigh_row(float* scores, float* maximum, float* sum, float* acc, int64_t padded) {
  constexpr int kVecs = kStep / kWidth;
  Vec top = load(scores);
#pragma GCC unroll 4
  for (int i = 1; i < kVecs; i++) top = larger(load(scores + i * kWidth), top);
  const float highest = max_of(top);
  if (highest > *maximum) {
    const Vec shrink = exp2(broadcast(*maximum - highest));
    *maximum = highest;
    store(sum, load(sum) * shrink);
    for (int64_t d = 0; d < padded; d += kWidth) store(acc + d, load(acc + d) * shrink);
  }
  const Vec offset = broadcast(*maximum);
  Vec total = load(sum);
#pragma GCC unroll 4
  for (int i = 0; i < kVecs; i++) {
    Vec weight = exp2(load(scores + i * kWidth) - offset);
    total += weight;
    store(scores + i * kWidth, weight);
  }
  store(sum, total);
}

static DecodeState decode_parts(const PagedAttention& call, int64_t count, float* scratch, size_t* total) {
  const int64_t rows = call.heads * count, padded = padded_dim(call);
  DecodeState state;
  float* p = scratch;
  state.q = p, p += round_up(rows * padded, kAlign);
  state.acc = p, p += round_up(rows * padded, kAlign);
  state.sum = p, p += rows * kAlign;
  state.scores = p, p += rows * kStep;
  state.maximum = p, p += round_up(rows, kAlign);
  *total = static_cast<size_t>(p - scratch);
  return state;
}

static size_t decode_scratch(const PagedAttention& call, int64_t max_count) {
  size_t total;
  decode_parts(call, max_count, nullptr, &total);
  return total;
}

// Rows of one step's positions, all KV heads each; scales only where the type has them.
template <typename K, typename V>
struct StepRows {
  const K* keys[kStep];
  const V* values[kStep];
  const float* key_scales[Scaled<K>::value ? kStep : 1];
  const float* value_scales[Scaled<V>::value ? kStep : 1];
};

// scores[rows, kStep] *= the scales of one KV head.
KILN_INLINE void scale_columns(const float* const* scales, int64_t head, int64_t rows, float* scores) {
  float column[kStep];
  for (int i = 0; i < kStep; i++) column[i] = scales[i][head];
  for (int64_t r = 0; r < rows; r++)
    for (int i = 0; i < kStep; i += kWidth)
      store(scores + r * kStep + i, load(scores + r * kStep + i) * load(column + i));
}

// One step: positions [first, first + valid) of the sequence, valid <= kStep. `next` is null at the end.
template <typename K, typename V>
static void decode_step(const PagedAttention& call, const Task& task, const DecodeState& state, int64_t first,
                        int64_t valid, const StepRows<K, V>& here, const StepRows<K, V>* next) {
  const K* const* const next_keys = next ? next->keys : nullptr;
  const V* const* const next_values = next ? next->values : nullptr;
  const int64_t group = call.heads / call.kv_heads, dim = call.head_dim, padded = padded_dim(call);
  const int64_t rows = group * task.count;
  const int64_t past = call.past[task.seq];
  // Do all rows see all sixteen positions? The first token has the earliest end, the last the latest begin.
  const int64_t earliest_end = visible(call, past + task.token).end;
  const int64_t latest_begin = visible(call, past + task.token + task.count - 1).begin;
  const bool whole = valid == kStep && latest_begin <= first && earliest_end >= first + kStep;

  for (int64_t head = 0; head < call.kv_heads; head++) {
    const int64_t offset = head * dim, row = head * rows;
    float* scores = state.scores + row * kStep;
    float* acc = state.acc + row * padded;
    score_any(static_cast<int>(rows), here.keys, next_keys, offset, state.q + row * padded, dim, padded, scores);
    if constexpr (Scaled<K>::value) scale_columns(here.key_scales, head, rows, scores);
    for (int64_t r = 0; r < rows; r++) {
      if (call.softcap > 0)
        for (int i = 0; i < kStep; i += kWidth)
          store(scores + r * kStep + i, cap(load(scores + r * kStep + i), call.softcap));
      if (!whole) {
        Range range = visible(call, past + task.token + r / group);
        range.end = at_most(range.end, first + valid);
        for (int i = 0; i < kStep; i += kWidth)
          store(scores + r * kStep + i, mask(load(scores + r * kStep + i), first + i, range));
      }
      weigh_row(scores + r * kStep, state.maximum + row + r, state.sum + (row + r) * kAlign, acc + r * padded, padded);
    }
    if constexpr (Scaled<V>::value) scale_columns(here.value_scales, head, rows, scores);
    if (whole) {
      add_any(static_cast<int>(rows), here.values, next_values, offset, 0, kStep, scores, acc, dim, padded);
      continue;
    }
    for (int64_t t = 0; t < task.count; t++) {
      const Range range = visible(call, past + task.token + t);
      const int64_t begin = at_least(range.begin - first, 0), end = at_most(range.end - first, valid);
      if (begin < end)
        add_any(static_cast<int>(group), here.values, static_cast<const V* const*>(nullptr), offset, static_cast<int>(begin),
                static_cast<int>(end), scores + t * group * kStep, acc + t * group * padded, dim, padded);
    }
  }
}

// Rows beyond the span repeat its last one: their scores are masked.
template <typename T>
KILN_INLINE void repeat_last(const T** rows, int64_t valid) {
  for (int64_t i = valid; i < kStep; i++) rows[i] = rows[valid - 1];
}

KILN_INLINE void find_scales(const PagedAttention& call, int64_t seq, const float* scales, int64_t first,
                             int64_t valid, const float** rows) {
  find_rows(call, seq, scales, call.kv_heads, first, valid, rows);
  repeat_last(rows, valid);
  for (int i = 0; i < kStep; i++) prefetch(rows[i]);
}

template <typename K, typename V>
static void decode_typed(const PagedAttention& call, const Task& task, float* scratch) {
  const int64_t group = call.heads / call.kv_heads, dim = call.head_dim, padded = padded_dim(call);
  const int64_t rows = call.heads * task.count;
  size_t unused;
  const DecodeState state = decode_parts(call, task.count, scratch, &unused);
  const int64_t row_size = call.kv_heads * dim;
  StepRows<K, V> sides[2];
  auto find = [&](StepRows<K, V>& side, int64_t first) {
    const int64_t valid = at_most(kStep, task.end - first);
    find_rows(call, task.seq, static_cast<const K*>(call.key_cache), row_size, first, valid, side.keys);
    find_rows(call, task.seq, static_cast<const V*>(call.value_cache), row_size, first, valid, side.values);
    repeat_last(side.keys, valid);
    repeat_last(side.values, valid);
    if constexpr (Scaled<K>::value) find_scales(call, task.seq, call.key_scale, first, valid, side.key_scales);
    if constexpr (Scaled<V>::value) find_scales(call, task.seq, call.value_scale, first, valid, side.value_scales);
  };
  int side = 0;
  find(sides[0], task.begin);
  // Nobody asked for the first step yet: ask for all of it, and prepare the queries while it comes.
  for (int i = 0; i < kStep; i++)
    for (int64_t d = 0; d < row_size; d += static_cast<int64_t>(64 / sizeof(K))) prefetch(sides[0].keys[i] + d);
  for (int i = 0; i < kStep; i++)
    for (int64_t d = 0; d < row_size; d += static_cast<int64_t>(64 / sizeof(V))) prefetch(sides[0].values[i] + d);

  for (int64_t r = 0; r < rows; r++) {
    const int64_t head = r / (group * task.count), token = r / group % task.count;
    take_query(call, task.seq, task.token + token, head * group + r % group, state.q + r * padded);
    state.maximum[r] = kNoMaximum;
  }
  __builtin_memset(state.acc, 0, sizeof(float) * rows * padded);
  __builtin_memset(state.sum, 0, sizeof(float) * rows * kAlign);

  for (int64_t first = task.begin; first < task.end; first += kStep, side ^= 1) {
    const bool more = first + kStep < task.end;
    if (more) find(sides[side ^ 1], first + kStep);
    decode_step(call, task, state, first, at_most(kStep, task.end - first), sides[side],
                more ? &sides[side ^ 1] : nullptr);
  }

  for (int64_t r = 0; r < rows; r++) {
    const float sum = sum_of(load(state.sum + r * kAlign));
    const float* acc = state.acc + r * padded;
    if (task.partial) {
      task.partial[r] = state.maximum[r];
      task.partial[rows + r] = sum;
      for (int64_t d = 0; d < dim; d++) task.partial[2 * rows + r * dim + d] = acc[d];
    } else {
      const int64_t head = r / (group * task.count) * group + r % group, token = r / group % task.count;
      float* out = call.output + ((call.cumulative[task.seq] + task.token + token) * call.heads + head) * dim;
      for (int64_t d = 0; d < dim; d++) out[d] = acc[d] / sum;
    }
  }
}

static void combine(const PagedAttention& call, int64_t seq, int64_t count, const float* partials, int64_t spans) {
  const int64_t group = call.heads / call.kv_heads, dim = call.head_dim, rows = call.heads * count;
  const int64_t stride = static_cast<int64_t>(partial_floats(rows, dim));
  for (int64_t r = 0; r < rows; r++) {
    float maximum = kNoMaximum;
    for (int64_t s = 0; s < spans; s++)
      maximum = partials[s * stride + r] > maximum ? partials[s * stride + r] : maximum;
    const int64_t head = r / (group * count) * group + r % group, token = r / group % count;
    float* out = call.output + ((call.cumulative[seq] + token) * call.heads + head) * dim;
    float sum = 0;
    for (int64_t s = 0; s < spans; s++) {
      const float* part = partials + s * stride;
      const float weight = exp2(broadcast(part[r] - maximum))[0];
      sum += weight * part[rows + r];
      const float* acc = part + 2 * rows + r * dim;
      for (int64_t d = 0; d < dim; d++) out[d] = (s ? out[d] : 0) + weight * acc[d];
    }
    for (int64_t d = 0; d < dim; d++) out[d] /= sum;
  }
}

}  // namespace kiln::KILN_ISA
