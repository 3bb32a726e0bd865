// Attention over bfloat16 pages, AVX-512 with BF16: two products an instruction. Its order of
// operations is in avx2_bf16_attention.cpp, which gives the same bits and takes the pages whose
// keys or head size do not fill 16 lanes.
#include <immintrin.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "avx2_kernels.h"
#include "avx512_kernels.h"
#include "bf16_exp.h"

namespace headwater::avx512_kernels {
namespace {

constexpr int kLanes = 16;
constexpr int kMaxRows = 6;       // query rows in registers
constexpr int kMaxVectors = 4;    // vectors of keys, or of head_dim, in registers
constexpr int kTileQueries = 48;  // query rows that a block's keys are kept in the L1 cache for
constexpr int kBlockVectors = kKeyBlock / kLanes;
constexpr int kRowPairs = kKeyBlock / 2;
constexpr float kUnseen = -std::numeric_limits<float>::infinity();

using Pair = uint32_t;  // of bfloat16, the even element in the low half

// The keys of a block that some row of a group sees, and the vectors of 16 that they lie in.
struct KeyRange {
  int first;
  int last;

  int first_vector() const { return first / kLanes; }
  int end_vector() const { return last / kLanes + 1; }
};

// A block's pages as vectors of 16 keys: where their keys and their values begin.
struct Vectors {
  Vectors(const AttendBlock& work, KeyRange range) {
    const PageShape& shape = work.shape;
    const size_t page_bytes = shape.page_bytes(), values_at = shape.key_bytes();
    for (int v = range.first_vector(); v < range.end_vector(); ++v) {
      const int key = work.block * kKeyBlock + v * kLanes, slot = key % shape.page_size;
      const uint8_t* page = work.head_base + page_bytes * work.page_table[key / shape.page_size];
      keys[v] = reinterpret_cast<const Pair*>(page) + slot;
      values[v] = reinterpret_cast<const Pair*>(page + values_at);
      values[v] += size_t(slot / 2) * shape.head_dim;
    }
  }

  const Pair* keys[kBlockVectors];    // [head_dim / 2][page_size]
  const Pair* values[kBlockVectors];  // [8][head_dim]
};

inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

[[gnu::always_inline]] inline __m512 add_pairs(Pair factors, __m512i pairs, __m512 sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(int(factors)), (__m512bh)pairs);
}

// Scores of V vectors of keys for R rows. kFirst: the first rows of a tile, for whom pages come
// from memory; meanwhile the next vectors of keys and their values are fetched, line after line.
template <bool kFirst, int R, int V>
[[gnu::always_inline]] inline void score(const Pair* queries, const Vectors& vectors, int first,
                                         int ahead, const PageShape& shape, float* scores) {
  const Pair* const* keys = vectors.keys + first;
  const int pairs = shape.head_dim / 2;
  __m512 acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = _mm512_setzero_ps();
  int fetched = 0, line = 0;  // of the vector that is being fetched
#pragma GCC unroll 2
  for (int i = 0; i < pairs; ++i) {
    const size_t at = size_t(i) * shape.page_size;
    if constexpr (kFirst) {
      for (int v = 0; v < V; ++v, ++line) {
        prefetch(vectors.keys[ahead + fetched] + line * shape.page_size);
        prefetch(vectors.values[ahead + fetched] + line * kLanes);
      }
      if (line >= pairs) {  // three vectors leave out a line or two
        line -= pairs;
        ++fetched;
      }
    }
    __m512i k[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) k[v] = _mm512_loadu_si512(keys[v] + at);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Pair q = queries[r * pairs + i];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = add_pairs(q, k[v], acc[r][v]);
    }
  }
  scores += first * kLanes;
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(scores + r * kKeyBlock + kLanes * v, acc[r][v]);
}

// Gives the keys of a row's vector that it does not see the score -inf.
inline __m512 masked(const float* scores, int v, int first, int last) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i key = _mm512_add_epi32(lane, _mm512_set1_epi32(kLanes * v));
  const __mmask16 seen = _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(first)) &
                         _mm512_cmple_epi32_mask(key, _mm512_set1_epi32(last));
  return _mm512_mask_loadu_ps(_mm512_set1_ps(kUnseen), seen, scores + kLanes * v);
}

inline __m512 exp_weight(__m512 score, __m512 top) {
  using namespace bf16_exp;
  const __m512 round = _mm512_set1_ps(kRound);
  const __m512 t = _mm512_fmsub_ps(score, _mm512_set1_ps(kLog2e), top);
  const __m512 n = _mm512_add_ps(t, round);
  const __m512 f = _mm512_sub_ps(t, _mm512_sub_ps(n, round));
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(kC3), f, _mm512_set1_ps(kC2));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kC1));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kC0));
  const __mmask16 normal = _mm512_cmp_ps_mask(t, _mm512_set1_ps(kLowest), _CMP_GE_OQ);
  const __m512i shift = _mm512_slli_epi32(_mm512_castps_si512(n), 23);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(normal, _mm512_castps_si512(p), shift));
}

// Turns the scores of R rows, side by side, into weights, 0 where a row does not see the key. The
// sums are those of the weights before they are rounded.
template <int R>
[[gnu::always_inline]] inline void soften(const AttendBlock& work, int row, KeyRange keys,
                                          float* scores, Pair* weights) {
  const int begin = work.block * kKeyBlock;
  const int* first = work.first_key + row;
  const int* last = work.last_key + row;
  // The vectors whose keys all rows see.
  const int whole = (*std::max_element(first, first + R) - begin + kLanes - 1) / kLanes;
  const int whole_end = (*std::min_element(last, last + R) - begin + 1) / kLanes;
  __m512 high[R], total[R];
  for (int r = 0; r < R; ++r) high[r] = _mm512_set1_ps(kUnseen);
  for (int v = keys.first_vector(); v < keys.end_vector(); ++v) {
    float* at = scores + kLanes * v;
    if (v < whole || v >= whole_end)
      for (int r = 0; r < R; ++r)
        _mm512_storeu_ps(at + r * kKeyBlock, masked(scores + r * kKeyBlock, v, first[r] - begin,
                                                    last[r] - begin));
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
      high[r] = _mm512_max_ps(high[r], _mm512_loadu_ps(at + r * kKeyBlock));
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const float maximum = work.partials[row + r][0] = _mm512_reduce_max_ps(high[r]);
    high[r] = _mm512_set1_ps(maximum * bf16_exp::kLog2e);
    total[r] = _mm512_setzero_ps();
  }
  for (int v = keys.first_vector(); v < keys.end_vector(); ++v)
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512 p =
          exp_weight(_mm512_loadu_ps(scores + r * kKeyBlock + kLanes * v), high[r]);
      _mm256_storeu_si256(
          reinterpret_cast<__m256i*>(weights + r * kRowPairs + kLanes / 2 * v),
          (__m256i)_mm512_cvtneps_pbh(p));
      total[r] = _mm512_add_ps(total[r], p);
    }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const __m256 half =
        _mm256_add_ps(_mm512_castps512_ps256(total[r]), _mm512_extractf32x8_ps(total[r], 1));
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    work.partials[row + r][1] = _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
}

// V * 16 columns of the outputs of R rows over the keys of the block that some row sees.
template <int R, int V>
[[gnu::always_inline]] inline void weigh(const Vectors& vectors, KeyRange keys, int head_dim,
                                         const Pair* weights, int column, float* const* outputs) {
  __m512 acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = _mm512_setzero_ps();
  // Not inlined it would keep the sums in memory.
  const auto add = [&](int pair, const Pair* values, __m512i seen) __attribute__((always_inline)) {
    __m512i x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v)
      x[v] = _mm512_and_si512(_mm512_loadu_si512(values + kLanes * v), seen);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Pair p = weights[r * kRowPairs + pair];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] = add_pairs(p, x[v], acc[r][v]);
    }
  };
  const auto at = [&](int pair) {
    return vectors.values[pair / (kLanes / 2)] + size_t(pair % (kLanes / 2)) * head_dim + column;
  };
  // Of the pairs at the ends a key may be unseen.
  const auto add_end = [&](int pair) {
    const int even = 2 * pair < keys.first ? 0 : 0xffff;
    const int odd = 2 * pair == keys.last ? 0 : ~0xffff;
    add(pair, at(pair), _mm512_set1_epi32(even | odd));
  };
  const int last = keys.last / 2;
  int pair = keys.first / 2;
  if (keys.first % 2 && pair < last) add_end(pair++);
  while (pair < last) {
    const int end = std::min(last, (pair / (kLanes / 2) + 1) * (kLanes / 2));
    for (const Pair* values = at(pair); pair < end; ++pair, values += head_dim)
      add(pair, values, _mm512_set1_epi32(-1));
  }
  add_end(last);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      _mm512_storeu_ps(outputs[r] + column + kLanes * v, acc[r][v]);
}

// The weights of R rows, rounded, from their scores; their maximum and sum go to the partials.
template <bool kFirst, int R>
[[gnu::noinline]] void weigh_keys(const AttendBlock& work, int row, KeyRange keys,
                                  const Vectors& vectors, Pair* weights) {
  alignas(64) float scores[R * kKeyBlock];
  alignas(64) Pair queries[R * kMaxHeadDim / 2];
  const PageShape& shape = work.shape;
  const int head_dim = shape.head_dim;
  int v = keys.first_vector();
  const int end = keys.end_vector();
  if constexpr (kFirst)
    for (int i = v; i < std::min(v + kMaxVectors, end); ++i)
      for (int d = 0; d < head_dim / 2; ++d) {
        prefetch(vectors.keys[i] + d * shape.page_size);
        prefetch(vectors.values[i] + d * kLanes);
      }
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < head_dim; d += kLanes)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(queries + (r * head_dim + d) / 2),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(work.queries[row + r] + d)));
  for (; v + kMaxVectors <= end; v += kMaxVectors) {
    const int ahead = v + 2 * kMaxVectors <= end ? v + kMaxVectors : v;
    score<kFirst, R, kMaxVectors>(queries, vectors, v, ahead, shape, scores);
  }
  switch (end - v) {
    case 3: score<kFirst, R, 3>(queries, vectors, v, v, shape, scores); break;
    case 2: score<kFirst, R, 2>(queries, vectors, v, v, shape, scores); break;
    case 1: score<kFirst, R, 1>(queries, vectors, v, v, shape, scores); break;
  }
  soften<R>(work, row, keys, scores, weights);
}

// The outputs of R rows.
template <int R>
[[gnu::noinline]] void weigh_values(const AttendBlock& work, int row, KeyRange keys,
                                    const Vectors& vectors, const Pair* weights) {
  const int head_dim = work.shape.head_dim;
  float* outputs[R];
  for (int r = 0; r < R; ++r) outputs[r] = work.partials[row + r] + kPartialHead;
  int column = 0;
  for (; column + kMaxVectors * kLanes <= head_dim; column += kMaxVectors * kLanes)
    weigh<R, kMaxVectors>(vectors, keys, head_dim, weights, column, outputs);
  for (; column < head_dim; column += kLanes)
    weigh<R, 1>(vectors, keys, head_dim, weights, column, outputs);
}

// Calls f with the count, 1 to kMaxRows, as a constant.
template <class F>
void with_rows(int count, F f) {
  switch (count) {
    case 1: f(std::integral_constant<int, 1>()); break;
    case 2: f(std::integral_constant<int, 2>()); break;
    case 3: f(std::integral_constant<int, 3>()); break;
    case 4: f(std::integral_constant<int, 4>()); break;
    case 5: f(std::integral_constant<int, 5>()); break;
    default: f(std::integral_constant<int, kMaxRows>()); break;
  }
}

// The keys that rows [row, row + count) see; last < first: none.
KeyRange seen_keys(const AttendBlock& work, int row, int count) {
  const int begin = work.block * kKeyBlock;
  KeyRange keys{kKeyBlock, -1};
  for (int r = row; r < row + count; ++r) {
    keys.first = std::min(keys.first, std::max(0, work.first_key[r] - begin));
    keys.last = std::max(keys.last, std::min(kKeyBlock - 1, work.last_key[r] - begin));
  }
  return keys;
}

// Rows [row, row + count), at most kTileQueries: all scores first, then all outputs, so that either
// the block's keys or its values stay in the L1 cache.
void attend_tile(const AttendBlock& work, int row, int count) {
  alignas(64) Pair weights[kTileQueries * kRowPairs];
  const KeyRange all = seen_keys(work, row, count);
  if (all.first > all.last) {
    for (int r = row; r < row + count; ++r) work.partials[r][0] = kUnseen;
    return;
  }
  const Vectors vectors(work, all);
  KeyRange seen[kTileQueries / kMaxRows];
  bool first = true;
  for (int i = 0; i < count; i += kMaxRows) {
    const int rows = std::min(kMaxRows, count - i);
    const KeyRange keys = seen[i / kMaxRows] = seen_keys(work, row + i, rows);
    Pair* own = weights + i * kRowPairs;
    if (keys.first > keys.last)
      for (int r = row + i; r < row + i + rows; ++r) work.partials[r][0] = kUnseen;
    else
      with_rows(rows, [&](auto constant) {
        if (first)
          weigh_keys<true, constant()>(work, row + i, keys, vectors, own);
        else
          weigh_keys<false, constant()>(work, row + i, keys, vectors, own);
        first = false;
      });
  }
  for (int i = 0; i < count; i += kMaxRows) {
    const KeyRange keys = seen[i / kMaxRows];
    if (keys.first <= keys.last)
      with_rows(std::min(kMaxRows, count - i), [&](auto constant) {
        weigh_values<constant()>(work, row + i, keys, vectors, weights + i * kRowPairs);
      });
  }
}

}  // namespace

void attend_bf16(const AttendBlock& work) {
  const PageShape& shape = work.shape;
  if (!shape.paired() || shape.page_size % kLanes || shape.head_dim % kLanes) return attend(work);
  for (int row = 0; row < work.rows; row += kTileQueries)
    attend_tile(work, row, std::min(kTileQueries, work.rows - row));
}

}  // namespace headwater::avx512_kernels
