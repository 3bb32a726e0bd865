"""The key file: who may use the server, as hashes of API keys, read again when it changes.

    [[keys]]
    hash = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    tenant = "research"

    [[keys]]
    hash = "sha256:…"
    tenant = "operators"
    admin = true

    [tenants.research]
    requests_per_minute = 600
    tokens_per_minute = 2_000_000
    concurrent_requests = 32
    weight = 2

Keys are random (`new_key`), so that a plain hash keeps them: there is nothing to guess that a slow
hash would protect, and a lookup by hash tells a listener of its timing nothing about any key.
"""

import hashlib
import logging
import secrets
import time
import tomllib
from collections.abc import Mapping
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

RELOAD_S: Final = 1.0
"""A changed file counts within this time."""
PREFIX: Final = "hw-"

log = logging.getLogger(__name__)

TenantName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[\w.:-]+$")]
Hash = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
PositiveInt = Annotated[int, Meta(ge=1, le=10**12)]


class KeyFileError(Exception):
    """The key file cannot be used; the message names the file and the field."""


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a tenant may use; None is no bound of its own. Tokens are those of prompts, cached ones
    too, and of answers. Under load tenants share the engine in proportion to `weight`."""

    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    concurrent_requests: PositiveInt | None = None
    weight: Annotated[float, Meta(gt=0.0, le=1000.0)] = 1.0


class _Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hash: Hash
    tenant: TenantName
    admin: bool = False


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: Annotated[list[_Key], Meta(min_length=1)]
    tenants: dict[TenantName, TenantLimits] = {}


@dataclass(frozen=True, slots=True)
class Credential:
    """Whose key a request showed. `admin` opens the operator's routes."""

    tenant: str
    admin: bool


def new_key() -> str:
    """A fresh API key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What the file holds of a key."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def key_entry(hash: str, tenant: str, admin: bool) -> str:
    """The entry of a key in the file. Raises KeyFileError for a tenant that cannot be named so."""
    try:
        msgspec.convert({"hash": hash, "tenant": tenant}, _Key)
    except msgspec.ValidationError as error:
        raise KeyFileError(
            f"{tenant!r} cannot be a tenant's name: use letters, digits, '_', '.', ':' and '-'."
        ) from error
    lines = ["[[keys]]", f'hash = "{hash}"', f'tenant = "{tenant}"', *["admin = true"] * admin]
    return "\n".join(lines) + "\n"


class KeyFile:
    """The keys of a file. A file that breaks while the server runs is told of in the log, and the
    last good one counts on. Used from one event loop only."""

    def __init__(self, path: Path) -> None:
        """Raises KeyFileError."""
        self._path = path
        self._credentials: Mapping[str, Credential] = {}
        self._limits: Mapping[str, TenantLimits] = {}
        self._version = _version(path)
        self._checked_s = time.monotonic()
        self._load()

    def find(self, key: str) -> Credential | None:
        """Whose key this is, if anyone's."""
        Context().run(self._reload_if_changed)  # not this request's matter: no trace in its lines
        return self._credentials.get(hash_key(key))

    def limits(self, tenant: str) -> TenantLimits:
        """What a tenant may use now."""
        return self._limits.get(tenant, _UNLIMITED)

    @property
    def tenants(self) -> frozenset[str]:
        """Those that have a key."""
        return frozenset(credential.tenant for credential in self._credentials.values())

    def _reload_if_changed(self) -> None:
        now_s = time.monotonic()
        if now_s - self._checked_s < RELOAD_S:
            return
        self._checked_s = now_s
        try:
            version = _version(self._path)
            if version == self._version:
                return
            self._version = version
            self._load()
            log.info("read %s again: %d keys", self._path, len(self._credentials))
        except KeyFileError as error:
            log.error("%s The keys read before count on.", error)

    def _load(self) -> None:
        try:
            content = tomllib.loads(self._path.read_text(encoding="utf-8"))
            _refuse_unknown(content)
            file = msgspec.convert(content, _File)
        except (OSError, ValueError, msgspec.ValidationError) as error:
            fault = _fault(error)
            raise KeyFileError(f"The key file {self._path} cannot be used: {fault}.") from error
        unknown = file.tenants.keys() - {key.tenant for key in file.keys}
        if unknown:
            raise KeyFileError(
                f"The key file {self._path} limits tenants that have no key: "
                f"{', '.join(sorted(unknown))}."
            )
        self._credentials = {key.hash: Credential(key.tenant, key.admin) for key in file.keys}
        self._limits = file.tenants


_UNLIMITED: Final = TenantLimits()


def _fault(error: Exception) -> str:
    """What is wrong with a file, in words of its fields."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    if isinstance(error, tomllib.TOMLDecodeError):
        text = str(error)
        return f"it is no TOML: {text[:1].lower()}{text[1:]}"
    what, _, place = str(error).partition(" - at `$.")
    where = place.rstrip("`")
    if not isinstance(error, msgspec.ValidationError):
        return what
    if "required field `keys`" in what or where == "keys":
        return "it holds no keys: `headwater key TENANT` makes one and its entry"
    if where.endswith(".hash") or "required field `hash`" in what:
        entry = where.removesuffix(".hash")
        return f"{entry}.hash must be 'sha256:' and 64 of 0-9 and a-f, as `headwater key` has it"
    if where.endswith(".tenant"):
        return f"{where} must be 1 to 64 letters, digits, '_', '.', ':' and '-'"
    if what.startswith("Object missing required field"):
        return f"{where} has no '{what.split('`')[1]}'"
    return f"{where}: {what[0].lower()}{what[1:].replace('`', '')}"


def _refuse_unknown(content: dict[str, Any]) -> None:
    """Raises ValueError that names a field nothing has, and the place: of a tenant's table
    msgspec does not say whose it is."""
    keys, tenants = content.get("keys"), content.get("tenants")
    places: list[tuple[str, object, type[msgspec.Struct]]] = [("the file", content, _File)]
    if isinstance(keys, list):
        places += [(f"keys[{index}]", key, _Key) for index, key in enumerate(keys)]
    if isinstance(tenants, dict):
        places += [(f"tenants.{name}", table, TenantLimits) for name, table in tenants.items()]
    for place, table, kind in places:
        known = kind.__struct_fields__
        unknown = [name for name in table if name not in known] if isinstance(table, dict) else ()
        if unknown:
            raise ValueError(f"{place} has no field '{unknown[0]}', but {', '.join(known)}")


def _version(path: Path) -> tuple[int, int, int]:
    """What changes when the file does, also when another takes its place."""
    try:
        status = path.stat()
    except OSError as error:
        raise KeyFileError(
            f"The key file {path} cannot be read: {error.strerror}. "
            "Make a key and its entry with `headwater key TENANT`."
        ) from error
    return status.st_mtime_ns, status.st_size, status.st_ino
