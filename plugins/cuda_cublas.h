// cuBLAS's libraries as Kiln uses them: found at run time, where ONNX Runtime or torch has them, and called through
// functions that are declared here, as their headers may not be there.
#pragma once

#include <dlfcn.h>

#include <initializer_list>

#include "cuda_element.h"

namespace kiln::cuda::cublas {

// Values of cublas_api.h and library_types.h, which never change.
constexpr int kSuccess = 0, kKeep = 0, kTranspose = 1, kFloatSums = 68, kInt32Sums = 72;
constexpr int kFloatData = 0, kHalfData = 2, kInt8Data = 3, kInt32Data = 10, kBfloat16Data = 14, kFloat8Data = 28;
constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what NVIDIA recommends for Hopper

inline int data_type(Element element) { return element == Element::kFloat16 ? kHalfData : kBfloat16Data; }

// One of the files of `names`, preferably one that is already in the process.
class Library {
 public:
  explicit Library(std::initializer_list<const char*> names) {
    for (int mode : {RTLD_LAZY | RTLD_NOLOAD, RTLD_LAZY})
      for (const char* name : names)
        if (!library_) library_ = dlopen(name, mode);
  }

  // Null, and the library incomplete, where there is none.
  template <typename Function>
  void find(const char* name, Function* function) {
    *function = library_ ? reinterpret_cast<Function>(dlsym(library_, name)) : nullptr;
    complete_ &= *function != nullptr;
  }

  bool complete() const { return complete_; }

 private:
  void* library_ = nullptr;
  bool complete_ = true;
};

// For callers without C++: a wrapper like those of cuda_scratch.h, to be deleted, or null where there can be none.
template <typename Wrapper>
Wrapper* created_or_null() {
  const char* problem = nullptr;
  auto* wrapper = new Wrapper(&problem);
  if (!problem) return wrapper;
  delete wrapper;
  return nullptr;
}

}  // namespace kiln::cuda::cublas
