"""The best that any cache of a size can do that knows the future: Belady's rule on the tree."""

import heapq

from prefix_cache.bench.traces import Workload

_NEVER = 1 << 60


def optimal_hits(workload: Workload, num_pages: int) -> int:
    """Pages found, when what is needed latest goes first (IBM Systems Journal 5, 1966). A page is
    never needed before the one above it, so the rule keeps prefixes whole by itself."""
    next_uses = _next_uses(workload)
    above: dict[int, int] = {}
    num_below: dict[int, int] = {}
    next_use: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    num_hits = 0
    for request, uses in zip(workload.requests, next_uses, strict=True):
        found = 0
        while found < len(request) and request[found] in next_use:
            found += 1
        num_hits += found
        next_use.update(zip(request[:found], uses, strict=False))
        on_path = set(request)
        kept: list[tuple[int, int]] = []
        excess = len(next_use) + len(request) - found - num_pages
        while excess > 0 and latest:
            entry = heapq.heappop(latest)
            page = entry[1]
            if next_use.get(page) != -entry[0] or num_below[page]:
                continue
            if page in on_path:
                kept.append(entry)
                continue
            del next_use[page]
            excess -= 1
            _lose_child(above[page], num_below, next_use, latest)
        for entry in kept:
            heapq.heappush(latest, entry)
        parent = request[found - 1] if found else -1
        for page, use in zip(request[found:], uses[found:], strict=True):
            next_use[page] = use
            above[page], num_below[page] = parent, 0
            if parent >= 0:
                num_below[parent] += 1
            parent = page
        if not num_below[request[-1]]:
            heapq.heappush(latest, (-uses[-1], request[-1]))
    return num_hits


def _lose_child(
    parent: int, num_below: dict[int, int], next_use: dict[int, int], latest: list[tuple[int, int]]
) -> None:
    if parent < 0:
        return
    num_below[parent] -= 1
    if not num_below[parent]:
        heapq.heappush(latest, (-next_use[parent], parent))


def _next_uses(workload: Workload) -> list[list[int]]:
    """For each page of each request, the next request that needs it."""
    upcoming: dict[int, int] = {}
    found: list[list[int]] = []
    for index in range(len(workload.requests) - 1, -1, -1):
        request = workload.requests[index]
        found.append([upcoming.get(page, _NEVER) for page in request])
        upcoming.update((page, index) for page in request)
    return found[::-1]
