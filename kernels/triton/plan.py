"""Which program attends to what: a batch becomes the work items of the attention kernels.

Made once per step and window on the host, used by all layers (the plan/run split of FlashInfer,
arXiv:2501.01005). A single new token goes to `decode_attention` whatever else is in the batch, and
where its keys are split depends on its own length alone: that makes its result independent of the
batch. Prefix groups move splits, so a deterministic plan is made without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kernels.contract import ForwardBatch, Int32Array, PrefixGroup


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How keys are shared out over programs.

    keys: what one program reads of a token's own keys, or of a shared prefix, at least.
    chunk_keys: the same for a tile of a chunk, whose states are larger.
    most: a stretch is cut into no more splits than this; they grow instead.
    few_tiles: a chunk of more tiles fills the machine and is not split over its keys.
    shared_keys: a shorter shared prefix is not worth a kernel of its own.
    """

    keys: int = 512
    chunk_keys: int = 1024
    most: int = 32
    few_tiles: int = 4
    shared_keys: int = 256

    def ranges(self, begin: int, end: int, least: int) -> list[tuple[int, int]]:
        """begin..end in stretches of `least` keys, or so many times its double as it takes."""
        size = least
        while size * self.most < end - begin:
            size *= 2
        return [(at, min(at + size, end)) for at in range(begin, end, size)]


DEFAULT_SPLITS: Final = SplitRule()


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Work items as the kernels say. Tokens have `num_states` partial states together, those of one
    token in a row from first_states[token] on; it is -1 for a token that has none."""

    decode: Int32Array
    prefill: Int32Array
    cascade: Int32Array
    members: Int32Array
    first_states: Int32Array
    merge: Int32Array
    num_states: int


def plan_attention(
    batch: ForwardBatch,
    page_size: int,
    window: int,
    tokens_per_tile: int,
    groups: Sequence[PrefixGroup] = (),
    splits: SplitRule = DEFAULT_SPLITS,
) -> AttentionPlan:
    """The plan of a layer with that window (0: none); `groups` must be empty for a window.

    tokens_per_tile: how many tokens fill the rows of a prefill or cascade tile.
    """
    planner = _Planner(batch, page_size, window, tokens_per_tile, splits)
    groups = [group for group in groups if group.num_pages * page_size >= splits.shared_keys]
    shared = np.zeros(batch.seq_lens.size, dtype=np.int64)
    for group in groups:
        shared[list(group.sequences)] = group.num_pages * page_size
    for sequence in range(batch.seq_lens.size):
        planner.add_sequence(sequence, int(shared[sequence]))
    for group in groups:
        planner.add_group(group)
    return planner.plan()


class _Planner:
    def __init__(
        self,
        batch: ForwardBatch,
        page_size: int,
        window: int,
        tokens_per_tile: int,
        splits: SplitRule,
    ) -> None:
        self._batch = batch
        self._page_size = page_size
        self._window = window
        self._tile = tokens_per_tile
        self._splits = splits
        self._decode: list[tuple[int, ...]] = []
        self._prefill: list[tuple[int, ...]] = []
        self._cascade: list[tuple[int, ...]] = []
        self._members: list[int] = []
        self._first_states = np.full(batch.token_ids.size, -1, dtype=np.int32)
        self._merge: list[tuple[int, ...]] = []
        self._num_states = 0

    def add_sequence(self, sequence: int, shared: int) -> None:
        """Items of a sequence's own keys, those from `shared` on."""
        begin, end = self._batch.cu_seqlens_q[sequence : sequence + 2].tolist()
        seq_len = int(self._batch.seq_lens[sequence])
        num_before = len(self._splits.ranges(0, shared, self._splits.keys)) if shared else 0
        if end - begin == 1:
            low = max(self._first_key(seq_len - 1), shared)
            ranges = self._splits.ranges(low, seq_len, self._splits.keys)
            state = self._states(begin, num_before + len(ranges)) + num_before
            for offset, (low, high) in enumerate(ranges):
                self._decode.append((begin, sequence, low, high, state + offset))
            return
        few = end - begin <= self._splits.few_tiles * self._tile
        least = self._splits.chunk_keys
        start = seq_len - (end - begin)
        for token in range(begin, end, self._tile):
            count = min(self._tile, end - token)
            low = max(self._first_key(start + token - begin), shared)
            high = start + token - begin + count
            ranges = self._splits.ranges(low, high, least) if few else [(low, high)]
            split = -1
            if num_before + len(ranges) > 1:
                split = num_before
                for one in range(token, token + count):
                    self._states(one, num_before + len(ranges))
            for low, high in ranges:
                self._prefill.append((token, count, sequence, low, high, split))
                split += 1

    def add_group(self, group: PrefixGroup) -> None:
        """Items of the keys that a group shares."""
        cu = self._batch.cu_seqlens_q.tolist()
        first = len(self._members)
        for sequence in group.sequences:
            self._members += range(cu[sequence], cu[sequence + 1])
        shared = group.num_pages * self._page_size
        ranges = self._splits.ranges(0, shared, self._splits.keys)
        for at in range(first, len(self._members), self._tile):
            count = min(self._tile, len(self._members) - at)
            for split, (low, high) in enumerate(ranges):
                self._cascade.append((at, count, group.sequences[0], low, high, split))

    def plan(self) -> AttentionPlan:
        # Long tiles first, so that short ones fill the gaps at the end.
        self._prefill.sort(key=lambda item: item[3] - item[4])
        return AttentionPlan(
            decode=_table(self._decode, 5),
            prefill=_table(self._prefill, 6),
            cascade=_table(self._cascade, 6),
            members=np.array(self._members, dtype=np.int32),
            first_states=self._first_states,
            merge=_table(self._merge, 3),
            num_states=self._num_states,
        )

    def _first_key(self, position: int) -> int:
        """The first key that a token sees, or one before it where a page begins."""
        if not self._window:
            return 0
        return max(0, position - self._window + 1) // self._page_size * self._page_size

    def _states(self, token: int, count: int) -> int:
        """The first of `count` new states of a token."""
        first = self._num_states
        self._first_states[token] = first
        self._merge.append((token, first, count))
        self._num_states += count
        return first


def _table(rows: list[tuple[int, ...]], width: int) -> Int32Array:
    return np.array(rows, dtype=np.int32).reshape(-1, width)
