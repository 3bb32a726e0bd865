// Matrix products with packed weights, AVX2. Vector lanes are 8 output rows.
//
// Quantised activations: the products of a block of 32 columns are summed in integers, exactly;
// then acc = fma(d * isum + m * xsum, xscale, acc) over blocks in ascending order. Float
// activations: acc = fma(w, x, acc) over columns in ascending order. Register tiles (R weight tiles
// by T rows) only decide what is loaded together.
#include <cstring>

#include "avx2_kernels.h"
#include "avx2_math.h"

namespace headwater::avx2_kernels {
namespace {

constexpr int kPrefetchBytes = 4096;  // ahead in the weight stream; no address faults

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
#pragma GCC unroll 8
  for (int line = 0; line < kBytes; line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes + line, _MM_HINT_T0);
}

// Keeps the compiler from moving work across: reordered sums spill the register tile and halve the
// speed.
inline void keep_order(__m256i& v) { asm volatile("" : "+x"(v)); }

// Scales of one 4-bit block applied to its integer sum: d * isum + m * xsum; m = -8 d for Q4_0.
template <WeightType kType>
inline __m256 scaled(const uint8_t* block, __m256i isum, float xsum) {
  const __m256 sum = _mm256_cvtepi32_ps(isum);
  const __m256 d = load_half(block);
  if constexpr (kType == WeightType::kQ4_1)
    return _mm256_fmadd_ps(d, sum, _mm256_mul_ps(load_half(block + 16), _mm256_set1_ps(xsum)));
  return _mm256_mul_ps(d, _mm256_sub_ps(sum, _mm256_set1_ps(8.0f * xsum)));
}

template <WeightType kType>
struct Q4 {
  static constexpr WeightType type = kType;
  static constexpr int scales = kType == WeightType::kQ4_1 ? 32 : 16;
  static constexpr int bytes = scales + 128;
};

// 4-bit weights, int8 activations. |sum of 16 products| <= 16 * 15 * 128 fits int16.
template <class Format, int R, int T>
struct Int4Int8 {
  using Act = Act8;
  static constexpr int bytes = Format::bytes;

  static inline void block(const uint8_t* const (&w)[R], const Act* const (&x)[T],
                           __m256 (&acc)[R][T]) {
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i sum[R][T];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      __m256i low[R], high[R];
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        const __m256i raw = load_bytes(w[r] + Format::scales + 32 * g);
        low[r] = _mm256_and_si256(raw, nibble);
        high[r] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble);
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i a = broadcast_word(x[t]->q + 4 * g);
        const __m256i b = broadcast_word(x[t]->q + 4 * g + 16);
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
          const __m256i p =
              _mm256_add_epi16(_mm256_maddubs_epi16(low[r], a), _mm256_maddubs_epi16(high[r], b));
          sum[r][t] = g == 0 ? p : _mm256_add_epi16(sum[r][t], p);
          keep_order(sum[r][t]);
        }
      }
    }
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256 term =
            scaled<Format::type>(w[r], _mm256_madd_epi16(sum[r][t], ones), x[t]->sum);
        acc[r][t] = _mm256_fmadd_ps(term, _mm256_set1_ps(x[t]->scale), acc[r][t]);
      }
    }
  }
};

// 8-bit weights, int16 activations.
template <int R, int T>
struct Int8Int16 {
  using Act = Act16;
  static constexpr int bytes = 272;

  static inline void block(const uint8_t* const (&w)[R], const Act* const (&x)[T],
                           __m256 (&acc)[R][T]) {
    __m256i sum[R][T];
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      __m256i q[R];
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r)
        q[r] = _mm256_cvtepi8_epi16(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(w[r] + 16 + 16 * pair)));
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i v = broadcast_word(x[t]->q + 2 * pair);
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
          const __m256i p = _mm256_madd_epi16(q[r], v);
          sum[r][t] = pair == 0 ? p : _mm256_add_epi32(sum[r][t], p);
          keep_order(sum[r][t]);
        }
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256 term = _mm256_mul_ps(load_half(w[r]), _mm256_cvtepi32_ps(sum[r][t]));
        acc[r][t] = _mm256_fmadd_ps(term, _mm256_set1_ps(x[t]->scale), acc[r][t]);
      }
    }
  }
};

// R weight tiles by T rows over all blocks of columns.
template <template <int, int> class Kernel, int R, int T>
void tile(const uint8_t* weights, size_t tile_bytes, const typename Kernel<R, T>::Act* acts,
          int blocks, float* out, int out_stride) {
  using K = Kernel<R, T>;
  const uint8_t* w[R];
  const typename K::Act* x[T];
  __m256 acc[R][T];
  for (int r = 0; r < R; ++r) w[r] = weights + r * tile_bytes;
  for (int t = 0; t < T; ++t) x[t] = acts + size_t(t) * blocks;
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) acc[r][t] = _mm256_setzero_ps();
  for (int b = 0; b < blocks; ++b) {
    if constexpr (T < 4)
      for (int r = 0; r < R; ++r) prefetch<K::bytes>(w[r]);
    K::block(w, x, acc);
    for (int r = 0; r < R; ++r) w[r] += K::bytes;
    for (int t = 0; t < T; ++t) ++x[t];
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) _mm256_storeu_ps(out + t * out_stride + r * kTileRows, acc[r][t]);
}

template <template <int, int> class Kernel, int R>
void rows_of_tile(const Matrix& w, int index, const typename Kernel<1, 1>::Act* x, int num_rows,
                  float* out, int out_stride) {
  const int blocks = w.units();
  const uint8_t* data = w.tile(index);
  int row = 0;
  for (; row + 4 <= num_rows; row += 4)
    tile<Kernel, R, 4>(data, w.tile_bytes(), x + size_t(row) * blocks, blocks,
                       out + row * out_stride, out_stride);
  x += size_t(row) * blocks;
  out += row * out_stride;
  switch (num_rows - row) {
    case 3: tile<Kernel, R, 3>(data, w.tile_bytes(), x, blocks, out, out_stride); break;
    case 2: tile<Kernel, R, 2>(data, w.tile_bytes(), x, blocks, out, out_stride); break;
    case 1: tile<Kernel, R, 1>(data, w.tile_bytes(), x, blocks, out, out_stride); break;
    default: break;
  }
}

template <template <int, int> class Kernel>
void quantised(const Matrix& w, const typename Kernel<1, 1>::Act* x, int num_rows, int first_tile,
               int num_tiles, float* out) {
  const int stride = num_tiles * kTileRows;
  int i = 0;
  // A single row waits for memory, which gives one stream of weights faster than two.
  for (; num_rows > 1 && i + 2 <= num_tiles; i += 2)
    rows_of_tile<Kernel, 2>(w, first_tile + i, x, num_rows, out + i * kTileRows, stride);
  for (; i < num_tiles; ++i)
    rows_of_tile<Kernel, 1>(w, first_tile + i, x, num_rows, out + i * kTileRows, stride);
}

template <int R, int T> using Q41Int8 = Int4Int8<Q4<WeightType::kQ4_1>, R, T>;
template <int R, int T> using Q40Int8 = Int4Int8<Q4<WeightType::kQ4_0>, R, T>;

// Eight rows by the columns of one unit (32 or 1), as floats [columns][8].
void unpack_unit(const Matrix& w, const uint8_t* unit, float* out) {
  const __m256i bits = w.type == WeightType::kBF16
                           ? _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(
                                                   reinterpret_cast<const __m128i*>(unit))),
                                               16)
                           : _mm256_setzero_si256();
  switch (w.type) {
    case WeightType::kF32:
      _mm256_storeu_ps(out, _mm256_loadu_ps(reinterpret_cast<const float*>(unit)));
      return;
    case WeightType::kF16: _mm256_storeu_ps(out, load_half(unit)); return;
    case WeightType::kBF16: _mm256_storeu_ps(out, _mm256_castsi256_ps(bits)); return;
    default: break;
  }
  const __m256 d = load_half(unit);
  if (w.type == WeightType::kQ8_0) {
    for (int pair = 0; pair < 16; ++pair) {
      const __m256i q = _mm256_cvtepi8_epi16(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(unit + 16 + 16 * pair)));
      const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(q, 16), 16);
      const __m256i odd = _mm256_srai_epi32(q, 16);
      _mm256_storeu_ps(out + 16 * pair, _mm256_mul_ps(d, _mm256_cvtepi32_ps(even)));
      _mm256_storeu_ps(out + 16 * pair + 8, _mm256_mul_ps(d, _mm256_cvtepi32_ps(odd)));
    }
    return;
  }
  const bool has_min = w.type == WeightType::kQ4_1;
  const __m256 m = has_min ? load_half(unit + 16) : _mm256_mul_ps(d, _mm256_set1_ps(-8.0f));
  for (int g = 0; g < 4; ++g) {
    const __m256i raw = load_bytes(unit + (has_min ? 32 : 16) + 32 * g);
    for (int byte = 0; byte < 4; ++byte) {
      for (int high = 0; high < 2; ++high) {
        const __m128i count = _mm_cvtsi32_si128(8 * byte + 4 * high);
        const __m256i q = _mm256_and_si256(_mm256_srl_epi32(raw, count), _mm256_set1_epi32(15));
        _mm256_storeu_ps(out + 8 * (4 * g + byte + 16 * high),
                         _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(q), m));
      }
    }
  }
}

template <int T>
void float_rows(const float* w, const float* x, ptrdiff_t x_stride, int cols, float* out,
                int out_stride) {
  __m256 acc[T];
  for (int t = 0; t < T; ++t) acc[t] = _mm256_setzero_ps();
  for (int c = 0; c < cols; ++c) {
    const __m256 v = _mm256_loadu_ps(w + size_t(c) * kTileRows);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
      acc[t] = _mm256_fmadd_ps(v, _mm256_broadcast_ss(x + t * x_stride + c), acc[t]);
  }
  for (int t = 0; t < T; ++t) _mm256_storeu_ps(out + t * out_stride, acc[t]);
}

void float_tile(const float* w, const Acts& x, int first_row, int num_rows, int cols, float* out,
                int out_stride) {
  int row = 0;
  const auto at = [&](int r) { return x.f32 + (first_row + r) * x.stride; };
  for (; row + 8 <= num_rows; row += 8)
    float_rows<8>(w, at(row), x.stride, cols, out + row * out_stride, out_stride);
  if (row + 4 <= num_rows) {
    float_rows<4>(w, at(row), x.stride, cols, out + row * out_stride, out_stride);
    row += 4;
  }
  for (; row < num_rows; ++row)
    float_rows<1>(w, at(row), x.stride, cols, out + row * out_stride, out_stride);
}

}  // namespace

void linear(const Matrix& w, ActKind kind, const Acts& x, int first_row, int num_rows,
            int first_tile, int num_tiles, float* out, float* scratch) {
  const size_t first_block = size_t(first_row) * w.units();
  if (kind == kActInt8) {
    if (w.type == WeightType::kQ4_1)
      quantised<Q41Int8>(w, x.int8 + first_block, num_rows, first_tile, num_tiles, out);
    else
      quantised<Q40Int8>(w, x.int8 + first_block, num_rows, first_tile, num_tiles, out);
    return;
  }
  if (kind == kActInt16) {
    quantised<Int8Int16>(w, x.int16 + first_block, num_rows, first_tile, num_tiles, out);
    return;
  }
  const int columns = w.quantised() ? kBlock : 1;
  for (int i = 0; i < num_tiles; ++i) {
    const uint8_t* data = w.tile(first_tile + i);
    for (int u = 0; u < w.units(); ++u)
      unpack_unit(w, data + size_t(u) * w.unit_bytes(), scratch + size_t(u) * columns * kTileRows);
    float_tile(scratch, x, first_row, num_rows, w.cols, out + i * kTileRows,
               num_tiles * kTileRows);
  }
}

void unpack_row(const Matrix& w, int row, float* out) {
  const int columns = w.quantised() ? kBlock : 1;
  float unit[kBlock * kTileRows];
  for (int u = 0; u < w.units(); ++u) {
    unpack_unit(w, w.tile(row / kTileRows) + size_t(u) * w.unit_bytes(), unit);
    for (int c = 0; c < columns; ++c)
      out[u * columns + c] = unit[c * kTileRows + row % kTileRows];
  }
}

}  // namespace headwater::avx2_kernels
