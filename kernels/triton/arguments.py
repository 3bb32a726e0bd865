"""Checks of what goes into a kernel, before anything is launched."""

import torch
import triton
from torch import Tensor

from kernels.contract import ContractError, KVDType

STORAGE = {
    KVDType.F32: torch.float32,
    KVDType.F16: torch.float16,
    KVDType.BF16: torch.bfloat16,
    KVDType.I8: torch.int8,
    KVDType.E4M3: torch.uint8,
    KVDType.E5M2: torch.uint8,
}
"""torch dtype of a pool's elements; 8-bit floats are bytes, converted by our own arithmetic, so
that every architecture and the interpreter do the same."""

COMPUTE = (torch.float16, torch.bfloat16, torch.float32)
"""dtypes of activations."""


def check(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise ContractError naming the argument unless it is a dense, 16-byte aligned tensor of that
    shape (-1 stands for any size) and one of the dtypes, where the interpreter or a GPU reads."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ContractError(
            f"{name}: dtype {str(tensor.dtype).removeprefix('torch.')}, not {wanted}"
        )
    given = tuple(tensor.shape)
    if len(given) != len(shape) or any(
        want not in (-1, have) for want, have in zip(shape, given, strict=True)
    ):
        raise ContractError(f"{name}: shape {given}, not {shape}")
    if not tensor.is_contiguous():
        raise ContractError(f"{name}: strides {tensor.stride()} are not contiguous")
    if tensor.data_ptr() % 16:
        raise ContractError(f"{name}: its memory is not aligned to 16 bytes")
    if tensor.device.type != ("cpu" if interpreted() else "cuda"):
        raise ContractError(f"{name}: lies on {tensor.device.type}, where kernels cannot read it")


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def upcast(dtype: torch.dtype) -> bool:
    """Whether matrix products of that dtype must be done in float32: the interpreter takes bfloat16
    operands of `tl.dot` for integers."""
    return interpreted() and dtype is torch.bfloat16
