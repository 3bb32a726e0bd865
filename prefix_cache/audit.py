"""Recount of pages from a walk over trees, tables and leases, compared with what the pool says."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prefix_cache.eviction import Evictor
from prefix_cache.lease import LeaseBook
from prefix_cache.page_pool import PageIds, PagePool
from prefix_cache.radix_tree import Node, RadixForest


class AuditError(Exception):
    """The books do not agree; `differences` has a sentence for each."""

    def __init__(self, differences: list[str]) -> None:
        super().__init__("; ".join(differences))
        self.differences = differences


class LiveTable(Protocol):
    """What the audit reads of a request's page table."""

    num_tokens: int
    num_writable: int
    copy_source: int | None

    @property
    def pages(self) -> list[int]: ...


def find_differences(
    pool: PagePool,
    forest: RadixForest,
    evictor: Evictor,
    tables: Collection[LiveTable],
    leases: LeaseBook,
) -> list[str]:
    """Every way in which pool, trees, tables and leases disagree, a sentence each. Changes
    nothing."""
    nodes = [node for root in forest.roots.values() for node in _walk(root)]
    found = [line for node in nodes for line in _check_node(node, pool, forest, evictor)]
    found += [line for table in tables for line in _check_table(table, forest)]
    found += _check_holds(nodes, tables, forest)
    found += _check_pool(pool, nodes, tables, leases, forest.page_size)
    found += [line for lease in leases for line in _check_path(lease.pages.tolist(), forest)]
    found += [
        f"namespace {name} has an empty tree"
        for name, root in forest.roots.items()
        if not root.children
    ]
    return found


def bad_subtrees(pool: PagePool, forest: RadixForest, evictor: Evictor) -> list[Node]:
    """The subtrees below roots that cannot be trusted: something in them is wrong, or a page of
    theirs stands twice in the trees. A page that is only not queued for eviction is no reason."""
    tops = [child for root in forest.roots.values() for child in root.children]
    pages = {id(top): [page for node in _walk(top) for page in node.pages.tolist()] for top in tops}
    counts = Counter(page for held in pages.values() for page in held)

    def is_bad(top: Node) -> bool:
        lines = (line for node in _walk(top) for line in _check_node(node, pool, forest, evictor))
        wrong = any("not queued" not in line and "sealed" not in line for line in lines)
        return wrong or top.first_page > 0 or any(counts[page] > 1 for page in pages[id(top)])

    bad = [top for top in tops if is_bad(top)]
    for root in forest.roots.values():  # siblings out of order: none of them can be found for sure
        if any("children" in line for line in _check_node(root, pool, forest, evictor)):
            bad += [child for child in root.children if child not in bad]
    return bad


def all_nodes(forest: RadixForest) -> list[Node]:
    """Every node with pages."""
    return [node for root in forest.roots.values() for node in _walk(root) if node.num_pages]


def _walk(root: Node) -> Iterator[Node]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack += node.children


def _label(node: Node) -> str:
    return f"node at page {node.first_page} with pages {node.pages[:4].tolist()}.."


def _check_node(node: Node, pool: PagePool, forest: RadixForest, evictor: Evictor) -> Iterator[str]:
    page_size = forest.page_size
    if node.num_pages != -(-node.num_tokens // page_size):
        yield f"{_label(node)}: {node.num_tokens} tokens in {node.num_pages} pages"
    if node.parent is not None and not node.num_pages:
        yield f"{_label(node)}: empty"
    if node.children and node.num_tokens % page_size:
        yield f"{_label(node)}: has children and ends inside a page"
    if node.child_keys != [child.key(page_size) for child in node.children]:
        yield f"{_label(node)}: keys differ from the children's first pages"
    for left, right in zip(node.child_keys, node.child_keys[1:], strict=False):
        if left >= right or right.startswith(left):
            yield f"{_label(node)}: children out of order, or one begins another"
    for child in node.children:
        if child.parent is not node or child.first_page != node.first_page + node.num_pages:
            yield f"{_label(child)}: misplaced below {_label(node)}"
    for index, page in enumerate(node.pages.tolist()):
        if forest.node_of(page) is not node:
            yield f"{_label(node)}: page {page} points to another node"
        num_slots = min(page_size, node.num_tokens - index * page_size)
        if pool.sealed[page] < num_slots:
            yield f"page {page}: {num_slots} slots published, {pool.sealed[page]} sealed"
    if evictor.is_candidate(node) and node.queued < 0:
        yield f"{_label(node)}: evictable but not queued"


def _check_table(table: LiveTable, forest: RadixForest) -> Iterator[str]:
    page_size = forest.page_size
    full = table.num_tokens // page_size
    label = f"table with pages {table.pages[:4]}.."
    if -(-table.num_tokens // page_size) > len(table.pages):
        yield f"{label}: {table.num_tokens} tokens in {len(table.pages)} pages"
    if table.num_writable not in (table.num_tokens, len(table.pages) * page_size):
        yield f"{label}: writable up to {table.num_writable}"
    yield from _check_path(table.pages[:full], forest)


def _check_path(pages: list[int], forest: RadixForest) -> Iterator[str]:
    """What is held of a prefix are the tree's own pages, in order from its root."""
    path: list[int] = []
    node = forest.node_of(pages[-1]) if pages else None
    while node is not None:
        path = node.pages.tolist() + path
        node = node.parent
    if path[: len(pages)] != pages:
        yield f"holder of pages {pages[:4]}..: these {len(pages)} are not those of the tree"


def _check_holds(
    nodes: list[Node], tables: Collection[LiveTable], forest: RadixForest
) -> Iterator[str]:
    """Where tables' full pages end, and what follows from that for the nodes above."""
    ends: dict[int, Counter[int]] = {}
    for table in tables:
        full = table.num_tokens // forest.page_size
        node = forest.node_of(table.pages[full - 1]) if full else None
        if node is not None:
            ends.setdefault(id(node), Counter())[full - node.first_page] += 1
    for node in nodes:
        held_children = sum(child.num_held > 0 for child in node.children)
        last = max(ends.get(id(node), {}), default=0)
        held = node.num_pages if held_children else last
        recounted = (dict(ends.get(id(node), {})), held_children, held)
        recorded = (node.ends, node.num_held_children, node.num_held)
        if recounted != recorded:
            yield f"{_label(node)}: held as {recounted}, recorded {recorded}"


def _check_pool(
    pool: PagePool,
    nodes: list[Node],
    tables: Collection[LiveTable],
    leases: LeaseBook,
    page_size: int,
) -> Iterator[str]:
    total = len(pool.refs)
    copied = [table.copy_source for table in tables if table.copy_source is not None]
    own = [table.pages[table.num_tokens // page_size :] for table in tables]
    refs = _tally([*own, copied], total)
    held = _tally([table.pages for table in tables], total) + refs
    listed = _tally([node.pages for node in nodes], total)
    free = _tally([pool.free_ids], total)
    owned = _tally([_owned_pages(table) for table in tables], total)
    pins = _tally([lease.pages for lease in leases], total)
    for page in np.flatnonzero(pins != pool.pins).tolist():
        yield f"page {page}: {pins[page]} leases counted, {pool.pins[page]} recorded"
    for page in np.flatnonzero(refs != pool.refs).tolist():
        yield f"page {page}: {refs[page]} references counted, {pool.refs[page]} recorded"
    for page in np.flatnonzero(listed != pool.listed).tolist():
        yield f"page {page}: listed by {listed[page]} nodes, recorded {pool.listed[page]}"
    for page in np.flatnonzero(owned != pool.owned).tolist():
        yield f"page {page}: {owned[page]} append owners, recorded {pool.owned[page]}"
    for page in np.flatnonzero(free != ((held == 0) & (listed == 0))).tolist():
        yield f"page {page}: {free[page]} times in the free list, {held[page]} references"
    for page in np.flatnonzero((free > 0) & (pool.sealed > 0)).tolist():
        yield f"page {page}: free, yet sealed"
    counts = pool.counts()
    num_referenced = int(np.count_nonzero(held))
    num_pinned = int(np.count_nonzero((held == 0) & (pins > 0)))
    num_cached = int(np.count_nonzero((held == 0) & (pins == 0) & (listed > 0)))
    recounted = (num_referenced, num_pinned, num_cached)
    if (counts.referenced, counts.pinned, counts.cached) != recounted:
        yield (
            f"{recounted} pages referenced, pinned and cached, "
            f"recorded {counts.referenced}, {counts.pinned} and {counts.cached}"
        )


def _owned_pages(table: LiveTable) -> list[int]:
    if table.num_writable <= table.num_tokens:
        return []
    page_size = table.num_writable // len(table.pages)
    return table.pages[table.num_tokens // page_size :]


def _tally(lists: Iterable[Sequence[int] | PageIds], total: int) -> NDArray[np.int64]:
    """How often each page id occurs in the lists."""
    ids = [np.asarray(pages, dtype=np.int64) for pages in lists]
    return np.bincount(np.concatenate(ids) if ids else np.empty(0, np.int64), minlength=total)
