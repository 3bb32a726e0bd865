"""What a body means: the conversation that the model reads, and the options."""

import json
from typing import Any

import pytest

from service.conversation import Conversation, Message, OutputFormat, ToolCall, ToolChoice
from service.dialects import chat_decode, messages_decode
from service.dialects.messages_decode import MessagesRequest
from service.errors import ApiError
from service.model_card import ModelCard
from tests.service.conftest import INFO, MODEL
from tests.service.endpoints.messages.calls import CALL, HELLO, RESULT, WEATHER, body

CARD = ModelCard.of(INFO, ())
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=4f1ab;"


def decode(**fields: Any) -> MessagesRequest:
    return messages_decode.decode(json.dumps(body(**fields)).encode(), CARD)


def messages(*wire: Any, **fields: Any) -> list[Message]:
    """The canonical messages of some on the wire."""
    return list(decode(messages=list(wire), **fields).generation.conversation.messages)


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def test_texts_and_blocks_say_the_same() -> None:
    plain = messages(HELLO, {"role": "assistant", "content": "a\nb"}, HELLO, system="s\nt")
    blocks = messages(
        user(text("hi")),
        assistant(text("a"), text("b", citations=None)),
        user(text("hi", **EPHEMERAL)),
        system=[text("s"), text("t", **EPHEMERAL)],
    )
    assert plain == blocks
    assert [m.role for m in plain] == ["system", "user", "assistant", "user"]
    assert [m.text for m in plain] == ["s\nt", "hi", "a\nb", "hi"]


def test_a_tool_loop_is_that_of_chat_completions() -> None:
    calls = assistant(text("Let me see."), CALL, {**CALL, "id": "toolu_2", "input": {}})
    results = user(
        RESULT,
        {**RESULT, "tool_use_id": "toolu_2", "content": [text("a"), text("b")], "is_error": True},
        text("and?"),
    )
    ours = decode(messages=[HELLO, calls, results], tools=[WEATHER], system="Be kind.")
    spec = {"name": "get_weather", "description": WEATHER["description"]}
    chat = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be kind."},
            HELLO,
            {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [
                    called("toolu_1", '{"city": "Köln"}'),
                    called("toolu_2", "{}"),
                ],
            },
            {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
            {"role": "tool", "tool_call_id": "toolu_2", "content": "a\nb"},
            {"role": "user", "content": "and?"},
        ],
        "tools": [
            {"type": "function", "function": {**spec, "parameters": WEATHER["input_schema"]}}
        ],
    }
    theirs = chat_decode.decode(json.dumps(chat).encode(), CARD)
    assert ours.generation.conversation == theirs.generation.conversation
    (tool,) = ours.generation.conversation.tools
    assert json.dumps(tool.spec) == json.dumps(theirs.generation.conversation.tools[0].spec)


def called(call_id: str, arguments: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def test_turns_of_one_role_are_one_turn() -> None:
    said = messages(
        HELLO,
        user(text("there")),
        assistant(text("Well."), CALL),
        user(RESULT),
        user(text("so?")),
        HELLO,
    )
    assert said == [
        Message("user", "hi\nthere"),
        Message(
            "assistant",
            "Well.",
            tool_calls=(ToolCall("toolu_1", "get_weather", '{"city": "Köln"}'),),
        ),
        Message("tool", "rain", tool_call_id="toolu_1"),
        Message("user", "so?\nhi"),
    ]


def test_thoughts_are_not_read_again() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    assert messages(HELLO, assistant(thought, hidden, text("So.")), HELLO)[1] == Message(
        "assistant", "So."
    )
    assert messages(HELLO, assistant(thought), HELLO)[1] == Message("assistant", "")
    assert messages(HELLO, assistant(), HELLO)[1] == Message("assistant", "")


@pytest.mark.parametrize(
    ("system", "read"),
    [
        ([text(BILLING), text("You help.")], ["You help."]),
        ([text(f"{BILLING}\nYou help.")], ["You help."]),
        (f"{BILLING}\nYou help.", ["You help."]),
        ([text(BILLING, **EPHEMERAL)], []),
        (BILLING, []),
        ([], []),
        (f"Not {BILLING}", [f"Not {BILLING}"]),
    ],
)
def test_the_billing_header_is_not_read(system: Any, read: list[str]) -> None:
    assert [m.text for m in messages(HELLO, system=system)[:-1]] == read
    later = messages(HELLO, {"role": "system", "content": system})
    assert [m.text for m in later[1:]] == read
    assert all(m.role == "system" for m in later[1:])


def test_a_last_message_of_the_assistant_is_continued() -> None:
    request = decode(messages=[HELLO, {"role": "assistant", "content": "The answer is ("}])
    assert request.generation.conversation.continue_final
    assert not decode().generation.conversation.continue_final


def test_options() -> None:
    options = decode(
        max_tokens=7,
        temperature=1,
        top_p=0.5,
        top_k=10**6,
        stop_sequences=["\n\nHuman:", "x"],
        ignore_eos=True,
        seed=1,
        min_tokens=3,
        repetition_penalty=1.5,
        stop_token_ids=[5],
        cache_salt="mine",
        timeout=2.5,
        metadata={"user_id": "u"},
        service_tier="auto",
        betas=["x"],
    ).generation.options
    assert (options.max_tokens, options.fit_max_tokens) == (7, True)
    assert (options.temperature, options.top_p, options.top_k) == (1.0, 0.5, INFO.vocab_size)
    assert options.stop == ("\n\nHuman:", "x")
    assert options.ignore_eos
    assert (options.seed, options.min_tokens, options.repetition_penalty) == (1, 3, 1.5)
    assert (options.stop_token_ids, options.salt, options.timeout_s) == ((5,), "mine", 2.5)
    with pytest.raises(ApiError) as caught:
        decode(max_tokens=2, min_tokens=3)
    assert caught.value.param == "min_tokens"
    unset = decode(temperature=None, top_p=None, stop_sequences=None, tools=None).generation
    assert (unset.options.temperature, unset.options.top_k, unset.options.stop) == (None, None, ())


@pytest.mark.parametrize(
    ("wire", "choice", "parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice("auto"), True),
        ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required"), False),
        (
            {"type": "tool", "name": "get_weather"},
            ToolChoice("required", ("get_weather",)),
            True,
        ),
    ],
)
def test_tool_choice(wire: Any, choice: ToolChoice, parallel: bool) -> None:
    options = decode(tools=[WEATHER], tool_choice=wire).generation.options
    assert (options.tool_choice, options.parallel_tool_calls) == (choice, parallel)


def test_an_output_format_keeps_its_keys_in_order() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}
    config = {"effort": "high", "format": {"type": "json_schema", "schema": schema}}
    found = decode(output_config=config).generation.options.output_format
    assert found == OutputFormat("json_schema", json.dumps(schema), "output_config.format.schema")
    assert decode(output_config={"effort": "low"}).generation.options.output_format is None


@pytest.mark.parametrize(
    ("kind", "thinks"),
    [("enabled", True), ("adaptive", True), ("between_tools", True), ("disabled", False)],
)
def test_thinking_is_told_to_the_template(kind: str, thinks: bool) -> None:
    kwargs = decode(thinking={"type": kind}).generation.conversation.template_kwargs
    assert kwargs == {"enable_thinking": thinks}
    assert decode().generation.conversation.template_kwargs == {}


def test_the_effort_is_told_to_the_template() -> None:
    asked = decode(output_config={"effort": "high"})
    assert asked.generation.conversation.template_kwargs == {"reasoning_effort": "high"}


def test_breakpoints_are_where_they_were_set() -> None:
    request = decode(
        tools=[WEATHER, {**WEATHER, "name": "other", **HOUR}],
        system=[text("s", **EPHEMERAL), text("t")],
        messages=[user(text("a", **EPHEMERAL)), assistant(text("b")), HELLO],
        **EPHEMERAL,
    )
    hour, minutes = request.generation.kept
    assert (hour.ttl_s, minutes.ttl_s) == (3600, 300)
    assert hour.conversation.messages == (Message("system", "s\nt"),)
    assert minutes.conversation is request.generation.conversation


def test_the_prefix_before_the_last_breakpoint() -> None:
    def prefix(**fields: Any) -> Conversation:
        (kept,) = decode(**fields).generation.kept
        return kept.conversation

    turns = [user(text("a", **EPHEMERAL)), assistant(text("b")), HELLO]
    kept = prefix(messages=turns, system="s", tools=[WEATHER])
    assert len(kept.tools) == 1
    assert kept.messages == (Message("system", "s"), Message("user", "a"))
    tools = [{**WEATHER, **EPHEMERAL}]
    assert prefix(system="s", tools=tools).messages == (Message("system", "s"),)
    assert prefix(tools=tools).messages == (Message("system"),)
    assert decode().generation.kept == ()
