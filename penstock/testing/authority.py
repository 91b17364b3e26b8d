"""Certificates for tests: an authority that signs for this host, and is trusted by nobody else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

DAY_S = 86_400.0


class Authority:
    """Signs certificates for 127.0.0.1 that are valid for a day, and leaves them in a folder as PEM files.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     certificate, key = Authority(Path(folder), "authority").issue("broker")
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['authority.pem', 'broker.key', 'broker.pem']
    """

    def __init__(self, folder: Path, name: str) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self.folder = folder
        self.name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca_file = self._write(name, self._sign(name, self._key.public_key(), DAY_S, ca=True))
        """Its own certificate: what those who trust it are given."""

    def issue(self, name: str, *, password: bytes = b"", valid_s: float = DAY_S) -> tuple[str, str]:
        """A certificate and its key, as the names of two files; it expired where `valid_s` is negative."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        lock: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            lock = serialization.BestAvailableEncryption(password)
        key = ec.generate_private_key(ec.SECP256R1())
        path = self.folder / f"{name}.key"
        path.touch(mode=0o600)
        path.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
        )
        return self._write(name, self._sign(name, key.public_key(), valid_s)), str(path)

    def _sign(
        self, name: str, public_key: ec.EllipticCurvePublicKey, valid_s: float, *, ca: bool = False
    ) -> x509.Certificate:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import NameOID

        def called(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        now = datetime.now(UTC)
        host = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
        builder = (
            x509.CertificateBuilder()
            .subject_name(called(name))
            .issuer_name(called(self.name))
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(seconds=valid_s))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(host, critical=False)
            # Strict checks, which Python 3.13 makes by default, want to see who signed whom and for what.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .add_extension(_key_usage(ca), critical=True)
        )
        return builder.sign(self._key, hashes.SHA256())

    def _write(self, name: str, certificate: x509.Certificate) -> str:
        from cryptography.hazmat.primitives import serialization

        path = self.folder / f"{name}.pem"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return str(path)


def _key_usage(ca: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip
