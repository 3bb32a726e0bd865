"""TLS, and a sentence for clients that speak plain HTTP to it."""

import asyncio
import re
import ssl
from pathlib import Path
from typing import Any, Final

_HANDSHAKE: Final = 0x16
"""The first byte of a TLS connection: the content type of its first record (RFC 8446, 5.1)."""
_CERTIFICATE: Final = re.compile(rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----")
_PRIVATE_KEY: Final = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")


class TlsContext(ssl.SSLContext):
    """Serves TLS with one certificate; what begins otherwise is let through, to be told so instead
    of the silent end that a failed handshake is: see `is_plain`."""

    @classmethod
    def of(cls, certificate: Path, key: Path | None) -> "TlsContext":
        """`key` None: the certificate's file holds it. Raises OSError where they are not usable;
        `unusable` says why."""
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context.sslobject_class = _Connection
        context.load_cert_chain(certificate, key)
        return context

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **kwargs: Any
    ) -> ssl.SSLObject:
        """As the base class; the connection also looks at what comes in first."""
        wrapped = super().wrap_bio(incoming, outgoing, *args, **kwargs)
        assert isinstance(wrapped, _Connection)  # `sslobject_class` is what it makes
        wrapped.watch(incoming, outgoing)
        return wrapped


def is_plain(transport: asyncio.BaseTransport) -> bool:
    """Whether the client does not speak the TLS that its connection should be of."""
    found = transport.get_extra_info("ssl_object")
    return isinstance(found, _Connection) and found.plain


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


class _Connection(ssl.SSLObject):
    """One connection's TLS; where it begins otherwise, `plain`, and its bytes go through as they
    are, so that they can be answered like any others."""

    plain = False
    _buffers: tuple[ssl.MemoryBIO, ssl.MemoryBIO]
    _begun = False

    def watch(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> None:
        """What the client sends and what it is sent."""
        self._buffers = (incoming, outgoing)

    def do_handshake(self) -> None:
        """Raises as the base class; plain bytes need none."""
        incoming, _ = self._buffers
        if not self._begun and incoming.pending:
            self._begun = True
            data = incoming.read()
            incoming.write(data)
            self.plain = data[0] != _HANDSHAKE
        if not self.plain:
            super().do_handshake()

    def read(self, *args: Any) -> Any:
        """As the base class."""
        if not self.plain:
            return super().read(*args)
        incoming, _ = self._buffers
        if not incoming.pending and not incoming.eof:
            raise ssl.SSLWantReadError
        size, *into = args or (1024,)
        data = incoming.read(size)
        if not into:
            return data
        into[0][: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        """As the base class."""
        return self._buffers[1].write(data) if self.plain else super().write(data)

    def pending(self) -> int:
        """As the base class."""
        return self._buffers[0].pending if self.plain else super().pending()

    def getpeercert(self, binary_form: bool = False) -> Any:
        """As the base class; nobody has shown one without a handshake."""
        return None if self.plain else super().getpeercert(binary_form)

    def unwrap(self) -> None:
        """As the base class."""
        if not self.plain:
            super().unwrap()
