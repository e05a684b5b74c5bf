// Reads what was measured of cuBLASLt's algorithms: "VERSION ROWS:WORDS ROWS:WORDS ...", rows ascending, words in
// hexadecimal with dots between, or "-" for cuBLAS's own choice.
#include "cuda_algorithms.h"

#include <sstream>

namespace kiln::cuda {
namespace {

bool read_words(const std::string& text, cublas::Algorithm* algorithm) {
  std::istringstream words(text);
  for (int i = 0; i < 8; i++) {
    words >> std::hex >> algorithm->data[i];
    if (words.fail() || (i < 7 && words.get() != '.')) return false;
  }
  return words.peek() == std::istringstream::traits_type::eof();
}

}  // namespace

Algorithms::Algorithms(const std::string& text, const char** error) {
  *error = nullptr;
  if (text.empty()) return;
  std::istringstream entries(text);
  size_t version = 0;
  if (!(entries >> version)) {
    *error = "algorithms must begin with the version of cuBLASLt";
    return;
  }
  std::string entry;
  while (entries >> entry) {
    Entry read = {};
    char colon = 0;
    std::istringstream parts(entry);
    std::string words;
    parts >> read.rows >> colon >> words;
    read.chosen = words != "-";
    const bool ascends = entries_.empty() || read.rows > entries_.back().rows;
    if (parts.fail() || colon != ':' || !ascends || (read.chosen && !read_words(words, &read.algorithm))) {
      *error = "algorithms must be ROWS:WORDS or ROWS:-, rows ascending, with 8 words in hexadecimal";
      return;
    }
    entries_.push_back(read);
  }
  if (!cublas::lt().library.complete() || cublas::lt().version() != version) entries_.clear();
}

const cublas::Algorithm* Algorithms::of(int64_t rows) const {
  for (const Entry& entry : entries_)
    if (rows <= entry.rows) return entry.chosen ? &entry.algorithm : nullptr;
  return nullptr;
}

}  // namespace kiln::cuda
