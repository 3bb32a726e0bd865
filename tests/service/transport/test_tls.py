"""A server with a certificate: TLS is served, and plain HTTP is told to use it."""

import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.scripted import text_script
from service.config import Settings
from service.transport.tls import TlsContext, unusable
from tests.service.calls import CHAT, body
from tests.service.conftest import LiveServer, run_server
from tests.service.raw import chat_request, connected, read_to_end


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    made = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject)
    subprocess.run([*made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text(key.read_text() + cert.read_text())
    return both


def test_what_is_wrong_with_a_certificate_or_key_is_said(certificate: Path) -> None:
    cert, key = certificate.parent / "cert.pem", certificate.parent / "key.pem"

    def fault(given: Path, own_key: Path | None) -> str:
        with pytest.raises(OSError) as caught:
            TlsContext.of(given, own_key)
        return unusable(given, own_key, caught.value)

    assert f"--tls-cert {cert} holds no private key" in fault(cert, None)
    assert "with --tls-key" in fault(cert, None)
    assert f"--tls-key {cert} holds no private key" in fault(cert, cert)
    assert f"--tls-cert {key} holds no usable certificate: no 'BEGIN" in fault(key, key)
    assert "nowhere.pem cannot be read: No such file" in fault(cert, cert.parent / "nowhere.pem")
    own = Path(__file__)
    assert f"--tls-cert {own} holds no usable certificate" in fault(own, None)


@pytest.fixture(scope="module")
def server(certificate: Path) -> Iterator[LiveServer]:
    with run_server(text_script("ok"), settings=Settings(tls_cert=certificate)) as running:
        yield running


def test_tls_is_served(server: LiveServer, certificate: Path) -> None:
    trusted = ssl.create_default_context(cafile=certificate)
    with httpx.Client(verify=trusted, trust_env=False) as client:
        answer = client.post(f"https://localhost:{server.port}{CHAT}", json=body())
    assert answer.json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize(
    "sent",
    [
        chat_request(body()),
        b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"DELETE /v1/responses/a HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"D",
        b"\r\n",
    ],
)
def test_plain_http_is_told_to_use_tls(server: LiveServer, sent: bytes) -> None:
    with connected(server) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        answer = read_to_end(sock)
    head, _, text = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json")
    assert json.loads(text)["error"]["code"] == "tls_required"
    assert b"use https://" in text
    assert b"content-length: %d\r\n" % len(text) in head


def test_plain_http_is_told_before_it_has_ended_and_then_cut(server: LiveServer) -> None:
    """It stayed open until the client said more, or the handshake's minute was over."""
    with connected(server) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n")
        assert read_to_end(sock).startswith(b"HTTP/1.1 400 ")


def test_what_begins_like_tls_and_is_not_just_ends(server: LiveServer) -> None:
    with connected(server) as sock:
        sock.sendall(b"\x16GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP/1.1" not in read_to_end(sock)
