"""The engine on the Triton backend, under the interpreter: cold, chunked, warm and side by side."""

from engine.types import SamplingParams
from kernels.registry import Selection, select_backend
from kernels.triton.backend import TritonBackend
from tests.engine.tiny import PAGE, Driver, prompt, tiny_core

GREEDY = SamplingParams(4, ignore_eos=True)


def answers(selection: Selection, token_budget: int) -> list[list[int]]:
    """Of two prompts that begin alike, together, and of the first again, from the cache."""
    run = Driver(tiny_core(selection=selection, token_budget=token_budget))
    shared = prompt(1, PAGE + 3)
    prompts = (shared + prompt(2, 5), shared + prompt(3, 2))
    ids = [run.add(tokens, sampling=GREEDY) for tokens in prompts]
    run.run()
    ids.append(run.add(prompts[0], sampling=GREEDY))
    run.run()
    run.assert_idle()
    return [run.answers[request_id].tokens for request_id in ids]


def test_the_engines_tokens_are_the_references() -> None:
    wanted = answers(select_backend("reference", threads=1, exact=False), 64)
    assert wanted[0] == wanted[2]
    for budget in (64, PAGE):
        backend = TritonBackend(exact=True)
        assert answers(Selection(backend, "triton", "a test"), budget) == wanted
