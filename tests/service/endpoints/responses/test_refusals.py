"""Bad input, unknown ids, clients that leave; pages of input items."""

import json
from typing import Any

import pytest

from engine.scripted import Script, ScriptStep, text_script
from tests.service.conftest import MODEL
from tests.service.endpoints.responses.calls import PATH, error_of, events_of, serving
from tests.service.raw import connected, read_until
from tests.service.websocket.live import by_word

OK = text_script("ok")
HANGS = text_script("so far", finish=None)
CALL = {"type": "function_call", "call_id": "c1", "name": "w", "arguments": '{"a":1}'}


def test_bad_bodies_name_the_field() -> None:
    bad: list[tuple[dict[str, Any], int, str | None]] = [
        ({"model": "gpt-9"}, 404, "model"),
        ({"model": 3}, 400, "model"),
        ({"input": None}, 400, "input"),
        ({"input": 5}, 400, "input"),
        ({"input": [{"type": "song"}]}, 400, "input[0].type"),
        ({"input": [CALL]}, 400, "input"),
        ({"stream": "yes"}, 400, "stream"),
        ({"background": 1}, 400, "background"),
        ({"store": "no"}, 400, "store"),
        ({"metadata": {"k": 1}}, 400, "metadata[...]"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"max_output_tokens": 99_999}, 400, "max_output_tokens"),
        ({"input": "x" * 5000}, 400, "input"),
        ({"previous_response_id": "resp_none"}, 400, "previous_response_id"),
        ({"conversation": "conv_1"}, 400, "conversation"),
    ]
    with serving(OK) as live:
        for fields, status, param in bad:
            for stream in (False, True):
                body = {"stream": stream} | fields
                answer = live.post(**body)
                assert (answer.status_code, error_of(answer)["param"]) == (status, param), fields
            if fields.keys() & {"model", "input", "metadata", "previous_response_id"}:
                counted = live.server.http.post(
                    f"{PATH}/input_tokens", json={"model": MODEL, "input": "hi", **fields}
                )
                assert (counted.status_code, error_of(counted)["param"]) == (status, param)
        assert live.create()["status"] == "completed"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000])
def test_what_is_no_json_object_is_400(body: bytes) -> None:
    with serving(OK) as live:
        for path in (PATH, f"{PATH}/input_tokens"):
            answer = live.server.http.post(path, content=body)
            assert answer.status_code == 400
            assert error_of(answer)["type"] == "invalid_request_error"


def test_unknown_ids_are_404_on_every_route() -> None:
    with serving(OK) as live:
        for method, path in (
            ("GET", ""),
            ("GET", "?stream=true"),
            ("DELETE", ""),
            ("POST", "/cancel"),
            ("GET", "/input_items"),
        ):
            answer = live.server.http.request(method, f"{PATH}/resp_none{path}")
            assert answer.status_code == 404
            assert error_of(answer)["code"] == "response_not_found"
        assert live.server.http.get(PATH).status_code == 426
        assert live.server.http.put(PATH).status_code == 405
        assert live.server.http.post(f"{PATH}/resp_none").status_code == 405


def test_bad_queries_name_the_parameter() -> None:
    with serving(OK) as live:
        response_id = live.create()["id"]
        for path, param in (
            ("?stream=perhaps", "stream"),
            ("?stream=true&starting_after=-1", "starting_after"),
            ("?stream=true&starting_after=x", "starting_after"),
            ("/input_items?limit=0", "limit"),
            ("/input_items?limit=101", "limit"),
            ("/input_items?order=up", "order"),
            ("/input_items?after=msg_none", "after"),
        ):
            answer = live.server.http.get(f"{PATH}/{response_id}{path}")
            assert (answer.status_code, error_of(answer)["param"]) == (400, param), path
        many = "&".join(f"a{i}=1" for i in range(100))
        assert live.server.http.get(f"{PATH}/{response_id}?{many}").status_code == 400
        tolerated = "?include[]=reasoning.encrypted_content&include_obfuscation=false"
        assert live.server.http.get(f"{PATH}/{response_id}{tolerated}").status_code == 200


def test_input_items_page_in_both_orders() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    history = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"role": "assistant", "content": "a"},
        CALL,
        output,
    ]
    with serving(OK) as live:
        response_id = live.create(input=history)["id"]
        path = f"{PATH}/{response_id}/input_items"
        whole = live.server.http.get(path, params={"order": "asc"}).json()
        assert [item["type"] for item in whole["data"]] == [
            "message",
            "message",
            "message",
            "function_call",
            "function_call_output",
        ]
        assert whole["has_more"] is False
        assert {item["status"] for item in whole["data"]} == {"completed"}
        ids = [item["id"] for item in whole["data"]]
        assert len(set(ids)) == 5
        assert (whole["first_id"], whole["last_id"]) == (ids[0], ids[-1])
        call, result = whole["data"][3:]
        assert CALL.items() <= call.items()
        assert output.items() <= result.items()
        newest = live.server.http.get(path, params={"limit": 2}).json()
        assert [item["id"] for item in newest["data"]] == ids[:2:-1]
        assert newest["has_more"] is True
        rest = live.server.http.get(path, params={"after": ids[3], "limit": 100}).json()
        assert [item["id"] for item in rest["data"]] == ids[2::-1]
        assert live.server.http.get(path, params={"after": ids[0]}).json()["data"] == []


def test_an_unstored_response_is_known_to_nobody() -> None:
    with serving(OK) as live:
        whole = live.create(store=False)
        told = events_of(live.post(store=False, stream=True).text)
        for response in (whole, told[-1]["response"]):
            assert (response["status"], response["store"]) == ("completed", False)
            assert live.server.http.get(f"{PATH}/{response['id']}").status_code == 404
            refused = live.post(previous_response_id=response["id"])
            assert error_of(refused)["code"] == "previous_response_not_found"


def test_a_warm_up_says_nothing_and_can_be_continued() -> None:
    with serving(OK) as live:
        warm = live.create(input="A long preamble", generate=False)
        assert (warm["status"], warm["output"], warm["usage"]["output_tokens"]) == (
            "completed",
            [],
            0,
        )
        live.create(input="Go", previous_response_id=warm["id"])
        assert "user\nA long preamble<|im_end|>\n<|im_start|>user\nGo<|im_end|>" in live.prompts[1]


def test_a_failure_is_a_status_before_the_first_frame_and_an_event_after() -> None:
    broken = Script((*text_script("before").steps, ScriptStep(error="bad page")))
    with serving(by_word(bad=broken, good=OK)) as live:
        whole = live.post(input="bad")
        assert whole.status_code == 500
        assert error_of(whole)["type"] == "server_error"
        late = live.post(input="bad", timeout=0.0001)
        assert late.status_code in (408, 500)
        told = events_of(live.post(input="bad", stream=True).text)
        assert told[-1]["type"] == "response.failed"
        assert told[-1]["response"]["error"]["code"] == "server_error"
        assert live.get(told[0]["response"]["id"]) == told[-1]["response"]
        assert live.create(input="good")["status"] == "completed"


def test_an_incomplete_answer_says_why() -> None:
    with serving(text_script("abcdefgh")) as live:
        cut = live.create(max_output_tokens=3)
        assert (cut["status"], cut["incomplete_details"]) == (
            "incomplete",
            {"reason": "max_output_tokens"},
        )
        assert cut["output"][0]["content"][0]["text"] == "abc"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_response(stream: bool) -> None:
    with serving(HANGS) as live:
        data = json.dumps({"model": MODEL, "input": "hi", "stream": stream}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
        with connected(live.server) as sock:
            sock.sendall(head.encode() + data)
            seen = read_until(sock, b"output_text.delta") if stream else b""
            while live.server.pool()["num_output_tokens"] < len("so far"):
                pass
        pool = live.server.wait_for_idle()
        assert pool["referenced"] == 0
        (record,) = live.server.ended()
        assert record.finish_reason == "abort"
        assert record.disconnected_ns
        if stream:
            start = seen.index(b"resp_")
            lost = live.wait_until_ended(seen[start : start + 37].decode())
            assert lost["status"] == "cancelled"
            assert live.replay(lost["id"])[-1]["response"] == lost
        else:
            assert live.server.http.get(f"{PATH}/{record.response_id}").status_code == 404
