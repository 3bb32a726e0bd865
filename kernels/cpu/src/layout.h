// Memory layouts shared by the kernels: packed weights, quantised activations, pages.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headwater {

constexpr int kTileRows = 16;    // output rows interleaved in one weight tile
constexpr int kBlock = 32;       // elements under one quantisation scale
constexpr int kKeyBlock = 256;   // keys per attention block, aligned to absolute positions
constexpr int kMaxHeadDim = 1024;
constexpr int kPartialHead = 8;  // floats before the output vector of an attention partial

// As checkpoints have them. From kQ5_0 on they are converted when they are packed (convert.h).
enum class WeightType : int32_t {
  kF32, kF16, kBF16, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K
};

// How a matrix wants its input: a bit set, so that matrices sharing an input can be asked at once.
enum ActKind : int { kActF32 = 1, kActInt8 = 2, kActInt16 = 4 };

// A row's 32 activations as int8: x = scale * q.
struct Act8 {
  float scale;
  float sum;  // of q, an exact integer
  int8_t q[kBlock];
};

// The same with int16.
struct Act16 {
  float scale;
  int16_t q[kBlock];
};

// Activations of a batch, in each of the forms its readers want (others are null).
struct Acts {
  const float* f32 = nullptr;  // [rows, stride]
  ptrdiff_t stride = 0;        // in floats
  const Act8* int8 = nullptr;  // [rows, cols / 32]
  const Act16* int16 = nullptr;
};

// A weight matrix [rows, cols] in tiles of 16 output rows; the last tile is padded with zeros.
//   F32, F16, BF16: [cols][16 rows]
//   Q8_0: per 32 columns, f16 d[16]; i8 q[16][16 rows][2 columns]
//   Q4_0: per 32 columns, f16 d[16]; u8 q[4][16 rows][4]
//   Q4_1: per 32 columns, f16 d[16]; f16 m[16]; u8 q[4][16 rows][4]
// The four bytes of a 4-bit row are columns 4g .. 4g + 3 in the low nibbles and those + 16 in the
// high ones, as in the checkpoint.
struct Matrix {
  WeightType type = WeightType::kF32;
  int rows = 0;
  int cols = 0;
  const uint8_t* data = nullptr;

  int tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  bool quantised() const { return type >= WeightType::kQ8_0; }
  bool four_bit() const { return type >= WeightType::kQ4_0; }
  // Bytes of 16 rows by 32 columns (block types) or by one column.
  int unit_bytes() const {
    switch (type) {
      case WeightType::kF32: return 64;
      case WeightType::kF16:
      case WeightType::kBF16: return 32;
      case WeightType::kQ8_0: return 544;
      case WeightType::kQ4_0: return 288;
      case WeightType::kQ4_1: return 320;
      default: return 0;  // never packed
    }
  }
  int columns() const { return quantised() ? kBlock : 1; }  // of a unit
  int units() const { return cols / columns(); }
  size_t tile_bytes() const { return size_t(unit_bytes()) * units(); }
  const uint8_t* tile(int index) const { return data + tile_bytes() * index; }
};

// What a page holds: float16, 8-bit codes with a float32 scale per slot, or bfloat16.
enum class PageType : int32_t { kF16, kI8, kBF16 };

// [page][layer][kv_head](K [head_dim][key_lanes], V [page_size][head_dim], scales of K [key_lanes],
// scales of V [key_lanes]). Keys lie along the vector lanes; pages of fewer than 8 slots leave some
// unused. An element of a scaled page is code * scale. In bfloat16 what is multiplied together lies
// in pairs: K [head_dim / 2][key_lanes][2], V [page_size / 2][head_dim][2]; page_size is even.
struct PageShape {
  int num_layers;
  int num_kv_heads;
  int head_dim;
  int page_size;
  PageType type;

  bool scaled() const { return type == PageType::kI8; }
  bool paired() const { return type == PageType::kBF16; }
  int element_bytes() const { return scaled() ? 1 : 2; }
  int key_lanes() const { return page_size < 8 ? 8 : page_size; }
  // Where an element lies among those of its head's keys, and of its values.
  size_t key_index(int slot, int d) const {
    if (paired()) return 2 * (size_t(d / 2) * key_lanes() + slot) + d % 2;
    return size_t(d) * key_lanes() + slot;
  }
  size_t value_index(int slot, int d) const {
    if (paired()) return 2 * (size_t(slot / 2) * head_dim + d) + slot % 2;
    return size_t(slot) * head_dim + d;
  }
  size_t key_bytes() const { return size_t(head_dim) * key_lanes() * element_bytes(); }
  size_t value_bytes() const { return size_t(head_dim) * page_size * element_bytes(); }
  size_t key_scales() const { return key_bytes() + value_bytes(); }  // where they begin in a head
  size_t value_scales() const { return key_scales() + sizeof(float) * key_lanes(); }
  size_t head_bytes() const {
    return scaled() ? value_scales() + sizeof(float) * key_lanes() : key_scales();
  }
  size_t layer_bytes() const { return head_bytes() * num_kv_heads; }
  // From one page to the next. Large pages are padded, so that a layer's part of each falls into
  // other cache sets than the last one's: of multiples of 4 KiB it would be the same few.
  size_t page_bytes() const {
    constexpr size_t kLarge = 1 << 17, kPeriod = 4096, kSkew = 33 * 64;
    const size_t bytes = layer_bytes() * num_layers;
    return bytes < kLarge ? bytes : (bytes + kPeriod - 1) / kPeriod * kPeriod + kSkew;
  }
};

// Query rows that share a kv head and pages, against one key block.
struct AttendBlock {
  const float* const* queries;  // [rows] -> [head_dim], rotated and scaled
  const int* first_key;         // [rows] first and last absolute position each row sees
  const int* last_key;
  int rows;
  int block;                  // keys block * 256 .. + 255
  const uint8_t* head_base;  // this layer and kv head in page 0
  const int32_t* page_table;
  PageShape shape;
  float* const* partials;  // [rows] -> [8 + head_dim]: maximum, sum, ..., output; maximum -inf: no
                           // key seen
};

struct Candidate {
  float logit;
  int32_t id;
};

}  // namespace headwater
