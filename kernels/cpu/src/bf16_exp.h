// exp(x) as the attention over bfloat16 pages computes it, on either instruction set: 2^n * p(f),
// n the nearest integer to x / ln 2 and f the rest. The weights are rounded to 8 bits afterwards,
// so a relative error of 7.5e-5 is enough.
#pragma once

namespace headwater::bf16_exp {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
constexpr float kLowest = -125.0f;     // 2^x below it counts as 0
constexpr float kC0 = 0.999928073f;
constexpr float kC1 = 0.693260986f;
constexpr float kC2 = 0.242611125f;
constexpr float kC3 = 0.0551716695f;

}  // namespace headwater::bf16_exp
