// The AVX2 kernels behind the table of isa.h.
#pragma once

#include "ahead.h"
#include "layout.h"

namespace headwater::avx2_kernels {

void linear(const Matrix& w, ActKind kind, const Acts& x, int first_row, int num_rows,
            int first_tile, int num_tiles, float* out, ptrdiff_t stride, bool add,
            float* scratch, Ahead& ahead);
// 16 rows by the columns of a unit, and of a whole tile, as floats [columns][16].
void unpack_unit(const Matrix& w, const uint8_t* unit, float* out);
void unpack_tile(const Matrix& w, int tile, float* out);
void unpack_row(const Matrix& w, int row, float* out);
void attend(const AttendBlock& work);
void attend_bf16(const AttendBlock& work);  // over pages of bfloat16
void to_bf16(const float* x, int n, uint16_t* out);
void merge(float* state, const float* partials, int count, int stride, int head_dim);
void finish(const float* state, int head_dim, float* out);

}  // namespace headwater::avx2_kernels
