"""Batches from step to step are those that each step alone would make."""

import random

import numpy as np

from engine.execution.batch_planner import BatchPlanner
from engine.execution.forward_batch import SequenceChunk, plan_batch
from kernels.contract import ForwardBatch

PAGE = 4
ARRAYS = (
    "token_ids",
    "positions",
    "cu_seqlens_q",
    "seq_lens",
    "page_table",
    "slot_mapping",
    "logit_rows",
)


def assert_same(batch: ForwardBatch, expected: ForwardBatch) -> None:
    for name in ARRAYS:
        found, wanted = getattr(batch, name), getattr(expected, name)
        assert found.tolist() == wanted.tolist(), name
        assert found.dtype == wanted.dtype and found.flags.c_contiguous
    assert (batch.num_top, batch.groups) == (expected.num_top, expected.groups)


class Sequence:
    """One of a pool whose pages all sequences take in a random order."""

    def __init__(self, rng: random.Random, shared: list[int], num_tokens: int) -> None:
        self.rng = rng
        self.tokens = np.array([rng.randrange(1000) for _ in range(400)], dtype=np.int32)
        self.pages = shared[: num_tokens // PAGE]
        self.end = num_tokens

    def next(self, length: int = 1) -> SequenceChunk:
        start, self.end = self.end, self.end + length
        late = self.rng.random() < 0.5  # the batch before this one was made ahead
        if start > PAGE and start % PAGE == late and self.rng.random() < 0.3:
            self.pages[start // PAGE - 1] = self.rng.randrange(10_000)  # found in the cache
        while len(self.pages) * PAGE < self.end:
            self.pages.append(self.rng.randrange(10_000))
        valid = start + length if self.rng.random() < 0.03 else start
        wanted = range(self.end - 1, self.end) if self.rng.random() < 0.95 else range(0)
        pages = np.array([*self.pages, 77], dtype=np.int64)
        return SequenceChunk(self.tokens, start, self.end, valid, pages, wanted, self)

    def guess(self) -> SequenceChunk:
        """A token that is not the next one."""
        wanted = range(self.end, self.end + 1)
        pages = np.array([*self.pages, 78], dtype=np.int64)
        return SequenceChunk(self.tokens, self.end, self.end + 1, self.end, pages, wanted, self)


def test_any_course_of_steps_gives_the_batches_of_its_steps() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        planner = BatchPlanner(PAGE)
        shared = [rng.randrange(10_000) for _ in range(8)]
        running: list[Sequence] = []
        kept: list[tuple[ForwardBatch, ForwardBatch]] = []
        for _ in range(60):
            if not running or rng.random() < 0.1:
                running.append(Sequence(rng, shared, rng.choice([0, 5, 16, 17, 30])))
            elif rng.random() < 0.05:
                running.pop(rng.randrange(len(running)))
            elif rng.random() < 0.05:
                rng.shuffle(running)
            if not running:
                continue
            long = rng.random() < 0.1
            chunks = [s.next(rng.randint(1, 6) if long else 1) for s in running]
            if rng.random() < 0.2:
                planner.plan([s.guess() for s in running], 1)  # a step that does not come
            num_top = rng.choice([0, 1, 1, 1])
            batch = planner.plan(chunks, num_top)
            kept.append((batch, plan_batch(chunks, PAGE, num_top)))
        for batch, expected in kept:
            assert_same(batch, expected)


def test_a_sequence_that_took_the_place_of_another_has_its_own_pages() -> None:
    planner = BatchPlanner(PAGE)
    tokens = np.arange(20, dtype=np.int32)
    one, other = object(), object()
    planner.plan([SequenceChunk(tokens, 9, 10, 9, [1, 2, 3], range(9, 10), one)], 1)
    batch = planner.plan([SequenceChunk(tokens, 10, 11, 10, [4, 5, 6], range(10, 11), other)], 1)
    assert batch.page_table.tolist() == [[4, 5, 6]]
    nameless = [SequenceChunk(tokens, n, n + 1, n, [n, 5, 6], range(n, n + 1)) for n in (9, 10)]
    assert [planner.plan([each], 1).page_table[0, 0] for each in nameless] == [9, 10]
