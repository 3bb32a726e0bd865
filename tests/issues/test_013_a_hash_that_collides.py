"""GHSA-rm76-4mrf-v9r8: a collision of page hashes served one company's pages to another. Here
tokens decide, so a hash of 8 bits must change no answer."""

import random

import pytest

from prefix_cache import evicted
from prefix_cache.cache import PrefixCache
from prefix_cache.eviction import ExpectedReuse
from tests.prefix_cache.oracle import Server, namespace


def test_a_hash_of_eight_bits_makes_no_wrong_match(monkeypatch: pytest.MonkeyPatch) -> None:
    good = evicted.prefix_hash
    monkeypatch.setattr(evicted, "prefix_hash", lambda *prefix: good(*prefix) & 0xFF or 1)
    rng = random.Random(13)
    server = Server(PrefixCache(40, 4, ExpectedReuse(4)), 4, 40)
    names = [namespace("a"), namespace("b")]
    for _ in range(5000):
        name = rng.choice(names)
        tokens = [rng.randint(0, 2) for _ in range(rng.randint(1, 40))]
        sequence = server.start(name, tokens)
        pages, found = sequence.table.pages, sequence.table.num_tokens
        for position in range(found):  # what is there is what these tokens make
            slot = server.slots[pages[position // 4]][position % 4]
            assert slot == (name, *tokens[: position + 1])
        if found < len(tokens):
            server.run(sequence, len(tokens), tail=True)
        server.release(sequence)
    server.check()
