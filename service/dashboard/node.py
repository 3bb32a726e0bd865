"""`GET /admin/tree/{page}`: a node of the radix tree, and the text that it stands for."""

from starlette.types import Receive, Scope, Send

from engine.api import Engine
from engine.text import Vocabulary
from engine.types import unpack_tokens
from service.errors import ApiError, asked
from service.transport.http import send_json


class TreeNode:
    """Named by its first page; long stretches show their beginning."""

    def __init__(self, engine: Engine, vocabulary: Vocabulary) -> None:
        self._engine = engine
        self._vocabulary = vocabulary

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError 404 where no node begins or goes on there now."""
        page: int = scope["path_params"]["page"]
        node = await asked(self._engine.read_node(page))
        if node is None:
            raise ApiError(404, f"The tree does not list page {page} now.", code="node_not_found")
        token_ids = unpack_tokens(node.token_ids).tolist()
        text = b"".join(map(self._vocabulary.token_bytes, token_ids))
        fields = {
            "tenant": node.tenant,
            "cache_salt": node.salt or None,
            "start": node.start,
            "tokens": node.num_tokens,
            "pages": node.num_pages,
            "referenced_pages": node.num_referenced,
            "leased_pages": node.num_leased,
            "children": node.num_children,
            "requests_since_use": node.age,
            "text": text.decode("utf-8", "replace"),
            "text_is_whole": len(token_ids) == node.num_tokens,
        }
        await send_json(send, {"object": "tree.node", "page": page, **fields})
