"""What a request does to its logits before a token is drawn, in the order `SamplingParams` says."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from engine.execution.grammar import TokenMatcher
from engine.types import SamplingParams
from kernels.contract import Float32Array, Int32Array

_FIRST_SIZE = 64


def changes_logits(sampling: SamplingParams) -> bool:
    """Whether the parameters do anything to logits."""
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.min_tokens
    )


class LogitRules:
    """Penalties, biases and bans of one request, with the counts of its tokens.

    A row's result depends on the row, the parameters and the request's own tokens alone. It costs
    a copy of the row and work for the distinct tokens of the request, not for the vocabulary.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Int32Array,
        end_token_ids: Collection[int],
        matcher: TokenMatcher | None = None,
    ) -> None:
        """`end_token_ids`: the model's own tokens that would end this request. `matcher`: the
        grammar that the output must match."""
        self.matcher = matcher
        self._sampling = sampling
        repeats = sampling.repetition_penalty != 1.0
        self._repeated = _Counts(np.unique(prompt) if repeats else None)
        self._output = _Counts()
        self._num_output = 0
        bias = dict(sampling.logit_bias)
        self._bias_ids = np.array(list(bias), dtype=np.intp)
        self._biases = np.array(list(bias.values()), dtype=np.float32)
        self._allowed = np.array(sampling.allowed_token_ids, dtype=np.intp)
        self._ends = np.array(sorted({*end_token_ids, *sampling.stop_token_ids}), dtype=np.intp)

    def forced(self) -> list[int]:
        """Tokens that `apply` would leave alone, one after another, whatever the rows."""
        if self.matcher is None or self._allowed.size:
            return []
        return self.matcher.forced()

    def note(self, token_id: int) -> None:
        """Count a token of the output."""
        self._num_output += 1
        if self.matcher is not None:
            self.matcher.accept(token_id)
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0:
            self._repeated.add(token_id)
        if sampling.frequency_penalty or sampling.presence_penalty:
            self._output.add(token_id)

    def apply(self, row: Float32Array) -> Float32Array:
        """A changed copy of float32 [vocab]; what is ruled out is -inf in it."""
        row = self._penalised(row)
        if self._bias_ids.size:
            row[self._bias_ids] += self._biases
        if self._allowed.size:
            only = np.full_like(row, -np.inf)
            only[self._allowed] = row[self._allowed]
            row = only
        if self.matcher is not None:
            self.matcher.mask(row)
        return row

    def forbid_end(self, row: Float32Array) -> None:
        """Rule out, in place, what would end a request that is too short to end, unless that
        leaves nothing. Comes after every other ban."""
        if self._num_output >= self._sampling.min_tokens or not self._ends.size:
            return
        kept = row[self._ends].copy()
        row[self._ends] = -np.inf
        if row.max() == -np.inf:
            row[self._ends] = kept

    def _penalised(self, row: Float32Array) -> Float32Array:
        row = row.copy()
        sampling = self._sampling
        if (ids := self._repeated.ids).size:
            values = row[ids]
            factor = np.float32(sampling.repetition_penalty)
            row[ids] = np.where(values > 0, values / factor, values * factor)
        if (ids := self._output.ids).size:
            row[ids] -= np.float32(sampling.frequency_penalty) * self._output.counts
            row[ids] -= np.float32(sampling.presence_penalty)
        return row


class _Counts:
    """How often each token was added, as parallel arrays of the distinct ones."""

    __slots__ = ("_counts", "_ids", "_place")

    def __init__(self, distinct: Int32Array | None = None) -> None:
        """`distinct` tokens were added once each."""
        ids = np.empty(0, dtype=np.int32) if distinct is None else distinct
        self._place = {token_id: place for place, token_id in enumerate(ids.tolist())}
        room = np.zeros(_FIRST_SIZE, dtype=np.intp)
        self._ids = np.concatenate([ids.astype(np.intp), room])
        self._counts = np.ones(self._ids.size, dtype=np.float32)

    @property
    def ids(self) -> NDArray[np.intp]:
        """intp [distinct]."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Float32Array:
        """float32 [distinct]."""
        return self._counts[: len(self._place)]

    def add(self, token_id: int) -> None:
        place = self._place.get(token_id)
        if place is not None:
            self._counts[place] += 1
            return
        place = self._place[token_id] = len(self._place)
        if place == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.ones_like(self._counts)])
        self._ids[place] = token_id
