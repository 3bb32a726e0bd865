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

void quantise8(const float* x, int n, Act8* out) {
  for (int i = 0; i < n; i += kBlock, ++out) {
    const __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + kLanes);
    const float high = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    out->scale = high / 127.0f;
    const __m512 inverse = _mm512_set1_ps(high > 0.0f ? 127.0f / high : 0.0f);
    const __m512i p = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse));
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
    out->sum = float(_mm512_reduce_add_epi32(_mm512_add_epi32(p, q)));
    auto* bytes = reinterpret_cast<__m128i*>(out->q);
    _mm_storeu_si128(bytes, _mm512_cvtsepi32_epi8(p));
    _mm_storeu_si128(bytes + 1, _mm512_cvtsepi32_epi8(q));
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
