// Attention of a few query rows against one key block, AVX2, and the merge of blocks.
//
// Per row: scores accumulate over head_dim in ascending order (lanes are keys), the sum of the
// weights runs over keys in eight fixed lanes, outputs accumulate over keys in ascending order
// (lanes are head_dim). Keys a row does not see have weight exactly 0, and slots no row of the
// group sees are not used, so neither neighbours nor the filling of a block change a row.
#include <algorithm>
#include <limits>

#include "avx2_kernels.h"
#include "avx2_math.h"

namespace headwater::avx2_kernels {
namespace {

constexpr int kMaxRows = 6;                  // query rows in registers
constexpr int kScoreStride = kKeyBlock + 8;  // a page of fewer than 8 slots stores past its end
constexpr int kPagesAhead = 2;               // prefetch of keys: pages lie anywhere in memory
constexpr float kUnseen = -std::numeric_limits<float>::infinity();

// The keys of a block that some row of a group sees: absolute positions [first, last].
struct KeyRange {
  int first;
  int last;
};

inline const uint8_t* page_at(const AttendBlock& work, int key) {
  return work.head_base + work.shape.page_bytes() * work.page_table[key / work.shape.page_size];
}

// How a page's elements become floats, eight at a time.
struct Halves {
  using Element = uint16_t;
  static __m256 load(const Element* p) { return load_half(p); }
};

struct Codes {
  using Element = int8_t;
  static __m256 load(const Element* p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
};

// Scores of `kVectors` * 8 keys that lie side by side in a page.
template <class Format, int R, int kVectors>
inline void score_keys(const float* const* q, const typename Format::Element* keys, int lanes,
                       int head_dim, const typename Format::Element* next, float* scores) {
  __m256 acc[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = _mm256_setzero_ps();
  for (int d = 0; d < head_dim; ++d) {
    __m256 k[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) k[v] = Format::load(keys + d * lanes + 8 * v);
    _mm_prefetch(reinterpret_cast<const char*>(next + d * lanes), _MM_HINT_T0);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256 x = _mm256_broadcast_ss(q[r] + d);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) acc[r][v] = _mm256_fmadd_ps(x, k[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      _mm256_storeu_ps(scores + r * kScoreStride + 8 * v, acc[r][v]);
}

// x[i] *= scales[i], lanes a multiple of 8.
inline void scale(float* x, const uint8_t* scales, int lanes) {
  for (int i = 0; i < lanes; i += 8)
    _mm256_storeu_ps(x + i, _mm256_mul_ps(_mm256_loadu_ps(x + i),
                                          _mm256_loadu_ps(reinterpret_cast<const float*>(scales) +
                                                          i)));
}

template <class Format, int R>
void score(const AttendBlock& work, const float* const* q, KeyRange keys, float* scores) {
  using Element = typename Format::Element;
  const int page_size = work.shape.page_size, head_dim = work.shape.head_dim;
  const int lanes = work.shape.key_lanes();
  const int begin = work.block * kKeyBlock;
  for (int key = keys.first / page_size * page_size; key <= keys.last; key += page_size) {
    const uint8_t* page = page_at(work, key);
    const auto* own = reinterpret_cast<const Element*>(page);
    const auto* next = reinterpret_cast<const Element*>(
        page_at(work, std::min(key + kPagesAhead * page_size, keys.last)));
    float* out = scores + key - begin;
    int lane = 0;
    for (; lane + 16 <= lanes; lane += 16)
      score_keys<Format, R, 2>(q, own + lane, lanes, head_dim, next + lane, out + lane);
    if (lane < lanes)
      score_keys<Format, R, 1>(q, own + lane, lanes, head_dim, next + lane, out + lane);
    if (work.shape.scaled())
      for (int r = 0; r < R; ++r)
        scale(out + r * kScoreStride, page + work.shape.key_scales(), lanes);
  }
}

// Turns a row's scores into weights in place, 0 where the row does not see the key.
// Vectors outside [first_vector, end_vector) are left alone.
void soften(float* scores, int first, int last, int first_vector, int end_vector, float* maximum,
            float* sum) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i before = _mm256_set1_epi32(first);
  const __m256i after = _mm256_set1_epi32(last);
  __m256 high = _mm256_set1_ps(kUnseen);
  for (int v = first_vector; v < end_vector; ++v) {
    const __m256i key = _mm256_add_epi32(lane, _mm256_set1_epi32(8 * v));
    const __m256i unseen =
        _mm256_or_si256(_mm256_cmpgt_epi32(before, key), _mm256_cmpgt_epi32(key, after));
    const __m256 s = _mm256_blendv_ps(_mm256_loadu_ps(scores + 8 * v), _mm256_set1_ps(kUnseen),
                                      _mm256_castsi256_ps(unseen));
    high = _mm256_max_ps(high, s);
    _mm256_storeu_ps(scores + 8 * v, s);
  }
  *maximum = horizontal_max(high);
  const __m256 top = _mm256_set1_ps(*maximum);
  __m256 total = _mm256_setzero_ps();
  for (int v = first_vector; v < end_vector; ++v) {
    const __m256 s = _mm256_loadu_ps(scores + 8 * v);
    const __m256 p = exp_ps(_mm256_sub_ps(s, top));
    _mm256_storeu_ps(scores + 8 * v, p);
    total = _mm256_add_ps(total, p);
  }
  *sum = horizontal_sum(total);
}

// Multiplies the weights of R rows with the scales of their values.
template <int R>
void scale_weights(const AttendBlock& work, KeyRange keys, float* weights) {
  const int page_size = work.shape.page_size, begin = work.block * kKeyBlock;
  for (int key = keys.first / page_size * page_size; key <= keys.last; key += page_size) {
    const auto* scales =
        reinterpret_cast<const float*>(page_at(work, key) + work.shape.value_scales());
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < page_size; ++i) weights[r * kScoreStride + key - begin + i] *= scales[i];
  }
}

// kVectors * 8 columns of the output of R rows.
template <class Format, int R, int kVectors>
inline void weigh_columns(const AttendBlock& work, KeyRange keys, const float* weights, int column,
                          float* const* outputs) {
  using Element = typename Format::Element;
  const int page_size = work.shape.page_size;
  const int head_dim = work.shape.head_dim;
  const int begin = work.block * kKeyBlock;
  __m256 acc[R][kVectors];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v) acc[r][v] = _mm256_setzero_ps();
  const auto at = [&](int key, int slot) {
    const auto* values =
        reinterpret_cast<const Element*>(page_at(work, key) + work.shape.key_bytes());
    return values + size_t(slot) * head_dim + column;
  };
  for (int key = keys.first; key <= keys.last;) {
    const int end = std::min(keys.last + 1, (key / page_size + 1) * page_size);
    const Element* values = at(key, key % page_size);
    const Element* next = at(std::min(end, keys.last), key % page_size);
    for (; key < end; ++key, values += head_dim, next += head_dim) {
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
      __m256 x[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[v] = Format::load(values + 8 * v);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m256 p = _mm256_broadcast_ss(weights + r * kScoreStride + key - begin);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[r][v] = _mm256_fmadd_ps(p, x[v], acc[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVectors; ++v)
      _mm256_storeu_ps(outputs[r] + column + 8 * v, acc[r][v]);
}

template <class Format, int R>
void attend_rows(const AttendBlock& work, int row, KeyRange keys) {
  alignas(32) float scores[R * kScoreStride];
  const int begin = work.block * kKeyBlock;
  score<Format, R>(work, work.queries + row, keys, scores);
  float* outputs[R];
  for (int r = 0; r < R; ++r) {
    float* partial = work.partials[row + r];
    soften(scores + r * kScoreStride, work.first_key[row + r] - begin,
           work.last_key[row + r] - begin, (keys.first - begin) / 8, (keys.last - begin) / 8 + 1,
           partial, partial + 1);
    outputs[r] = partial + kPartialHead;
  }
  if (work.shape.scaled()) scale_weights<R>(work, keys, scores);
  constexpr int kVectors = R <= 3 ? 4 : 2;
  int column = 0;
  for (; column + 8 * kVectors <= work.shape.head_dim; column += 8 * kVectors)
    weigh_columns<Format, R, kVectors>(work, keys, scores, column, outputs);
  for (; column < work.shape.head_dim; column += 8)
    weigh_columns<Format, R, 1>(work, keys, scores, column, outputs);
}

template <class Format>
void some_rows(const AttendBlock& work, int row, int count, KeyRange keys) {
  switch (count) {
    case 1: attend_rows<Format, 1>(work, row, keys); break;
    case 2: attend_rows<Format, 2>(work, row, keys); break;
    case 3: attend_rows<Format, 3>(work, row, keys); break;
    case 4: attend_rows<Format, 4>(work, row, keys); break;
    case 5: attend_rows<Format, 5>(work, row, keys); break;
    default: attend_rows<Format, 6>(work, row, keys); break;
  }
}

}  // namespace

void attend(const AttendBlock& work) {
  if (work.shape.paired()) return attend_bf16(work);
  const int begin = work.block * kKeyBlock;
  for (int row = 0; row < work.rows;) {
    const int count = std::min(kMaxRows, work.rows - row);
    KeyRange keys{begin + kKeyBlock, begin - 1};
    for (int r = row; r < row + count; ++r) {
      keys.first = std::min(keys.first, std::max(begin, work.first_key[r]));
      keys.last = std::max(keys.last, std::min(begin + kKeyBlock - 1, work.last_key[r]));
    }
    if (keys.first > keys.last)
      for (int r = row; r < row + count; ++r) work.partials[r][0] = kUnseen;
    else if (work.shape.scaled())
      some_rows<Codes>(work, row, count, keys);
    else
      some_rows<Halves>(work, row, count, keys);
    row += count;
  }
}

namespace {

// What the state and the partials of up to 8 blocks are multiplied with as they are folded in one
// after the other, each time by exp(maximum before - maximum after) and exp(partial's - after).
struct MergeScales {
  MergeScales(float* maximum, const float* partials, int count, int stride) {
    alignas(32) float before[8], own[8], after[8];
    for (int i = 0; i < 8; ++i) before[i] = own[i] = after[i] = 0.0f;
    for (int i = 0; i < count; ++i) {
      before[i] = *maximum;
      own[i] = partials[size_t(i) * stride];
      after[i] = *maximum = std::max(*maximum, own[i]);
    }
    const __m256 top = _mm256_load_ps(after);
    _mm256_store_ps(old, exp_ps(_mm256_sub_ps(_mm256_load_ps(before), top)));
    _mm256_store_ps(fresh, exp_ps(_mm256_sub_ps(_mm256_load_ps(own), top)));
  }

  alignas(32) float old[8];
  alignas(32) float fresh[8];
};

}  // namespace

void merge(float* state, const float* partials, int count, int stride, int head_dim) {
  for (; count > 0; count -= 8, partials += size_t(8) * stride) {
    const int some = std::min(count, 8);
    const MergeScales scales(state, partials, some, stride);
    for (int i = 0; i < some; ++i) {
      const float* partial = partials + size_t(i) * stride;
      if (partial[0] == kUnseen) continue;
      state[1] = state[1] * scales.old[i] + partial[1] * scales.fresh[i];
    }
    for (int d = kPartialHead; d < kPartialHead + head_dim; d += 8) {
      __m256 sum = _mm256_loadu_ps(state + d);
      for (int i = 0; i < some; ++i) {
        const float* partial = partials + size_t(i) * stride;
        if (partial[0] == kUnseen) continue;
        const __m256 scaled =
            _mm256_mul_ps(_mm256_loadu_ps(partial + d), _mm256_set1_ps(scales.fresh[i]));
        sum = _mm256_fmadd_ps(sum, _mm256_set1_ps(scales.old[i]), scaled);
      }
      _mm256_storeu_ps(state + d, sum);
    }
  }
}

void finish(const float* state, int head_dim, float* out) {
  const __m256 scale = _mm256_set1_ps(1.0f / state[1]);
  for (int d = 0; d < head_dim; d += 8)
    _mm256_storeu_ps(out + d, _mm256_mul_ps(_mm256_loadu_ps(state + kPartialHead + d), scale));
}

}  // namespace headwater::avx2_kernels
