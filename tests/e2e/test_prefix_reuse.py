"""What the house is for: a common prefix is computed once, and nobody's answer changes by it."""

from functools import partial
from typing import TypeAlias

from tests.e2e.conftest import Server
from tests.e2e.conversations import at_once, cached_tokens, chat, system_prompt, text_of

PAGE = 16
Message: TypeAlias = dict[str, str]


def test_a_second_request_computes_only_its_tail(server: Server) -> None:
    system = system_prompt("harbour", 75)
    first = chat(server, system, "Which ship came first?")
    before = server.pool()["num_computed_tokens"]
    second = chat(server, system, "Which ship left last?")
    computed = server.pool()["num_computed_tokens"] - before
    prompt = second["usage"]["prompt_tokens"]
    assert prompt > 1500
    assert cached_tokens(first) == 0 or cached_tokens(first) < 64
    assert cached_tokens(second) > prompt - 20
    assert computed == prompt - cached_tokens(second) + second["usage"]["completion_tokens"] - 1


def test_agents_that_arrive_together_compute_their_prompt_once(server: Server) -> None:
    system = system_prompt("orchard", 40)
    before = server.pool()["num_computed_tokens"]
    answers = at_once([partial(chat, server, system, f"Tree {n}?") for n in range(8)])
    computed = server.pool()["num_computed_tokens"] - before
    prompts = [answer["usage"]["prompt_tokens"] for answer in answers]
    outputs = sum(answer["usage"]["completion_tokens"] for answer in answers)
    shared = min(prompts) - 32
    assert computed < shared + 8 * (64 + PAGE) + outputs
    assert sorted(cached_tokens(answer) >= shared - PAGE for answer in answers)[1:] == [True] * 7


def test_cold_and_warm_answers_are_equal(server: Server) -> None:
    # A namespace of its own: pages that a lane of another test holds by a lease outlive a flush.
    ask = partial(
        chat,
        server,
        system_prompt("observatory", 12),
        "Name a star.",
        logprobs=True,
        top_logprobs=3,
        cache_salt="observatory",
    )
    cold = ask()
    warm = ask()
    server.flush()
    again = ask()
    assert cached_tokens(cold) == cached_tokens(again) == 0
    # The last token is computed again, for its logits.
    assert cached_tokens(warm) == warm["usage"]["prompt_tokens"] - 1
    assert cold["choices"] == warm["choices"] == again["choices"]


def test_eight_streams_at_once_each_equal_their_lone_run(server: Server) -> None:
    topics = ["rain", "iron", "bread", "chess", "moss", "glass", "tides", "owls"]
    system = system_prompt("library", 6)
    lone = [text_of(chat(server, system, f"Write about {t}.", max_tokens=40)) for t in topics]
    server.flush()
    together = at_once(
        [partial(chat, server, system, f"Write about {t}.", max_tokens=40) for t in topics]
    )
    assert [text_of(answer) for answer in together] == lone


def test_another_salt_shares_nothing(server: Server) -> None:
    system = system_prompt("vault", 10)
    chat(server, system, "Open.")
    assert cached_tokens(chat(server, system, "Open.", cache_salt="other")) == 0
    assert cached_tokens(chat(server, system, "Open.")) > 0


def test_a_history_sent_again_costs_only_its_new_tail(server: Server) -> None:
    """What the model said comes back as text and is found with the tokens it chose, whatever the
    dialect: sampled wildly, these are often not those that the text would be cut into."""
    http = server.http
    system = "You are the replay test. Ramble."

    def chat(history: list[Message]) -> tuple[str, int, int]:
        body = {"model": "default", "messages": history, "temperature": 1.3, "max_tokens": 40}
        answer = http.post("/v1/chat/completions", json={**body, "seed": 3}).raise_for_status()
        usage = answer.json()["usage"]
        text = answer.json()["choices"][0]["message"]["content"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return text, cached, usage["total_tokens"]

    def messages(history: list[Message]) -> tuple[str, int, int]:
        body = {"model": "default", "messages": history, "temperature": 1.0, "max_tokens": 40}
        answer = http.post("/v1/messages", json={**body, "system": system}).raise_for_status()
        usage = answer.json()["usage"]
        read, output = usage["cache_read_input_tokens"], usage["output_tokens"]
        total = usage["input_tokens"] + usage["cache_creation_input_tokens"] + read + output
        return answer.json()["content"][0]["text"], read, total

    first: list[Message] = [{"role": "system", "content": system}]
    for ask, history in ((chat, first), (messages, [])):
        before = 0
        for turn in range(4):
            history.append({"role": "user", "content": f"Tell me something, part {turn}."})
            text, cached, total = ask(history)
            if before:
                assert cached == before - 1, (ask.__name__, turn)  # all but the last, unread token
            before = total
            history.append({"role": "assistant", "content": text})
