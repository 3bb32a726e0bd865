"""Weights on the device, dequantised once into the dtype that the matrix products run in."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.contract import DecoderSpec, DecoderWeights, LayerWeights, Weight
from kernels.dequantise import dequantise


@dataclass(frozen=True, slots=True)
class TritonLayer:
    """One layer; projections of the same input are one matrix. Norms are float32."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class TritonModel:
    """`inv_freq`: float64 [half], what positions are multiplied with; a model without rotary
    positions has one angle of 0."""

    spec: DecoderSpec
    embedding: Tensor
    layers: tuple[TritonLayer, ...]
    final_norm: Tensor
    head: Tensor
    inv_freq: Tensor

    @property
    def weight_bytes(self) -> int:
        tensors = [self.embedding, self.final_norm, self.head]
        for layer in self.layers:
            tensors += [layer.attn_norm, layer.qkv, layer.o, layer.mlp_norm, layer.gate_up]
            optional = (layer.down, layer.qkv_bias, layer.q_norm, layer.k_norm, layer.o_bias)
            tensors += [tensor for tensor in optional if tensor is not None]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def load_model(
    spec: DecoderSpec, weights: DecoderWeights, dtype: torch.dtype, device: torch.device
) -> TritonModel:
    """Dequantise and upload. The weights must fit the spec (`check_weights`)."""

    def upload(*parts: Weight) -> Tensor:
        return torch.cat([_values(part).to(dtype) for part in parts]).to(device)

    def layer(one: LayerWeights) -> TritonLayer:
        biases = [
            np.zeros(weight.shape[0], dtype=np.float32) if bias is None else dequantise(bias)
            for weight, bias in ((one.q, one.q_bias), (one.k, one.k_bias), (one.v, one.v_bias))
        ]
        biased = any(bias is not None for bias in (one.q_bias, one.k_bias, one.v_bias))
        qkv_bias = torch.from_numpy(np.concatenate(biases)).to(dtype).to(device)
        return TritonLayer(
            attn_norm=_values(one.attn_norm).to(device),
            qkv=upload(one.q, one.k, one.v),
            qkv_bias=qkv_bias if biased else None,
            q_norm=None if one.q_norm is None else _values(one.q_norm).to(device),
            k_norm=None if one.k_norm is None else _values(one.k_norm).to(device),
            o=upload(one.o),
            o_bias=None if one.o_bias is None else upload(one.o_bias),
            mlp_norm=_values(one.mlp_norm).to(device),
            gate_up=upload(one.gate, one.up),
            down=upload(one.down),
        )

    embedding = upload(weights.embedding)
    return TritonModel(
        spec,
        embedding=embedding,
        layers=tuple(layer(one) for one in weights.layers),
        final_norm=_values(weights.final_norm).to(device),
        head=embedding if weights.head is None else upload(weights.head),
        inv_freq=torch.tensor(spec.rope_inv_freq or (0.0,), dtype=torch.float64, device=device),
    )


def _values(weight: Weight) -> Tensor:
    return torch.from_numpy(dequantise(weight))
