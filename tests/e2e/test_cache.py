"""The cache by hand, on the real model: explained, warmed, leased."""

import json
import time
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.conftest import Server, serve
from tests.e2e.conversations import cached_tokens, chat, system_prompt

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    answer = server.http.post(f"/v1/cache/{path}", json=body)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def conversation(system: str, *turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    said = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    return [{"role": "system", "content": system}, *said]


def end_all_leases(server: Server) -> None:
    """Of the server's other tests: turns on WebSockets leave leases of minutes."""
    for lease in server.http.get("/v1/cache/leases").json()["data"]:
        server.http.delete(f"/v1/cache/leases/{lease['id']}").raise_for_status()
    assert server.pool()["pinned"] == 0


def explained(server: Server, **body: Any) -> dict[str, Any]:
    cache: dict[str, Any] = post(server, "explain", **body)["cache"]
    return cache


def test_an_answer_says_where_and_why_it_missed(server: Server) -> None:
    system = system_prompt("pier", 12)
    first = chat(server, system, "How deep is the water?", cache_report=True)["usage"]["cache"]
    assert first["cached_tokens"] + first["missed_tokens"] > 200
    assert first["reason"] in ("cold", "diverged")
    report = chat(server, system, "How deep is a well?", cache_report=True)["usage"]["cache"]
    divergence = report["first_divergence"]
    assert report["reason"] == "diverged"
    assert report["cached_tokens"] == report["device_tokens"] == divergence["position"]
    assert divergence["section"] == {"type": "message", "index": 1, "name": "user"}
    assert divergence["before"].endswith("How deep is")
    assert divergence["prompt"].startswith(" a well?")
    assert divergence["stored"].startswith(" the water?")
    assert "cache" not in chat(server, system, "How deep?")["usage"]


def test_an_explanation_is_what_the_request_then_gets_and_changes_nothing(server: Server) -> None:
    system = system_prompt("attic", 8)
    chat(server, system, "What is up there?")
    messages = conversation(system, "What is down there?")
    before = server.pool()
    told = [explained(server, messages=messages) for _ in range(2)]
    after = server.pool()
    assert told[0] == told[1]
    assert {k: after[k] for k in ("num_computed_tokens", "cached", "referenced")} == {
        k: before[k] for k in ("num_computed_tokens", "cached", "referenced")
    }
    got = chat(server, system, "What is down there?", cache_report=True)["usage"]["cache"]
    assert got == told[0]


def test_history_told_otherwise_than_it_was_said_is_called_so(server: Server) -> None:
    system = system_prompt("press", 8)
    said = chat(server, system, "Say a line.", max_tokens=24)["choices"][0]["message"]["content"]
    again = conversation(system, "Say a line.", said, "And another.")
    assert explained(server, messages=again)["reason"] is None
    cut = conversation(system, "Say a line.", said[: len(said) // 2] + "!", "And another.")
    report = explained(server, messages=cut)
    assert report["reason"] == "history_rewritten"
    assert report["first_divergence"]["section"]["index"] == 2


def test_a_changed_tool_is_named(server: Server) -> None:
    messages = conversation(system_prompt("sky", 4), "Rain?")
    post(server, "prewarm", messages=messages, tools=[WEATHER])
    changed = json.loads(json.dumps(WEATHER).replace("of a city", "of a town"))
    report = explained(server, messages=messages, tools=[changed])
    assert report["reason"] == "diverged"
    assert report["first_divergence"]["section"]["name"] == "get_weather"


def test_flushed_cold_short_salted(server: Server) -> None:
    words = "zebra quince lantern " * 30
    assert explained(server, prompt=words)["reason"] == "cold"
    assert explained(server, prompt="Hm")["reason"] in ("too_short", "diverged", None)
    post(server, "prewarm", prompt=words)
    assert explained(server, prompt=words)["reason"] is None
    assert explained(server, prompt=words, cache_salt="s")["reason"] == "namespace"
    server.flush()
    assert explained(server, prompt=words)["reason"] == "evicted"


def test_what_is_warmed_is_found(server: Server) -> None:
    system = system_prompt("stove", 20)
    warmed = post(server, "prewarm", messages=conversation(system, "Hot?"))
    assert warmed["computed_tokens"] == warmed["prompt_tokens"] - warmed["cached_tokens"]
    assert warmed["lease"] is None
    assert cached_tokens(chat(server, system, "Hot?")) == warmed["prompt_tokens"] - 1


def test_a_lease_holds_against_a_flush_until_it_is_ended(server: Server) -> None:
    end_all_leases(server)
    messages = conversation(system_prompt("vault door", 10), "Shut?")
    lease = post(server, "leases", messages=messages, ttl="10m")
    assert lease["tokens"] == lease["tokens_asked"] // 16 * 16
    assert 590 < lease["remaining_seconds"] <= lease["ttl_seconds"] == 600
    server.flush()
    assert server.pool()["pinned"] == lease["tokens"] // 16
    assert explained(server, messages=messages)["cached_tokens"] == lease["tokens"]
    listed = server.http.get("/v1/cache/leases").json()["data"]
    assert [each["id"] for each in listed] == [lease["id"]]
    longer = post(server, f"leases/{lease['id']}", ttl=3600)
    assert longer["remaining_seconds"] > 3590
    assert server.http.delete(f"/v1/cache/leases/{lease['id']}").json()["deleted"] is True
    assert server.http.delete(f"/v1/cache/leases/{lease['id']}").status_code == 404
    assert server.pool()["pinned"] == 0


def test_a_lease_ends_by_itself(server: Server) -> None:
    end_all_leases(server)
    lease = post(server, "leases", prompt="one two three four five six " * 10, ttl=0.5)
    assert lease["tokens"] > 16
    deadline_s = time.monotonic() + 20
    while server.pool()["pinned"]:
        assert time.monotonic() < deadline_s


def test_a_report_shows_the_leases_of_its_request_as_objects(server: Server) -> None:
    end_all_leases(server)
    text = "one two three four five six " * 10
    body = {"model": "default", "input": text, "max_output_tokens": 1, "cache_report": True}
    answer = server.http.post("/v1/responses", json={**body, "prompt_cache_retention": "24h"})
    (lease,) = answer.raise_for_status().json()["usage"]["cache"]["leases"]
    assert (lease["object"], lease["ttl_seconds"]) == ("cache.lease", 86_400)
    (listed,) = server.http.get("/v1/cache/leases").json()["data"]
    assert {**listed, "remaining_seconds": 0} == {**lease, "remaining_seconds": 0}
    end_all_leases(server)


def test_dialects_lease_what_they_ask_to_keep(server: Server) -> None:
    end_all_leases(server)
    system = system_prompt("cellar", 10)
    block = {"type": "text", "text": system, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"model": "default", "max_tokens": 4, "system": [block]}
    body["messages"] = [{"role": "user", "content": "Cold?"}]
    usage = server.http.post("/v1/messages", json=body).raise_for_status().json()["usage"]
    (lease,) = server.http.get("/v1/cache/leases").json()["data"]
    kept = usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    assert (lease["ttl_seconds"], lease["tokens_asked"]) == (3600, kept)
    server.http.delete(f"/v1/cache/leases/{lease['id']}").raise_for_status()
    for fields, ttl_s in (
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800),
        ({"prompt_cache_retention": "24h"}, 86_400),
    ):
        chat(server, system, "Cold?", **fields)
        (lease,) = server.http.get("/v1/cache/leases").json()["data"]
        assert lease["ttl_seconds"] == ttl_s
        server.http.delete(f"/v1/cache/leases/{lease['id']}").raise_for_status()
    marked = {"type": "text", "text": system, "prompt_cache_breakpoint": {"mode": "explicit"}}
    messages = [{"role": "system", "content": [marked]}, {"role": "user", "content": "Cold?"}]
    for fields, ttl_s in (({}, 1800), ({"prompt_cache_retention": "24h"}, 86_400)):
        body = {"model": "default", "max_tokens": 2, "messages": messages, **fields}
        server.http.post("/v1/chat/completions", json=body).raise_for_status()
        (lease,) = server.http.get("/v1/cache/leases").json()["data"]
        assert (lease["ttl_seconds"], lease["tokens_asked"]) == (ttl_s, kept)
        server.http.delete(f"/v1/cache/leases/{lease['id']}").raise_for_status()
    chat(server, system, "Cold?", prompt_cache_retention="in_memory", prompt_cache_options={})
    assert server.http.get("/v1/cache/leases").json()["data"] == []


def test_wrong_calls_are_refused_by_field(server: Server) -> None:
    def refused(path: str, **body: Any) -> tuple[int, str | None]:
        answer: httpx.Response = server.http.post(f"/v1/cache/{path}", json=body)
        return answer.status_code, answer.json()["error"]["param"]

    assert refused("explain") == (400, "prompt")
    assert refused("explain", prompt="a", messages=[]) == (400, "messages")
    assert refused("prewarm", prompt=[1, -1]) == (400, "prompt[1]")
    assert refused("prewarm", prompt="a", ttl="8d") == (400, "ttl")
    assert refused("leases", prompt="a", ttl=-1) == (400, "ttl")
    assert refused("leases/nobody", ttl=5) == (404, None)
    assert refused("prewarm", prompt="word " * 60_000) == (400, "prompt")


def test_a_file_of_prompts_is_warm_when_the_server_is_ready(tmp_path: Path) -> None:
    system = system_prompt("dawn", 10)
    file = tmp_path / "prompts.jsonl"
    leased = {"messages": conversation(system, "Up?"), "ttl": "1h"}
    other = {"prompt": "Good morning " * 9}
    file.write_text(f"{json.dumps(leased)}\n\n{json.dumps(other)}\n")
    with serve("--prewarm", str(file), "--kv-memory", "256MiB") as server:
        report = chat(server, system, "Up?", cache_report=True)["usage"]["cache"]
        assert report["missed_tokens"] == 1
        assert len(server.http.get("/v1/cache/leases").json()["data"]) == 1


def test_what_no_longer_fits_comes_back_from_disk(tmp_path: Path) -> None:
    """Three prompts of which the pool holds two: each is evicted before it is asked again."""
    systems = [system_prompt(topic, 60) for topic in ("quarry", "meadow", "tunnel")]
    folder = str(tmp_path / "not" / "there yet")
    sizes = ("--kv-memory", "64MiB", "--cache-disk", "256MiB")
    with serve(*sizes, "--cache-dir", folder) as server:
        first = [chat(server, system, "Why?", cache_report=True) for system in systems]
        again = [chat(server, system, "Why?", cache_report=True) for system in systems]
        reports = [answer["usage"]["cache"] for answer in again]
        assert sum(report["disk_tokens"] for report in reports) > 500
        for before, after in zip(first, again, strict=True):
            assert before["choices"] == after["choices"]
        server.flush()
        assert explained(server, prompt=systems[0])["cached_tokens"] == 0


def test_events_tell_what_is_stored_leased_and_removed(server: Server) -> None:
    with server.http.stream("GET", "/v1/cache/events") as answer:
        frames = answer.iter_lines()

        def wait_for(kind: str) -> dict[str, Any]:
            for line in frames:
                if line.startswith("data: "):
                    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if event["type"] == kind:
                        return event
            raise AssertionError("the stream ended")

        assert wait_for("resync")["page_size"] == 16
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as other:
            body = {"prompt": "seventeen lamps burn in the hall " * 12, "ttl": 60}
            lease = other.post("/v1/cache/leases", json=body).raise_for_status().json()
            stored = wait_for("stored")
            leased = wait_for("leased")
            assert leased["lease"] == lease["id"]
            assert len(leased["pages"]) == lease["tokens"] // 16
            assert set(stored["pages"]) <= set(leased["pages"])
            other.delete(f"/v1/cache/leases/{lease['id']}").raise_for_status()
            assert wait_for("lease_ended")["lease"] == lease["id"]
            other.post("/admin/cache/flush").raise_for_status()
            gone: set[str] = set()
            while not set(leased["pages"]) <= gone:
                gone.update(wait_for("removed")["pages"])


def test_a_lease_of_a_system_message_is_what_later_prompts_begin_with(server: Server) -> None:
    system = system_prompt("lighthouse", 12)
    lease = post(server, "leases", messages=conversation(system), ttl="1m")
    again = server.http.get(f"/v1/cache/leases/{lease['id']}")
    assert again.json()["id"] == lease["id"]
    assert again.json()["tokens_asked"] == lease["tokens_asked"]
    assert server.http.get("/v1/cache/leases/lease-none").status_code == 404
    cache = explained(server, messages=conversation(system, "How high is it?"))
    assert cache["cached_tokens"] == lease["tokens_asked"]
    assert "assistant" not in (cache.get("first_divergence") or {}).get("stored", "")
    server.http.delete(f"/v1/cache/leases/{lease['id']}").raise_for_status()
