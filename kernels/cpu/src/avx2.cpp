// Row-wise AVX2 kernels (norms, quantisation, activation, selection) and the table of all kernels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "avx2_kernels.h"
#include "avx2_math.h"
#include "isa.h"

namespace headwater {
namespace {

// Rows side by side, whose sums need not wait for one another.
template <int R>
void norm_rows(const float* x, const float* weight, float eps, int n, int size, float* y) {
  __m256 sums[R], scales[R];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  for (int i = 0; i < n; i += 8)
    for (int r = 0; r < R; ++r) {
      const __m256 v = _mm256_loadu_ps(x + ptrdiff_t(r) * n + i);
      sums[r] = _mm256_fmadd_ps(v, v, sums[r]);
    }
  for (int r = 0; r < R; ++r)
    scales[r] = _mm256_set1_ps(1.0f / std::sqrt(horizontal_sum(sums[r]) / float(size) + eps));
  for (int i = 0; i < n; i += 8) {
    const __m256 w = _mm256_loadu_ps(weight + i);
    for (int r = 0; r < R; ++r) {
      const ptrdiff_t at = ptrdiff_t(r) * n + i;
      const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + at), scales[r]);
      _mm256_storeu_ps(y + at, _mm256_mul_ps(v, w));
    }
  }
}

void rms_norm(const float* x, int rows, const float* weight, float eps, int n, int size, float* y) {
  constexpr int kRows = 4;
  int r = 0;
  for (; r + kRows <= rows; r += kRows, x += ptrdiff_t(kRows) * n, y += ptrdiff_t(kRows) * n)
    norm_rows<kRows>(x, weight, eps, n, size, y);
  for (; r < rows; ++r, x += n, y += n) norm_rows<1>(x, weight, eps, n, size, y);
}

// The largest magnitude of a block.
float magnitude(const float* x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 high = _mm256_setzero_ps();
  for (int i = 0; i < kBlock; i += 8)
    high = _mm256_max_ps(high, _mm256_andnot_ps(sign, _mm256_loadu_ps(x + i)));
  return horizontal_max(high);
}

// Eight elements divided by the scale and rounded to nearest.
inline __m256i rounded(const float* x, __m256 inverse) {
  return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inverse));
}

inline float sum_int32(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_unpackhi_epi64(s, s));
  return float(_mm_cvtsi128_si32(s) + _mm_extract_epi32(s, 1));
}

void quantise8(const float* x, ptrdiff_t stride, int blocks, Act8* out, ptrdiff_t out_stride) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int i = 0; i < blocks; ++i, x += stride, out += out_stride) {
    const float high = magnitude(x);
    out->scale = high / 127.0f;
    const __m256 inverse = _mm256_set1_ps(high > 0.0f ? 127.0f / high : 0.0f);
    const __m256i a = rounded(x, inverse), b = rounded(x + 8, inverse);
    const __m256i c = rounded(x + 16, inverse), d = rounded(x + 24, inverse);
    out->sum = sum_int32(_mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d)));
    const __m256i q = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->q),
                        _mm256_permutevar8x32_epi32(q, order));
  }
}

void quantise16(const float* x, ptrdiff_t stride, int blocks, Act16* out, ptrdiff_t out_stride) {
  for (int i = 0; i < blocks; ++i, x += stride, out += out_stride) {
    const float high = magnitude(x);
    out->scale = high / 32767.0f;
    const __m256 inverse = _mm256_set1_ps(high > 0.0f ? 32767.0f / high : 0.0f);
    for (int j = 0; j < kBlock; j += 16) {
      const __m256i a = rounded(x + j, inverse), b = rounded(x + j + 8, inverse);
      const __m256i q = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out->q + j), q);
    }
  }
}

void silu_mul(const float* gate, const float* up, int n, float* y) {
  const __m256 one = _mm256_set1_ps(1.0f);
  for (int i = 0; i < n; i += 8) {
    const __m256 g = _mm256_loadu_ps(gate + i);
    const __m256 e = exp_ps(_mm256_sub_ps(_mm256_setzero_ps(), g));
    const __m256 s = _mm256_div_ps(g, _mm256_add_ps(one, e));
    _mm256_storeu_ps(y + i, _mm256_mul_ps(s, _mm256_loadu_ps(up + i)));
  }
}

void to_half(const float* x, int n, uint16_t* out) {
  for (int i = 0; i < n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
}

void to_codes(const float* x, int n, int8_t* out, float* scale) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 high = _mm256_setzero_ps();
  for (int i = 0; i < n; i += 8)
    high = _mm256_max_ps(high, _mm256_andnot_ps(sign, _mm256_loadu_ps(x + i)));
  const float largest = horizontal_max(high);
  *scale = largest > 0.0f ? largest / 127.0f : 1.0f;
  const __m256 divisor = _mm256_set1_ps(*scale);
  for (int i = 0; i < n; i += 8) {
    const __m256i q = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(x + i), divisor));
    const __m128i pairs =
        _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), _mm_packs_epi16(pairs, pairs));
  }
}

float log_sum_exp(const float* x, int n) {
  float high = -std::numeric_limits<float>::infinity();
  __m256 top = _mm256_set1_ps(high);
  int i = 0;
  for (; i + 8 <= n; i += 8) top = _mm256_max_ps(top, _mm256_loadu_ps(x + i));
  high = horizontal_max(top);
  for (; i < n; ++i) high = std::max(high, x[i]);
  top = _mm256_set1_ps(high);
  // Pairs of chunks in double keep the error of a long sum below a float's last bit.
  double total = 0.0;
  for (i = 0; i + 8 <= n;) {
    __m256 sum = _mm256_setzero_ps();
    for (int end = std::min(n - 7, i + 1024); i < end; i += 8)
      sum = _mm256_add_ps(sum, exp_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), top)));
    total += horizontal_sum(sum);
  }
  for (; i < n; ++i) total += exp_ss(x[i] - high);
  return high + float(std::log(total));
}

bool better(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Keeps a heap whose front is the worst of the k best so far.
void select(const float* logits, int n, int k, Candidate* best) {
  for (int i = 0; i < k; ++i) best[i] = {logits[i], i};
  std::make_heap(best, best + k, better);
  const auto offer = [&](int i) {
    const Candidate c{logits[i], i};
    if (!better(c, best[0])) return;
    std::pop_heap(best, best + k, better);
    best[k - 1] = c;
    std::push_heap(best, best + k, better);
  };
  int i = k;
  for (; i + 8 <= n; i += 8) {
    const __m256 worst = _mm256_set1_ps(best[0].logit);
    const __m256 above = _mm256_cmp_ps(_mm256_loadu_ps(logits + i), worst, _CMP_GT_OQ);
    if (_mm256_movemask_ps(above))
      for (int j = i; j < i + 8; ++j) offer(j);
  }
  for (; i < n; ++i) offer(i);
  std::sort(best, best + k, better);
}

// Independent sums, each a chain of multiply-adds that stays in a register.
template <bool kInteger>
int64_t multiply_chains(int64_t rounds) {
  constexpr int kChains = 12;
  __m256i factor = kInteger ? _mm256_set1_epi8(1) : _mm256_castps_si256(_mm256_set1_ps(1.0f));
  __m256i sums[kChains];
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) {
    sums[c] = _mm256_setzero_si256();
    asm volatile("" : "+x"(sums[c]));  // that they are all alike is not known
  }
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : "+x"(factor));  // nor what is computed
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) {
      if constexpr (kInteger)
        sums[c] = _mm256_add_epi16(sums[c], _mm256_maddubs_epi16(factor, factor));
      else
        sums[c] = _mm256_castps_si256(_mm256_fmadd_ps(_mm256_castsi256_ps(factor),
                                                      _mm256_castsi256_ps(factor),
                                                      _mm256_castsi256_ps(sums[c])));
    }
  }
#pragma GCC unroll 12
  for (int c = 0; c < kChains; ++c) asm volatile("" ::"x"(sums[c]));
  return rounds * kChains * (kInteger ? 32 : 8);
}

int64_t multiply(bool integer, int64_t rounds) {
  return integer ? multiply_chains<true>(rounds) : multiply_chains<false>(rounds);
}

}  // namespace

const Isa& avx2() {
  static const Isa table{
      "avx2",
      avx2_kernels::linear,
      avx2_kernels::unpack_row,
      rms_norm,
      quantise8,
      quantise16,
      silu_mul,
      to_half,
      avx2_kernels::to_bf16,
      to_codes,
      avx2_kernels::attend,
      avx2_kernels::merge,
      avx2_kernels::finish,
      select,
      log_sum_exp,
      multiply,
  };
  return table;
}

}  // namespace headwater
