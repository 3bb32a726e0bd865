// Attention over bfloat16 pages, AVX2: the bits of avx512bf16_attention.cpp.
//
// Queries, keys, weights and values are bfloat16, sums float32. A pair of products is added as
// vdpbf16ps adds it: the odd element's by one multiply-add, then the even one's by another. Per
// row: scores accumulate over pairs of head_dim in ascending order (lanes are keys), the sum of the
// weights over keys in sixteen fixed lanes, outputs over pairs of keys in ascending order (lanes
// are head_dim). What a row does not see has weight exactly 0, and slots that no row of the group
// sees are not used.
#include <algorithm>
#include <limits>

#include "avx2_kernels.h"
#include "avx2_math.h"
#include "bf16_exp.h"

namespace headwater::avx2_kernels {
namespace {

constexpr int kMaxRows = 6;                  // query rows in registers
constexpr int kScoreStride = kKeyBlock + 8;  // a page of fewer than 8 slots stores past its end
constexpr int kSumLanes = 16;
constexpr float kUnseen = -std::numeric_limits<float>::infinity();

// The keys of a block that some row of a group sees, counted from the block's first.
struct KeyRange {
  int first;
  int last;
};

inline const uint8_t* page_at(const AttendBlock& work, int key) {
  const int page = (work.block * kKeyBlock + key) / work.shape.page_size;
  return work.head_base + work.shape.page_bytes() * work.page_table[page];
}

// x rounded to bfloat16, as the high half of each lane.
inline __m256i rounded(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum =
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_set1_epi32(0x7fc00000);
  return _mm256_and_si256(_mm256_blendv_epi8(sum, quiet, nan), _mm256_set1_epi32(~0xffff));
}

// The odd and the even elements of eight pairs.
struct Pairs {
  explicit Pairs(__m256i bits)
      : odd(_mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(~0xffff)))),
        even(_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))) {}
  __m256 odd, even;
};

inline __m256 add_pair(const float* factors, const Pairs& pairs, __m256 sum) {
  sum = _mm256_fmadd_ps(_mm256_broadcast_ss(factors + 1), pairs.odd, sum);
  return _mm256_fmadd_ps(_mm256_broadcast_ss(factors), pairs.even, sum);
}

// Scores of kVectors * 8 keys that lie side by side in a page.
template <int R, int kVectors>
inline void score_keys(const float* queries, const uint16_t* keys, int lanes, int head_dim,
                       float* scores) {
  __m256 acc[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = _mm256_setzero_ps();
  for (int d = 0; d < head_dim; d += 2, keys += 2 * lanes) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Pairs k(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + 16 * v)));
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) acc[r][v] = add_pair(queries + r * head_dim + d, k, acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      _mm256_storeu_ps(scores + r * kScoreStride + 8 * v, acc[r][v]);
}

template <int R>
void score(const AttendBlock& work, const float* queries, KeyRange keys, float* scores) {
  const int page_size = work.shape.page_size, head_dim = work.shape.head_dim;
  const int lanes = work.shape.key_lanes();
  for (int key = keys.first / page_size * page_size; key <= keys.last; key += page_size) {
    const auto* own = reinterpret_cast<const uint16_t*>(page_at(work, key));
    int lane = 0;
    for (; lane + 16 <= lanes; lane += 16)
      score_keys<R, 2>(queries, own + 2 * lane, lanes, head_dim, scores + key + lane);
    if (lane < lanes)
      score_keys<R, 1>(queries, own + 2 * lane, lanes, head_dim, scores + key + lane);
  }
}

inline __m256 exp_weight(__m256 score, __m256 top) {
  using namespace bf16_exp;
  const __m256 round = _mm256_set1_ps(kRound);
  const __m256 t = _mm256_fmsub_ps(score, _mm256_set1_ps(kLog2e), top);
  const __m256 n = _mm256_add_ps(t, round);
  const __m256 f = _mm256_sub_ps(t, _mm256_sub_ps(n, round));
  __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(kC3), f, _mm256_set1_ps(kC2));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kC1));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(kC0));
  const __m256i shift = _mm256_slli_epi32(_mm256_castps_si256(n), 23);
  p = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), shift));
  return _mm256_and_ps(p, _mm256_cmp_ps(t, _mm256_set1_ps(kLowest), _CMP_GE_OQ));
}

// Turns a row's scores into weights in place, rounded to bfloat16, 0 where the row does not see the
// key. `sum` is that of the weights before they are rounded.
void soften(float* scores, int first, int last, KeyRange keys, float* maximum, float* sum) {
  const int begin = keys.first / kSumLanes * kSumLanes;
  const int end = (keys.last / kSumLanes + 1) * kSumLanes;
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i before = _mm256_set1_epi32(first), after = _mm256_set1_epi32(last);
  __m256 high = _mm256_set1_ps(kUnseen);
  for (int i = begin; i < end; i += 8) {
    const __m256i key = _mm256_add_epi32(lane, _mm256_set1_epi32(i));
    const __m256i unseen =
        _mm256_or_si256(_mm256_cmpgt_epi32(before, key), _mm256_cmpgt_epi32(key, after));
    const __m256 s = _mm256_blendv_ps(_mm256_loadu_ps(scores + i), _mm256_set1_ps(kUnseen),
                                      _mm256_castsi256_ps(unseen));
    high = _mm256_max_ps(high, s);
    _mm256_storeu_ps(scores + i, s);
  }
  *maximum = horizontal_max(high);
  const __m256 top = _mm256_set1_ps(*maximum * bf16_exp::kLog2e);
  __m256 total[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  for (int i = begin; i < end; i += 8) {
    const __m256 p = exp_weight(_mm256_loadu_ps(scores + i), top);
    _mm256_storeu_ps(scores + i, _mm256_castsi256_ps(rounded(p)));
    total[i / 8 % 2] = _mm256_add_ps(total[i / 8 % 2], p);
  }
  *sum = horizontal_sum(_mm256_add_ps(total[0], total[1]));
}

// kVectors * 8 columns of the output of R rows.
template <int R, int kVectors>
inline void weigh_columns(const AttendBlock& work, KeyRange keys, const float* weights, int column,
                          float* const* outputs) {
  const int page_size = work.shape.page_size, head_dim = work.shape.head_dim;
  __m256 acc[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = _mm256_setzero_ps();
  for (int key = keys.first & ~1; key <= keys.last;) {
    const uint8_t* page = page_at(work, key) + work.shape.key_bytes();
    const int end = std::min(keys.last + 1, (key / page_size + 1) * page_size);
    const auto* values = reinterpret_cast<const uint16_t*>(page) +
                         work.shape.value_index(key % page_size, column);
    for (; key < end; key += 2, values += 2 * head_dim) {
      const int seen = (key < keys.first ? 0 : 0xffff) | (key == keys.last ? 0 : ~0xffff);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 16 * v));
        const Pairs x(_mm256_and_si256(bits, _mm256_set1_epi32(seen)));
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
          acc[r][v] = add_pair(weights + r * kScoreStride + key, x, acc[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      _mm256_storeu_ps(outputs[r] + column + 8 * v, acc[r][v]);
}

template <int R>
void attend_rows(const AttendBlock& work, int row, KeyRange keys) {
  alignas(32) float scores[R * kScoreStride];
  alignas(32) float queries[R * kMaxHeadDim];
  const int head_dim = work.shape.head_dim, begin = work.block * kKeyBlock;
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < head_dim; d += 8)
      _mm256_storeu_ps(
          queries + r * head_dim + d,
          _mm256_castsi256_ps(rounded(_mm256_loadu_ps(work.queries[row + r] + d))));
  score<R>(work, queries, keys, scores);
  float* outputs[R];
  for (int r = 0; r < R; ++r) {
    float* partial = work.partials[row + r];
    soften(scores + r * kScoreStride, work.first_key[row + r] - begin,
           work.last_key[row + r] - begin, keys, partial, partial + 1);
    outputs[r] = partial + kPartialHead;
  }
  int column = 0;
  for (; column + 16 <= head_dim; column += 16)
    weigh_columns<R, 2>(work, keys, scores, column, outputs);
  if (column < head_dim) weigh_columns<R, 1>(work, keys, scores, column, outputs);
}

void some_rows(const AttendBlock& work, int row, int count, KeyRange keys) {
  switch (count) {
    case 1: attend_rows<1>(work, row, keys); break;
    case 2: attend_rows<2>(work, row, keys); break;
    case 3: attend_rows<3>(work, row, keys); break;
    case 4: attend_rows<4>(work, row, keys); break;
    case 5: attend_rows<5>(work, row, keys); break;
    default: attend_rows<6>(work, row, keys); break;
  }
}

}  // namespace

void to_bf16(const float* x, int n, uint16_t* out) {
  for (int i = 0; i < n; i += 8) {
    const __m256i high = _mm256_srli_epi32(rounded(_mm256_loadu_ps(x + i)), 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm_packus_epi32(_mm256_castsi256_si128(high),
                                      _mm256_extracti128_si256(high, 1)));
  }
}

void attend_bf16(const AttendBlock& work) {
  const int begin = work.block * kKeyBlock;
  for (int row = 0; row < work.rows;) {
    const int count = std::min(kMaxRows, work.rows - row);
    KeyRange keys{kKeyBlock, -1};
    for (int r = row; r < row + count; ++r) {
      keys.first = std::min(keys.first, std::max(0, work.first_key[r] - begin));
      keys.last = std::max(keys.last, std::min(kKeyBlock - 1, work.last_key[r] - begin));
    }
    if (keys.first > keys.last)
      for (int r = row; r < row + count; ++r) work.partials[r][0] = kUnseen;
    else
      some_rows(work, row, count, keys);
    row += count;
  }
}

}  // namespace headwater::avx2_kernels
