// The AVX-512 kernels behind the table of isa.h. Every one computes each row by the same operations
// in the same order as its AVX2 twin, so the two tables give the same bits.
#pragma once

#include "ahead.h"
#include "layout.h"

namespace headwater::avx512_kernels {

void linear(const Matrix& w, ActKind kind, const Acts& x, int first_row, int num_rows,
            int first_tile, int num_tiles, float* out, ptrdiff_t stride, bool add,
            float* scratch, Ahead& ahead);
void silu_mul(const float* gate, const float* up, int n, float* y);
void quantise8(const float* x, ptrdiff_t stride, int blocks, Act8* out, ptrdiff_t out_stride);
float log_sum_exp(const float* logits, int n);
int64_t multiply(bool integer, int64_t rounds);
void attend(const AttendBlock& work);
void attend_bf16(const AttendBlock& work);  // needs BF16 as well

}  // namespace headwater::avx512_kernels
