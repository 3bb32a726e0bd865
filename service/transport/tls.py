"""TLS, and a sentence for clients that speak plain HTTP to it."""

import re
import ssl
from pathlib import Path
from typing import Any, Final

_HANDSHAKE: Final = 0x16
"""The first byte of a TLS connection: the content type of its first record (RFC 8446, 5.1)."""
_TOLD: Final = b"This port speaks TLS: use https://, or wss:// for WebSockets.\n"
_CERTIFICATE: Final = re.compile(rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----")
_PRIVATE_KEY: Final = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
_ANSWER: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_TOLD), _TOLD)
)


class TlsContext(ssl.SSLContext):
    """Serves TLS with one certificate; what begins otherwise gets a plain 400 instead of the
    silent end that a failed handshake is."""

    @classmethod
    def of(cls, certificate: Path, key: Path | None) -> "TlsContext":
        """`key` None: the certificate's file holds it. Raises OSError where they are not usable;
        `unusable` says why."""
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context.sslobject_class = _Handshake
        context.load_cert_chain(certificate, key)
        return context

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any
    ) -> ssl.SSLObject:
        """As the base class; the connection's handshake also looks at what comes in first."""
        wrapped = super().wrap_bio(incoming, outgoing, *args, **kwargs)
        assert isinstance(wrapped, _Handshake)  # `sslobject_class` is what it makes
        wrapped.watch(incoming, outgoing)
        return wrapped


def unusable(certificate: Path, key: Path | None, error: OSError) -> str:
    """A sentence on a certificate and key that `TlsContext.of` did not take."""
    given = f"--tls-cert {certificate}"
    source, option = (certificate, given) if key is None else (key, f"--tls-key {key}")
    for path, name in ((certificate, given), (source, option)):
        if (fault := _unreadable(path)) is not None:
            return f"{name} cannot be read: {fault}."
    if not _CERTIFICATE.search(certificate.read_bytes()):
        return f"{given} holds no usable certificate: no 'BEGIN CERTIFICATE' (PEM) stands in it."
    if not _PRIVATE_KEY.search(source.read_bytes()):
        hint = ": name the file that has it with --tls-key" if key is None else ""
        return f"{option} holds no private key (PEM){hint}."
    reason = getattr(error, "reason", "") or str(error)
    return f"{given} holds no usable certificate and key: {reason}."


def _unreadable(path: Path) -> str | None:
    try:
        with path.open("rb"):
            return None
    except OSError as error:
        return error.strerror or str(error)


class _Handshake(ssl.SSLObject):
    """One connection's TLS, whose handshake answers plain HTTP once."""

    _buffers: tuple[ssl.MemoryBIO, ssl.MemoryBIO] | None = None

    def watch(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> None:
        """What the client sends and what it is sent, until the first byte has come."""
        self._buffers = (incoming, outgoing)

    def do_handshake(self) -> None:
        """Raises as the base class; SSLWantReadError where plain HTTP was answered: the answer is
        written, and what comes after it, the client's end first of all, fails the handshake."""
        if self._buffers is not None and self._buffers[0].pending:
            incoming, outgoing = self._buffers
            self._buffers = None
            data = incoming.read()
            incoming.write(data)
            if data[0] != _HANDSHAKE:
                outgoing.write(_ANSWER)
                raise ssl.SSLWantReadError
        super().do_handshake()
