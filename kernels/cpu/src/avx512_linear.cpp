// Matrix products with packed weights, AVX-512 with VNNI. A vector's lanes are a tile's 16 output
// rows; the arithmetic is that of avx2_linear.cpp, bit for bit.
#include <immintrin.h>

#include <cstring>

#include "avx2_kernels.h"
#include "avx512_kernels.h"

namespace headwater::avx512_kernels {
namespace {

constexpr int kPrefetchBytes = 4096;  // ahead in the weight stream; no address faults
constexpr int kRows = 8;              // activation rows in registers

inline __m512i broadcast_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

inline __m512 load_half(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

template <int kBytes>
inline void prefetch(const uint8_t* p) {
#pragma GCC unroll 16
  for (int line = 0; line < kBytes; line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes + line, _MM_HINT_T0);
}

// 4-bit weights, int8 activations.
template <WeightType kType>
struct Int4Int8 {
  using Act = Act8;
  static constexpr int scales = kType == WeightType::kQ4_1 ? 64 : 32;
  static constexpr int bytes = scales + 256;

  template <int T>
  static inline void block(const uint8_t* w, const Act* const (&x)[T], __m512 (&acc)[T]) {
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i sum[T];
    for (int t = 0; t < T; ++t) sum[t] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      const __m512i raw = _mm512_loadu_si512(w + scales + 64 * g);
      const __m512i low = _mm512_and_si512(raw, nibble);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(raw, 4), nibble);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        sum[t] = _mm512_dpbusd_epi32(sum[t], low, broadcast_word(x[t]->q + 4 * g));
        sum[t] = _mm512_dpbusd_epi32(sum[t], high, broadcast_word(x[t]->q + 4 * g + 16));
      }
    }
    const __m512 d = load_half(w);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m512 isum = _mm512_cvtepi32_ps(sum[t]);
      __m512 term;
      if constexpr (kType == WeightType::kQ4_1)
        term = _mm512_fmadd_ps(d, isum,
                               _mm512_mul_ps(load_half(w + 32), _mm512_set1_ps(x[t]->sum)));
      else
        term = _mm512_mul_ps(d, _mm512_sub_ps(isum, _mm512_set1_ps(8.0f * x[t]->sum)));
      acc[t] = _mm512_fmadd_ps(term, _mm512_set1_ps(x[t]->scale), acc[t]);
    }
  }
};

// 8-bit weights, int16 activations.
struct Int8Int16 {
  using Act = Act16;
  static constexpr int bytes = 544;

  template <int T>
  static inline void block(const uint8_t* w, const Act* const (&x)[T], __m512 (&acc)[T]) {
    __m512i sum[T];
    for (int t = 0; t < T; ++t) sum[t] = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      const __m512i q = _mm512_cvtepi8_epi16(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32 + 32 * pair)));
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t)
        sum[t] = _mm512_dpwssd_epi32(sum[t], q, broadcast_word(x[t]->q + 2 * pair));
    }
    const __m512 d = load_half(w);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
      acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_cvtepi32_ps(sum[t])),
                               _mm512_set1_ps(x[t]->scale), acc[t]);
  }
};

// T rows against one weight tile over all blocks of columns; kFirst: its first rows, for whom the
// weights come from memory. kAhead: there is something to be fetched meanwhile.
template <class Kernel, bool kFirst, int T, bool kAhead = false>
void rows(const uint8_t* w, const typename Kernel::Act* acts, int blocks, float* out,
          ptrdiff_t stride, Ahead& ahead) {
  const typename Kernel::Act* x[T];
  __m512 acc[T];
  for (int t = 0; t < T; ++t) x[t] = acts + size_t(t) * blocks;
  for (int t = 0; t < T; ++t) acc[t] = _mm512_setzero_ps();
  for (int b = 0; b < blocks; ++b, w += Kernel::bytes) {
    if constexpr (kFirst) prefetch<Kernel::bytes>(w);
    if constexpr (kAhead) ahead.fetch();
    Kernel::template block<T>(w, x, acc);
    for (int t = 0; t < T; ++t) ++x[t];
  }
  for (int t = 0; t < T; ++t) _mm512_storeu_ps(out + t * stride, acc[t]);
}

template <class Kernel, bool kFirst>
void some_rows(int count, const uint8_t* w, const typename Kernel::Act* x, int blocks, float* out,
               ptrdiff_t stride, Ahead& ahead) {
  switch (count) {
    case 1: rows<Kernel, kFirst, 1>(w, x, blocks, out, stride, ahead); break;
    case 2: rows<Kernel, kFirst, 2>(w, x, blocks, out, stride, ahead); break;
    case 3: rows<Kernel, kFirst, 3>(w, x, blocks, out, stride, ahead); break;
    case 4: rows<Kernel, kFirst, 4>(w, x, blocks, out, stride, ahead); break;
    case 5: rows<Kernel, kFirst, 5>(w, x, blocks, out, stride, ahead); break;
    case 6: rows<Kernel, kFirst, 6>(w, x, blocks, out, stride, ahead); break;
    case 7: rows<Kernel, kFirst, 7>(w, x, blocks, out, stride, ahead); break;
    default:
      if (ahead.left > 0)
        rows<Kernel, kFirst, kRows, true>(w, x, blocks, out, stride, ahead);
      else
        rows<Kernel, kFirst, kRows>(w, x, blocks, out, stride, ahead);
  }
}

template <class Kernel>
void quantised(const Matrix& w, const typename Kernel::Act* x, int num_rows, int first_tile,
               int num_tiles, float* out, ptrdiff_t stride, Ahead& ahead) {
  const int blocks = w.units();
  for (int i = 0; i < num_tiles; ++i, out += kTileRows) {
    const uint8_t* tile = w.tile(first_tile + i);
    some_rows<Kernel, true>(num_rows, tile, x, blocks, out, stride, ahead);
    for (int row = kRows; row < num_rows; row += kRows)
      some_rows<Kernel, false>(num_rows - row, tile, x + size_t(row) * blocks, blocks,
                               out + row * stride, stride, ahead);
  }
}

// T rows of floats against an unpacked tile [cols][16].
template <int T>
void float_rows(const float* w, const float* x, ptrdiff_t x_stride, int cols, float* out,
                ptrdiff_t stride) {
  __m512 acc[T];
  for (int t = 0; t < T; ++t) acc[t] = _mm512_setzero_ps();
  for (int c = 0; c < cols; ++c) {
    const __m512 v = _mm512_loadu_ps(w + size_t(c) * kTileRows);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
      acc[t] = _mm512_fmadd_ps(v, _mm512_set1_ps(x[t * x_stride + c]), acc[t]);
  }
  for (int t = 0; t < T; ++t) _mm512_storeu_ps(out + t * stride, acc[t]);
}

}  // namespace

void linear(const Matrix& w, ActKind kind, const Acts& x, int first_row, int num_rows,
            int first_tile, int num_tiles, float* out, ptrdiff_t stride, float* scratch,
            Ahead& ahead) {
  const size_t block = size_t(first_row) * w.units();
  if (kind == kActInt16)
    return quantised<Int8Int16>(w, x.int16 + block, num_rows, first_tile, num_tiles, out, stride,
                                ahead);
  if (kind == kActInt8 && w.type == WeightType::kQ4_1)
    return quantised<Int4Int8<WeightType::kQ4_1>>(w, x.int8 + block, num_rows, first_tile,
                                                  num_tiles, out, stride, ahead);
  if (kind == kActInt8)
    return quantised<Int4Int8<WeightType::kQ4_0>>(w, x.int8 + block, num_rows, first_tile,
                                                  num_tiles, out, stride, ahead);
  for (int i = 0; i < num_tiles; ++i) {
    avx2_kernels::unpack_tile(w, first_tile + i, scratch);
    float* y = out + i * kTileRows;
    const float* in = x.f32 + first_row * x.stride;
    int row = 0;
    for (; row + kRows <= num_rows; row += kRows)
      float_rows<kRows>(scratch, in + row * x.stride, x.stride, w.cols, y + row * stride, stride);
    for (; row < num_rows; ++row)
      float_rows<1>(scratch, in + row * x.stride, x.stride, w.cols, y + row * stride, stride);
  }
}

}  // namespace headwater::avx512_kernels
