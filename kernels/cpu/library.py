"""The C ABI of the CPU kernels, as ctypes sees it (src/abi.cpp, src/step.h, src/model.h)."""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

from kernels.contract import BackendUnavailable

ABI_VERSION = 6
INVALID = -2
"""The status of a step whose batch is outside the contract."""


class SourceWeight(Structure):
    """A weight in its checkpoint form; `data` is null where the model has none."""

    _fields_ = (
        ("type", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("reserved", c_int32),
        ("data", c_void_p),
    )


class Spec(Structure):
    """contract.DecoderSpec."""

    _fields_ = (
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab_size", c_int32),
        ("num_rope", c_int32),
        ("norm_eps", c_float),
        ("rope_scale", c_float),
        ("rope_inv_freq", POINTER(c_double)),
        ("sliding_window", POINTER(c_int32)),
    )


class Batch(Structure):
    """contract.ForwardBatch; `numbers` are its arrays one after another."""

    _fields_ = (
        ("num_tokens", c_int32),
        ("num_seqs", c_int32),
        ("max_pages", c_int32),
        ("num_rows", c_int32),
        ("num_top", c_int32),
        ("num_groups", c_int32),
        ("num_numbers", c_int32),
        ("numbers", c_void_p),
    )


class Result(Structure):
    """Where a step's logits go."""

    _fields_ = (
        ("full", c_void_p),
        ("top_ids", c_void_p),
        ("top_logits", c_void_p),
        ("logsumexp", c_void_p),
    )


_SIGNATURES = {
    "hw_open": ([c_int32] * 3, c_void_p),
    "hw_isa": ([c_void_p], ctypes.c_char_p),
    "hw_close": ([c_void_p], None),
    "hw_load": ([c_void_p, POINTER(Spec), POINTER(SourceWeight)], c_void_p),
    "hw_free_model": ([c_void_p], None),
    "hw_model_bytes": ([c_void_p], c_int64),
    "hw_alloc_kv": ([c_int32] * 6, c_void_p),
    "hw_free_kv": ([c_void_p], None),
    "hw_copy_pages": ([c_void_p, c_void_p, c_void_p, c_int32], None),
    "hw_export_page": ([c_void_p, c_int32, c_void_p], None),
    "hw_import_page": ([c_void_p, c_int32, c_void_p], None),
    "hw_prepare": ([c_void_p, c_void_p, c_void_p, POINTER(Batch), POINTER(Result)], c_int32),
    "hw_start": ([c_void_p, c_void_p], c_int32),
    "hw_finish": ([c_void_p], None),
    "hw_multiply": ([c_void_p, c_int32, c_int64], c_int64),
    "hw_read": ([c_void_p, c_void_p, c_int64], ctypes.c_uint64),
}


def open_library(path: Path) -> ctypes.CDLL:
    """Load and bind the library. Raises BackendUnavailable where it is not a library of ours."""
    try:
        library = ctypes.CDLL(str(path))
        version = library.hw_abi_version()
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(
            f"The cpu backend's library {path} cannot be loaded ({error}): delete it, and it is "
            "compiled anew."
        ) from error
    if version != ABI_VERSION:
        raise BackendUnavailable(
            f"The cpu backend's library {path} speaks version {version} of its interface, not "
            f"{ABI_VERSION}: delete it, and it is compiled anew."
        )
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = result
    return library
