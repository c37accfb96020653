"""Throw-away certificates for 127.0.0.1, signed by an authority of their own."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """Two PEM files."""

    pem: Path
    key: Path


class Authority:
    """Signs certificates; `pem` is its own."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.pem = folder / f"{name.replace(' ', '-')}.pem"
        self.pem.write_bytes(self._sign(self._name, self._key, is_authority=True))

    def issue(self, name: str) -> Certificate:
        """A certificate for a server on 127.0.0.1, or for a client."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        made.pem.write_bytes(self._sign(subject, key, is_authority=False))
        plain = serialization.NoEncryption()
        made.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
        return made

    def server_context(self, certificate: Certificate, *, wants_certificate: bool = False) -> ssl.SSLContext:
        """Of a server that shows `certificate`, and may want one of this authority in return."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.pem, certificate.key)
        if wants_certificate:
            context.load_verify_locations(self.pem)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), True)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)
