"""vllm#44701: an adapter's name and a salt went untagged into one key, so that one matched the
other."""

import itertools
from dataclasses import fields

from prefix_cache.cache import PrefixCache
from prefix_cache.key import Namespace
from tests.engine.tiny import Driver, prompt, tiny_core
from tests.prefix_cache.oracle import Server

TOKENS = [1] * 9


def test_no_permutation_of_the_fields_finds_anothers_pages() -> None:
    values = ("m", "mode", "f16", "X", "", "X,", '"X"')
    names = [Namespace(*each) for each in itertools.permutations(values, len(fields(Namespace)))]
    names = names[::23]
    assert len(set(names)) == len(names) > 200
    server = Server(PrefixCache(3 * len(names), 4), 4, 3 * len(names))
    for name in names:
        sequence = server.start(name, TOKENS)
        assert sequence.table.num_tokens == 0
        server.run(sequence, len(TOKENS), tail=True)
        server.release(sequence)
    for name in names:
        assert server.start(name, TOKENS).table.num_tokens == len(TOKENS)


def test_a_salt_that_is_spelled_like_a_tenant_finds_nothing() -> None:
    run = Driver(tiny_core())
    tokens = prompt(3, 60)
    for tenant, salt in (("X", ""), ("", "X"), ("public", "X"), ("X", "X"), ("XX", "")):
        request_id = run.add(tokens, 2, tenant=tenant, salt=salt)
        run.run()
        started = run.answers[request_id].started
        assert started is not None and started.num_cached_tokens == 0
