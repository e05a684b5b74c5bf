// The sizes and attributes of one call of the operator, which kernels on all devices need alike (schema.py has the
// contract). Knows no device.
#pragma once

#include <cstdint>

namespace kiln {

struct Geometry {
  int64_t query_stride;  // elements; larger than a row where query, key and value are packed side by side
  int64_t key_stride;
  int64_t value_stride;
  int64_t tokens;
  int64_t seqs;
  int64_t blocks;
  int64_t block_size;
  int64_t max_blocks;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t positions;    // rows of cos and sin
  int64_t rotary_half;  // half of the rotated part of a head; 0: no rotation
  bool interleaved;     // pairs (2i, 2i + 1) instead of (i, i + rotary_half)
  int64_t window;       // 0: unlimited
  float scale;          // already resolved, never 0
  float softcap;        // 0: none
};

}  // namespace kiln
