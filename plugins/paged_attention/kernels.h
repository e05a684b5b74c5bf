// What the dispatcher (cpu.cc) and the kernels, compiled once per instruction set (kernels.cc), share.
#pragma once

#include "cpu.h"

namespace kiln {

// Working memory of one thread; grows, never shrinks, and goes with the thread. Its size depends on the geometry
// only, not on the context.
struct Scratch {
  float* take(size_t floats);  // 64-byte aligned, null when memory is out; valid until the next take

 private:
  friend struct ScratchOwner;
  float* data = nullptr;
  size_t capacity = 0;
};

// New tokens [first, first + count) of one sequence that a task computes, all with one list of heads.
struct Task {
  int64_t seq;
  int64_t kv_head;     // prefill only; decode computes all
  int64_t token;       // first token of the task, within the sequence's new ones
  int64_t count;       // how many
  int64_t begin, end;  // decode only: positions of the context [begin, end) that this task reads
  float* partial;      // decode only: where the partial result goes; null: straight to the output
  int64_t cost;        // relative; the longest run first
};

// A partial decode result of `rows` query rows: maximum [rows], sum [rows], accumulator [rows, head_dim].
inline size_t partial_floats(int64_t rows, int64_t head_dim) { return static_cast<size_t>(rows * (head_dim + 2)); }

struct Kernels {
  const char* name;
  size_t (*write_scratch)(const PagedAttention&);
  size_t (*decode_scratch)(const PagedAttention&, int64_t max_count);
  size_t (*prefill_scratch)(const PagedAttention&, int64_t max_count);
  // Rotates and stores keys and values of packed tokens [first, first + count) of sequence seq.
  void (*write)(const PagedAttention&, int64_t seq, int64_t first, int64_t count, float* scratch);
  void (*decode)(const PagedAttention&, const Task&, float* scratch);
  void (*prefill)(const PagedAttention&, const Task&, float* scratch);
  // Joins `spans` consecutive partial results of a sequence's `count` new tokens into the output.
  void (*combine)(const PagedAttention&, int64_t seq, int64_t count, const float* partials, int64_t spans);
};

const Kernels& kernels_plain();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_avx512bf16();

}  // namespace kiln
