"""The certificate and private key of a replay server, which are checked before it starts."""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from typing import Final

from samplebatch.errors import ArgumentError

Pair = tuple[str | os.PathLike[str], str | os.PathLike[str]]
"""The paths of a certificate and of its private key, in PEM."""

_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
_KEY: Final = b"PRIVATE KEY-----"
_OTHER_KEY: Final = {"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"}
"""Reasons of OpenSSL for the key of another certificate; the last where one is of RSA, and one of a curve."""
_OUT_OF_DATE: Final = {9, 10}
"""Codes of OpenSSL for a certificate that is not valid yet, and for one that has expired."""


def read_pair(tls: Pair, names: tuple[str, str] = ("tls[0]", "tls[1]")) -> tuple[bytes, bytes]:
    """Read a certificate and its private key.

    Parameters
    ----------
    tls
        The paths of both.
    names
        The arguments or options that they were given by.

    Raises
    ------
    ArgumentError
        If there is no certificate or no private key in PEM, or the key is encrypted or of another certificate.
    OSError
        If a file cannot be read.
    """
    certificate, key = (_read(path, name) for path, name in zip(tls, names, strict=True))
    first, second = (repr(os.fspath(path)) for path in tls)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(tls[0])
    except ssl.SSLError as error:
        found = "a damaged one" if _CERTIFICATE in certificate else "none"
        raise ArgumentError(f"{names[0]} must be a file with a certificate in PEM, {first} has {found}") from error
    try:
        _server_context(tls)
    except _EncryptedKey as error:
        raise ArgumentError(f"{names[1]} must be a private key without a passphrase, {second} is encrypted") from error
    except ssl.SSLError as error:
        if error.reason in _OTHER_KEY:
            raise ArgumentError(
                f"{names[1]} must be the private key of the certificate in {first}, {second} has another"
            ) from error
        found = "a damaged one" if _KEY in key else "none"
        raise ArgumentError(f"{names[1]} must be a file with a private key in PEM, {second} has {found}") from error
    return certificate, key


def find_expiry(tls: Pair) -> str | None:
    """Tell that clients will refuse a certificate for its dates; None if they will not.

    A client that trusts nothing else shakes hands with it, in memory.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(tls[0])
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = _server_context(tls).wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (asking, answering, asking):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OUT_OF_DATE:
            return f"clients will refuse the certificate in {os.fspath(tls[0])!r}: {error.verify_message}"
    except ssl.SSLError:
        return None
    return None


class _EncryptedKey(Exception):
    """Raised in place of asking for a passphrase on the terminal."""


def _refuse_passphrase() -> str:
    raise _EncryptedKey


def _server_context(tls: Pair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # It is for Flight to say which keys are too weak.
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.load_cert_chain(*tls, password=_refuse_passphrase)
    return context


def _read(path: str | os.PathLike[str], name: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        # Its class follows from the number.
        sentence = f"{name} must be a file that can be read, got {error.strerror}"
        raise OSError(error.errno, sentence, os.fspath(path)) from error
