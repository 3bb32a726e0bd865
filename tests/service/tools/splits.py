"""Ways to cut a text, which must not change what a parser makes of it."""

import random
from collections.abc import Iterator

from engine.text import Utf8Assembler
from service.tools.pieces import Piece, ToolParser, joined


def splits(data: bytes, num_random: int = 200) -> Iterator[list[bytes]]:
    """One piece, every cut in two, and random cuts in more; inside code points too."""
    yield [data]
    for cut in range(1, len(data)):
        yield [data[:cut], data[cut:]]
    rng = random.Random(len(data))
    for _ in range(num_random):
        cuts = sorted(rng.sample(range(1, len(data)), min(len(data) - 1, rng.randint(2, 12))))
        yield [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def read(parser: ToolParser, parts: list[bytes]) -> list[Piece]:
    """All pieces of a text that comes in parts."""
    utf8 = Utf8Assembler()
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.feed(utf8.feed(part))
    return joined([*pieces, *parser.feed(utf8.finish()), *parser.finish()])
