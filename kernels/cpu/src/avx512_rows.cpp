// Row-wise AVX-512 kernels: activation, quantisation, normalisation of logits. Their arithmetic is
// that of avx2.cpp, bit for bit.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "avx2_math.h"
#include "avx512_kernels.h"
#include "avx512_math.h"

namespace headwater::avx512_kernels {
namespace {

constexpr int kLanes = 16;

inline __mmask16 first_lanes(int n) { return __mmask16(n < kLanes ? (1u << n) - 1 : 0xffff); }

// For each of four vectors, what `f` makes of its lanes.
template <class F>
inline __m128i reduce_four(const __m512i (&v)[4], F f) {
  const __m512i low = f(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
  const __m512i high = f(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  const __m512i four = f(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
  const __m512i two = f(four, _mm512_shuffle_i64x2(four, four, 0x4e));
  return _mm512_castsi512_si128(f(two, _mm512_shuffle_i64x2(two, two, 0xb1)));
}

}  // namespace

void silu_mul(const float* gate, const float* up, int n, float* y) {
  const __m512 one = _mm512_set1_ps(1.0f), most = _mm512_set1_ps(88.0f);
  const auto product = [&](__m512 g, __m512 u) {
    const __m512 e = exp_ps(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), g), most));
    return _mm512_mul_ps(_mm512_div_ps(g, _mm512_add_ps(one, e)), u);
  };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    _mm512_storeu_ps(y + i, product(_mm512_loadu_ps(gate + i), _mm512_loadu_ps(up + i)));
  const __mmask16 rest = first_lanes(n - i);
  if (rest)  // what a masked store wrote is slow to be read
    _mm512_mask_storeu_ps(
        y + i, rest,
        product(_mm512_maskz_loadu_ps(rest, gate + i), _mm512_maskz_loadu_ps(rest, up + i)));
}

// Four blocks at a time share the reductions and divisions; the last ones may be done again.
void quantise8(const float* x, ptrdiff_t stride, int blocks, Act8* out, ptrdiff_t out_stride) {
  constexpr int kSome = 4;
  const __m128 most = _mm_set1_ps(127.0f);
  for (int first = 0; first < blocks; first += kSome) {
    __m512 a[kSome], b[kSome];
    __m512i high[kSome], sum[kSome];
    ptrdiff_t at[kSome];
    for (int i = 0; i < kSome; ++i) {
      at[i] = std::min(first + i, blocks - 1);
      a[i] = _mm512_loadu_ps(x + at[i] * stride);
      b[i] = _mm512_loadu_ps(x + at[i] * stride + kLanes);
      high[i] = _mm512_castps_si512(_mm512_max_ps(_mm512_abs_ps(a[i]), _mm512_abs_ps(b[i])));
    }
    const __m128 highest = _mm_castsi128_ps(reduce_four(high, [](__m512i p, __m512i q) {
      return _mm512_castps_si512(_mm512_max_ps(_mm512_castsi512_ps(p), _mm512_castsi512_ps(q)));
    }));
    const __m128 scales = _mm_div_ps(highest, most);
    const __mmask8 some = _mm_cmp_ps_mask(highest, _mm_setzero_ps(), _CMP_GT_OQ);
    const __m512 inverses = _mm512_castps128_ps512(_mm_maskz_div_ps(some, most, highest));
    __m128i codes[kSome][2];
    for (int i = 0; i < kSome; ++i) {
      const __m512 inverse = _mm512_permutexvar_ps(_mm512_set1_epi32(i), inverses);
      const __m512i p = _mm512_cvtps_epi32(_mm512_mul_ps(a[i], inverse));
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(b[i], inverse));
      sum[i] = _mm512_add_epi32(p, q);
      codes[i][0] = _mm512_cvtsepi32_epi8(p);
      codes[i][1] = _mm512_cvtsepi32_epi8(q);
    }
    const __m128 sums = _mm_cvtepi32_ps(reduce_four(sum, [](__m512i p, __m512i q) {
      return _mm512_add_epi32(p, q);
    }));
    const __m128 heads[] = {_mm_unpacklo_ps(scales, sums), _mm_unpackhi_ps(scales, sums)};
    for (int i = 0; i < kSome; ++i) {
      Act8& block = out[at[i] * out_stride];
      auto* head = reinterpret_cast<__m64*>(&block.scale);  // and the sum
      i % 2 ? _mm_storeh_pi(head, heads[i / 2]) : _mm_storel_pi(head, heads[i / 2]);
      auto* bytes = reinterpret_cast<__m128i*>(block.q);
      _mm_storeu_si128(bytes, codes[i][0]);
      _mm_storeu_si128(bytes + 1, codes[i][1]);
    }
  }
}

float log_sum_exp(const float* x, int n) {
  __m512 top = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  for (int i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = first_lanes(n - i);
    top = _mm512_mask_max_ps(top, lanes, top, _mm512_maskz_loadu_ps(lanes, x + i));
  }
  const float high = _mm512_reduce_max_ps(top);
  top = _mm512_set1_ps(high);
  const __m256 half_top = _mm512_castps512_ps256(top);
  double total = 0.0;
  int i = 0;
  while (i + 8 <= n) {
    __m256 sum = _mm256_setzero_ps();
    const int end = std::min(n - 7, i + 1024);
    for (; i + 8 < end; i += kLanes) {
      const __m512 e = exp_ps(_mm512_sub_ps(_mm512_loadu_ps(x + i), top));
      sum = _mm256_add_ps(sum, _mm512_castps512_ps256(e));
      sum = _mm256_add_ps(sum, _mm512_extractf32x8_ps(e, 1));
    }
    for (; i < end; i += 8)
      sum = _mm256_add_ps(sum, headwater::exp_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), half_top)));
    total += horizontal_sum(sum);
  }
  for (; i < n; ++i) total += exp_ss(x[i] - high);
  return high + float(std::log(total));
}

}  // namespace headwater::avx512_kernels
