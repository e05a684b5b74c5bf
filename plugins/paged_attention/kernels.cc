// The kernels of one instruction set. Compiled once per set, with -DKILN_ISA=plain, avx2, avx512 or avx512bf16 and
// the matching machine flags; only kernels_<isa>() is visible outside.
#include "kernels.h"

#include "decode.h"
#include "prefill.h"
#include "write.h"

namespace kiln {
namespace KILN_ISA {

template <typename K>
static void decode_keys(const PagedAttention& call, const Task& task, float* scratch) {
  switch (call.value_type) {
    case CacheType::kFloat32:
      return decode_typed<K, F32>(call, task, scratch);
    case CacheType::kFloat16:
      return decode_typed<K, F16>(call, task, scratch);
    case CacheType::kBfloat16:
      return decode_typed<K, Bf16>(call, task, scratch);
    case CacheType::kInt8:
      return decode_typed<K, Int8>(call, task, scratch);
  }
}

static void decode(const PagedAttention& call, const Task& task, float* scratch) {
  switch (call.key_type) {
    case CacheType::kFloat32:
      return decode_keys<F32>(call, task, scratch);
    case CacheType::kFloat16:
      return decode_keys<F16>(call, task, scratch);
    case CacheType::kBfloat16:
      return decode_keys<Bf16>(call, task, scratch);
    case CacheType::kInt8:
      return decode_keys<Int8>(call, task, scratch);
  }
}

}  // namespace KILN_ISA

const Kernels& KILN_JOIN(kernels_, KILN_ISA)() {
  static const Kernels kernels = {
      KILN_STRING(KILN_ISA), KILN_ISA::write_scratch, KILN_ISA::decode_scratch, KILN_ISA::prefill_scratch,
      KILN_ISA::write,       KILN_ISA::decode,        KILN_ISA::prefill,        KILN_ISA::combine,
  };
  return kernels;
}

}  // namespace kiln
