// The table of AVX-512 kernels; what does not gain from it stays AVX2.
#include <immintrin.h>

#include "avx512_kernels.h"
#include "isa.h"

namespace headwater::avx512_kernels {
namespace {

// Independent sums, each a chain of multiply-adds that stays in a register.
template <bool kInteger>
int64_t multiply_chains(int64_t rounds) {
  constexpr int kChains = 16;
  __m512i factor = kInteger ? _mm512_set1_epi8(1) : _mm512_castps_si512(_mm512_set1_ps(1.0f));
  __m512i sums[kChains];
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) {
    sums[c] = _mm512_setzero_si512();
    asm volatile("" : "+v"(sums[c]));  // that they are all alike is not known
  }
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : "+v"(factor));  // nor what is computed
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) {
      if constexpr (kInteger)
        sums[c] = _mm512_dpbusd_epi32(sums[c], factor, factor);
      else
        sums[c] = _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(factor),
                                                      _mm512_castsi512_ps(factor),
                                                      _mm512_castsi512_ps(sums[c])));
    }
  }
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) asm volatile("" ::"v"(sums[c]));
  return rounds * kChains * (kInteger ? 64 : 16);
}

}  // namespace

int64_t multiply(bool integer, int64_t rounds) {
  return integer ? multiply_chains<true>(rounds) : multiply_chains<false>(rounds);
}

}  // namespace headwater::avx512_kernels

namespace headwater {

const Isa& avx512() {
  static const Isa table = [] {
    Isa isa = avx2();
    isa.name = "avx512";
    isa.linear = avx512_kernels::linear;
    isa.silu_mul = avx512_kernels::silu_mul;
    isa.quantise8 = avx512_kernels::quantise8;
    isa.log_sum_exp = avx512_kernels::log_sum_exp;
    isa.attend = avx512_kernels::attend;
    isa.multiply = avx512_kernels::multiply;
    return isa;
  }();
  return table;
}

const Isa& avx512_bf16() {
  static const Isa table = [] {
    Isa isa = avx512();
    isa.name = "avx512bf16";
    isa.attend = avx512_kernels::attend_bf16;
    return isa;
  }();
  return table;
}

}  // namespace headwater
