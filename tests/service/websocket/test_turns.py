"""Turns over a real socket: events, continuations, forks, warm-ups."""

import pytest

from engine.scripted import Script, ScriptStep, text_script
from engine.types import FinishReason
from service.endpoints.responses_socket import SocketLimits
from tests.service.conftest import HELD_S, held
from tests.service.websocket.live import (
    Frame,
    create,
    one_after_another,
    receive,
    said,
    serving,
    turn,
    until,
)

pytestmark = pytest.mark.anyio

HELLO = text_script("Hello, wörld 😀", 3, delay_s=0.01)
HANGS = text_script("so far", 3, finish=None)


async def test_a_turn_has_the_protocols_events_and_its_pieces_are_its_text() -> None:
    script = Script(held("Hello, wörld 😀").steps, num_cached_tokens=5)
    async with serving(script) as live, live.connect() as socket:
        await create(socket)
        frames: list[Frame] = []
        await until(socket, "response.output_text.delta", frames)
        live.server.go_on()
        await until(socket, "response.completed", frames)
        kinds = [frame["type"].removeprefix("response.") for frame in frames]
        deltas = kinds.count("output_text.delta")
        assert deltas > 1
        assert kinds == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            *["output_text.delta"] * deltas,
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))
        response = frames[-1]["response"]
        assert said(frames) == response["output"][0]["content"][0]["text"] == "Hello, wörld 😀"
        assert response["id"] == frames[0]["response"]["id"]
        assert response["id"].startswith("resp_")
        usage = response["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == 5
        assert usage["output_tokens"] == len("Hello, wörld 😀".encode())
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_a_continuation_reads_the_former_turns_but_not_their_instructions() -> None:
    scripts = one_after_another(text_script("Paris."), text_script("2.1 million."))
    async with serving(scripts) as live, live.connect() as socket:
        first = await turn(socket, input="Capital of France?", instructions="Be brief.")
        await turn(
            socket,
            input=[{"role": "user", "content": "How many live there?"}],
            previous_response_id=first[-1]["response"]["id"],
        )
        assert "Be brief." in live.prompts[0]
        assert "Be brief." not in live.prompts[1]
        assert live.prompts[1].endswith(
            "<|im_start|>user\nCapital of France?<|im_end|>\n"
            "<|im_start|>assistant\nParis.<|im_end|>\n"
            "<|im_start|>user\nHow many live there?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


async def test_a_chain_goes_on_over_another_socket() -> None:
    async with serving(HELLO) as live:
        async with live.connect() as socket:
            first = await turn(socket, input="one", store=False)
        async with live.connect() as socket:
            previous = first[-1]["response"]["id"]
            second = await turn(socket, input="two", previous_response_id=previous)
        assert second[-1]["response"]["previous_response_id"] == previous
        assert "Hello, wörld 😀" in live.prompts[1]


async def test_a_running_response_can_be_forked_with_what_it_said_so_far() -> None:
    scripts = one_after_another(HANGS, text_script("fork"))
    async with serving(scripts) as live, live.connect() as socket:
        await create(socket, input="Long story")
        started = await receive(socket)
        text = ""
        while text != "so far":
            text += (await until(socket, "response.output_text.delta"))["delta"]
        parent = started["response"]["id"]
        await create(socket, input="Shorter", previous_response_id=parent, stream_id="fork")
        assert (await until(socket, "response.completed", lane="fork"))["response"]["output"]
        assert live.prompts[1].endswith(
            "Long story<|im_end|>\n<|im_start|>assistant\nso far<|im_end|>\n"
            "<|im_start|>user\nShorter<|im_end|>\n<|im_start|>assistant\n"
        )
        assert live.server.pool()["running"] == 1


async def test_a_response_that_has_said_nothing_yet_can_be_forked() -> None:
    scripts = one_after_another(Script(finish=None), text_script("fork"))
    async with serving(scripts) as live, live.connect() as socket:
        await create(socket, input="Silence")
        parent = (await until(socket, "response.in_progress"))["response"]["id"]
        frames = await turn(socket, input="Now", previous_response_id=parent, stream_id="fork")
        assert said(frames, "fork") == "fork"
        assert live.prompts[1].endswith(
            "Silence<|im_end|>\n<|im_start|>user\nNow<|im_end|>\n<|im_start|>assistant\n"
        )


async def test_an_incomplete_response_ends_so_and_can_be_forked() -> None:
    async with serving(text_script("abcdefgh")) as live, live.connect() as socket:
        cut = await turn(socket, max_output_tokens=3)
        assert cut[-1]["type"] == "response.incomplete"
        assert cut[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        previous = cut[-1]["response"]["id"]
        await turn(socket, input="Go on", previous_response_id=previous, stream_id="b")
        assert "assistant\nabc<|im_end|>\n<|im_start|>user\nGo on" in live.prompts[1]


async def test_a_response_whose_socket_closed_can_be_continued() -> None:
    async with serving(one_after_another(HANGS, HELLO)) as live:
        async with live.connect() as socket:
            await create(socket)
            lost = (await receive(socket))["response"]["id"]
            text = ""
            while text != "so far":
                text += (await until(socket, "response.output_text.delta"))["delta"]
        live.server.wait_for_idle()
        async with live.connect() as socket:
            frames = await turn(socket, input="Again?", previous_response_id=lost)
        assert frames[-1]["type"] == "response.completed"
        assert "assistant\nso far<|im_end|>" in live.prompts[1]


async def test_a_warm_up_computes_the_prompt_and_says_nothing() -> None:
    async with serving(HELLO) as live, live.connect() as socket:
        warm = await turn(socket, input="A long preamble", generate=False)
        assert [frame["type"] for frame in warm] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        response = warm[-1]["response"]
        assert response["output"] == []
        assert response["usage"]["output_tokens"] == 0
        assert response["usage"]["input_tokens"] > 0
        await turn(socket, input="Go", previous_response_id=response["id"])
        assert "user\nA long preamble<|im_end|>\n<|im_start|>user\nGo<|im_end|>" in live.prompts[1]


async def test_tool_results_reach_the_model() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny in Paris"}
    async with serving(HELLO) as live, live.connect() as socket:
        user = {"role": "user", "content": "Weather?"}
        frames = await turn(socket, input=[user, call, output], stream=True, include=[], tools=[])
        assert frames[-1]["type"] == "response.completed"
        assert "sunny in Paris" in live.prompts[0]


async def test_progress_is_told_while_the_prompt_is_computed() -> None:
    late = Script((ScriptStep(tuple(b"late"), delay_s=HELD_S),))
    limits = SocketLimits(max_silence_s=0.05)
    async with serving(late, limits) as live, live.connect() as socket:
        await create(socket)
        frames: list[Frame] = []
        for _ in range(3):
            await until(socket, "response.in_progress", frames)
        live.server.go_on()
        await until(socket, "response.completed", frames)
        assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))
        assert said(frames) == "late"


async def test_a_request_that_misses_its_timeout_fails() -> None:
    async with serving(HANGS) as live, live.connect() as socket:
        await create(socket, timeout=600)
        frames: list[Frame] = []
        while said(frames) != "so far":
            await until(socket, "response.output_text.delta", frames)
        live.server.go_on()
        await until(socket, "response.failed", frames)
        assert frames[-1]["response"]["error"]["code"] == "timeout"
        assert said(frames) == "so far"


async def test_stop_strings_end_a_turn_and_never_leak() -> None:
    script = text_script("Once STOP upon", 1, finish=FinishReason.LENGTH)
    async with serving(script) as live, live.connect() as socket:
        frames = await turn(socket, stop=[" STOP"])
        assert frames[-1]["type"] == "response.completed"
        assert said(frames) == "Once"
