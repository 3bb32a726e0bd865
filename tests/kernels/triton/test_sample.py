"""Sampling on the device draws what the engine's sampler draws."""

import numpy as np
import pytest
import torch

from engine.types import SamplingParams
from kernels.contract import ContractError, Float32Array, StepLogits
from kernels.triton.sample import sample
from tests.engine.execution.sampling import sample as host_sample

PARAMS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 12, 0.8, 0.05),
)
"""Temperature, top-k, top-p and min-p."""


def params(row: int) -> SamplingParams:
    temperature, top_k, top_p, min_p = PARAMS[row % len(PARAMS)]
    seed = 0xFEDCBA9876543210 - row if row % 2 else row
    return SamplingParams(
        max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )


def drawn(logits: Float32Array, rows: list[SamplingParams], positions: list[int]) -> list[int]:
    tokens = torch.full((len(rows),), -7, dtype=torch.int32)
    seeds = np.array([one.seed for one in rows], dtype=np.uint64).view(np.int64)
    sample(
        torch.from_numpy(logits),
        torch.tensor([[one.temperature, one.top_p, one.min_p] for one in rows]).double(),
        torch.tensor([one.top_k for one in rows], dtype=torch.int32),
        torch.from_numpy(seeds),
        torch.tensor(positions, dtype=torch.int32),
        tokens,
    )
    return tokens.tolist()


def check(num_rows: int, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    # Rounded, so that ties are many; some tokens cannot be chosen.
    logits = rng.normal(0, 2, (num_rows, vocab_size)).round(1).astype(np.float32)
    logits[::3, : vocab_size // 4] = -np.inf
    rows = [params(row) for row in range(num_rows)]
    positions = list(range(100, 100 + num_rows))
    wanted = host_sample(StepLogits(logits), rows, positions)
    assert drawn(logits, rows, positions) == [one.token_id for one in wanted if one is not None]


def test_the_same_tokens_as_the_engine() -> None:
    check(len(PARAMS), 300)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_same_tokens_over_several_tiles() -> None:
    check(6 * len(PARAMS), 2500)


def test_rows_that_are_not_finite_give_no_token() -> None:
    logits = np.zeros((4, 40), dtype=np.float32)
    logits[0, 3] = np.nan
    logits[1, 3] = np.inf
    logits[2] = -np.inf
    logits[3, 7:] = -np.inf
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    assert drawn(logits, [greedy] * 4, [1] * 4) == [-1, -1, -1, 0]


def test_arguments_outside_the_contract_are_named() -> None:
    ints, longs = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    reals, logits = torch.ones(2, 3, dtype=torch.float64), torch.zeros(2, 8)
    with pytest.raises(ContractError, match="real_params: dtype float32"):
        sample(logits, reals.float(), ints, longs, ints, ints)
    with pytest.raises(ContractError, match="seeds: shape"):
        sample(logits, reals, ints, longs[:1].clone(), ints, ints)
