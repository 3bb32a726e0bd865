"""Text assets from a Hugging Face folder: tokenizer.json and what stands beside it."""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from engine.text.assets import TextAssets, TextError
from engine.text.encoder import Encoder
from engine.text.vocabulary import Vocabulary, byte_level_pieces, sentencepiece_pieces

Json = Mapping[str, object]


def assets_from_folder(folder: Path) -> TextAssets:
    """Reads tokenizer.json and, where present, tokenizer_config.json, chat_template.jinja,
    generation_config.json and config.json.

    Truncation and padding that a tokenizer.json may ask for are switched off. Raises TextError
    naming the file and the reason.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TextError(folder, "has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        encoder = Encoder(tokenizer)
    except Exception as error:  # the library raises nothing narrower
        raise TextError(file, str(error)) from error
    config = _read_json(folder / "tokenizer_config.json")
    bos, eos = (_token_text(config, name) for name in ("bos_token", "eos_token"))
    bos_id = tokenizer.token_to_id(bos) if bos else None
    return TextAssets(
        path=folder,
        tokenizer=tokenizer,
        encoder=encoder,
        vocabulary=_vocabulary(file, tokenizer),
        chat_template=_chat_template(folder, config),
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=_end_ids(folder, tokenizer, eos),
        add_bos=bos_id is not None and bos_id in encoder.prefix_ids,
    )


def _read_json(file: Path) -> Json:
    """A JSON object, empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TextError(file, f"cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise TextError(file, "is not a JSON object")
    return value


def _token_text(config: Json, name: str) -> str:
    """A special token's text, written as a string or as an object with `content`."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _vocabulary(file: Path, tokenizer: Tokenizer) -> Vocabulary:
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(ids.values(), default=-1) + 1)
    for token, token_id in ids.items():
        tokens[token_id] = token
    added = tokenizer.get_added_tokens_decoder()
    special_ids = [token_id for token_id, token in added.items() if token.special]
    kinds = _decoder_kinds(tokenizer)
    if "ByteLevel" in kinds:
        return Vocabulary(byte_level_pieces(tokens, added), special_ids)
    if kinds & {"ByteFallback", "Metaspace"}:
        return Vocabulary(sentencepiece_pieces(tokens, added), special_ids)
    names = ", ".join(sorted(kinds)) or "none"
    raise TextError(file, f"decoder {names} is not supported; byte-level and sentencepiece are")


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    if tokenizer.decoder is None:
        return set()
    state = json.loads(tokenizer.decoder.__getstate__())
    return {part["type"] for part in (state, *state.get("decoders", ()))} - {"Sequence"}


def _chat_template(folder: Path, config: Json) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's: a string, or a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TextError(file, f"cannot be read: {error}") from error
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _end_ids(folder: Path, tokenizer: Tokenizer, eos: str) -> frozenset[int]:
    """The EOS token and the ids of generation_config.json, or else of config.json."""
    found: set[int] = set()
    if eos and (eos_id := tokenizer.token_to_id(eos)) is not None:
        found.add(eos_id)
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise TextError(folder / name, f"eos_token_id: {value!r} is not a list of token ids")
        if ids:
            return frozenset(found.union(ids))
    return frozenset(found)
