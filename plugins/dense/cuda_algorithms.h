// Which of cuBLASLt's algorithms a product takes at which number of rows, where that was measured, and the measuring.
#pragma once

#include <string>
#include <vector>

#include "../cuda_cublas_lt.h"
#include "cuda.h"

namespace kiln::cuda {

// What the attribute `algorithms` of schema.py says, of this version of cuBLASLt: nothing else is taken.
class Algorithms {
 public:
  // Nothing: cuBLAS chooses.
  Algorithms() = default;
  // `error` says what is wrong with the text, or is null. Loads cuBLASLt.
  Algorithms(const std::string& text, const char** error);

  // For a product of so many rows: that of the least number measured which is not below. Null: cuBLAS's own choice.
  const cublas::Algorithm* of(int64_t rows) const;

 private:
  struct Entry {
    int64_t rows;
    bool chosen;  // false: cuBLAS's own choice
    cublas::Algorithm algorithm;
  };
  std::vector<Entry> entries_;  // by rows, ascending
};

// How long a product takes by one algorithm; one of zeros is cuBLAS's own choice.
struct TimedAlgorithm {
  cublas::Algorithm algorithm;
  float microseconds;
};

}  // namespace kiln::cuda
