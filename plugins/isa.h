// Which instruction set's kernels run: the best of this machine, or the one that a test asked for.
#pragma once

namespace kiln {

// 1 plain, 2 AVX2 (with FMA, F16C), 3 AVX-512 (F, BW, DQ, VL), 4 the same with VNNI, 5 the same with VNNI and BF16.
int isa_in_use();

}  // namespace kiln

// The kernel table name_plain(), name_avx2() or name_avx512(), as build.py compiles them for this machine. A folder
// whose kernels are compiled for more asks for name_avx512vnni() or name_avx512bf16() first.
#if defined(__x86_64__)
#define KILN_FOR_ISA(name) \
  (kiln::isa_in_use() >= 3 ? name##_avx512() : kiln::isa_in_use() == 2 ? name##_avx2() : name##_plain())
#define KILN_FOR_ISA_VNNI(name) (kiln::isa_in_use() >= 4 ? name##_avx512vnni() : KILN_FOR_ISA(name))
#define KILN_FOR_ISA_BF16(name) (kiln::isa_in_use() >= 5 ? name##_avx512bf16() : KILN_FOR_ISA(name))
#else
#define KILN_FOR_ISA(name) name##_plain()
#define KILN_FOR_ISA_VNNI(name) name##_plain()
#define KILN_FOR_ISA_BF16(name) name##_plain()
#endif

extern "C" {

// 0 picks the best instruction set of this machine, others are those of isa_in_use().
// Returns the set in use from now on in this process, or -1 (and changes nothing) where the machine lacks it.
// For tests and benchmarks.
__attribute__((visibility("default"))) int kiln_set_isa(int isa);
}
