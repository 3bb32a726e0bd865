"""Text assets from the metadata of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (tokenizer.ggml.*). The byte-level
BPE of GPT-2 is built for the pre-tokenizers `smollm`, `llama-bpe` and `qwen2`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import PreTokenizer
from tokenizers.processors import TemplateProcessing

from engine.text import pre_tokenizers
from engine.text.assets import TextAssets, TextError
from engine.text.encoder import Encoder
from engine.text.vocabulary import Vocabulary, byte_level_pieces

_PREFIX: Final = "tokenizer.ggml."
_END_TEXTS: Final = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}
)
"""Control tokens that end a turn in every family read here; a GGUF file names only one or two."""


class UnsupportedTokenizer(TextError):
    """The file's tokenizer is of a kind that only a tokenizer.json can describe."""


class TokenType(IntEnum):
    """tokenizer.ggml.token_type, as far as it matters here."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class _Family:
    """How one pre-type tokenises; `add_bos` is what a file that does not say means."""

    pre_tokenizer: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


_FAMILIES: Final[Mapping[str, _Family]] = MappingProxyType(
    {
        "smollm": _Family(pre_tokenizers.smollm),
        "llama-bpe": _Family(pre_tokenizers.llama3, ignore_merges=True, add_bos=True),
        "qwen2": _Family(pre_tokenizers.qwen2, nfc=True),
    }
)

_T = TypeVar("_T")


class _Metadata:
    """Typed reads of the tokenizer's keys; each error names file and key."""

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        self.path = path
        self._values = values

    def error(self, name: str, reason: str) -> TextError:
        return TextError(self.path, f"{_PREFIX}{name}: {reason}")

    def optional(self, name: str, kind: type[_T]) -> _T | None:
        value = self._values.get(_PREFIX + name)
        if value is None:
            return None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, f"is {type(value).__name__}, not {kind.__name__}")
        return value

    def array(self, name: str, kind: type[_T]) -> tuple[_T, ...]:
        value = self.optional(name, tuple)
        if value is None:
            raise self.error(name, "is missing")
        if not all(isinstance(item, kind) for item in value):
            raise self.error(name, f"has elements that are not {kind.__name__}")
        return value

    def token_id(self, name: str, size: int) -> int | None:
        value = self.optional(name, int)
        if value is not None and not 0 <= value < size:
            raise self.error(name, f"{value} is outside the vocabulary of {size}")
        return value


def assets_from_metadata(path: Path, values: Mapping[str, object]) -> TextAssets:
    """Text assets from a GGUF file's metadata (arrays are tuples); `path` names it in errors.

    Raises UnsupportedTokenizer for a kind that needs a tokenizer.json, TextError for missing or
    damaged metadata.
    """
    metadata = _Metadata(path, values)
    family = _family(metadata)
    tokens = metadata.array("tokens", str)
    types = metadata.array("token_type", int)
    if len(types) != len(tokens):
        raise metadata.error("token_type", f"has {len(types)} entries for {len(tokens)} tokens")
    bos_id = metadata.token_id("bos_token_id", len(tokens))
    eos_id = metadata.token_id("eos_token_id", len(tokens))
    add_bos = metadata.optional("add_bos_token", bool)
    add_bos = bos_id is not None and (family.add_bos if add_bos is None else add_bos)
    tokenizer = _build(metadata, family, tokens)
    special_ids = [i for i, kind in enumerate(types) if kind == TokenType.CONTROL]
    user_ids = [i for i, kind in enumerate(types) if kind == TokenType.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in special_ids])
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False) for i in user_ids])
    if add_bos and bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, bos_id)]
        )
    end_ids = {metadata.token_id(f"{name}_token_id", len(tokens)) for name in ("eot", "eom")}
    end_ids |= {eos_id, *(i for i in special_ids if tokens[i] in _END_TEXTS)}
    template = values.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise TextError(path, "tokenizer.chat_template: is not a string")
    return TextAssets(
        path=path,
        tokenizer=tokenizer,
        encoder=Encoder(tokenizer),
        vocabulary=Vocabulary(byte_level_pieces(tokens, {*special_ids, *user_ids}), special_ids),
        chat_template=template,
        bos_token="" if bos_id is None else tokens[bos_id],
        eos_token="" if eos_id is None else tokens[eos_id],
        eos_token_ids=frozenset(i for i in end_ids if i is not None),
        add_bos=add_bos,
    )


def _family(metadata: _Metadata) -> _Family:
    model, pre = metadata.optional("model", str), metadata.optional("pre", str)
    if model is None:
        raise metadata.error("model", "is missing: the file describes no tokenizer")
    if model == "gpt2" and pre is not None and pre in _FAMILIES:
        return _FAMILIES[pre]
    raise UnsupportedTokenizer(
        metadata.path,
        f"its tokenizer (model {model!r}, pre-tokenizer {pre!r}) cannot be built from GGUF "
        f"metadata, only model 'gpt2' with {', '.join(_FAMILIES)} can: put the model's "
        "tokenizer.json (with tokenizer_config.json) beside the file",
    )


def _build(metadata: _Metadata, family: _Family, tokens: tuple[str, ...]) -> Tokenizer:
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise metadata.error("tokens", "some tokens occur twice")
    merges: list[tuple[str, str]] = []
    for merge in metadata.array("merges", str):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise metadata.error("merges", f"{merge!r} is not two tokens")
        merges.append((left, right))
    try:
        model = models.BPE(vocab=ids, merges=merges, ignore_merges=family.ignore_merges)
    except Exception as error:  # the library raises nothing narrower
        raise metadata.error("merges", str(error)) from error
    tokenizer = Tokenizer(model)
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = family.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
