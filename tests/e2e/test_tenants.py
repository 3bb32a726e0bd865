"""Tenants share no prefix, no lease, no explanation: what a key has not computed is not there."""

import json
from pathlib import Path
from typing import Any

import httpx

from service.access.keys import hash_key, key_entry, new_key
from tests.e2e.conftest import serve
from tests.e2e.conversations import system_prompt


def test_nothing_of_one_key_is_seen_by_another(tmp_path: Path) -> None:
    keys = {tenant: new_key() for tenant in ("north", "south")}
    file = tmp_path / "keys.toml"
    file.write_text("\n".join(key_entry(hash_key(k), t, False) for t, k in keys.items()) + "\n")
    messages = [
        {"role": "system", "content": system_prompt("border", 10)},
        {"role": "user", "content": "Who goes there?"},
    ]
    with serve("--keys", str(file), "--kv-memory", "256MiB") as server:

        def post(tenant: str, path: str, **body: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {keys[tenant]}"}
            return server.http.post(path, json=body, headers=headers)

        lease = post("north", "/v1/cache/leases", messages=messages, cache_salt="s").json()
        for salt in ({"cache_salt": "s"}, {}):
            found = post("south", "/v1/cache/explain", messages=messages, **salt).json()["cache"]
            assert (found["cached_tokens"], found["reason"]) == (0, "cold")
            body = {"model": "default", "messages": messages, "max_tokens": 2, **salt}
            usage = post("south", "/v1/chat/completions", **body).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert post("south", f"/v1/cache/leases/{lease['id']}", ttl=60).status_code == 404
        mine = server.http.get(
            "/v1/cache/leases", headers={"authorization": f"Bearer {keys['south']}"}
        )
        assert mine.json()["data"] == []
        again = post("north", "/v1/cache/explain", messages=messages, cache_salt="s").json()
        assert again["cache"]["missed_tokens"] <= 1


def test_a_prompt_of_the_start_up_file_is_found_by_its_tenant_alone(tmp_path: Path) -> None:
    keys = {tenant: new_key() for tenant in ("north", "south")}
    file, prompts = tmp_path / "keys.toml", tmp_path / "prompts.jsonl"
    file.write_text("\n".join(key_entry(hash_key(k), t, False) for t, k in keys.items()) + "\n")
    prompt = "Eleven bells ring before the tide turns. " * 9
    prompts.write_text(json.dumps({"prompt": prompt, "tenant": "north", "ttl": "1h"}) + "\n")
    with serve("--keys", str(file), "--prewarm", str(prompts), "--kv-memory", "256MiB") as server:

        def cached(tenant: str) -> int:
            body = {"model": "default", "prompt": prompt, "max_tokens": 1}
            headers = {"authorization": f"Bearer {keys[tenant]}"}
            asked = server.http.post("/v1/cache/explain", json={"prompt": prompt}, headers=headers)
            answer = server.http.post("/v1/completions", json=body, headers=headers)
            usage = answer.raise_for_status().json()["usage"]
            found: int = usage["prompt_tokens_details"]["cached_tokens"]
            assert asked.json()["cache"]["cached_tokens"] == found, "explained as it came"
            assert found in (0, usage["prompt_tokens"] - 1)
            return found

        assert cached("south") == 0
        assert cached("north") > 60
        assert cached("south") > 60, "its own by now"
