// Where a product's results go: bias, scales, and what fills up the last panel. Shared by both products.
#pragma once

#include "../simd.h"
#include "kernels.h"

namespace kiln::KILN_ISA {

constexpr int kPanelVecs = kPanel / kWidth;  // vectors per panel
constexpr int kMostPanels = 4;               // of a register block
constexpr int kMostRows = 16;

// Sums of each row's activations by group, of which weights with zeros have too much.
struct RowSums {
  const float* sums;
  int64_t stride;  // from row to row
};

// y of some rows and panels. All its columns exist: the last panel's are in a buffer where the product is narrower.
struct Target {
  float* y;
  int64_t stride;
  const float* bias;
  const float* scale;   // of the weights, [panels, groups, 16]
  const float* zero;    // as scale, or null
  int64_t scale_panel;  // floats from one panel's to the next
  int64_t scale_group;  // and from one group's: 0 where one scale is for the whole depth
  RowSums row_sums;     // read where there are zeros

  // y = (sums - row_sum * zero) * weight_scale, to which the first group adds the bias and others what is there. All
  // register blocks end a group with this, so that a row has the same bits in each.
  template <int kRows, int kVecs>
  __attribute__((always_inline)) void finish(const Vec (&sums)[kRows][kVecs], int64_t group) const {
    const float* before = group ? y : bias;
    const int64_t before_stride = group ? stride : 0;
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; v++) {
      const int64_t column = v * kWidth;
      const int64_t at = v / kPanelVecs * scale_panel + group * scale_group + column % kPanel;
      const Vec weight_scale = load(scale + at);
      const Vec weight_zero = zero ? load(zero + at) : Vec{};
#pragma GCC unroll 16
      for (int r = 0; r < kRows; r++) {
        const Vec sum = zero ? sums[r][v] - weight_zero * row_sums.sums[r * row_sums.stride + group] : sums[r][v];
        store(y + r * stride + column, sum * weight_scale + load(before + r * before_stride + column));
      }
    }
  }
};

static const float kZeros[kMostPanels * kPanel] = {};

// Calls body(target) for the panels [panel, panel + panels) of y, the last of which may be narrower than a panel. y
// already has the results of `earlier` groups. `row_sums` are of these rows.
template <typename Body>
KILN_INLINE void with_target(const PackedWeights& weights, float* y, int64_t row, int64_t rows, int64_t panel,
                             int64_t panels, int64_t earlier, const RowSums& row_sums, Body body) {
  const int64_t first = panel * kPanel, columns = at_most(panels * kPanel, weights.width - first);
  const int64_t groups = groups_of(weights.depth, weights.group_size);
  const int64_t scales = panel * groups * kPanel;
  Target target = {y + row * weights.width + first,
                   weights.width,
                   weights.bias ? weights.bias + first : kZeros,
                   weights.scale + scales,
                   weights.zero ? weights.zero + scales : nullptr,
                   groups * kPanel,
                   groups > 1 ? kPanel : 0,
                   row_sums};
  if (columns == panels * kPanel) return body(target);
  float results[kMostRows * kMostPanels * kPanel], bias[kMostPanels * kPanel] = {};
  if (weights.bias) __builtin_memcpy(bias, weights.bias + first, static_cast<size_t>(columns) * sizeof(float));
  Target padded = target;
  padded.y = results;
  padded.stride = panels * kPanel;
  padded.bias = bias;
  for (int64_t r = 0; earlier && r < rows; r++)
    __builtin_memcpy(results + r * padded.stride, target.y + r * target.stride,
                     static_cast<size_t>(columns) * sizeof(float));
  body(padded);
  for (int64_t r = 0; r < rows; r++)
    __builtin_memcpy(target.y + r * target.stride, results + r * padded.stride,
                     static_cast<size_t>(columns) * sizeof(float));
}

}  // namespace kiln::KILN_ISA
