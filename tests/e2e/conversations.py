"""Prompts and requests that the end-to-end tests share."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tests.e2e.conftest import Server

T = TypeVar("T")


def system_prompt(subject: str, num_rules: int) -> str:
    """About 20 tokens a rule, sharing nothing with another subject's prompt."""
    rules = [
        f"{subject} rule {n}: read line {n} of the {subject} manual, then answer in one sentence."
        for n in range(num_rules)
    ]
    return "\n".join([f"You work in the {subject} department.", *rules])


def chat(server: Server, system: str, user: str, **options: Any) -> dict[str, Any]:
    """One unstreamed greedy answer."""
    body = {
        "model": "default",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "temperature": 0,
        "max_tokens": 16,
        **options,
    }
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def text_of(answer: dict[str, Any]) -> str:
    content = answer["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def at_once(calls: list[Callable[[], T]]) -> list[T]:
    """Run all calls at the same moment, each on a thread; their results in order."""
    gate = threading.Barrier(len(calls))

    def wait_and_call(call: Callable[[], T]) -> T:
        gate.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(wait_and_call, calls))
