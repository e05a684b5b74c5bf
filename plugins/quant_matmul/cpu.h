// Products with quantised weights, and what quantises the activations, on the CPU: a call's operands and entry points.
//
// Semantics are in schema.py, the layout of the weights in packing.py. Knows nothing of ONNX Runtime: threads come in
// as a function, operands as pointers. Nothing here owns memory. A row's result depends on that row only, to the bit.
#pragma once

#include <cstdint>
#include <string>

#include "../parallel.h"

namespace kiln {

constexpr int64_t kPanel = 16;             // outputs per panel of packed weights
constexpr int64_t kStep = 4;               // products per step
constexpr int64_t kVectorBytes = 64;       // a step of a panel of 8-bit weights, two of 4-bit ones
constexpr int64_t kDeepestGroup = 131072;  // 127 * 127 * this still fits into 32 bits

// Internal linkage: the kernels' files include this too, and the linker could keep the copy built with AVX-512.
#define KILN_COUNT static inline __attribute__((always_inline)) int64_t
KILN_COUNT pieces_of(int64_t whole, int64_t piece) { return (whole + piece - 1) / piece; }
KILN_COUNT at_most(int64_t value, int64_t limit) { return value < limit ? value : limit; }
// How many groups of `size` (0: everything) a row has; one where it is empty, so that results are written nevertheless.
KILN_COUNT groups_of(int64_t length, int64_t size) { return size && length ? pieces_of(length, size) : 1; }

struct Quantised {
  int8_t* q;     // [rows, depth]
  float* scale;  // [rows, groups]
  int64_t group_size;
};

struct QuantizeRows {
  const float* x;  // [rows, depth]
  Quantised out;
  int64_t rows;
  int64_t depth;
};

struct AddRmsNormQuantize {
  const float* x;  // [rows, depth]
  const float* skip;
  const float* gamma;  // [depth]
  Quantised out;
  float* sum;  // [rows, depth], may be x or skip; or null: nobody reads it
  int64_t rows;
  int64_t depth;
  float epsilon;
};

struct SwiGluQuantize {
  const float* gate;  // [rows, depth]
  const float* up;
  Quantised out;
  int64_t rows;
  int64_t depth;
  float alpha;
};

struct PackedWeights {
  const uint8_t* data;
  const float* scale;  // [panels, groups, 16]
  const float* zero;   // the same, or null: what the integers are above their values, in units of the scale
  const float* bias;   // [width], or null
  int64_t depth;
  int64_t width;
  int64_t group_size;
  int bits;
};
KILN_COUNT panels_of(const PackedWeights& weights) { return pieces_of(weights.width, kPanel); }
KILN_COUNT panel_bytes_of(const PackedWeights& weights) {
  return pieces_of(weights.depth, kStep * 8 / weights.bits) * kVectorBytes;
}
#undef KILN_COUNT

struct Int8MatMul {
  const int8_t* q;     // [rows, depth]
  const float* scale;  // [rows, groups]
  PackedWeights weights;
  float* y;  // [rows, width]
  int64_t rows;
  int64_t group_size;  // of the activations
};

struct WeightMatMul {
  const float* x;  // [rows, depth]
  PackedWeights weights;
  float* y;  // [rows, width]
  int64_t rows;
};

// Each returns what went wrong, or nothing.
std::string run(const QuantizeRows& call, Parallel& parallel);
std::string run(const AddRmsNormQuantize& call, Parallel& parallel);
std::string run(const SwiGluQuantize& call, Parallel& parallel);
std::string run(const Int8MatMul& call, Parallel& parallel);
std::string run(const WeightMatMul& call, Parallel& parallel);

}  // namespace kiln
