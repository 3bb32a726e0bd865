"""Three that do not fit together, on the real model: all finish, hardly anything is done twice."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.conftest import Server, serve

PAGE = 16


def complete(server: Server, number: int, num_prompt: int, max_tokens: int) -> Any:
    """The choice of a greedy answer of exactly so many tokens to a prompt of exactly so many."""
    prompt = [1000 + (number * 977 + place * 31) % 5000 for place in range(num_prompt)]
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 1,
    }
    answer = server.http.post("/v1/completions", json=body).raise_for_status().json()
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == max_tokens
    return answer["choices"]


def test_three_whose_totals_exceed_the_pool_by_a_fifth() -> None:
    """After vllm-project/vllm#18115, where they preempted each other for ever."""
    # All are as quick as each other, so that none has ended when the pages run out.
    arguments = ("--kv-memory", "16MiB", "--max-context", "512", "--speculation", "off")
    with serve(*arguments) as server:
        each = int(1.2 * server.pool()["total"] * PAGE / 3)
        num_prompt, max_tokens = each // 3, each - each // 3
        alone = [complete(server, number, num_prompt, max_tokens) for number in range(3)]
        server.flush()
        before = server.pool()
        with ThreadPoolExecutor(3) as pool:
            work = (range(3), [num_prompt] * 3, [max_tokens] * 3)
            together = list(pool.map(complete, [server] * 3, *work))
        after = server.pool()
        assert together == alone
        assert after["num_preemptions"] > before["num_preemptions"]
        computed = after["num_computed_tokens"] - before["num_computed_tokens"]
        recomputed = computed - 3 * (num_prompt + max_tokens - 1)
        assert 0 <= recomputed <= 3 * num_prompt
        assert after["referenced"] == 0
