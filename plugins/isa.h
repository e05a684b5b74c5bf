// Which instruction set's kernels run: the best of this machine, or the one that a test asked for.
#pragma once

namespace kiln {

// 1 plain, 2 AVX2 (with FMA, F16C), 3 AVX-512 (F, BW, DQ, VL).
int isa_in_use();

}  // namespace kiln

// The kernel table name_plain(), name_avx2() or name_avx512(), as build.py compiles them for this machine.
#if defined(__x86_64__)
#define KILN_FOR_ISA(name) \
  (kiln::isa_in_use() == 3 ? name##_avx512() : kiln::isa_in_use() == 2 ? name##_avx2() : name##_plain())
#else
#define KILN_FOR_ISA(name) name##_plain()
#endif

extern "C" {

// 0 picks the best instruction set of this machine, others are those of isa_in_use().
// Returns the set in use from now on in this process, or -1 (and changes nothing) where the machine lacks it.
// For tests and benchmarks.
__attribute__((visibility("default"))) int kiln_set_isa(int isa);
}
