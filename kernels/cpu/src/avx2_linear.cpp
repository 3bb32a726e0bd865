// Matrix products with packed weights, AVX2. Vector lanes are output rows, a tile is two vectors.
//
// Quantised activations: the products of a block of 32 columns are summed in integers, exactly;
// then acc = fma(d * isum + m * xsum, xscale, acc) over blocks in ascending order. Float
// activations: acc = fma(w, x, acc) over columns in ascending order. The rows of a register tile
// only decide what is loaded together.
#include <cstring>

#include "avx2_kernels.h"
#include "avx2_math.h"

namespace headwater::avx2_kernels {
namespace {

constexpr int kPrefetchBytes = 4096;  // ahead in the weight stream; no address faults
constexpr int kRows = 4;              // activation rows in registers

inline __m256i load_bytes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// Four bytes of activations in every lane.
inline __m256i broadcast_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return _mm256_set1_epi32(word);
}

template <int kBytes>
inline void prefetch(const uint8_t* p) {
#pragma GCC unroll 16
  for (int line = 0; line < kBytes; line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes + line, _MM_HINT_T0);
}

inline void store(float* out, __m256 sum, bool add) {
  _mm256_storeu_ps(out, add ? _mm256_add_ps(_mm256_loadu_ps(out), sum) : sum);
}

// Keeps the compiler from moving work across: reordered sums spill the register tile and halve the
// speed.
inline void keep_order(__m256i& v) { asm volatile("" : "+x"(v)); }

// 4-bit weights, int8 activations. |sum of 16 products| <= 16 * 15 * 128 fits int16.
template <WeightType kType>
struct Int4Int8 {
  using Act = Act8;
  static constexpr int scales = kType == WeightType::kQ4_1 ? 64 : 32;
  static constexpr int bytes = scales + 256;

  // Scales of half a block applied to its integer sum: d * isum + m * xsum; m = -8 d for Q4_0.
  static inline __m256 scaled(const uint8_t* half, __m256i isum, float xsum) {
    const __m256 sum = _mm256_cvtepi32_ps(isum);
    const __m256 d = load_half(half);
    if constexpr (kType == WeightType::kQ4_1)
      return _mm256_fmadd_ps(d, sum, _mm256_mul_ps(load_half(half + 32), _mm256_set1_ps(xsum)));
    return _mm256_mul_ps(d, _mm256_sub_ps(sum, _mm256_set1_ps(8.0f * xsum)));
  }

  template <int T>
  static inline void block(const uint8_t* w, const Act* const (&x)[T], __m256 (&acc)[2][T]) {
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i sum[2][T];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      __m256i low[2], high[2];
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r) {
        const __m256i raw = load_bytes(w + scales + 64 * g + 32 * r);
        low[r] = _mm256_and_si256(raw, nibble);
        high[r] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble);
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i a = broadcast_word(x[t]->q + 4 * g);
        const __m256i b = broadcast_word(x[t]->q + 4 * g + 16);
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r) {
          const __m256i p =
              _mm256_add_epi16(_mm256_maddubs_epi16(low[r], a), _mm256_maddubs_epi16(high[r], b));
          sum[r][t] = g == 0 ? p : _mm256_add_epi16(sum[r][t], p);
          keep_order(sum[r][t]);
        }
      }
    }
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256 term = scaled(w + 16 * r, _mm256_madd_epi16(sum[r][t], ones), x[t]->sum);
        acc[r][t] = _mm256_fmadd_ps(term, _mm256_set1_ps(x[t]->scale), acc[r][t]);
      }
    }
  }
};

// 8-bit weights, int16 activations.
struct Int8Int16 {
  using Act = Act16;
  static constexpr int bytes = 544;

  template <int T>
  static inline void block(const uint8_t* w, const Act* const (&x)[T], __m256 (&acc)[2][T]) {
    __m256i sum[2][T];
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      __m256i q[2];
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r)
        q[r] = _mm256_cvtepi8_epi16(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + 32 + 32 * pair + 16 * r)));
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i v = broadcast_word(x[t]->q + 2 * pair);
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r) {
          const __m256i p = _mm256_madd_epi16(q[r], v);
          sum[r][t] = pair == 0 ? p : _mm256_add_epi32(sum[r][t], p);
          keep_order(sum[r][t]);
        }
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < 2; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256 term = _mm256_mul_ps(load_half(w + 16 * r), _mm256_cvtepi32_ps(sum[r][t]));
        acc[r][t] = _mm256_fmadd_ps(term, _mm256_set1_ps(x[t]->scale), acc[r][t]);
      }
    }
  }
};

// T rows against one weight tile over all blocks of columns; kFirst: its first rows, for whom the
// weights come from memory. kAhead: there is something to be fetched meanwhile.
template <class Kernel, bool kFirst, int T, bool kAhead = false>
void rows(const uint8_t* w, const typename Kernel::Act* acts, int blocks, float* out,
          ptrdiff_t stride, bool add, Ahead& ahead) {
  const typename Kernel::Act* x[T];
  __m256 acc[2][T];
  for (int t = 0; t < T; ++t) x[t] = acts + size_t(t) * blocks;
  for (int t = 0; t < T; ++t) acc[0][t] = acc[1][t] = _mm256_setzero_ps();
  for (int b = 0; b < blocks; ++b, w += Kernel::bytes) {
    if constexpr (kFirst) prefetch<Kernel::bytes>(w);
    if constexpr (kAhead) ahead.fetch();
    Kernel::block(w, x, acc);
    for (int t = 0; t < T; ++t) ++x[t];
  }
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < 2; ++r) store(out + t * stride + 8 * r, acc[r][t], add);
}

template <class Kernel, bool kFirst>
void some_rows(int count, const uint8_t* w, const typename Kernel::Act* x, int blocks, float* out,
               ptrdiff_t stride, bool add, Ahead& ahead) {
  switch (count) {
    case 1: rows<Kernel, kFirst, 1>(w, x, blocks, out, stride, add, ahead); break;
    case 2: rows<Kernel, kFirst, 2>(w, x, blocks, out, stride, add, ahead); break;
    case 3: rows<Kernel, kFirst, 3>(w, x, blocks, out, stride, add, ahead); break;
    default:
      if (ahead.left > 0)
        rows<Kernel, kFirst, kRows, true>(w, x, blocks, out, stride, add, ahead);
      else
        rows<Kernel, kFirst, kRows>(w, x, blocks, out, stride, add, ahead);
  }
}

template <class Kernel>
void quantised(const Matrix& w, const typename Kernel::Act* x, int num_rows, int first_tile,
               int num_tiles, float* out, ptrdiff_t stride, bool add, Ahead& ahead) {
  const int blocks = w.units();
  for (int i = 0; i < num_tiles; ++i, out += kTileRows) {
    const uint8_t* tile = w.tile(first_tile + i);
    some_rows<Kernel, true>(num_rows, tile, x, blocks, out, stride, add, ahead);
    for (int row = kRows; row < num_rows; row += kRows)
      some_rows<Kernel, false>(num_rows - row, tile, x + size_t(row) * blocks, blocks,
                               out + row * stride, stride, add, ahead);
  }
}

// Four bits of every byte of a word as floats: element `byte` of the low or high nibbles.
inline __m256 nibbles(__m256i raw, int byte, int high) {
  const __m128i count = _mm_cvtsi32_si128(8 * byte + 4 * high);
  return _mm256_cvtepi32_ps(
      _mm256_and_si256(_mm256_srl_epi32(raw, count), _mm256_set1_epi32(15)));
}

// Half a unit: eight of its rows.
void unpack_half(const Matrix& w, const uint8_t* unit, int half, float* out) {
  if (w.type == WeightType::kF32) {
    _mm256_storeu_ps(out, _mm256_loadu_ps(reinterpret_cast<const float*>(unit) + 8 * half));
    return;
  }
  const auto* bytes = reinterpret_cast<const __m128i*>(unit + 16 * half);
  if (w.type == WeightType::kBF16) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(bytes));
    _mm256_storeu_ps(out, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
    return;
  }
  const __m256 d = load_half(bytes);
  if (w.type == WeightType::kF16) {
    _mm256_storeu_ps(out, d);
    return;
  }
  if (w.type == WeightType::kQ8_0) {
    for (int pair = 0; pair < 16; ++pair) {
      const __m256i q = _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 2 + 2 * pair));
      const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(q, 16), 16);
      const __m256i odd = _mm256_srai_epi32(q, 16);
      float* columns = out + 2 * pair * kTileRows;
      _mm256_storeu_ps(columns, _mm256_mul_ps(d, _mm256_cvtepi32_ps(even)));
      _mm256_storeu_ps(columns + kTileRows, _mm256_mul_ps(d, _mm256_cvtepi32_ps(odd)));
    }
    return;
  }
  const bool has_min = w.type == WeightType::kQ4_1;
  const __m256 m = has_min ? load_half(bytes + 2) : _mm256_mul_ps(d, _mm256_set1_ps(-8.0f));
  for (int g = 0; g < 4; ++g) {
    const __m256i raw = load_bytes(unit + (has_min ? 64 : 32) + 64 * g + 32 * half);
    for (int byte = 0; byte < 4; ++byte)
      for (int high = 0; high < 2; ++high)
        _mm256_storeu_ps(out + kTileRows * (4 * g + byte + 16 * high),
                         _mm256_fmadd_ps(d, nibbles(raw, byte, high), m));
  }
}

// T rows of floats against an unpacked tile [cols][16].
template <int T>
void float_rows(const float* w, const float* x, ptrdiff_t x_stride, int cols, float* out,
                ptrdiff_t stride, bool add) {
  __m256 acc[2][T];
  for (int t = 0; t < T; ++t) acc[0][t] = acc[1][t] = _mm256_setzero_ps();
  for (int c = 0; c < cols; ++c, w += kTileRows) {
    const __m256 low = _mm256_loadu_ps(w), high = _mm256_loadu_ps(w + 8);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256 v = _mm256_broadcast_ss(x + t * x_stride + c);
      acc[0][t] = _mm256_fmadd_ps(low, v, acc[0][t]);
      acc[1][t] = _mm256_fmadd_ps(high, v, acc[1][t]);
    }
  }
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < 2; ++r) store(out + t * stride + 8 * r, acc[r][t], add);
}

}  // namespace

void unpack_unit(const Matrix& w, const uint8_t* unit, float* out) {
  unpack_half(w, unit, 0, out);
  unpack_half(w, unit, 1, out + 8);
}

void unpack_tile(const Matrix& w, int tile, float* out) {
  const uint8_t* unit = w.tile(tile);
  for (int u = 0; u < w.units(); ++u, unit += w.unit_bytes(), out += w.columns() * kTileRows)
    unpack_unit(w, unit, out);
}

void unpack_row(const Matrix& w, int row, float* out) {
  float unit[kBlock * kTileRows];
  for (int u = 0; u < w.units(); ++u) {
    unpack_unit(w, w.tile(row / kTileRows) + size_t(u) * w.unit_bytes(), unit);
    for (int c = 0; c < w.columns(); ++c)
      out[u * w.columns() + c] = unit[c * kTileRows + row % kTileRows];
  }
}

void linear(const Matrix& w, ActKind kind, const Acts& x, int first_row, int num_rows,
            int first_tile, int num_tiles, float* out, ptrdiff_t stride, bool add, float* scratch,
            Ahead& ahead) {
  const size_t block = size_t(first_row) * w.units();
  if (kind == kActInt16)
    return quantised<Int8Int16>(w, x.int16 + block, num_rows, first_tile, num_tiles, out, stride,
                                add, ahead);
  if (kind == kActInt8 && w.type == WeightType::kQ4_1)
    return quantised<Int4Int8<WeightType::kQ4_1>>(w, x.int8 + block, num_rows, first_tile,
                                                  num_tiles, out, stride, add, ahead);
  if (kind == kActInt8)
    return quantised<Int4Int8<WeightType::kQ4_0>>(w, x.int8 + block, num_rows, first_tile,
                                                  num_tiles, out, stride, add, ahead);
  for (int i = 0; i < num_tiles; ++i) {
    unpack_tile(w, first_tile + i, scratch);
    float* y = out + i * kTileRows;
    const float* in = x.f32 + first_row * x.stride;
    int row = 0;
    for (; row + kRows <= num_rows; row += kRows)
      float_rows<kRows>(scratch, in + row * x.stride, x.stride, w.cols, y + row * stride, stride, add);
    for (; row < num_rows; ++row)
      float_rows<1>(scratch, in + row * x.stride, x.stride, w.cols, y + row * stride, stride, add);
  }
}

}  // namespace headwater::avx2_kernels
