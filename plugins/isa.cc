// Picks the instruction set once per process; every kernel of the library follows.
#include "isa.h"

#include <atomic>

namespace kiln {
namespace {

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

bool has_vnni() {
#if defined(__x86_64__)
  return has_avx512() && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

bool has_bf16() {
#if defined(__x86_64__)
  return has_vnni() && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

std::atomic<int> chosen_isa{0};

int best_isa() {
  static const int best = has_bf16() ? 5 : has_vnni() ? 4 : has_avx512() ? 3 : has_avx2() ? 2 : 1;
  return best;
}

}  // namespace

int isa_in_use() {
  const int isa = chosen_isa.load(std::memory_order_relaxed);
  return isa ? isa : best_isa();
}

}  // namespace kiln

int kiln_set_isa(int isa) {
  if (isa < 0 || isa > kiln::best_isa()) return -1;
  kiln::chosen_isa = isa;
  return kiln::isa_in_use();
}
