// The seam between the step and an instruction set: one table of kernels per instruction set.
//
// Every row of a kernel is computed by the same sequence of operations however many rows it is
// called with; that is what makes results independent of batch and chunking. A table that orders
// its operations differently is another numeric mode and needs a name of its own.
#pragma once

#include "ahead.h"
#include "layout.h"

namespace headwater {

struct Isa {
  const char* name;

  // out[row * out_stride + i] (+)= sum over columns of w[first_tile * 16 + i] * x[first_row + row],
  // for i < num_tiles * 16. `scratch` holds 16 * cols floats. Some of `ahead` is
  // fetched meanwhile.
  void (*linear)(const Matrix& w, ActKind kind, const Acts& x, int first_row, int num_rows,
                 int first_tile, int num_tiles, float* out, ptrdiff_t out_stride, bool add,
                 float* scratch, Ahead& ahead);
  // One row of a matrix as floats.
  void (*unpack_row)(const Matrix& w, int row, float* out);

  // y = x / sqrt(mean(x^2) + eps) * weight for each of `rows` rows of n, a multiple of 8; `size` is
  // the divisor of the mean.
  void (*rms_norm)(const float* x, int rows, const float* weight, float eps, int n, int size,
                   float* y);
  // Blocks of 32, `stride` floats apart, to out[0], out[out_stride] ...
  void (*quantise8)(const float* x, ptrdiff_t stride, int blocks, Act8* out, ptrdiff_t out_stride);
  void (*quantise16)(const float* x, ptrdiff_t stride, int blocks, Act16* out,
                     ptrdiff_t out_stride);
  void (*silu_mul)(const float* gate, const float* up, int n, float* y);  // n a multiple of 8
  void (*to_half)(const float* x, int n, uint16_t* out);                  // n a multiple of 8
  void (*to_bf16)(const float* x, int n, uint16_t* out);                // n a multiple of 8

  // Codes of one vector and its scale, the largest magnitude / 127, 1 for zeros.
  void (*to_codes)(const float* x, int n, int8_t* out, float* scale);  // n a multiple of 8

  void (*attend)(const AttendBlock& work);
  // Folds the partials of `count` consecutive key blocks, `stride` floats apart, into `state` in
  // ascending order (same layout as a partial; empty: maximum -inf).
  void (*merge)(float* state, const float* partials, int count, int stride, int head_dim);
  void (*finish)(const float* state, int head_dim, float* out);

  // The k largest of n logits by falling value, ties by rising id, into best[k].
  void (*select)(const float* logits, int n, int k, Candidate* best);
  float (*log_sum_exp)(const float* logits, int n);

  // `rounds` rounds of independent multiply-adds on registers, of floats or of 8-bit integers, for
  // measurements: the limit of `linear` and `attend`. Returns the products done.
  int64_t (*multiply)(bool integer, int64_t rounds);
};

const Isa& avx2();
const Isa& avx512();       // AVX-512 F, BW, DQ, VL and VNNI; the bits of avx2()
const Isa& avx512_bf16();  // with BF16 as well; the bits of avx2()

}  // namespace headwater
