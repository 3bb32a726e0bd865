"""The unmodified `openai` SDK, sync and async, on every call of the Responses API over HTTP."""

import openai
import pytest
from openai import AsyncOpenAI

from engine.scripted import text_script
from tests.service.conftest import MODEL, held
from tests.service.endpoints.responses.calls import serving
from tests.service.websocket.live import by_word, one_after_another

HELLO = text_script("Hello, wörld\u2028😀", 3, delay_s=0.01)
SLOW = text_script("0123456789", 1, delay_s=0.005)


def test_create_returns_the_whole_object() -> None:
    with serving(HELLO) as live:
        response = live.client.responses.create(
            model=MODEL, input="hi", instructions="be brief", metadata={"run": "7"}
        )
        assert response.output_text == "Hello, wörld\u2028😀"
        assert (response.status, response.model, response.object) == (
            "completed",
            MODEL,
            "response",
        )
        assert response.id.startswith("resp_")
        assert (response.instructions, response.metadata) == ("be brief", {"run": "7"})
        assert response.usage is not None
        assert response.usage.output_tokens == len("Hello, wörld\u2028😀".encode())
        assert response.usage.input_tokens_details.cached_tokens == 0
        system = "<|im_start|>system\nbe brief<|im_end|>\n"
        user = "<|im_start|>user\nhi<|im_end|>\n"
        assert live.prompts == [f"{system}{user}<|im_start|>assistant\n"]


def test_the_stream_helper_accepts_the_order_of_events() -> None:
    with (
        serving(held("Hello, wörld\u2028😀")) as live,
        live.client.responses.stream(model=MODEL, input="hi") as stream,
    ):
        events = []
        for each in stream:
            events.append(each)
            if each.type == "response.output_text.delta" and len(each.snapshot) == 1:
                live.server.go_on()
        final = stream.get_final_response()
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert len(pieces) > 1
        assert "".join(pieces) == final.output_text == "Hello, wörld\u2028😀"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1].type == "response.completed"


def test_a_stored_response_is_retrieved_continued_listed_and_deleted() -> None:
    with serving(one_after_another(text_script("Paris."), text_script("2 million."))) as live:
        responses = live.client.responses
        first = responses.create(model=MODEL, input="Capital of France?")
        assert responses.retrieve(first.id) == first
        second = responses.create(
            model=MODEL, input="How many live there?", previous_response_id=first.id
        )
        assert second.previous_response_id == first.id
        assert "assistant\nParis.<|im_end|>\n<|im_start|>user\nHow many" in live.prompts[1]
        items = list(responses.input_items.list(second.id, order="asc", limit=1))
        texts = [item.to_dict()["content"][0]["text"] for item in items]  # type: ignore[index]
        assert texts == ["Capital of France?", "Paris.", "How many live there?"]
        assert items[1].id == first.output[0].id
        responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            responses.retrieve(first.id)
        third = responses.create(model=MODEL, input="Sure?", previous_response_id=second.id)
        assert "Capital of France?" in live.prompts[2]
        assert third.status == "completed"


def test_input_tokens_counts_what_a_create_reads() -> None:
    with serving(HELLO) as live:
        first = live.client.responses.create(model=MODEL, input="one")
        count = live.client.responses.input_tokens.count
        fresh = count(model=MODEL, input="one")
        assert first.usage is not None
        assert (fresh.object, fresh.input_tokens) == (
            "response.input_tokens",
            first.usage.input_tokens,
        )
        chained = count(input="two", instructions="x", previous_response_id=first.id)
        second = live.client.responses.create(
            model=MODEL, input="two", instructions="x", previous_response_id=first.id
        )
        assert second.usage is not None
        assert chained.input_tokens == second.usage.input_tokens


def test_a_background_response_is_followed_and_resumed() -> None:
    with serving(SLOW) as live:
        responses = live.client.responses
        stream = responses.create(model=MODEL, input="hi", background=True, stream=True)
        seen = []
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        stream.close()
        created = seen[0]
        assert created.type == "response.created"
        rest = list(
            responses.retrieve(
                created.response.id, stream=True, starting_after=seen[-1].sequence_number
            )
        )
        events = [*seen, *rest]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "0123456789"
        with responses.stream(response_id=created.response.id) as again:
            assert again.get_final_response().output_text == "0123456789"


def test_a_background_response_is_cancelled() -> None:
    with serving(text_script("so far", finish=None)) as live:
        response = live.client.responses.create(model=MODEL, input="hi", background=True)
        assert (response.status, response.background) == ("in_progress", True)
        cancelled = live.client.responses.cancel(response.id)
        assert (cancelled.id, cancelled.status) == (response.id, "cancelled")
        assert live.client.responses.cancel(response.id) == cancelled
        pool = live.server.wait_for_idle()
        assert pool["referenced"] == 0


@pytest.mark.anyio
async def test_the_async_client_makes_every_call() -> None:
    scripts = by_word(hang=text_script("so far", finish=None), hi=HELLO)
    with serving(scripts) as live:
        url = f"{live.server.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            responses = client.responses
            first = await responses.create(model=MODEL, input="hi")
            assert first.output_text == "Hello, wörld\u2028😀"
            async with responses.stream(
                model=MODEL, input="hi", previous_response_id=first.id
            ) as stream:
                final = await stream.get_final_response()
            assert final.output_text == first.output_text
            replayed = [event async for event in await responses.retrieve(final.id, stream=True)]
            assert replayed[-1].type == "response.completed"
            items = [item.type async for item in responses.input_items.list(final.id)]
            assert items == ["message"] * 3
            counted = await responses.input_tokens.count(model=MODEL, input="hi")
            assert first.usage is not None
            assert counted.input_tokens == first.usage.input_tokens
            hangs = await responses.create(model=MODEL, input="hang", background=True)
            assert (await responses.cancel(hangs.id)).status == "cancelled"
            await responses.delete(hangs.id)
            with pytest.raises(openai.NotFoundError):
                await responses.retrieve(hangs.id)
