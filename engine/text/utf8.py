"""Bytes to text as they come, whole code points only."""

import codecs


class Utf8Assembler:
    """Decodes a stream of byte pieces; an incomplete code point waits for the next piece.

    U+FFFD stands only for bytes that no continuation could make valid. The pieces joined equal
    `bytes.decode(errors="replace")` of everything fed.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        """The text that is complete after `data`."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """The rest: U+FFFD for a code point that stayed incomplete. The assembler starts anew."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
