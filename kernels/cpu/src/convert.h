// Checkpoint rows in formats that have no kernels of their own.
#pragma once

#include <vector>

#include "layout.h"

namespace headwater {

// The format that a matrix of this type is packed in: itself where there are kernels for it. Q4_K
// becomes Q4_1, which loses only what float16 cannot hold of a scale or minimum, and Q5_0 becomes
// Q8_0 as it is; Q5_1, Q5_K and Q6_K become Q8_0, their elements rounded again to 8 bits a block of
// 32.
WeightType packed_type(WeightType source);

// A checkpoint row's bytes; `cols` a multiple of the type's block.
size_t source_row_bytes(WeightType type, int cols);

// A row of `cols` elements in the checkpoint form of packed_type(type). Only for types that differ
// from it.
void convert_row(WeightType type, const uint8_t* row, int cols, uint8_t* out);

}  // namespace headwater
