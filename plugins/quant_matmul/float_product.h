// Products of float activations with 8-bit or 4-bit weights, summed in float32 group by group, in the order of the
// depth.
//
// Few rows: weights are widened in registers as they stream from memory. Many rows: a tile of them is widened once,
// into the second cache, and then serves all rows. Both sum in the same order, so a row has the same bits in each.
#pragma once

#include "dot.h"
#include "target.h"

namespace kiln::KILN_ISA {

#if defined(__AVX512F__)
constexpr int kFloatRows = 6, kFloatPanels = 4;  // 24 sums of 32 registers
#elif defined(__AVX2__)
constexpr int kFloatRows = 6, kFloatPanels = 1;  // 12 of 16
#else
constexpr int kFloatRows = 3, kFloatPanels = 1;
#endif
constexpr int64_t kTileDepth = 512;        // of a widened tile: 128 KB
constexpr int64_t kFloatAhead = 16;        // vectors of each panel that are fetched ahead of their use

// The weight in the last bits of each lane, as a float: a byte becomes the last mantissa bits of 2^23 + byte.
template <int kBits>
KILN_INLINE Vec widened(UintVec stored) {
#if defined(__AVX512F__)
  if (kBits == 4) {  // the look-up reads the last four bits of each lane; without a mask, GCC 12 warns
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return (Vec)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)stored, values);
  }
#endif
  constexpr uint32_t mask = (1u << kBits) - 1;
  return (Vec)((stored & mask) | 0x4b000000u) - broadcast(8388608.0f + (1 << (kBits - 1)));
}

struct FloatDepth {
  int64_t depth;
  int64_t group_size;
  int64_t groups;
  int64_t panel_bytes;
};

// The product of kRows rows with kPanels panels, widened on the way.
template <int kBits, int kPanels, int kRows>
static void multiply_stream(const float* x, int64_t stride, const uint8_t* weights, const FloatDepth depth,
                            const Target target) {
  constexpr int kVecs = kPanels * kPanelVecs, kPerVector = 8 / kBits;
  const int64_t vectors = depth.panel_bytes / kVectorBytes;
  for (int64_t g = 0; g < depth.groups; g++) {
    Vec sums[kRows][kVecs] = {};
    UintVec stored[kVecs];
    auto load_weights = [&](int64_t s) __attribute__((always_inline)) {
      const int64_t vector = s / kPerVector, ahead = vector + kFloatAhead;
      // Beyond the end of these panels the next ones follow.
      const uint8_t* next = weights + (ahead < vectors ? ahead : ahead + (kPanels - 1) * vectors) * kVectorBytes;
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; v++) {
        const int64_t panel = v / kPanelVecs * depth.panel_bytes;
        if (v % kPanelVecs == 0) __builtin_prefetch(next + panel);
        stored[v] = (UintVec)load_bytes(weights + vector * kVectorBytes + panel + v % kPanelVecs * sizeof(ByteVec));
      }
    };
    auto add_product = [&](int64_t k, int shift) __attribute__((always_inline)) {
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; v++) {
        const Vec values = widened<kBits>(stored[v] >> shift);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) sums[r][v] += values * x[r * stride + k];
      }
    };
    auto add = [&](int64_t s, int odd) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int i = 0; i < kStep; i++) add_product(s * kStep + i, 8 * i + 4 * odd);
    };
    const int64_t begin = g * depth.group_size, end = at_most(depth.depth, begin + depth.group_size);
    for_steps<kBits>(begin / kStep, end / kStep, load_weights, add);
    if (end % kStep) {
      const int64_t s = end / kStep;
      load_weights(s);
      for (int i = 0; i < end % kStep; i++) add_product(s * kStep + i, 8 * i + static_cast<int>(s % kPerVector) * 4);
    }
    target.finish(sums, g);
  }
}

// tile[count, kPanels * 16] = weights [k, k + count) of the panels; k is a multiple of 4.
template <int kBits, int kPanels>
static void widen_tile(const uint8_t* weights, int64_t panel_bytes, int64_t k, int64_t count, float* tile) {
  constexpr int kPerVector = 8 / kBits, kTileWidth = kPanels * kPanel;
  for (int p = 0; p < kPanels; p++)
    for (int64_t i = 0; i < count; i += kStep) {
      const int64_t s = (k + i) / kStep;
      const uint8_t* at = weights + p * panel_bytes + s / kPerVector * kVectorBytes;
      float* out = tile + i * kTileWidth + p * kPanel;
      for (int v = 0; v < kPanelVecs; v++) {
        const UintVec stored = (UintVec)load_bytes(at + v * sizeof(ByteVec)) >> static_cast<int>(s % kPerVector) * 4;
#pragma GCC unroll 4
        for (int product = 0; product < kStep; product++)
          if (product < count - i)
            store(out + product * kTileWidth + v * kWidth, widened<kBits>(stored >> 8 * product));
      }
    }
}

// Part of a group's depth: [begin, begin + count) of a row of x. `first` begins the group, `last` ends it; in between,
// the sums [rows, kPanels * 16] wait in memory.
struct Part {
  int64_t begin, count, group;
  bool first, last;
};

template <int kPanels, int kRows>
static void multiply_tile(const float* x, int64_t stride, const float* tile, const Part part, float* waiting,
                          const Target target) {
  constexpr int kVecs = kPanels * kPanelVecs, kTileWidth = kPanels * kPanel;
  Vec sums[kRows][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; v++) sums[r][v] = part.first ? Vec{} : load(waiting + r * kTileWidth + v * kWidth);
  for (int64_t k = 0; k < part.count; k++, tile += kTileWidth) {
    Vec values[kVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; v++) values[v] = load(tile + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      const Vec activation = broadcast(x[r * stride + part.begin + k]);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; v++) sums[r][v] += values[v] * activation;
    }
  }
  if (part.last) return target.finish(sums, part.group);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; v++) store(waiting + r * kTileWidth + v * kWidth, sums[r][v]);
}

// Both kinds of register block for 1 .. kRows rows.
template <int kBits, int kPanels, int kRows>
struct FloatBlocks {
  void (*stream[kRows + 1])(const float*, int64_t, const uint8_t*, FloatDepth, Target);
  void (*tile[kRows + 1])(const float*, int64_t, const float*, Part, float*, Target);
  constexpr FloatBlocks() : stream(), tile() { fill<kRows>(); }
  template <int kCount>
  constexpr void fill() {
    stream[kCount] = multiply_stream<kBits, kPanels, kCount>;
    tile[kCount] = multiply_tile<kPanels, kCount>;
    if constexpr (kCount > 1) fill<kCount - 1>();
  }
};

// The scratch area has a tile and the sums that wait, for many rows, then the rows' own sums.
static size_t float_scratch(const WeightMatMul& call, int64_t rows) {
  const int64_t waiting = rows <= kFloatRows ? 0 : (kTileDepth + rows) * kFloatPanels * kPanel;
  const int64_t sums = call.weights.zero ? rows * groups_of(call.weights.depth, call.weights.group_size) : 0;
  return static_cast<size_t>(waiting + sums) * sizeof(float);
}

// The sum of n floats, always in the same order.
static float sum_of_floats(const float* x, int64_t n) {
  Vec sums = {};
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) sums += load(x + i);
  float sum = 0;
  for (int lane = 0; lane < kWidth; lane++) sum += sums[lane];
  for (; i < n; i++) sum += x[i];
  return sum;
}

template <int kBits, int kPanels>
static void float_panels(const WeightMatMul& call, const Block& block, int64_t panel, const FloatDepth& depth,
                         float* scratch, const float* sums) {
  static constexpr FloatBlocks<kBits, kPanels, kFloatRows> blocks;
  const int64_t k = depth.depth;
  const uint8_t* weights = call.weights.data + panel * depth.panel_bytes;
  const float* x = call.x + block.row * k;
  if (block.rows <= kFloatRows)
    return with_target(call.weights, call.y, block.row, block.rows, panel, kPanels, 0, RowSums{sums, depth.groups},
                       [&](const Target& target) { blocks.stream[block.rows](x, k, weights, depth, target); });
  float *tile = scratch, *waiting = tile + kTileDepth * kFloatPanels * kPanel;
  for (int64_t g = 0; g < depth.groups; g++) {
    const int64_t begin = g * depth.group_size, end = at_most(k, begin + depth.group_size);
    int64_t at = begin;
    do {
      const int64_t count = at_most(end - at, kTileDepth);
      const Part part = {at, count, g, at == begin, at + count == end};
      widen_tile<kBits, kPanels>(weights, depth.panel_bytes, at, count, tile);
      for (int64_t r = 0; r < block.rows; r += kFloatRows) {
        const int64_t rows = at_most(block.rows - r, kFloatRows);
        const RowSums row_sums = {sums + r * depth.groups, depth.groups};
        with_target(call.weights, call.y, block.row + r, rows, panel, kPanels, g, row_sums, [&](const Target& target) {
          blocks.tile[rows](x + r * k, k, tile, part, waiting + r * kPanels * kPanel, target);
        });
      }
      at += count;
    } while (at < end);
  }
}

template <int kBits>
static void float_product(const WeightMatMul& call, const Block& block, char* scratch) {
  const PackedWeights& w = call.weights;
  const FloatDepth depth = {w.depth, w.group_size ? w.group_size : w.depth, groups_of(w.depth, w.group_size),
                            panel_bytes_of(w)};
  float* area = reinterpret_cast<float*>(scratch);
  float* row_sums = area + (block.rows <= kFloatRows ? 0 : (kTileDepth + block.rows) * kFloatPanels * kPanel);
  for (int64_t r = 0; w.zero && r < block.rows; r++)
    for (int64_t g = 0; g < depth.groups; g++) {
      const int64_t begin = g * depth.group_size, n = at_most(depth.group_size, w.depth - begin);
      row_sums[r * depth.groups + g] = sum_of_floats(call.x + (block.row + r) * w.depth + begin, n);
    }
  int64_t panel = block.panel;
  const int64_t end = block.panel + block.panels;
  for (; panel + kFloatPanels <= end; panel += kFloatPanels)
    float_panels<kBits, kFloatPanels>(call, block, panel, depth, area, row_sums);
  for (; panel < end; panel++) float_panels<kBits, 1>(call, block, panel, depth, area, row_sums);
}

static void weight_matmul(const WeightMatMul& call, const Block& block, char* scratch) {
  if (call.weights.bits == 8)
    float_product<8>(call, block, scratch);
  else
    float_product<4>(call, block, scratch);
}

}  // namespace kiln::KILN_ISA
