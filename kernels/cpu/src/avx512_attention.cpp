// Attention of query rows against one key block, AVX-512: the arithmetic of avx2_attention.cpp, bit
// for bit, with 16 lanes. Pages whose keys or head size do not fill 16 lanes are left to AVX2.
#include <immintrin.h>

#include <algorithm>
#include <limits>

#include "avx2_kernels.h"
#include "avx512_kernels.h"
#include "avx512_math.h"

namespace headwater::avx512_kernels {
namespace {

constexpr int kLanes = 16;
constexpr int kMaxRows = 6;       // query rows in registers
constexpr int kMaxVectors = 4;    // vectors of keys, or of head_dim, in registers
constexpr int kBlockVectors = kKeyBlock / kLanes;
constexpr float kUnseen = -std::numeric_limits<float>::infinity();

// The vectors of 16 keys of a block that some row of a group sees.
struct VectorRange {
  int first;
  int end;
};

// How a page's elements become floats, 16 at a time.
struct Halves {
  using Element = uint16_t;
  static __m512 load(const Element* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
};

struct Codes {
  using Element = int8_t;
  static __m512 load(const Element* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
};

// A block's pages as vectors of 16 keys: where the keys, the values and their scales begin.
template <class Format>
struct Vectors {
  using Element = typename Format::Element;

  Vectors(const AttendBlock& work, VectorRange range) {
    const PageShape& shape = work.shape;
    const size_t page_bytes = shape.page_bytes(), values_at = shape.key_bytes();
    for (int v = range.first; v < range.end; ++v) {
      const int key = work.block * kKeyBlock + v * kLanes, slot = key % shape.page_size;
      const uint8_t* page = work.head_base + page_bytes * work.page_table[key / shape.page_size];
      keys[v] = reinterpret_cast<const Element*>(page) + slot;
      values[v] = reinterpret_cast<const Element*>(page + values_at);
      values[v] += size_t(slot) * shape.head_dim;
      key_scales[v] = reinterpret_cast<const float*>(page + shape.key_scales()) + slot;
      value_scales[v] = reinterpret_cast<const float*>(page + shape.value_scales()) + slot;
    }
  }

  const Element* keys[kBlockVectors];    // [head_dim][page_size]
  const Element* values[kBlockVectors];  // [16][head_dim]
  const float* key_scales[kBlockVectors];
  const float* value_scales[kBlockVectors];
};

inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

// Scores of V vectors of keys for R rows. kFirst: the first rows of a tile, for whom pages come
// from memory; meanwhile the next vectors of keys and the values of these are fetched.
template <class Format, bool kFirst, int R, int V>
inline void score(const float* const* q, const Vectors<Format>& vectors, int first, int ahead,
                  const PageShape& shape, float* scores) {
  const typename Format::Element* const* keys = vectors.keys + first;
  const int page_size = shape.page_size;
  __m512 acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = _mm512_setzero_ps();
  // A line holds two rows of 16 keys (four of codes), or one of 32, which two vectors share.
  const int odd = page_size > kLanes ? page_size : 0;
  for (int pair = 0; pair < shape.head_dim; pair += 2) {
    if constexpr (kFirst)
      for (int v = 0; v < V; ++v) {
        prefetch(vectors.keys[ahead + v] + pair * page_size + (v & 1) * odd);
        prefetch(vectors.values[first + v] + pair * kLanes);
      }
#pragma GCC unroll 2
    for (int d = pair; d < pair + 2; ++d) {
      __m512 k[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) k[v] = Format::load(keys[v] + d * page_size);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512 x = _mm512_set1_ps(q[r][d]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[r][v] = _mm512_fmadd_ps(x, k[v], acc[r][v]);
      }
    }
  }
  scores += first * kLanes;
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      if (shape.scaled())
        acc[r][v] = _mm512_mul_ps(acc[r][v], _mm512_loadu_ps(vectors.key_scales[first + v]));
      _mm512_storeu_ps(scores + r * kKeyBlock + kLanes * v, acc[r][v]);
    }
}

// Gives the keys of a row's vector that it does not see the score -inf.
inline __m512 masked(const float* scores, int v, int first, int last) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i key = _mm512_add_epi32(lane, _mm512_set1_epi32(kLanes * v));
  const __mmask16 seen = _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(first)) &
                         _mm512_cmple_epi32_mask(key, _mm512_set1_epi32(last));
  return _mm512_mask_loadu_ps(_mm512_set1_ps(kUnseen), seen, scores + kLanes * v);
}

// Turns a row's scores into weights in place, 0 where the row does not see the key.
void soften(float* scores, int first, int last, VectorRange range, float* maximum, float* sum) {
  __m512 high = _mm512_set1_ps(kUnseen);
  for (int v = range.first; v < range.end; ++v) {
    __m512 s = _mm512_loadu_ps(scores + kLanes * v);
    if (first > kLanes * v || last < kLanes * v + kLanes - 1) {
      s = masked(scores, v, first, last);
      _mm512_storeu_ps(scores + kLanes * v, s);
    }
    high = _mm512_max_ps(high, s);
  }
  *maximum = _mm512_reduce_max_ps(high);
  const __m512 top = _mm512_set1_ps(*maximum);
  __m256 total = _mm256_setzero_ps();  // in 8 lanes, low half first
  for (int v = range.first; v < range.end; ++v) {
    const __m512 p = exp_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + kLanes * v), top));
    _mm512_storeu_ps(scores + kLanes * v, p);
    total = _mm256_add_ps(total, _mm512_castps512_ps256(p));
    total = _mm256_add_ps(total, _mm512_extractf32x8_ps(p, 1));
  }
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(total), _mm256_extractf128_ps(total, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  *sum = _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

// V * 16 columns of the outputs of R rows over keys [first, last] of the block.
template <class Format, int R, int V>
inline void weigh(const Vectors<Format>& vectors, int first, int last, int head_dim,
                  const float* weights, int column, float* const* outputs) {
  __m512 acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = _mm512_setzero_ps();
  for (int key = first; key <= last;) {
    const int end = std::min(last + 1, (key / kLanes + 1) * kLanes);
    const typename Format::Element* values =
        vectors.values[key / kLanes] + size_t(key % kLanes) * head_dim + column;
    for (; key < end; ++key, values += head_dim) {
      __m512 x[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) x[v] = Format::load(values + kLanes * v);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512 p = _mm512_set1_ps(weights[r * kKeyBlock + key]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[r][v] = _mm512_fmadd_ps(p, x[v], acc[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      _mm512_storeu_ps(outputs[r] + column + kLanes * v, acc[r][v]);
}

template <class Format, bool kFirst, int R>
void attend_rows(const AttendBlock& work, int row, int first, int last) {
  alignas(64) float scores[R * kKeyBlock];
  const PageShape& shape = work.shape;
  const int head_dim = shape.head_dim, begin = work.block * kKeyBlock;
  const VectorRange range{first / kLanes, last / kLanes + 1};
  const Vectors<Format> vectors(work, range);
  const float* const* q = work.queries + row;
  int v = range.first;
  if constexpr (kFirst)
    for (int i = v; i < std::min(v + kMaxVectors, range.end); ++i)
      for (int d = 0; d < head_dim; d += 2) prefetch(vectors.keys[i] + d * shape.page_size);
  for (; v + kMaxVectors <= range.end; v += kMaxVectors) {
    const int ahead = v + 2 * kMaxVectors <= range.end ? v + kMaxVectors : v;
    score<Format, kFirst, R, kMaxVectors>(q, vectors, v, ahead, shape, scores);
  }
  for (; v < range.end; ++v) score<Format, kFirst, R, 1>(q, vectors, v, v, shape, scores);
  float* outputs[R];
  for (int r = 0; r < R; ++r) {
    float* partial = work.partials[row + r];
    float* weights = scores + r * kKeyBlock;
    soften(weights, work.first_key[row + r] - begin, work.last_key[row + r] - begin, range,
           partial, partial + 1);
    for (v = range.first; shape.scaled() && v < range.end; ++v)
      _mm512_storeu_ps(weights + kLanes * v,
                       _mm512_mul_ps(_mm512_loadu_ps(weights + kLanes * v),
                                     _mm512_loadu_ps(vectors.value_scales[v])));
    outputs[r] = partial + kPartialHead;
  }
  int column = 0;
  for (; column + kMaxVectors * kLanes <= head_dim; column += kMaxVectors * kLanes)
    weigh<Format, R, kMaxVectors>(vectors, first, last, head_dim, scores, column, outputs);
  for (; column < head_dim; column += kLanes)
    weigh<Format, R, 1>(vectors, first, last, head_dim, scores, column, outputs);
}

template <class Format, bool kFirst>
void some_rows(const AttendBlock& work, int row, int count, int first, int last) {
  switch (count) {
    case 1: attend_rows<Format, kFirst, 1>(work, row, first, last); break;
    case 2: attend_rows<Format, kFirst, 2>(work, row, first, last); break;
    case 3: attend_rows<Format, kFirst, 3>(work, row, first, last); break;
    case 4: attend_rows<Format, kFirst, 4>(work, row, first, last); break;
    case 5: attend_rows<Format, kFirst, 5>(work, row, first, last); break;
    default: attend_rows<Format, kFirst, 6>(work, row, first, last); break;
  }
}

template <class Format>
void attend_pages(const AttendBlock& work) {
  const int begin = work.block * kKeyBlock;
  for (int row = 0; row < work.rows;) {
    const int count = std::min(kMaxRows, work.rows - row);
    int first = kKeyBlock, last = -1;
    for (int r = row; r < row + count; ++r) {
      first = std::min(first, std::max(0, work.first_key[r] - begin));
      last = std::max(last, std::min(kKeyBlock - 1, work.last_key[r] - begin));
    }
    if (first > last)
      for (int r = row; r < row + count; ++r) work.partials[r][0] = kUnseen;
    else if (row == 0)
      some_rows<Format, true>(work, row, count, first, last);
    else
      some_rows<Format, false>(work, row, count, first, last);
    row += count;
  }
}

}  // namespace

void attend(const AttendBlock& work) {
  const PageShape& shape = work.shape;
  if (shape.paired() || shape.page_size % kLanes || shape.head_dim % kLanes)
    avx2_kernels::attend(work);
  else if (shape.scaled())
    attend_pages<Codes>(work);
  else
    attend_pages<Halves>(work);
}

}  // namespace headwater::avx512_kernels
