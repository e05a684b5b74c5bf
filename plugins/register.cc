// The library's entry point for ONNX Runtime: adds the operators of all folders to a session, in the domain "kiln".
#include <map>
#include <mutex>

#include "operators.h"
#include "ort_binding.h"

namespace {

using namespace kiln::ort;

OrtCustomOpDomain* domain_of(OrtApi api) {
  // One domain for each copy of ONNX Runtime in the process, shared by its sessions. ONNX Runtime keeps pointers to
  // the domain and the operators and never frees them, so they live as long as the library.
  static std::mutex mutex;
  static std::map<OrtApi, OrtCustomOpDomain*> domains;
  std::lock_guard<std::mutex> lock(mutex);
  OrtCustomOpDomain*& domain = domains[api];
  if (!domain) {
    OrtCustomOpDomain* fresh = nullptr;
    require(api, CreateCustomOpDomain::of(api)("kiln", &fresh));
    for (const auto& operators : {paged_attention_operators(), elementwise_operators(), quant_matmul_operators()})
      for (const OrtCustomOp* op : operators) require(api, CustomOpDomainAdd::of(api)(fresh, op));
    domain = fresh;
  }
  return domain;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) {
  OrtApi api = base->GetApi(kApiVersion);
  if (!api) {
    const std::string message =
        std::string("kiln's operators need ONNX Runtime's API version 24 (1.24 or later): found ONNX Runtime ") +
        base->GetVersionString();
    return CreateStatus::of(base->GetApi(1))(kFail, message.c_str());
  }
  return guarded(api, "RegisterCustomOps", [&] { require(api, AddCustomOpDomain::of(api)(options, domain_of(api))); });
}
