// Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#include "convert.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace headwater {
namespace {

constexpr int kSuperBlock = 256;  // elements of a block of the K formats
constexpr int kRun = 32;          // elements under one scale of Q4_K and Q5_K

float half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return _cvtsh_ss(half);
}

void put_half(float x, uint8_t* p) {
  const uint16_t half = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(p, &half, 2);
}

// Scale and minimum of run i of a Q4_K or Q5_K block: element = scale * q - minimum.
struct RunScale {
  RunScale(const uint8_t* block, int i) {
    const uint8_t* packed = block + 4;
    const int high = i < 4 ? 0 : (packed[i + 4] & 15) | (packed[i - 4] >> 6 << 4);
    const int high_minimum = i < 4 ? 0 : (packed[i + 4] >> 4) | (packed[i] >> 6 << 4);
    scale = half_at(block) * float(i < 4 ? packed[i] & 63 : high);
    minimum = half_at(block + 2) * float(i < 4 ? packed[i + 4] & 63 : high_minimum);
  }

  float scale;
  float minimum;
};

// The quants of run i: 32 bytes hold two runs, one in their low halves, the next in the high ones.
int nibble(const uint8_t* quants, int i, int j) {
  return quants[kRun * (i / 2) + j] >> (4 * (i % 2)) & 15;
}

void q4_k_to_q4_1(const uint8_t* block, uint8_t* out) {
  for (int i = 0; i < kSuperBlock / kRun; ++i, out += 20) {
    const RunScale run(block, i);
    put_half(run.scale, out);
    put_half(-run.minimum, out + 2);
    for (int j = 0; j < 16; ++j)
      out[4 + j] = uint8_t(nibble(block + 16, i, j) | nibble(block + 16, i, j + 16) << 4);
  }
}

void unpack_q5_k(const uint8_t* block, float* out) {
  for (int i = 0; i < kSuperBlock / kRun; ++i) {
    const RunScale run(block, i);
    for (int j = 0; j < kRun; ++j, ++out)
      *out = run.scale * float(nibble(block + 48, i, j) | (block[16 + j] >> i & 1) << 4) -
             run.minimum;
  }
}

void unpack_q6_k(const uint8_t* block, float* out) {
  const float d = half_at(block + 208);
  for (int i = 0; i < kSuperBlock; ++i) {
    const int half = i / 128, run = i % 128 / 32, j = i % 32;
    const int low = block[64 * half + 32 * (run % 2) + j] >> (4 * (run / 2)) & 15;
    const int high = block[128 + 32 * half + j] >> (2 * run) & 3;
    out[i] = d * float(int8_t(block[192 + i / 16])) * float((low | high << 4) - 32);
  }
}

// Quant i of a Q5_0 or Q5_1 block; `bits` are its fifth bits, which the nibbles follow.
int five_bits(const uint8_t* bits, int i) {
  const int low = bits[4 + i % 16] >> (4 * (i / 16)) & 15;
  return low | (bits[i / 8] >> (i % 8) & 1) << 4;
}

void q5_0_to_q8_0(const uint8_t* block, uint8_t* out) {
  std::memcpy(out, block, 2);
  for (int i = 0; i < kBlock; ++i) out[2 + i] = uint8_t(five_bits(block + 2, i) - 16);
}

void unpack_q5_1(const uint8_t* block, float* out) {
  const float scale = half_at(block), minimum = half_at(block + 2);
  for (int i = 0; i < kBlock; ++i) out[i] = scale * float(five_bits(block + 4, i)) + minimum;
}

void to_q8_0(const float* x, uint8_t* out) {
  float high = 0.0f;
  for (int i = 0; i < kBlock; ++i) high = std::max(high, std::fabs(x[i]));
  put_half(high / 127.0f, out);
  const float scale = half_at(out);
  for (int i = 0; i < kBlock; ++i) {
    const float q = scale > 0.0f ? std::nearbyint(x[i] / scale) : 0.0f;
    out[2 + i] = uint8_t(int8_t(std::clamp(q, -127.0f, 127.0f)));
  }
}

int block_size(WeightType type) { return type >= WeightType::kQ4_K ? kSuperBlock : kBlock; }

int block_bytes(WeightType type) {
  switch (type) {
    case WeightType::kQ8_0: return 34;
    case WeightType::kQ4_0: return 18;
    case WeightType::kQ4_1: return 20;
    case WeightType::kQ5_0: return 22;
    case WeightType::kQ5_1: return 24;
    case WeightType::kQ4_K: return 144;
    case WeightType::kQ5_K: return 176;
    case WeightType::kQ6_K: return 210;
    default: return 0;
  }
}

}  // namespace

WeightType packed_type(WeightType source) {
  if (source < WeightType::kQ5_0) return source;
  return source == WeightType::kQ4_K ? WeightType::kQ4_1 : WeightType::kQ8_0;
}

size_t source_row_bytes(WeightType type, int cols) {
  if (type == WeightType::kF32) return size_t(cols) * 4;
  if (type < WeightType::kQ8_0) return size_t(cols) * 2;
  return size_t(cols) / block_size(type) * block_bytes(type);
}

void convert_row(WeightType type, const uint8_t* row, int cols, uint8_t* out) {
  float x[kSuperBlock];
  const int size = block_size(type);
  for (int done = 0; done < cols; done += size, row += block_bytes(type)) {
    if (type == WeightType::kQ4_K) {
      q4_k_to_q4_1(row, out);
      out += kSuperBlock / kRun * 20;
      continue;
    }
    if (type == WeightType::kQ5_0) {
      q5_0_to_q8_0(row, out);
      out += 34;
      continue;
    }
    if (type == WeightType::kQ5_K)
      unpack_q5_k(row, x);
    else if (type == WeightType::kQ6_K)
      unpack_q6_k(row, x);
    else
      unpack_q5_1(row, x);
    for (int i = 0; i < size; i += kBlock, out += 34) to_q8_0(x + i, out);
  }
}

}  // namespace headwater
