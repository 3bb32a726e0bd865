"""`response.create` to the canonical request, and what is refused, by its path."""

import json
from typing import Any

import pytest

from service.conversation import Message, Tool, ToolCall
from service.dialects.responses_decode import CreateRequest, decode_create, in_this_dialect
from service.errors import ApiError, invalid
from service.model_card import ModelCard

CARD = ModelCard(
    names=("m", "alias"), loaded_at=0, max_context=1024, vocab_size=1000, fingerprint="fp_0"
)
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "w", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"


def decode(**body: Any) -> CreateRequest:
    fields = {"type": "response.create", "model": "m", "input": "hi", **body}
    return decode_create(json.dumps(fields).encode(), CARD)


def messages(*items: dict[str, Any]) -> tuple[Message, ...]:
    return decode(input=list(items)).input


def test_a_string_is_a_user_message_and_instructions_come_first() -> None:
    request = decode(instructions="be brief")
    assert request.conversation(request.input).messages == (
        Message("system", "be brief"),
        Message("user", "hi"),
    )


def test_items_become_messages() -> None:
    assert messages(
        USER,
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "one", "annotations": []},
                {"type": "refusal", "refusal": "no"},
            ],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
        CALL,
        {**CALL, "call_id": "c2", "arguments": '{"city": "Rome"}'},
        OUTPUT,
        {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "rain"}]},
    ) == (
        Message("user", "hi"),
        Message("developer", "d"),
        Message(
            "assistant",
            "one\nno",
            tool_calls=(ToolCall("c1", "w", "{}"), ToolCall("c2", "w", '{"city": "Rome"}')),
        ),
        Message("tool", "sunny", tool_call_id="c1"),
        Message("tool", "rain", tool_call_id="c2"),
    )


def test_a_call_without_a_former_turn_is_a_turn_of_its_own() -> None:
    assert messages(USER, CALL)[1] == Message("assistant", tool_calls=(ToolCall("c1", "w", "{}"),))


def test_flat_tools_are_nested_as_templates_read_them() -> None:
    tool = {"type": "function", "name": "w", "parameters": {"type": "object"}, "strict": True}
    assert decode(tools=[tool], tool_choice="auto").tools == (
        Tool(
            "w",
            {
                "type": "function",
                "function": {"name": "w", "parameters": {"type": "object"}, "strict": True},
            },
        ),
    )


def test_options() -> None:
    options = decode(
        max_output_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=3,
        stop="x",
        stop_token_ids=[2],
        ignore_eos=True,
        priority=-2,
        timeout=1.5,
        cache_salt="s",
    ).options
    assert (options.max_tokens, options.temperature, options.top_p) == (7, 0, 0.5)
    assert (options.top_k, options.min_p, options.seed) == (0, 0.1, 3)
    assert (options.stop, options.stop_token_ids, options.ignore_eos) == (("x",), (2,), True)
    assert (options.priority, options.timeout_s, options.salt) == (-2, 1.5, "s")
    assert decode().options.max_tokens is None


@pytest.mark.parametrize(
    "body", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}, "generate": True}]
)
def test_a_warm_up_samples_nothing(body: dict[str, Any]) -> None:
    request = decode(max_output_tokens=9, **body)
    assert not request.body.generates
    assert request.options.max_tokens == 0


def test_what_agents_send_along_is_tolerated() -> None:
    request = decode(
        stream=True,
        include=[],
        tools=[],
        background=False,
        truncation="auto",
        text={"format": {"type": "text"}, "verbosity": "low"},
        reasoning={"effort": "low"},
        parallel_tool_calls=True,
        something_new={"deep": [1]},
        temperature=None,
        conversation=None,
        ignore_eos=None,
    )
    assert request.input == (Message("user", "hi"),)
    hints = {"reasoning_effort": "low", "verbosity": "low"}
    assert request.conversation(request.input).template_kwargs == hints
    assert decode(model="alias").body.model == "alias"


def test_the_nearest_trace_context_wins() -> None:
    handshake = {"traceparent": "h", "tracestate": "hs"}
    client = {"ws_request_header_traceparent": TRACE, "ws_request_header_tracestate": "a=b"}
    metadata = {"traceparent": "m"}
    everywhere = decode(client_metadata=client, traceparent="t", metadata=metadata)
    assert everywhere.trace_context(handshake) == (TRACE, "a=b")
    assert decode(traceparent="t", metadata=metadata).trace_context(handshake) == ("t", None)
    assert decode(metadata=metadata).trace_context(handshake) == ("m", None)
    assert decode(client_metadata={"x": 1}).trace_context(handshake) == ("h", "hs")
    assert decode().trace_context({}) == (None, None)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"model": None}, "model", "invalid_type"),
        ({"input": 3}, "input", "invalid_type"),
        ({"input": [USER, 7]}, "input[1]", "invalid_type"),
        ({"input": [USER, USER, {"type": "song"}]}, "input[2].type", "invalid_value"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0].type", "invalid_value"),
        ({"input": [{"content": "x"}]}, "input[0].role", "missing_required_parameter"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "invalid_value",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
            "missing_required_parameter",
        ),
        (
            {"input": [USER, {"type": "function_call", "call_id": "c", "name": "w"}]},
            "input[1].arguments",
            "missing_required_parameter",
        ),
        (
            {"input": [{**OUTPUT, "output": [{"type": "input_text", "text": 1}]}]},
            "input[0].output[0].text",
            "invalid_type",
        ),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "function", "name": "w"}}, "tool_choice.name", "invalid_value"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "unsupported_value"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n"}}},
            "text.format.schema",
            "missing_required_parameter",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_value"),
        ({"include": ["reasoning.encrypted_content", "x"]}, "include[1]", "invalid_value"),
        ({"prediction": {"type": "content"}}, "prediction", "unknown_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
        ({"max_output_tokens": "9"}, "max_output_tokens", "invalid_type"),
        ({"temperature": 2.5}, "temperature", "invalid_value"),
        ({"top_p": -1}, "top_p", "invalid_value"),
        ({"stop": ["ok", ""]}, "stop[1]", "invalid_value"),
        ({"stop_token_ids": [1, 1000]}, "stop_token_ids[1]", "invalid_value"),
        ({"truncation": "middle"}, "truncation", "invalid_value"),
        ({"metadata": {"k": "v" * 513}}, "metadata[...]", "invalid_value"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value"),
        ({"metadata": {"k": 1}}, "metadata[...]", "invalid_type"),
        ({"cache_salt": ""}, "cache_salt", "invalid_value"),
    ],
)
def test_a_refusal_names_the_field(body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(**body)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_an_unknown_model_is_404() -> None:
    with pytest.raises(ApiError) as caught:
        decode(model="gpt-9")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"3", b'{"model":"m","input":"\xff"}', b"[" * 100_000]
)
def test_what_is_no_json_object_is_400(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_create(data, CARD)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("items", "said"),
    [([USER, CALL], "'c1'"), ([USER, OUTPUT], "'c1'"), ([USER, OUTPUT, CALL], "'c1'")],
)
def test_calls_and_outputs_must_pair(items: list[dict[str, Any]], said: str) -> None:
    request = decode(input=items)
    with pytest.raises(ApiError) as caught:
        request.conversation(request.input)
    assert caught.value.param == "input"
    assert said in caught.value.message


def test_there_must_be_something_to_read() -> None:
    request = decode(input=None)
    with pytest.raises(ApiError) as caught:
        request.conversation(())
    assert (caught.value.param, caught.value.code) == ("input", "missing_required_parameter")
    assert decode(input=None, instructions="warm").conversation(()).messages


def test_errors_of_the_common_path_get_this_dialects_names() -> None:
    assert in_this_dialect(invalid("sampling.max_tokens", "x")).param == "max_output_tokens"
    assert in_this_dialect(invalid("messages", "x")).param == "input"
    assert in_this_dialect(invalid("sampling.top_p", "x")).param == "top_p"
    assert in_this_dialect(ApiError(500, "x")).param is None
