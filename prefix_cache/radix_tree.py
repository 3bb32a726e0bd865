"""Radix trees over token ids, one per namespace: match, insert, split and cut.

Edges begin and end on page boundaries; only a leaf may end inside a page. Children are sorted by
the bytes of their first page's tokens, and none of these is a prefix of another, so the sibling
with the longest common start is next to where a bisect ends.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from prefix_cache.key import Namespace
from prefix_cache.page_pool import PageIds

TokenIds = NDArray[np.int32]
_Items = TypeVar("_Items", TokenIds, PageIds)
_TOKEN_BYTES = 4
_NO_TOKENS: Final[TokenIds] = np.empty(0, dtype=np.int32)
_NO_PAGES: Final[PageIds] = np.empty(0, dtype=np.int64)


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """How many tokens a and b share from their start."""
    length = min(len(a), len(b))
    if not length or a[0] != b[0]:
        return 0
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length


def _common_tokens(a: bytes, b: bytes) -> int:
    length = min(len(a), len(b))
    differing = int.from_bytes(a[:length], "little") ^ int.from_bytes(b[:length], "little")
    if not differing:
        return length // _TOKEN_BYTES
    lowest_bit = (differing & -differing).bit_length() - 1
    return lowest_bit // (8 * _TOKEN_BYTES)


def _joined(runs: list[PageIds]) -> PageIds:
    """A copy of all runs, one after another."""
    if len(runs) == 1:
        return runs[0].copy()
    return np.concatenate(runs) if runs else _NO_PAGES


def _appended(buffer: _Items, length: int, items: _Items) -> _Items:
    end = length + len(items)
    if end > len(buffer):
        larger = np.empty(max(end, 2 * length), dtype=buffer.dtype)
        larger[:length] = buffer[:length]
        buffer = larger
    buffer[length:end] = items
    return buffer


@dataclass(frozen=True, slots=True)
class Use:
    """The last request that ended in a node: when (`tick` counts ends), how many turns had gone
    on from one another with it, its kind, as the eviction policy tells them apart, and how many
    pages it had. `whole` until the end of what it left is cut."""

    tick: int
    turns: int
    kind: int
    num_pages: int
    whole: bool = True


NEVER: Final = Use(0, 0, 0, 0)


class Node:
    """A stretch of tokens and one page for each page of it; a root has none of either.

    Changed only by `RadixForest`. first_page: page index in the sequence at which the stretch
    begins. latest: the child that came or was used last. use and queued belong to eviction: the
    last use of what ends here, and the kind of queue the node stands in (-1 for none). Of live
    tables, which `Holds` counts: ends, how many hold their path as far as so many pages of the
    node; num_held_children, in how many children any page is held; num_held, how many of its own
    first pages are.
    """

    __slots__ = (
        "_pages",
        "_tokens",
        "child_keys",
        "children",
        "ends",
        "first_page",
        "latest",
        "num_held",
        "num_held_children",
        "num_pages",
        "num_tokens",
        "parent",
        "queued",
        "use",
    )

    def __init__(self, parent: "Node | None", first_page: int) -> None:
        self.parent = parent
        self.first_page = first_page
        self.num_tokens = 0
        self.num_pages = 0
        self.child_keys: list[bytes] = []
        self.children: list[Node] = []
        self.latest: Node | None = None
        self.use = NEVER
        self.queued = -1
        self.ends: dict[int, int] = {}
        self.num_held_children = 0
        self.num_held = 0
        self._tokens = _NO_TOKENS
        self._pages = _NO_PAGES

    @property
    def tokens(self) -> TokenIds:
        """A view, valid until the node changes."""
        return self._tokens[: self.num_tokens]

    @property
    def pages(self) -> PageIds:
        """A view, valid until the node changes."""
        return self._pages[: self.num_pages]

    def key(self, page_size: int) -> bytes:
        """The bytes of the first page's tokens: what the parent sorts by."""
        return self.tokens[:page_size].tobytes()

    def closest_child(self, key: bytes) -> tuple["Node | None", int]:
        """The child sharing the longest start with `key` and how many tokens; None for 0 tokens."""
        index = bisect_left(self.child_keys, key)
        best, common = None, 0
        for neighbour in range(max(index - 1, 0), min(index + 1, len(self.children))):
            shared = _common_tokens(self.child_keys[neighbour], key)
            if shared > common:
                best, common = self.children[neighbour], shared
        return best, common

    def append(self, tokens: TokenIds, pages: PageIds) -> None:
        if self.num_tokens:
            self._tokens = _appended(self._tokens, self.num_tokens, tokens)
            self._pages = _appended(self._pages, self.num_pages, pages)
        else:
            self._tokens, self._pages = tokens.copy(), pages.copy()
        self.num_tokens += len(tokens)
        self.num_pages += len(pages)

    def keep(self, num_tokens: int, num_pages: int) -> None:
        """Forget what lies behind the first `num_tokens` tokens and `num_pages` pages."""
        self.num_tokens = num_tokens
        self.num_pages = num_pages

    def drop_front(self, num_tokens: int, num_pages: int) -> None:
        self._tokens = self.tokens[num_tokens:].copy()
        self._pages = self.pages[num_pages:].copy()
        self.keep(len(self._tokens), len(self._pages))
        self.first_page += num_pages

    def split_holds(self, upper: "Node", depth: int) -> None:
        """What is held of the first `depth` pages is `upper`'s from now on, which gets them."""
        upper.num_held = min(self.num_held, depth)
        upper.ends = {end: count for end, count in self.ends.items() if end <= depth}
        upper.num_held_children = int(self.num_held > depth)
        self.num_held -= upper.num_held
        self.ends = {end - depth: count for end, count in self.ends.items() if end > depth}


class Root(Node):
    """The empty stretch at which a namespace's tree begins."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, 0)
        self.namespace = namespace


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix and its pages, of which the last may be valid in part.

    `runs` are views of the nodes' pages, valid until these change. `node` is the last one on the
    way, None where nothing is stored; `depth` of its tokens match.
    """

    num_tokens: int
    runs: list[PageIds]
    node: Node | None
    depth: int

    @property
    def pages(self) -> PageIds:
        """A copy of all runs."""
        return _joined(self.runs)


@dataclass(frozen=True, slots=True)
class Insertion:
    """What `insert` did with the pages offered, from the first one on.

    canonical: pages the tree already had for the leading full pages; listed: the offered pages
    behind those that the tree lists now (none where it had all the tokens); replaced: a page the
    tree listed until now whose tokens `listed` has too, and more.
    """

    canonical: PageIds
    listed: PageIds
    replaced: int | None


class RadixForest:
    """One tree per namespace, and which node lists a page. Knows no reference counts."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.roots: dict[Namespace, Root] = {}
        self._node_of = np.full(num_pages, None, dtype=np.object_)

    def node_of(self, page: int) -> Node | None:
        """The one node that lists the page."""
        node: Node | None = self._node_of[page]
        return node

    def is_covered(self, page: int) -> bool:
        """Whether a live table's path leads to or through the page."""
        node = self.node_of(page)
        if node is None or not node.num_held:
            return False
        return node.num_held == node.num_pages or page in node.pages[: node.num_held]

    def count_covered(self, path: PageIds) -> int:
        """How many pages of a path, from its root on, live tables hold: its first ones."""
        node = self.node_of(int(path[-1])) if len(path) else None
        end = len(path)
        while node is not None:
            if node.num_held:
                return node.first_page + min(node.num_held, end - node.first_page)
            end, node = node.first_page, node.parent
        return 0

    def match(self, namespace: Namespace, tokens: TokenIds) -> Match:
        """The longest prefix of `tokens` stored, token by token. Changes nothing."""
        node: Node | None = self.roots.get(namespace)
        runs: list[PageIds] = []
        position = common = 0
        while node is not None and position < len(tokens):
            child, shared = node.closest_child(self._key(tokens, position))
            if child is None:
                break
            node, common = child, shared
            if common == self.page_size:
                common = common_prefix(node.tokens, tokens[position:])
            runs.append(node.pages[: -(-common // self.page_size)])
            position += common
            if common < node.num_tokens:
                break
        return Match(position, runs, node, common)

    def continuation(self, found: Match) -> TokenIds:
        """The stored tokens that follow a match: the rest of the edge, else the start of the
        branch used last; a view, empty at the end of what is stored."""
        node = found.node
        if node is None:
            return _NO_TOKENS
        if found.depth < node.num_tokens or node.latest is None:
            return node.tokens[found.depth :]
        return node.latest.tokens

    def path_tokens(self, node: Node, num_tokens: int, most: int | None = None) -> TokenIds:
        """The tokens from the root to the first `num_tokens` of the node, the last `most` of them
        (all for None), and perhaps more."""
        parts = [node.tokens[:num_tokens]]
        length, above = len(parts[0]), node.parent
        while above is not None and (most is None or length < most):
            parts.append(above.tokens)
            length += above.num_tokens
            above = above.parent
        return np.concatenate(parts[::-1]) if len(parts) > 1 else parts[0]

    def namespace_of(self, node: Node) -> Namespace:
        """The namespace whose tree the node is in."""
        while node.parent is not None:
            node = node.parent
        assert isinstance(node, Root)
        return node.namespace

    def insert(
        self, namespace: Namespace, after: int | None, start: int, tokens: TokenIds, pages: PageIds
    ) -> Insertion:
        """Store `tokens` in `pages`, one page per page_size tokens, at page index `start`.

        `after` is the page the tree lists at index start-1 of the sequence, None at the root.
        Where the tree has a full page of the same tokens it keeps its own; a leaf's last page
        that holds a part of ours is replaced by ours, which is the same page if ours grew.
        """
        node, depth = self._locate(namespace, after, start)
        page_size = self.page_size
        known: list[PageIds] = []
        done = 0
        replaced: int | None = None
        while True:
            rest = tokens[done * page_size :]
            edge = node.tokens[depth * page_size :]
            common = common_prefix(edge, rest)
            if whole := common // page_size:
                known.append(node.pages[depth : depth + whole].copy())
                done += whole
                depth += whole
            if common == len(rest):
                return Insertion(_joined(known), pages[:0], None)
            rest = rest[whole * page_size :]
            if common < len(edge):
                self._attach(self._fork_point(node, depth), rest, pages[done:])
                break
            if node.children or node.parent is None:
                child, shared = node.closest_child(self._key(rest, 0))
                if child is None or not shared:
                    self._attach(node, rest, pages[done:])
                    break
                node, depth = child, 0
                continue
            replaced = self._grow(node, depth, rest, pages[done:])
            break
        return Insertion(_joined(known), pages[done:], replaced)

    def cut(self, leaf: Node, num_pages: int) -> PageIds:
        """Take the last `num_pages` pages off a leaf, and an emptied one (and an emptied
        namespace) out of the forest; its parent then counts as used when it was, but cut.
        """
        if leaf.use.whole:
            leaf.use = replace(leaf.use, whole=False)
        kept = leaf.num_pages - num_pages
        pages = leaf.pages[kept:].copy()
        self._node_of[pages] = None
        if kept:
            leaf.keep(kept * self.page_size, kept)
            return pages
        parent = leaf.parent
        assert parent is not None
        index = bisect_left(parent.child_keys, leaf.key(self.page_size))
        del parent.child_keys[index], parent.children[index]
        if parent.latest is leaf:
            parent.latest = parent.children[-1] if parent.children else None
        leaf.keep(0, 0)
        if leaf.use.tick > parent.use.tick:
            parent.use = leaf.use
        if isinstance(parent, Root) and not parent.children:
            del self.roots[parent.namespace]
        return pages

    def detach(self, child: Node) -> None:
        """Take a subtree that stands below a root out of the forest, whatever it holds."""
        root = child.parent
        assert isinstance(root, Root)
        kept = [each for each in root.children if each is not child]
        root.children = kept
        root.child_keys = [each.key(self.page_size) for each in kept]
        root.latest = kept[-1] if kept else None
        if not kept:
            self.roots.pop(root.namespace, None)

    def relist(self, nodes: Iterable[Node]) -> None:
        """Make these nodes' pages, and no others, point to them."""
        self._node_of[:] = None
        for node in nodes:
            self._node_of[node.pages] = node

    def _key(self, tokens: TokenIds, position: int) -> bytes:
        return tokens[position : position + self.page_size].tobytes()

    def _locate(self, namespace: Namespace, after: int | None, start: int) -> tuple[Node, int]:
        if after is None:
            root = self.roots.get(namespace)
            if root is None:
                root = self.roots[namespace] = Root(namespace)
            return root, 0
        node = self.node_of(after)
        assert node is not None
        return node, start - node.first_page

    def _attach(self, parent: Node, tokens: TokenIds, pages: PageIds) -> None:
        leaf = Node(parent, parent.first_page + parent.num_pages)
        leaf.append(tokens, pages)
        key = leaf.key(self.page_size)
        index = bisect_left(parent.child_keys, key)
        parent.child_keys.insert(index, key)
        parent.children.insert(index, leaf)
        parent.latest = leaf
        self._node_of[pages] = leaf

    def _fork_point(self, node: Node, depth: int) -> Node:
        """The node that ends where `depth` pages of `node` do; splits it unless `depth` is 0."""
        parent = node.parent
        assert parent is not None
        if not depth:
            return parent
        num_tokens = depth * self.page_size
        upper = Node(parent, node.first_page)
        upper.use = node.use
        upper.append(node.tokens[:num_tokens], node.pages[:depth])
        node.split_holds(upper, depth)
        parent.children[bisect_left(parent.child_keys, node.key(self.page_size))] = upper
        node.drop_front(num_tokens, depth)
        node.parent = upper
        upper.children = [node]
        upper.latest = node
        if parent.latest is node:
            parent.latest = upper
        upper.child_keys = [node.key(self.page_size)]
        self._node_of[upper.pages] = upper
        return upper

    def _grow(self, leaf: Node, depth: int, tokens: TokenIds, pages: PageIds) -> int | None:
        """Let a leaf go on with `tokens` behind its first `depth` pages; a page replaced or None.

        A longer first page keeps the leaf's place among its siblings: none shares its whole key.
        """
        replaced: int | None = None
        if depth < leaf.num_pages and leaf.pages[depth] != pages[0]:
            replaced = int(leaf.pages[depth])
            self._node_of[replaced] = None
        old_key = leaf.key(self.page_size)
        leaf.keep(depth * self.page_size, depth)
        leaf.append(tokens, pages)
        self._node_of[pages] = leaf
        parent = leaf.parent
        assert parent is not None
        parent.child_keys[bisect_left(parent.child_keys, old_key)] = leaf.key(self.page_size)
        return replaced
