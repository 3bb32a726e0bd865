"""Pages in device memory."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contract import ContractError, KVDType, KVLayout
from kernels.triton.arguments import STORAGE


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's keys and values inside a pool: element (page, head, slot, i) of `keys` lies
    page · page_stride + (head · page_size + slot) · head_dim + i elements on; scales alike with
    `scale_stride` and without the last dimension. Where the dtype has no scales, the scale tensors
    are stand-ins that are never read."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    value_scales: Tensor
    page_stride: int
    scale_stride: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDType


@dataclass(frozen=True)
class TritonKVPool:
    """`pages` is [num_pages, num_layers, K|V, num_kv_heads, page_size, head_dim]; `scales`, float32
    without the last dimension, is None where the dtype has none."""

    layout: KVLayout
    pages: Tensor
    scales: Tensor | None = None

    @classmethod
    def allocate(cls, layout: KVLayout, num_pages: int, device: torch.device) -> "TritonKVPool":
        """Contents undefined. Raises ContractError for a shape the kernels cannot read and
        MemoryError."""
        if layout.head_dim * layout.dtype.itemsize % 16:
            raise ContractError(f"head_dim: {layout.head_dim} elements are no multiple of 16 bytes")
        shape = (
            *(num_pages, layout.num_layers, 2),
            *(layout.num_kv_heads, layout.page_size, layout.head_dim),
        )
        try:
            pages = torch.empty(shape, dtype=STORAGE[layout.dtype], device=device)
            if not layout.dtype.scaled:
                return cls(layout, pages)
            return cls(layout, pages, torch.empty(shape[:-1], dtype=torch.float32, device=device))
        except RuntimeError as error:
            raise MemoryError(f"no memory for {num_pages} pages: {error}") from error

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What a page consists of, in the order of its export."""
        return (self.pages,) if self.scales is None else (self.pages, self.scales)

    @functools.cached_property
    def layers(self) -> tuple[LayerPages, ...]:
        """The pages layer by layer."""
        return tuple(self._layer(layer) for layer in range(self.layout.num_layers))

    def _layer(self, layer: int) -> LayerPages:
        pages = self.pages[:, layer]
        scales = pages if self.scales is None else self.scales[:, layer]
        return LayerPages(
            keys=pages[:, 0],
            values=pages[:, 1],
            key_scales=scales[:, 0],
            value_scales=scales[:, 1],
            page_stride=pages.stride(0),
            scale_stride=0 if self.scales is None else scales.stride(0),
            num_pages=self.num_pages,
            page_size=self.layout.page_size,
            num_kv_heads=self.layout.num_kv_heads,
            head_dim=self.layout.head_dim,
            dtype=self.layout.dtype,
        )
