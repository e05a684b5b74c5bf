// What a plugin library's entry point for ONNX Runtime does: adds its operators to a session, in the domain "kiln".
// Knows no operator.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "ort_binding.h"

namespace kiln::ort {

// One domain for each copy of ONNX Runtime in the process, shared by its sessions. ONNX Runtime keeps pointers to the
// domain and the operators and never frees them, so they live as long as the library.
template <typename Operators>
OrtCustomOpDomain* domain_of(OrtApi api, Operators operators) {
  static std::mutex mutex;
  static std::map<OrtApi, OrtCustomOpDomain*> domains;
  std::lock_guard<std::mutex> lock(mutex);
  OrtCustomOpDomain*& domain = domains[api];
  if (!domain) {
    OrtCustomOpDomain* fresh = nullptr;
    require(api, CreateCustomOpDomain::of(api)("kiln", &fresh));
    for (const OrtCustomOp* op : operators()) require(api, CustomOpDomainAdd::of(api)(fresh, op));
    domain = fresh;
  }
  return domain;
}

// `operators()` lists the library's; it is called once for each copy of ONNX Runtime.
template <typename Operators>
OrtStatus* register_operators(OrtSessionOptions* options, const OrtApiBase* base, Operators operators) {
  OrtApi api = base->GetApi(kApiVersion);
  if (!api) {
    const std::string message =
        std::string("kiln's operators need ONNX Runtime's API version 24 (1.24 or later): found ONNX Runtime ") +
        base->GetVersionString();
    return CreateStatus::of(base->GetApi(1))(kFail, message.c_str());
  }
  return guarded(api, "RegisterCustomOps",
                 [&] { require(api, AddCustomOpDomain::of(api)(options, domain_of(api, operators))); });
}

inline std::vector<const OrtCustomOp*> joined(std::initializer_list<std::vector<const OrtCustomOp*>> folders) {
  std::vector<const OrtCustomOp*> all;
  for (const auto& folder : folders) all.insert(all.end(), folder.begin(), folder.end());
  return all;
}

}  // namespace kiln::ort
