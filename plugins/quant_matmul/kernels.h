// What the dispatcher (cpu.cc) and the kernels, compiled once per instruction set (kernels.cc), share.
#pragma once

#include "cpu.h"

namespace kiln {

// Part of a product that one thread computes.
struct Block {
  int64_t row, rows;
  int64_t panel, panels;
};

// `Work` is a range of rows or a Block. Scratch is 64-byte aligned and holds scratch_bytes(call, the most rows).
template <typename Call, typename Work>
struct Kernel {
  void (*run)(const Call&, const Work&, char* scratch);
  size_t (*scratch_bytes)(const Call&, int64_t rows);
};

struct Rows {
  int64_t begin, end;
};

struct QuantMatMulKernels {
  Kernel<QuantizeRows, Rows> quantize_rows;
  Kernel<AddRmsNormQuantize, Rows> add_rms_norm_quantize;
  Kernel<SwiGluQuantize, Rows> swiglu_quantize;
  Kernel<Int8MatMul, Block> int8_matmul;
  Kernel<WeightMatMul, Block> weight_matmul;
};

const QuantMatMulKernels& quant_matmul_plain();
const QuantMatMulKernels& quant_matmul_avx2();
const QuantMatMulKernels& quant_matmul_avx512();
const QuantMatMulKernels& quant_matmul_avx512vnni();

}  // namespace kiln
