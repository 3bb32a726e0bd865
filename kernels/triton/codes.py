"""Elements of pages: 8-bit codes to numbers and back. Helpers inlined into kernels.

An e4m3 or e5m2 code becomes the upper bits of a float16, exactly, subnormals included; for e4m3
that is the number divided by 2^8, which `code_unit` gives back through the scale.
"""

import triton
import triton.language as tl


@triton.jit
def code_unit(KV: tl.constexpr) -> tl.constexpr:
    """What a slot's scale is multiplied with."""
    return 256.0 if KV == "e4m3" else 1.0


@triton.jit
def widen(codes: tl.tensor, KV: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Stored elements as `dtype`, before their scale."""
    if KV == "e5m2":
        codes = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif KV == "e4m3":
        bits = codes.to(tl.uint16)
        codes = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return codes.to(dtype)


@triton.jit
def narrow(x: tl.tensor, KV: tl.constexpr) -> tl.tensor:
    """Codes of float32 numbers within the largest code, rounded to nearest: halves up for int8,
    to even for floats."""
    if KV == "i8":
        return tl.floor(x + 0.5).to(tl.int8)
    elif KV == "e4m3":
        return _float_code(x, 20, 2.0**-120)
    else:
        return _float_code(x, 21, 2.0**-112)


@triton.jit
def _float_code(x: tl.tensor, DROPPED: tl.constexpr, REBIAS: tl.constexpr) -> tl.tensor:
    """Sign, exponent and the upper mantissa bits of a float32 whose exponent is moved by `REBIAS`
    to the bias of the narrow type: below its range float32 is subnormal too, so one rounding of
    the bits rounds numbers of both kinds."""
    bits = (tl.abs(x) * REBIAS).to(tl.uint32, bitcast=True)
    odd = (bits >> DROPPED) & 1
    code = (bits + ((1 << (DROPPED - 1)) - 1) + odd) >> DROPPED
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)
