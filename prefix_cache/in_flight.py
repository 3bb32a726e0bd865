"""Prompts being computed now, so that requests with the same prompt wait instead of computing it.

A registry beside the tree: it holds no references and no pages.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from prefix_cache.key import Namespace
from prefix_cache.radix_tree import TokenIds, common_prefix

Key = TypeVar("Key", bound=Hashable)
_FirstPage = tuple[Namespace, bytes]
_TOKEN_BYTES = 4


class Progress(Protocol):
    """What is read of a request's page table: how many tokens it has published."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: TokenIds
    token_bytes: bytes
    progress: Progress


class InFlight(Generic[Key]):
    """Running requests by the first page of their prompts; keys are the caller's, each once."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._prompts: dict[_FirstPage, dict[Key, _Prompt]] = {}
        self._first_pages: dict[Key, _FirstPage] = {}

    def __len__(self) -> int:
        return len(self._first_pages)

    def register(
        self, key: Key, namespace: Namespace, token_ids: TokenIds, table: Progress
    ) -> None:
        """Say that a request computes this prompt into `table`. Raises KeyError if it did."""
        if key in self._first_pages:
            raise KeyError(key)
        tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
        token_bytes = tokens.tobytes()
        first_page = (namespace, token_bytes[: self._page_size * _TOKEN_BYTES])
        self._first_pages[key] = first_page
        self._prompts.setdefault(first_page, {})[key] = _Prompt(tokens, token_bytes, table)

    def unregister(self, key: Key) -> None:
        """Forget a request that ended, was preempted, or has computed its prompt; else nothing."""
        first_page = self._first_pages.pop(key, None)
        if first_page is None:
            return
        prompts = self._prompts[first_page]
        del prompts[key]
        if not prompts:
            del self._prompts[first_page]

    def leader(self, namespace: Namespace, token_ids: TokenIds, matched: int) -> Key | None:
        """The request that will publish, in full pages, most of these tokens beyond `matched`.

        None if nobody will: what a request has published already is there to be matched. Of
        equals the one registered first. Costs a page's comparison for each prompt with the same
        first page, and more only for those that agree on the next page they will publish.
        """
        tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
        token_bytes = tokens.tobytes()
        page_size, page_bytes = self._page_size, self._page_size * _TOKEN_BYTES
        best, longest = None, 0
        for key, prompt in self._prompts.get((namespace, token_bytes[:page_bytes]), {}).items():
            known = max(longest, matched, prompt.progress.num_tokens)
            start = known // page_size * page_bytes
            next_page = token_bytes[start : start + page_bytes]
            if len(next_page) < page_bytes or not prompt.token_bytes.startswith(next_page, start):
                continue
            shared = common_prefix(prompt.token_ids, tokens)
            shared -= shared % page_size
            if shared > known:
                best, longest = key, shared
        return best
