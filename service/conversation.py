"""The canonical request: what every dialect decodes to, and the one generation path reads."""

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

# As OpenAI's; a checkpoint's own generation settings are not read.
DEFAULT_TEMPERATURE: Final = 1.0
DEFAULT_TOP_P: Final = 1.0

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
JSONValue: TypeAlias = "bool | int | float | str | list[JSONValue] | dict[str, JSONValue] | None"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the assistant made; `arguments` is the JSON text exactly as it was generated."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `text` joins the text parts of the wire's content."""

    role: Role
    text: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; `spec` is the wire's JSON, rendered verbatim. `schema_path`
    is the field in which its client gave the schema of its arguments."""

    name: str
    spec: dict[str, JSONValue]
    schema_path: str = field(default="tools", compare=False)


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the model reads. `continue_final`: the last assistant message is left open;
    `asks_answer`: the head of the answer's turn stands behind the messages."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    template_kwargs: dict[str, JSONValue] = field(default_factory=dict)
    continue_final: bool = False
    asks_answer: bool = True

    def beginning(self, num_messages: int) -> "Conversation":
        """The first messages, with the tools; none of them: what the tools are rendered into,
        which is the system's text."""
        if num_messages == len(self.messages):
            return self
        messages = self.messages[: num_messages or 1]
        if not num_messages and messages[0].role != "system":
            messages = (Message("system"),)
        return Conversation(messages, self.tools, self.template_kwargs)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools may be called or must be; `names` are those that may, None for all."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What the text of the answer must match: JSON Schema's or Lark's text, a regular expression,
    or a JSON list of choices. `path` is the field that holds it."""

    kind: Literal["json_schema", "regex", "choice", "lark"]
    source: str
    path: str


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to generate. None means: the server's default (for max_tokens, all the context left).

    Ranges are checked by the dialect, which knows the field's name on its wire.
    `keep_s`: how long the whole prompt is to be leased. `cache_report`: usage is to say what of the
    prompt was cached, and why not more. `fit_max_tokens`: more than the context has left is cut to
    what is left, not refused. `prediction`: what the answer is expected to have.
    """

    max_tokens: int | None = None
    fit_max_tokens: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    priority: int = 0
    timeout_s: float | None = None
    salt: str = ""
    keep_s: float | None = None
    cache_report: bool = False
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    output_format: OutputFormat | None = None
    prediction: str = ""


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """A beginning of the prompt to be leased for `ttl_s`: what `conversation` renders to, as far
    as the prompt begins with it."""

    conversation: Conversation
    ttl_s: float


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation. `id` is the id the dialect shows (chatcmpl-…, resp_…). `kept` are the
    prefixes to be leased, shortest first.

    `former` are token ids, packed, of a prompt and its answer that the conversation continues.
    """

    id: str
    model: str
    conversation: Conversation
    options: GenerationOptions
    former: bytes = b""
    kept: tuple[KeptPrefix, ...] = ()

    @property
    def callable_tools(self) -> tuple[str, ...]:
        """Names of the tools that this answer may call."""
        choice = self.options.tool_choice
        if choice.mode == "none":
            return ()
        names = (tool.name for tool in self.conversation.tools)
        return tuple(n for n in names if choice.names is None or n in choice.names)
