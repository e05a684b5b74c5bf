// How kernels are lent threads.
#pragma once

#include <cstddef>

namespace kiln {

// Runs body(user, i) for i in [0, total), in any order and on any threads, and returns when all are done.
struct Parallel {
  virtual void run(size_t total, void (*body)(void* user, size_t index), void* user) = 0;

 protected:
  ~Parallel() = default;
};

}  // namespace kiln
