// Memory layouts shared by the kernels: packed weights, quantised activations, pages.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headwater {

constexpr int kTileRows = 16;    // output rows interleaved in one weight tile
constexpr int kBlock = 32;       // elements under one quantisation scale
constexpr int kKeyBlock = 256;   // keys per attention block, aligned to absolute positions
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

// Pages of float16, or of 8-bit codes with a float32 scale per slot:
// [page][layer][kv_head](K [head_dim][key_lanes], V [page_size][head_dim], scales of K [key_lanes],
// scales of V [key_lanes]). Keys lie along the vector lanes; pages of fewer than 8 slots leave some
// unused. An element of a scaled page is code * scale.
struct PageShape {
  int num_layers;
  int num_kv_heads;
  int head_dim;
  int page_size;
  bool scaled;

  int element_bytes() const { return scaled ? 1 : 2; }
  int key_lanes() const { return page_size < 8 ? 8 : page_size; }
  size_t key_bytes() const { return size_t(head_dim) * key_lanes() * element_bytes(); }
  size_t value_bytes() const { return size_t(head_dim) * page_size * element_bytes(); }
  size_t key_scales() const { return key_bytes() + value_bytes(); }  // where they begin in a head
  size_t value_scales() const { return key_scales() + sizeof(float) * key_lanes(); }
  size_t head_bytes() const {
    return scaled ? value_scales() + sizeof(float) * key_lanes() : key_scales();
  }
  size_t layer_bytes() const { return head_bytes() * num_kv_heads; }
  size_t page_bytes() const { return layer_bytes() * num_layers; }
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
