"""What becomes of fields that nobody here knows: slips are refused by name, others are ignored."""

import logging
from collections.abc import Iterable
from types import UnionType
from typing import (
    Annotated,
    Any,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import pytest
from anthropic.types import MessageCountTokensParams
from anthropic.types import message_create_params as message_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.responses_client_event_param import ResponseCreate

from service import prewarm
from service.dialects import chat_decode, completions_decode, messages_decode, responses_decode
from service.dialects.common import Extensions
from service.dialects.known_fields import MAX_BYTES, MAX_LOOKED_AT, KnownFields
from service.errors import ApiError

CHAT, COMPLETIONS = chat_decode.FIELDS, completions_decode.FIELDS
RESPONSES, MESSAGES = responses_decode.FIELDS, messages_decode.FIELDS
ALL = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


def body(*names: str) -> bytes:
    return msgspec.json.encode(dict.fromkeys(names, 1))


@pytest.mark.parametrize(
    ("fields", "name", "meant"),
    [
        (CHAT, "max_token", "max_tokens"),
        (CHAT, "maxTokens", "max_tokens"),
        (CHAT, "max-tokens", "max_tokens"),
        (CHAT, "MAX_TOKENS", "max_tokens"),
        (CHAT, "temprature", "temperature"),
        (CHAT, "temperture", "temperature"),
        (CHAT, "tempertaure", "temperature"),
        (CHAT, "temparature", "temperature"),
        (CHAT, "topP", "top_p"),
        (CHAT, "stops", "stop"),
        (CHAT, "promtp", ""),
        (COMPLETIONS, "promtp", "prompt"),
        (CHAT, "modle", "model"),
        (CHAT, "message", "messages"),
        (CHAT, "seeds", "seed"),
        (CHAT, "frequencyPenalty", "frequency_penalty"),
        (CHAT, "max_new_tokens", "max_completion_tokens"),
        (CHAT, "n_predict", "max_completion_tokens"),
        (CHAT, "num_predict", "max_completion_tokens"),
        (CHAT, "streem", "stream"),
        (CHAT, "system", "messages"),
        (CHAT, "instructions", "messages"),
        (COMPLETIONS, "system", "prompt"),
        (RESPONSES, "system", "instructions"),
        (MESSAGES, "instructions", "system"),
        (MESSAGES, "num_predict", "max_tokens"),
        (CHAT, "maxNewTokens", "max_completion_tokens"),
        (CHAT, "guided_json", "structured_outputs.json"),
        (CHAT, "stop_sequences", "stop"),
        (COMPLETIONS, "max_completion_tokens", "max_tokens"),
        (COMPLETIONS, "prompts", "prompt"),
        (RESPONSES, "max_tokens", "max_output_tokens"),
        (RESPONSES, "messages", "input"),
        (RESPONSES, "response_format", "text.format"),
        (RESPONSES, "previous_response", "previous_response_id"),
        (RESPONSES, "instruction", "instructions"),
        (MESSAGES, "max_output_tokens", "max_tokens"),
        (MESSAGES, "stop", "stop_sequences"),
        (MESSAGES, "stop_sequence", "stop_sequences"),
        (MESSAGES, "response_format", "output_config.format"),
        *[(fields, "topp", "top_p") for fields in ALL],
        *[(fields, "topk", "top_k") for fields in ALL],
        *[(fields, "temp", "temperature") for fields in ALL],
        *[(fields, "temprture", "temperature") for fields in ALL],
        (CHAT, "max_tokn", "max_tokens"),
        (COMPLETIONS, "max_tokn", "max_tokens"),
        (MESSAGES, "max_tokn", "max_tokens"),
        (RESPONSES, "max_otput_tokns", "max_output_tokens"),
        *[(fields, name, "tools") for fields in (CHAT, MESSAGES) for name in ("tols", "tool")],
        (CHAT, "sytem", "messages"),
        (MESSAGES, "sytem", "system"),
        (CHAT, "repeat_penalty", "repetition_penalty"),
        *[(CHAT, name, "response_format") for name in ("json_schema", "format")],
        (CHAT, "response_schema", "response_format"),
        (CHAT, "grammar", "structured_outputs.grammar"),
        (RESPONSES, "json_schema", "text.format"),
        (MESSAGES, "response_schema", "output_config.format"),
    ],
)
def test_a_slip_is_refused_with_what_it_is_for(fields: KnownFields, name: str, meant: str) -> None:
    if not meant:
        fields.check(body(name))
        return
    with pytest.raises(ApiError) as caught:
        fields.check(body("model", name))
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unknown_parameter", name)
    assert f"'{meant}'" in error.message


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        *[(fields, "options", {"num_ctx": 8192}) for fields in ALL],
        *[(fields, "num_ctx", 8192) for fields in ALL],
        *[(fields, "extra_body", {"seed": 1}) for fields in ALL],
        (RESPONSES, "prediction", {"type": "content", "content": "x"}),
        (RESPONSES, "logit_bias", {"5": 9}),
        (RESPONSES, "allowed_token_ids", [5]),
        (MESSAGES, "grammar", "root ::= 'a'"),
        (MESSAGES, "logit_bias", {"5": 9}),
        (CHAT, "typical_p", 0.9),
        (COMPLETIONS, "json_schema", {"type": "object"}),
        (COMPLETIONS, "messages", [{"role": "user", "content": "hi"}]),
        (COMPLETIONS, "tools", [{"type": "function"}]),
        *[(fields, "previous_response_id", "resp_1") for fields in (CHAT, COMPLETIONS, MESSAGES)],
        *[(fields, "include_stop_str_in_output", True) for fields in (RESPONSES, MESSAGES)],
        *[(fields, "chat_template_kwargs", {"a": 1}) for fields in (RESPONSES, MESSAGES)],
        (CHAT, "background", True),
    ],
)
def test_what_changes_answers_elsewhere_is_refused_by_name(
    fields: KnownFields, name: str, value: Any
) -> None:
    with pytest.raises(ApiError) as caught:
        fields.check(msgspec.json.encode({name: value}))
    assert (caught.value.status, caught.value.param) == (400, name)
    assert f"'{name}' is not supported here" in caught.value.message
    for nothing in ("null", "false", "0", '""', "[]", "{}"):
        fields.check(f'{{"{name}": {nothing}}}'.encode())


@pytest.mark.parametrize("name", ["n", "repetition_penalty", "typical_p", "num_beams"])
def test_a_factor_of_one_asks_for_nothing(name: str) -> None:
    for fields in ALL:
        fields.check(body(name))


@pytest.mark.parametrize("name", ["skip_special_tokens", "parallel_tool_calls"])
def test_the_usual_way_asks_for_nothing_and_the_other_is_refused(name: str) -> None:
    MESSAGES.check(f'{{"{name}": true}}'.encode())
    with pytest.raises(ApiError, match=f"'{name}' is not supported here"):
        MESSAGES.check(f'{{"{name}": false}}'.encode())


@pytest.mark.parametrize("name", ["top_logprobs", "mirostat", "no_repeat_ngram_size", "echo"])
def test_one_of_anything_else_asks_for_something(name: str) -> None:
    with pytest.raises(ApiError, match=f"'{name}' is not supported here"):
        MESSAGES.check(body(name))


@pytest.mark.parametrize("field", msgspec.structs.fields(Extensions), ids=lambda each: each.name)
def test_every_dialect_takes_the_extensions(field: msgspec.structs.FieldInfo) -> None:
    """Messages ignored most of them, `seed` 1 and `cache_salt` among them."""
    for fields in ALL:
        assert field.encode_name in fields.known


MESSAGE = {"role": "user", "content": "hi"}
PROMPT = prewarm.FIELDS


@pytest.mark.parametrize(
    ("fields", "value", "path", "meant"),
    [
        (CHAT, {"messages": [MESSAGE, {**MESSAGE, "tool_call": []}]}, "messages[1].", "tool_calls"),
        (CHAT, {"messages": [{**MESSAGE, "toolCallId": "a"}]}, "messages[0].", "tool_call_id"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "texts": ""}]}]},
            "messages[0].content[0].",
            "text",
        ),
        (
            CHAT,
            {"messages": [{"tool_calls": [{"function": {"argument": "{}"}}]}]},
            "messages[0].tool_calls[0].function.",
            "arguments",
        ),
        (
            CHAT,
            {"prediction": {"content": [{"type": "text", "text": "x", "cacheControl": {}}]}},
            "prediction.content[0].",
            "cache_control",
        ),
        (CHAT, {"tools": [{"functions": {}}]}, "tools[0].", "function"),
        (CHAT, {"tools": [{"function": {"parameter": {}}}]}, "tools[0].function.", "parameters"),
        (CHAT, {"tools": [{"function": {"desciption": ""}}]}, "tools[0].function.", "description"),
        (CHAT, {"response_format": {"jsonSchema": {}}}, "response_format.", "json_schema"),
        (
            CHAT,
            {"response_format": {"json_schema": {"schemas": {}}}},
            "response_format.json_schema.",
            "schema",
        ),
        (CHAT, {"stream_options": {"includeUsage": True}}, "stream_options.", "include_usage"),
        (COMPLETIONS, {"stream_options": {"inclde_usage": 1}}, "stream_options.", "include_usage"),
        (RESPONSES, {"text": {"formats": {}}}, "text.", "format"),
        (RESPONSES, {"tools": [{"parameter": {}}]}, "tools[0].", "parameters"),
        (RESPONSES, {"input": [{**MESSAGE, "callId": "a"}]}, "input[0].", "call_id"),
        (MESSAGES, {"tools": [{"inputSchema": {}}]}, "tools[0].", "input_schema"),
        (
            MESSAGES,
            {"messages": [{"content": [{"cache_controls": {}}]}]},
            "messages[0].content[0].",
            "cache_control",
        ),
        (MESSAGES, {"system": [{"cacheControl": {}}]}, "system[0].", "cache_control"),
        (MESSAGES, {"tool_choice": {"names": "f"}}, "tool_choice.", "name"),
        (PROMPT, {"messages": [{**MESSAGE, "tool_call": []}]}, "messages[0].", "tool_calls"),
        (PROMPT, {"salt": "a"}, "", "cache_salt"),
        (PROMPT, {"ttl_seconds": 9}, "", "ttl"),
        (PROMPT, {"system": "a"}, "", "messages"),
    ],
)
def test_a_slip_within_an_object_is_refused_where_it_stands(
    fields: KnownFields, value: dict[str, Any], path: str, meant: str
) -> None:
    data = msgspec.json.encode(value)
    with pytest.raises(ApiError) as caught:
        fields.check(data)
    error = caught.value
    assert (error.status, error.code) == (400, "unknown_parameter")
    assert error.param is not None
    assert error.param.startswith(path)
    assert f"'{meant}'" in error.message


def test_what_is_within_free_json_is_nobodys_slip() -> None:
    schema = {"propertie": {"typo": 1, "tool_call": 2}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    kwargs = {"tool_call": 1, "messages": [{"tool_call": 1}]}
    CHAT.check(msgspec.json.encode({"tools": [tool], "chat_template_kwargs": kwargs}))


def test_what_is_very_large_is_not_looked_into() -> None:
    def asked(num_bytes: int) -> bytes:
        return msgspec.json.encode({"messages": [{"content": "x" * num_bytes, "tool_call": 1}]})

    CHAT.check(asked(MAX_BYTES))
    with pytest.raises(ApiError):
        CHAT.check(asked(MAX_BYTES // 2))


def test_of_a_long_list_the_first_are_looked_at() -> None:
    slip = {**MESSAGE, "tool_call": []}
    CHAT.check(msgspec.json.encode({"messages": [MESSAGE] * MAX_LOOKED_AT + [slip]}))
    with pytest.raises(ApiError):
        CHAT.check(msgspec.json.encode({"messages": [MESSAGE] * (MAX_LOOKED_AT - 1) + [slip]}))


@pytest.mark.parametrize("value", [1, "x", None, [1, "x", None, [[{"tool_call": 1}]]], {}, []])
def test_what_is_no_object_is_left_to_the_decoder(value: Any) -> None:
    CHAT.check(msgspec.json.encode({"messages": value, "tools": value, "stream_options": value}))


OTHERS = (
    "top_a", "mode", "x", "nn", "min_length", "typical_p", "mirostat", "cache_prompt", "n_probs",
    "options", "keep_alive", "think", "models", "provider", "transforms", "route", "num_retries",
    "language", "purpose", "my_own_field", "ext", "", "é", "a" * 1000,
)  # fmt: skip


@pytest.mark.parametrize("fields", ALL)
def test_other_fields_are_ignored_and_told_in_the_log(
    fields: KnownFields, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fields.check(body("model"))
    assert not caplog.records
    fields.check(msgspec.json.encode(dict.fromkeys(OTHERS, False)))
    (record,) = caplog.records
    assert "'top_a'" in record.message
    assert len(record.message) < 700


def typed(*params: Any) -> set[str]:
    """The parameters of an SDK's call."""
    return {name for each in params for name in get_type_hints(each)}


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        (CHAT, (chat_params.CompletionCreateParamsStreaming,)),
        (COMPLETIONS, (completion_params.CompletionCreateParamsStreaming,)),
        (RESPONSES, (response_params.ResponseCreateParamsStreaming, InputTokenCountParams)),
        (RESPONSES, (ResponseCreate,)),
        (MESSAGES, (message_params.MessageCreateParamsStreaming, MessageCountTokensParams)),
        (MESSAGES, (beta_params.MessageCreateParamsStreaming,)),
    ],
)
def test_all_that_the_sdks_have_is_known(fields: KnownFields, params: tuple[Any, ...]) -> None:
    assert len(typed(*params)) > 10
    assert typed(*params) <= fields.known


def sample(kind: Any, depth: int = 0) -> Any:
    """A value with every field that an SDK's type allows, all members of a union side by side."""
    origin, arguments = get_origin(kind), get_args(kind)
    if depth > 12:
        return None
    if hasattr(kind, "__total__"):  # a TypedDict of any origin
        return {name: sample(each, depth + 1) for name, each in get_type_hints(kind).items()}
    if origin in (Required, NotRequired, Annotated):
        return sample(arguments[0], depth)
    if origin in (list, Iterable) and arguments:
        inner = sample(arguments[0], depth + 1)
        return inner if isinstance(inner, list) else [inner]
    if origin in (Union, UnionType):
        members = [sample(each, depth + 1) for each in arguments]
        objects = [each for each in members if isinstance(each, dict)]
        objects += [one for each in members if isinstance(each, list) for one in each]
        return objects or members[0]
    return 1


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        (CHAT, chat_params.CompletionCreateParamsStreaming),
        (COMPLETIONS, completion_params.CompletionCreateParamsStreaming),
        (RESPONSES, response_params.ResponseCreateParamsStreaming),
        (MESSAGES, message_params.MessageCreateParamsStreaming),
        (MESSAGES, beta_params.MessageCreateParamsStreaming),
    ],
)
def test_nothing_within_the_sdks_objects_is_taken_for_a_slip(
    fields: KnownFields, params: Any
) -> None:
    whole = sample(params)
    there = fields.inside.keys() & whole.keys()
    assert there
    assert all(isinstance(whole[name], list | dict) for name in there)
    for name in there:
        objects = whole[name] if isinstance(whole[name], list) else [whole[name]]
        for each in objects:
            fields.check(msgspec.json.encode({name: each}))
            fields.check(msgspec.json.encode({name: [each]}))


VLLM_AND_SGLANG = (
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids",
    "skip_special_tokens", "include_stop_str_in_output", "spaces_between_special_tokens",
    "length_penalty", "use_beam_search", "bad_words", "allowed_token_ids", "prompt_logprobs",
    "logprob_token_ids", "truncate_prompt_tokens", "truncation_side", "stream_interval", "echo",
    "no_stop_trim", "stop_regex", "lora_path", "separate_reasoning", "stream_reasoning",
    "custom_logit_processor", "return_hidden_states", "return_meta_info", "rid", "extra_key",
    "session_params", "chat_template_kwargs", "continue_final_message", "documents",
    "chat_template", "add_generation_prompt", "add_special_tokens", "structured_outputs",
    "priority", "session_id", "cache_salt", "return_token_ids", "return_tokens_as_token_ids",
    "return_token_offsets", "return_prompt_text", "return_prompt_token_ids", "reasoning_effort",
    "return_cached_tokens_details", "include_reasoning", "thinking_token_budget", "request_id",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "prediction", "web_search_options", "moderation", "functions", "function_call", "verbosity",
)  # fmt: skip


def test_all_that_agents_send_beyond_the_sdks_is_known() -> None:
    assert set(VLLM_AND_SGLANG) <= CHAT.known


@pytest.mark.parametrize("fields", ALL)
def test_no_known_field_is_taken_for_another(fields: KnownFields) -> None:
    fields.check(body(*fields.known))
    assert not fields.known & fields.meant.keys()
