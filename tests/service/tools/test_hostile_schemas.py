"""Schemas that try to hurt: each is refused with a pointer or compiles, within bounded CPU.

The kinds of vllm-project/vllm#17313, #17248, #19270 and text-generation-inference#2280.
"""

import random
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from engine.scripted import text_script
from tests.service.calls import CHAT, ask, body
from tests.service.conftest import LiveServer, run_server
from tests.service.tools.hostile import FAMILIES, Family

PATH = "response_format.json_schema.schema"
NUM_EACH = 20
STARTING_S = 1.5
"""CPU that the helper's interpreter may take before its own limit of a second counts."""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with run_server(text_script("{}")) as running:
        yield running


def tried(server: LiveServer, schema: Any) -> int:
    """The status of an answer to be written under the schema, which is refused where it stands."""
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = server.http.post(CHAT, json=body(response_format=asked))
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert error["param"].startswith(PATH), error
        assert error["message"]
    return answer.status_code


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.__name__)
def test_a_hostile_schema_is_refused_or_compiles(server: LiveServer, family: Family) -> None:
    tried(server, family(random.Random(1)))
    ask(server)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.__name__)
def test_two_hundred_hostile_schemas(server: LiveServer, family: Family) -> None:
    for seed in range(NUM_EACH):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        tried(server, family(random.Random(seed)))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert spent < 1.0 + STARTING_S, (seed, spent)
    ask(server)
