"""What becomes of fields that nobody here knows: slips are refused by name, others are ignored."""

import logging
from typing import Any, get_type_hints

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

from service.dialects import chat_decode, completions_decode, messages_decode, responses_decode
from service.dialects.known_fields import KnownFields
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
        (CHAT, "maxNewTokens", "max_completion_tokens"),
        (CHAT, "guided_json", "structured_outputs.json"),
        (CHAT, "stop_sequences", "stop"),
        (COMPLETIONS, "max_completion_tokens", "max_tokens"),
        (COMPLETIONS, "prompts", "prompt"),
        (RESPONSES, "max_tokens", "max_output_tokens"),
        (RESPONSES, "messages", "input"),
        (RESPONSES, "response_format", "text.format"),
        (RESPONSES, "previous_response", ""),
        (RESPONSES, "instruction", "instructions"),
        (MESSAGES, "max_output_tokens", "max_tokens"),
        (MESSAGES, "stop", "stop_sequences"),
        (MESSAGES, "stop_sequence", "stop_sequences"),
        (MESSAGES, "response_format", "output_config.format"),
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
    fields.check(body(*OTHERS))
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
