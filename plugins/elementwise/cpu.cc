// Cuts a call into blocks of rows or elements and runs them on the caller's threads.
#include "cpu.h"

#include <algorithm>

#include "../isa.h"
#include "kernels.h"

namespace kiln {
namespace {

// Elements per block, about: some 5 us of work. A call of one block, a decode step say, runs inline, as waking another
// thread takes as long.
constexpr int64_t kBlockElements = 16384;

template <typename Call>
struct Work {
  const Call& call;
  void (*kernel)(const Call&, int64_t begin, int64_t end);
  int64_t total;
  int64_t block;
};

template <typename Call>
void run_blocks(const Work<Call>& work, Parallel& parallel) {
  if (work.total <= work.block) return work.kernel(work.call, 0, work.total);
  auto body = [](void* user, size_t index) {
    const Work<Call>& work = *static_cast<const Work<Call>*>(user);
    const int64_t begin = static_cast<int64_t>(index) * work.block;
    work.kernel(work.call, begin, std::min(work.total, begin + work.block));
  };
  parallel.run(static_cast<size_t>((work.total + work.block - 1) / work.block), body, const_cast<Work<Call>*>(&work));
}

}  // namespace

void run(const AddRmsNorm& call, Parallel& parallel) {
  const int64_t rows = std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, call.hidden));
  run_blocks<AddRmsNorm>({call, KILN_FOR_ISA(elementwise).add_rms_norm, call.rows, rows}, parallel);
}

void run(const SwiGlu& call, Parallel& parallel) {
  run_blocks<SwiGlu>({call, KILN_FOR_ISA(elementwise).swiglu, call.size, kBlockElements}, parallel);
}

}  // namespace kiln
