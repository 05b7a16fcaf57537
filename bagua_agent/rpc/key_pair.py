"""Makes a job's key pair: a program that prints a certificate and its key in PEM, and ends.

It is a process of its own, since the library that it loads takes 11 MiB, which an agent would keep until its job ends.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime

NAME = "agents.bagua.internal"  # in every job's certificate, in the place of a host
_BEGINNING, _NEVER = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


def make() -> bytes:
    """Returns a new certificate with its key, on P-256."""
    # Here, since the agent imports this module for NAME.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGINNING)
        .not_valid_after(_NEVER)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(make())
