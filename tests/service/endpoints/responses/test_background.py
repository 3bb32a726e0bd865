"""Responses that run by themselves: their end, their bound, their drain."""

from engine.scripted import Script, ScriptStep, text_script
from service.responses.listing import MAX_PAGE
from tests.service.conftest import held, quick
from tests.service.endpoints.responses.calls import PATH, error_of, serving
from tests.service.websocket.live import by_word

HANGS = text_script("so far", finish=None)
SLOW = text_script("0123456789", 1, delay_s=0.02)


def test_it_completes_without_its_connection() -> None:
    with serving(SLOW) as live:
        response = live.create(background=True)
        assert response["status"] == "in_progress"
        assert response["output"] == []
        ended = live.wait_until_ended(response["id"])
        assert ended["status"] == "completed"
        assert ended["background"] is True
        assert ended["output"][0]["content"][0]["text"] == "0123456789"
        assert ended["usage"]["output_tokens"] == 10
        again = live.create(previous_response_id=response["id"], input="more")
        assert "assistant\n0123456789<|im_end|>" in live.prompts[1]
        assert again["status"] == "completed"


def test_what_is_refused_is_refused_at_once() -> None:
    with serving(SLOW) as live:
        refused = live.post(background=True, input="x" * 5000)
        assert refused.status_code == 400
        assert error_of(refused)["code"] == "context_length_exceeded"
        assert error_of(refused)["param"] == "input"
        unstored = live.post(background=True, store=False)
        assert (unstored.status_code, error_of(unstored)["param"]) == (400, "background")
        unknown = live.post(background=True, previous_response_id="resp_no")
        assert error_of(unknown)["code"] == "previous_response_not_found"
        assert live.create()["status"] == "completed"


def test_an_engine_failure_is_its_end() -> None:
    broken = Script((*text_script("before").steps, ScriptStep(error="bad page")))
    with serving(broken) as live:
        ended = live.wait_until_ended(live.create(background=True)["id"])
        assert ended["status"] == "failed"
        assert ended["error"]["code"] == "server_error"
        assert ended["output"][0]["content"][0]["text"] == "before"


def test_a_cancelled_one_tells_its_followers_and_keeps_what_was_said() -> None:
    with serving(HANGS) as live:
        response = live.create(background=True)
        told = live.follow(response["id"])
        while live.server.pool()["num_output_tokens"] < len("so far"):
            pass
        cancelled = live.server.http.post(f"{PATH}/{response['id']}/cancel").json()
        assert cancelled["status"] == "cancelled"
        last = told.result()[-1]
        assert last["response"] == cancelled
        assert last["type"] == "response.failed"
        assert live.replay(response["id"]) == told.result()
        assert live.get(response["id"]) == cancelled
        assert live.server.wait_for_idle()["referenced"] == 0


def test_only_background_responses_can_be_cancelled() -> None:
    with serving(SLOW) as live:
        response = live.create()
        refused = live.server.http.post(f"{PATH}/{response['id']}/cancel")
        assert refused.status_code == 400
        assert "background" in error_of(refused)["message"]
        done = live.wait_until_ended(live.create(background=True)["id"])
        assert live.server.http.post(f"{PATH}/{done['id']}/cancel").json() == done


def test_a_deleted_one_stops() -> None:
    with serving(HANGS) as live:
        response = live.create(background=True)
        deleted = live.server.http.delete(f"{PATH}/{response['id']}")
        assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
        assert live.server.http.get(f"{PATH}/{response['id']}").status_code == 404
        assert [record.finish_reason for record in live.server.ended()] == ["abort"]


def test_one_too_many_is_refused() -> None:
    with serving(HANGS, quick(background_responses=2)) as live:
        kept = [live.create(background=True)["id"] for _ in range(2)]
        refused = live.post(background=True)
        assert refused.status_code == 429
        assert error_of(refused)["code"] == "rate_limit_exceeded"
        live.server.http.post(f"{PATH}/{kept[0]}/cancel")
        while (again := live.post(background=True)).status_code == 429:
            pass
        assert again.status_code == 200
        for response_id in (kept[1], again.json()["id"]):
            live.server.http.post(f"{PATH}/{response_id}/cancel")


def test_a_drain_lets_it_end() -> None:
    with serving(held("0123456789")) as live:
        response = live.create(background=True)
        told = live.follow(response["id"])
        while not live.server.pool()["num_output_tokens"]:
            pass
        live.server.stop()
        live.server.go_on()
        assert told.result()[-1]["type"] == "response.completed"


def test_a_second_stop_ends_it_with_a_terminal_event() -> None:
    with serving(HANGS) as live:
        response = live.create(background=True)
        told = live.follow(response["id"])
        while live.server.pool()["num_output_tokens"] < len("so far"):
            pass
        live.server.stop()
        while live.server.http.get("/health/ready").status_code != 503:
            pass
        live.server.stop()
        last = told.result()[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == "server_is_overloaded"


def test_neighbours_are_listed_apart() -> None:
    with serving(by_word(hang=HANGS, other=SLOW)) as live:
        one, two = live.create(input="hang", background=True), live.create(input="other")
        for response, word in ((one, "hang"), (two, "other")):
            items = live.server.http.get(f"{PATH}/{response['id']}/input_items?limit={MAX_PAGE}")
            assert [item["content"][0]["text"] for item in items.json()["data"]] == [word]
        live.server.http.post(f"{PATH}/{one['id']}/cancel")
