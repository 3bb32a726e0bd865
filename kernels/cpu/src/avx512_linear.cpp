// Matrix products with packed weights, AVX-512 with VNNI. A vector's lanes are a tile's 16 output
// rows; the arithmetic is that of avx2_linear.cpp, bit for bit.
#include <immintrin.h>

#include <cstring>

#include "avx2_kernels.h"
#include "avx512_kernels.h"

namespace headwater::avx512_kernels {
namespace {

constexpr int kRows = 6;   // activation rows in registers
constexpr int kTiles = 2;  // and weight tiles: an activation is loaded once for both

inline __m512i broadcast_word(const void* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

inline __m512 load_half(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// By additions, for which there are pipes that dot products leave idle.
inline __m512 eight_times(float x) {
  const __m512 two = _mm512_add_ps(_mm512_set1_ps(x), _mm512_set1_ps(x));
  const __m512 four = _mm512_add_ps(two, two);
  return _mm512_add_ps(four, four);
}

inline void store(float* out, __m512 sum, bool add) {
  _mm512_storeu_ps(out, add ? _mm512_add_ps(_mm512_loadu_ps(out), sum) : sum);
}

// _mm_prefetch has no such hint without a flag of its own.
inline void prefetch_for_write(const float* p) { asm volatile("prefetchw %0" ::"m"(*p)); }

// Keeps the compiler from moving work across: reordered sums spill the register tile.
inline void keep_order(__m512i& v) { asm volatile("" : "+v"(v)); }

// The weights of the tiles after those at work, fetched while they are: evenly, lest products wait
// for memory at one time and memory for products at another. No address faults.
struct Stream {
  Stream(const uint8_t* begin, size_t bytes, int chances)
      : next(begin), end(begin + bytes), pace(int((bytes / kLine + chances) / chances)) {}

  static constexpr int kLine = 64;
  const uint8_t* next;
  const uint8_t* const end;
  const int pace;  // lines at a time

  void fetch() {
    for (int i = 0; i < pace && next < end; ++i, next += kLine)
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
  }
};

// 4-bit weights, int8 activations.
template <WeightType kType>
struct Int4Int8 {
  using Act = Act8;
  static constexpr int scales = kType == WeightType::kQ4_1 ? 64 : 32;
  static constexpr int bytes = scales + 256;

  template <int R, int N>
  static inline void block(const uint8_t* w, size_t tile_bytes, const Act* const (&x)[R],
                           __m512 (&acc)[R][N]) {
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i sum[R][N];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sum[r][n] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
      __m512i low[N], high[N];
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        const __m512i raw = _mm512_loadu_si512(w + n * tile_bytes + scales + 64 * g);
        low[n] = _mm512_and_si512(raw, nibble);
        high[n] = _mm512_and_si512(_mm512_srli_epi16(raw, 4), nibble);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512i a = broadcast_word(x[r]->q + 4 * g);
        const __m512i b = broadcast_word(x[r]->q + 4 * g + 16);
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) sum[r][n] = _mm512_dpbusd_epi32(sum[r][n], low[n], a);
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          sum[r][n] = _mm512_dpbusd_epi32(sum[r][n], high[n], b);
          keep_order(sum[r][n]);
        }
      }
    }
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n, w += tile_bytes) {
      const __m512 d = load_half(w);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512 isum = _mm512_cvtepi32_ps(sum[r][n]);
        __m512 term;
        if constexpr (kType == WeightType::kQ4_1)
          term = _mm512_fmadd_ps(d, isum,
                                 _mm512_mul_ps(load_half(w + 32), _mm512_set1_ps(x[r]->sum)));
        else
          term = _mm512_mul_ps(d, _mm512_sub_ps(isum, eight_times(x[r]->sum)));
        acc[r][n] = _mm512_fmadd_ps(term, _mm512_set1_ps(x[r]->scale), acc[r][n]);
      }
    }
  }
};

// 8-bit weights, int16 activations.
struct Int8Int16 {
  using Act = Act16;
  static constexpr int bytes = 544;

  template <int R, int N>
  static inline void block(const uint8_t* w, size_t tile_bytes, const Act* const (&x)[R],
                           __m512 (&acc)[R][N]) {
    __m512i sum[R][N];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sum[r][n] = _mm512_setzero_si512();
#pragma GCC unroll 16
    for (int pair = 0; pair < 16; ++pair) {
      __m512i q[N];
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n)
        q[n] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(
            reinterpret_cast<const __m256i*>(w + n * tile_bytes + 32 + 32 * pair)));
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512i v = broadcast_word(x[r]->q + 2 * pair);
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n) {
          sum[r][n] = _mm512_dpwssd_epi32(sum[r][n], q[n], v);
          keep_order(sum[r][n]);
        }
      }
    }
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n, w += tile_bytes) {
      const __m512 d = load_half(w);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
        acc[r][n] = _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_cvtepi32_ps(sum[r][n])),
                                    _mm512_set1_ps(x[r]->scale), acc[r][n]);
    }
  }
};

// R rows against N weight tiles over all blocks of columns. kAhead: something else is to be fetched
// meanwhile.
template <class Kernel, int R, int N, bool kAhead = false>
void rows(const uint8_t* w, const typename Kernel::Act* acts, int blocks, float* out,
          ptrdiff_t stride, bool add, Stream& stream, Ahead& ahead) {
  const size_t tile_bytes = size_t(blocks) * Kernel::bytes;
  const typename Kernel::Act* x[R];
  __m512 acc[R][N];
  for (int r = 0; r < R; ++r) {
    x[r] = acts + size_t(r) * blocks;
    for (int n = 0; n < N; ++n) acc[r][n] = _mm512_setzero_ps();
  }
  // The last to write them was often another core.
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) prefetch_for_write(out + r * stride + n * kTileRows);
  for (int b = 0; b < blocks; ++b, w += Kernel::bytes) {
    stream.fetch();
    if constexpr (kAhead) ahead.fetch();
    Kernel::template block<R, N>(w, tile_bytes, x, acc);
    for (int r = 0; r < R; ++r) ++x[r];
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n)
      store(out + r * stride + n * kTileRows, acc[r][n], add);
}

template <class Kernel, int N>
void some_rows(int count, const uint8_t* w, const typename Kernel::Act* x, int blocks, float* out,
               ptrdiff_t stride, bool add, Stream& stream, Ahead& ahead) {
  switch (count) {
    case 1: return rows<Kernel, 1, N>(w, x, blocks, out, stride, add, stream, ahead);
    case 2: return rows<Kernel, 2, N>(w, x, blocks, out, stride, add, stream, ahead);
    case 3: return rows<Kernel, 3, N>(w, x, blocks, out, stride, add, stream, ahead);
    case 4: return rows<Kernel, 4, N, true>(w, x, blocks, out, stride, add, stream, ahead);
    case 5: return rows<Kernel, 5, N, true>(w, x, blocks, out, stride, add, stream, ahead);
    default: return rows<Kernel, kRows, N, true>(w, x, blocks, out, stride, add, stream, ahead);
  }
}

// All rows against N tiles, as many at a time in every pass as can be.
template <class Kernel, int N>
void all_rows(const uint8_t* w, const typename Kernel::Act* x, int num_rows, int blocks, float* out,
              ptrdiff_t stride, bool add, Ahead& ahead) {
  const size_t bytes = size_t(N) * blocks * Kernel::bytes;
  const int passes = (num_rows + kRows - 1) / kRows;
  Stream stream(w + bytes, bytes, passes * blocks);
  for (int pass = 0, row = 0; pass < passes; ++pass) {
    const int count = (num_rows - row) / (passes - pass);
    some_rows<Kernel, N>(count, w, x + size_t(row) * blocks, blocks, out + row * stride, stride,
                         add, stream, ahead);
    row += count;
  }
}

template <class Kernel>
void quantised(const Matrix& w, const typename Kernel::Act* x, int num_rows, int first_tile,
               int num_tiles, float* out, ptrdiff_t stride, bool add, Ahead& ahead) {
  const int blocks = w.units();
  int tile = first_tile;
  for (; num_rows > 2 && tile + kTiles <= first_tile + num_tiles; tile += kTiles) {
    all_rows<Kernel, kTiles>(w.tile(tile), x, num_rows, blocks, out, stride, add, ahead);
    out += kTiles * kTileRows;
  }
  for (; tile < first_tile + num_tiles; ++tile, out += kTileRows)
    all_rows<Kernel, 1>(w.tile(tile), x, num_rows, blocks, out, stride, add, ahead);
}

constexpr int kFloatRows = 8;

// T rows of floats against an unpacked tile [cols][16].
template <int T>
void float_rows(const float* w, const float* x, ptrdiff_t x_stride, int cols, float* out,
                ptrdiff_t stride, bool add) {
  __m512 acc[T];
  for (int t = 0; t < T; ++t) acc[t] = _mm512_setzero_ps();
  for (int c = 0; c < cols; ++c) {
    const __m512 v = _mm512_loadu_ps(w + size_t(c) * kTileRows);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
      acc[t] = _mm512_fmadd_ps(v, _mm512_set1_ps(x[t * x_stride + c]), acc[t]);
  }
  for (int t = 0; t < T; ++t) store(out + t * stride, acc[t], add);
}

}  // namespace

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
    avx2_kernels::unpack_tile(w, first_tile + i, scratch);
    float* y = out + i * kTileRows;
    const float* in = x.f32 + first_row * x.stride;
    int row = 0;
    for (; row + kFloatRows <= num_rows; row += kFloatRows)
      float_rows<kFloatRows>(scratch, in + row * x.stride, x.stride, w.cols, y + row * stride, stride, add);
    for (; row < num_rows; ++row)
      float_rows<1>(scratch, in + row * x.stride, x.stride, w.cols, y + row * stride, stride, add);
  }
}

}  // namespace headwater::avx512_kernels
