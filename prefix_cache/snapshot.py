"""Warm restart: what is cached, written when the server ends and read when it starts.

A folder holds one manifest and the page file it names. Pages are written first, to a file of a new
name; then the manifest replaces the old one in one step; then older page files go. So whenever the
writer dies, the manifest there is whole and so are its pages. What cannot be trusted is refused as
a whole (manifest) or from the first bad page of a prefix on (pages), never repaired.
"""

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import xxhash

from prefix_cache.cache import PrefixCache
from prefix_cache.key import Namespace
from prefix_cache.radix_tree import Node, TokenIds
from prefix_cache.tiers import DiskBook, DiskTier

MANIFEST: Final = "manifest"
_PAGES: Final = "pages-"
_VERSION: Final = 2
_DIGEST_BYTES: Final = 16


class SnapshotError(Exception):
    """A snapshot that cannot be used; the message says why."""


class _Name(msgspec.Struct, frozen=True):
    tenant: str
    salt: str
    adapter: str


class _Stretch(msgspec.Struct, frozen=True):
    """A node: its parent among those before it (-1 for a root), tokens, and for each of its pages
    a checksum, and its id where a disk tier is kept; the pages stand in the page file in the order
    of the nodes."""

    parent: int
    name: int
    tick: int
    tokens: bytes
    checksums: tuple[bytes, ...]
    ids: tuple[int, ...]


class _Leased(msgspec.Struct, frozen=True):
    name: int
    tokens: bytes
    ttl_s: float
    remaining_s: float
    id: str = ""


class _Manifest(msgspec.Struct, frozen=True):
    version: int
    identity: "Identity"
    pages: str
    names: tuple[_Name, ...]
    stretches: tuple[_Stretch, ...]
    leases: tuple[_Leased, ...]
    disk: DiskBook | None


class Identity(msgspec.Struct, frozen=True):
    """What decides the bits of a page: pages of another identity are foreign."""

    model_digest: str
    numeric_mode: str
    kv_dtype: str
    page_size: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Restored:
    """What a start took over. `refused` is why the rest, or all, was not; "" for nothing."""

    num_pages: int
    num_tokens: int
    num_leases: int
    refused: str = ""
    num_disk_pages: int = 0


def save(
    folder: Path,
    identity: Identity,
    cache: PrefixCache,
    export_page: Callable[[int], bytes],
    tier: DiskTier | None = None,
) -> int:
    """Write what is cached now, and the leases, and what a kept disk tier holds; how many pages of
    the device. Nothing may run meanwhile.

    Raises OSError; a former snapshot then stays as it was.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    pages = f"{_PAGES}{secrets.token_hex(8)}"
    names: dict[Namespace, int] = {}
    stretches: list[_Stretch] = []
    with open(folder / pages, "xb", opener=_private) as file:
        for name, node, parent, before in _nodes(cache):
            index = names.setdefault(name, len(names))
            tokens = np.concatenate([before, node.tokens])
            checksums: list[bytes] = []
            for offset, page in enumerate(node.pages.tolist()):
                end = len(before) + (offset + 1) * identity.page_size
                data = export_page(page)
                file.write(data)
                checksums.append(_checksum(data, name, tokens[:end]))
            own = _packed(node.tokens)
            ids = () if tier is None else tier.ids_of(node.pages)
            stretches.append(_Stretch(parent, index, node.use.tick, own, tuple(checksums), ids))
        file.flush()
        os.fsync(file.fileno())
    now_s = cache.clock()
    leases = [
        _Leased(
            names[lease.namespace],
            _packed(cache.leases.tokens(lease)),
            lease.ttl_s,
            lease.expires_s - now_s,
            lease.id,
        )
        for lease in cache.leases.all()
    ]
    disk = None if tier is None else tier.book(names)
    manifest = _Manifest(
        _VERSION,
        identity,
        pages,
        tuple(_Name(name.tenant, name.salt, name.adapter) for name in names),
        tuple(stretches),
        tuple(leases),
        disk,
    )
    _write_manifest(folder, msgspec.msgpack.encode(manifest))
    for old in folder.glob(f"{_PAGES}*"):
        if old.name != pages:
            old.unlink()
    return sum(len(each.checksums) for each in stretches)


def load(
    folder: Path,
    identity: Identity,
    cache: PrefixCache,
    import_page: Callable[[int, bytes], None],
    tier: DiskTier | None = None,
) -> Restored:
    """Take over what a former server left, as much as there are free pages for, what was used last
    first, and all that its disk tier held. Never raises for what the folder holds: what is wrong
    with it is told."""
    try:
        manifest = _read_manifest(folder, identity)
        with (folder / manifest.pages).open("rb") as file:
            return _Loader(manifest, file.fileno(), cache, import_page, tier).run()
    except SnapshotError as error:
        return Restored(0, 0, 0, str(error))
    except FileNotFoundError:
        return Restored(0, 0, 0, "")
    except OSError as error:
        return Restored(0, 0, 0, f"the snapshot cannot be read: {error}")
    finally:
        if tier is not None:
            tier.settle()


class _Loader:
    """One load: stretches by their place in the manifest, pages by theirs in the file."""

    def __init__(
        self,
        manifest: _Manifest,
        fd: int,
        cache: PrefixCache,
        import_page: Callable[[int, bytes], None],
        tier: DiskTier | None,
    ) -> None:
        self._tier = tier
        self._manifest = manifest
        self._fd = fd
        self._cache = cache
        self._import_page = import_page
        self._page_size = manifest.identity.page_size
        self._tokens = [np.frombuffer(each.tokens, dtype="<i4") for each in manifest.stretches]
        counts = [len(each.checksums) for each in manifest.stretches]
        self._first_page = np.cumsum([0, *counts]).tolist()
        self._refused = ""
        self._num_pages = 0
        self._num_tokens = 0

    def run(self) -> Restored:
        self._take_disk()
        stretches = self._manifest.stretches
        parents = {each.parent for each in stretches}
        leaves = [index for index in range(len(stretches)) if index not in parents]
        room = self._cache.stats().free
        chosen: list[int] = []
        counted: set[int] = set()
        for leaf in sorted(leaves, key=lambda index: -stretches[index].tick):
            path = [index for index in self._path(leaf) if index not in counted]
            room -= sum(len(stretches[index].checksums) for index in path)
            if room < 0:
                break
            counted.update(path)
            chosen.append(leaf)
        for leaf in reversed(chosen):  # so that what was used last is so again
            self._restore(leaf)
        num_leases = sum(map(self._lease, self._manifest.leases))
        tier = self._tier
        if tier is not None and (num_lost := tier.settle()) and not self._refused:
            self._refused = f"{num_lost} pages on disk, as what stood before them had no room"
        num_disk = 0 if tier is None else len(tier)
        return Restored(self._num_pages, self._num_tokens, num_leases, self._refused, num_disk)

    def _take_disk(self) -> None:
        book, tier = self._manifest.disk, self._tier
        if book is None or tier is None:
            self._tier = None
            if book is not None and book.records:
                self._refused = f"{len(book.records)} pages on disk: there is no --cache-disk now"
            return
        names = [self._namespace(place) for place in range(len(self._manifest.names))]
        if refusal := tier.take_over(book, names):
            self._tier = None
            if book.records:
                self._refused = f"{len(book.records)} pages on disk: {refusal}"

    def _path(self, leaf: int) -> list[int]:
        path = [leaf]
        while (parent := self._manifest.stretches[path[-1]].parent) >= 0:
            path.append(parent)
        return path[::-1]

    def _restore(self, leaf: int) -> None:
        """A whole prefix, from the page on that is not there yet, up to the first bad one."""
        path = self._path(leaf)
        tokens = np.concatenate([self._tokens[index] for index in path]).astype(np.int32)
        sources = [
            (self._first_page[index] + offset, checksum)
            for index in path
            for offset, checksum in enumerate(self._manifest.stretches[index].checksums)
        ]
        name = self._namespace(self._manifest.stretches[leaf].name)
        cache, page_size = self._cache, self._page_size
        table = cache.match(name, tokens).table
        start = table.num_tokens // page_size
        done = table.num_tokens
        if done < len(tokens) and cache.extend(table, len(tokens)) is not None:
            for place in range(start, len(sources)):
                end = min(len(tokens), (place + 1) * page_size)
                data = self._read(sources[place], name, tokens[:end])
                if data is None:
                    break
                self._import_page(int(table.page_ids[place]), data)
                done = end
                self._num_pages += 1
        self._num_tokens += max(0, done - table.num_tokens)
        cache.publish(table, tokens, max(done, table.num_tokens), tail=True)
        if self._tier is not None:
            ids = [own for index in path for own in self._manifest.stretches[index].ids]
            for place in range(start, done // page_size):
                self._tier.know(int(table.page_ids[place]), ids[place])
        cache.release(table)

    def _read(self, source: tuple[int, bytes], name: Namespace, prefix: TokenIds) -> bytes | None:
        place, checksum = source
        size = self._manifest.identity.page_bytes
        data = os.pread(self._fd, size, place * size)
        if len(data) == size and _checksum(data, name, prefix) == checksum:
            return data
        self._refused = f"page {place} of the snapshot is torn or not what it was"
        return None

    def _lease(self, lease: _Leased) -> bool:
        tokens = np.frombuffer(lease.tokens, dtype="<i4").astype(np.int32)
        if lease.remaining_s <= 0:
            return False
        name = self._namespace(lease.name)
        granted = self._cache.leases.grant(name, tokens, lease.ttl_s, lease.id)
        if granted is None:
            return False
        granted.expires_s = self._cache.clock() + lease.remaining_s
        return True

    def _namespace(self, index: int) -> Namespace:
        identity, name = self._manifest.identity, self._manifest.names[index]
        return Namespace(
            identity.model_digest,
            identity.numeric_mode,
            identity.kv_dtype,
            name.tenant,
            name.salt,
            name.adapter,
        )


def _nodes(cache: PrefixCache) -> Iterator[tuple[Namespace, Node, int, TokenIds]]:
    """All nodes, parents first: namespace, node, its parent's place, the tokens before it."""
    place = 0
    for name, root in cache.roots():
        stack = [(child, -1, np.empty(0, dtype=np.int32)) for child in root.children]
        while stack:
            node, parent, before = stack.pop()
            yield name, node, parent, before
            behind = np.concatenate([before, node.tokens])
            stack += [(child, place, behind) for child in node.children]
            place += 1


def _checksum(data: bytes, name: Namespace, prefix: TokenIds) -> bytes:
    """Of a page and of all that decides what it holds."""
    digest = xxhash.xxh3_128(data)
    for part in (name.tenant, name.salt, name.adapter):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    digest.update(_packed(prefix))
    return digest.digest()


def _packed(tokens: TokenIds) -> bytes:
    return tokens.astype("<i4").tobytes()


def _private(path: str, flags: int) -> int:
    """What prompts were computed to is nobody else's to read."""
    return os.open(path, flags, 0o600)


def _write_manifest(folder: Path, body: bytes) -> None:
    """Replace the manifest in one step that survives a loss of power."""
    draft = folder / f"{MANIFEST}.draft"
    draft.unlink(missing_ok=True)
    with open(draft, "xb", opener=_private) as file:
        file.write(xxhash.xxh3_128_digest(body) + body)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / MANIFEST)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _read_manifest(folder: Path, identity: Identity) -> _Manifest:
    data = (folder / MANIFEST).read_bytes()
    digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(body) != digest:
        raise SnapshotError("the snapshot's manifest is torn")
    try:
        manifest = msgspec.msgpack.decode(body, type=_Manifest)
    except msgspec.MsgspecError as error:
        raise SnapshotError(f"the snapshot's manifest is of another form: {error}") from error
    if manifest.version != _VERSION:
        raise SnapshotError(f"the snapshot has version {manifest.version}, not {_VERSION}")
    for field in Identity.__struct_fields__:
        theirs, ours = getattr(manifest.identity, field), getattr(identity, field)
        if theirs != ours:
            raise SnapshotError(f"the snapshot is foreign: its {field} is {theirs}, not {ours}")
    if "/" in manifest.pages:
        raise SnapshotError("the snapshot names a file outside its folder")
    return manifest
