"""Who is at the other end of a link, read from its certificate and nothing else.

An identity is the one URI C{llmgw://FLEET/node/NAME} or C{llmgw://FLEET/server/NAME}; the common name is never looked at.
Surprising: in TLS 1.3 a client has finished its handshake before the server has judged its certificate, and is then told
only an alert. So each side explains an alert with facts of its own certificate, and the server keeps the whole reason.
"""

from __future__ import annotations

from datetime import UTC, datetime

from attrs import frozen
from cryptography import x509

from llmgw import pki
from llmgw.errors import LlmgwError


class IdentityError(LlmgwError):
    """A peer's certificate does not say who it is in the one way we take."""


@frozen
class PeerCertificate:
    """What a certificate says of its holder. C{role} is C{node} or C{server}, C{serial} hexadecimal.

    C{not_before} and C{not_after} are seconds since 1970; C{addresses} the DNS names and IP addresses.
    """

    fleet: str
    role: str
    name: str
    serial: str
    not_before: float
    not_after: float
    addresses: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} (serial {short(self.serial)})"

    @classmethod
    def read(cls, certificate: x509.Certificate) -> PeerCertificate:
        """The identity in C{certificate}.

        @raise IdentityError: no URI or more than one, one of another form, or a purpose that is not its role's.
        """
        try:
            who = pki.identity_of(certificate)
        except pki.PkiError as error:
            raise IdentityError(f"certificate with serial {short(pki.serial_of(certificate))}: {error}") from None
        return cls(
            who.fleet,
            who.role,
            who.name,
            pki.serial_of(certificate),
            certificate.not_valid_before_utc.timestamp(),
            certificate.not_valid_after_utc.timestamp(),
            pki.addresses_of(certificate),
        )


def short(serial: str) -> str:
    """The first digits of a serial number: enough to tell two certificates apart in a log."""
    return serial[:8]


def day(seconds: float) -> str:
    """C{2026-11-30 04:17 UTC}."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
