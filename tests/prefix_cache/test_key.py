"""Namespaces keep apart what must not be shared, whichever field says so."""

from dataclasses import fields, replace
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from prefix_cache.cache import PrefixCache
from prefix_cache.key import Namespace
from tests.prefix_cache.oracle import Server, as_array

NAMES = [field.name for field in fields(Namespace)]
PLAIN = Namespace(model_digest="m", numeric_mode="exact", kv_dtype="f16", tenant="t")


def test_an_adapter_is_not_a_salt() -> None:
    """vllm-project/vllm#44701: adapter "COLLIDE" and salt "COLLIDE" have nothing in common."""
    server = Server(PrefixCache(8, 4), 4, 8)
    sequence = server.start(replace(PLAIN, adapter="COLLIDE"), [1, 2, 3, 4, 5])
    server.run(sequence, 5, tail=True)
    for other in (replace(PLAIN, salt="COLLIDE"), PLAIN):
        assert server.cache.peek(other, as_array([1, 2, 3, 4, 5])) == 0
    assert server.cache.peek(replace(PLAIN, adapter="COLLIDE"), as_array([1, 2, 3, 4, 5])) == 5


@given(st.lists(st.text("ab", max_size=2), min_size=len(NAMES), max_size=len(NAMES)))
def test_permuted_fields_are_different_namespaces(values: list[str]) -> None:
    orders = set(permutations(values))
    cache = PrefixCache(1, 1)
    (first, *others) = sorted(orders)
    stored = Namespace(**dict(zip(NAMES, first, strict=True)))
    table = cache.match(stored, as_array([1])).table
    cache.extend(table, 1)
    cache.publish(table, as_array([1]), 1)
    assert cache.peek(stored, as_array([1])) == 1
    for values_ in others:
        other = Namespace(**dict(zip(NAMES, values_, strict=True)))
        assert cache.peek(other, as_array([1])) == 0
