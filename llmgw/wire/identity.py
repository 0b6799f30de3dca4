"""Who is at the other end of a link, read from its certificate and nothing else; and why TLS failed, in a sentence.

An identity is the one URI C{llmgw://FLEET/ROLE/NAME}; the common name is never looked at.
Surprising: in TLS 1.3 a client has finished its handshake before the server has judged its certificate, and is then told
only an alert, which is often misleading. So each side explains an alert with the facts of its own certificate and clock, and
a verdict of its own with those of the peer's.
"""

from __future__ import annotations

from datetime import UTC, datetime

from attrs import define, frozen
from cryptography import x509
from OpenSSL import SSL
from OpenSSL.crypto import X509

from llmgw import pki
from llmgw.errors import LlmgwError
from llmgw.fleet.units import show_duration

NOT_YET_VALID, EXPIRED, PURPOSE = 9, 10, 26
_UNKNOWN_AUTHORITY = {2, 18, 19, 20, 21}


class IdentityError(LlmgwError):
    """A peer's certificate does not say who it is in the one way we take."""


@frozen
class PeerCertificate:
    """What a certificate says of its holder. C{role} is C{node}, C{server} or C{operator}, C{serial} hexadecimal.

    C{not_before} and C{not_after} are seconds since 1970; C{addresses} the DNS names and IP addresses.
    """

    fleet: str
    role: str
    name: str
    serial: str
    not_before: float
    not_after: float
    addresses: tuple[str, ...] = ()
    issuer: str = ""

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
            raise IdentityError(
                f"the certificate with serial {short(pki.serial_of(certificate))} is no identity: {error}"
            ) from None
        return cls(
            who.fleet,
            who.role,
            who.name,
            pki.serial_of(certificate),
            certificate.not_valid_before_utc.timestamp(),
            certificate.not_valid_after_utc.timestamp(),
            pki.addresses_of(certificate),
            certificate.issuer.rfc4514_string(),
        )


@define
class Verdict:
    """What OpenSSL thought of the peer's certificate: filled in during the handshake, read when it has failed.

    @ivar error: OpenSSL's number of the first error, 0 for none.
    @ivar certificate: the certificate that it is about.
    """

    error: int = 0
    certificate: x509.Certificate | None = None

    def judge(self, connection: SSL.Connection, certificate: X509, error: int, depth: int, ok: int) -> bool:
        """The verify callback: it remembers, and always agrees with OpenSSL."""
        if not ok and not self.error:
            self.error, self.certificate = error, certificate.to_cryptography()
        return bool(ok)

    def explain(self, now: float) -> str:
        """Why we did not take the peer's certificate; C{now} is our wall clock."""
        if self.certificate is None:
            return f"its certificate failed verification (OpenSSL error {self.error})"
        its = f"its certificate {_describe(self.certificate)}"
        if self.error == EXPIRED:
            end = self.certificate.not_valid_after_utc.timestamp()
            return f"{its} expired on {day(end)}; our clock says {day(now)}: renew it, or set the clock that is wrong"
        if self.error == NOT_YET_VALID:
            start = self.certificate.not_valid_before_utc.timestamp()
            return f"{its} is valid only from {day(start)}; our clock says {day(now)}: set the clock that is wrong"
        if self.error in _UNKNOWN_AUTHORITY:
            return f"{its} was issued by {self.certificate.issuer.rfc4514_string()}, which is not our authority"
        if self.error == PURPOSE:
            return f"{its} is not for this side of a link (its extended key usage says so)"
        return f"{its} failed verification (OpenSSL error {self.error})"


# What OpenSSL's reasons mean when we read them; {ours} is our certificate. The first that is part of the reason counts.
_REASONS = {
    "alert certificate expired": "it says that {ours} has expired ({ends}; our clock says {now}): renew it, or set its clock",
    "alert bad certificate": "it does not take {ours}, without saying why",
    "alert unknown ca": "it does not know the authority that issued {ours} ({issuer})",
    "alert unsupported certificate": "it says that {ours} is not for this side of a link",
    "alert certificate revoked": "it says that {ours} is revoked",
    "alert certificate required": "it got no certificate from us",
    "peer did not return a certificate": "it showed no certificate",
    "alert no application protocol": "it does not speak llmgw/1",
    "alert internal error": "it failed with an internal error (it may not speak llmgw/1)",
    "alert protocol version": "it does not take TLS 1.3",
    "unsupported protocol": "it does not offer TLS 1.3",
    "http request": "it spoke plain HTTP; this port speaks TLS",
    "wrong version number": "it does not speak TLS",
    "packet length too long": "it does not speak TLS",
    "unexpected message": "it does not speak TLS as it should",
}


def explain_tls(error: SSL.Error, ours: PeerCertificate, now: float) -> str:
    """Why TLS with a peer failed where we had no fault to find, as the end of a sentence that began with the peer.

    @param now: our wall clock.
    """
    reasons = [str(part[2]) for part in error.args[0]] if error.args and isinstance(error.args[0], list | tuple) else []
    reason = "; ".join(reasons) or type(error).__name__
    if "alert bad certificate" in reason and now < ours.not_before:
        return (
            f"it does not take our certificate {ours}, which is valid only from {day(ours.not_before)}; our clock says {day(now)}"
        )
    for part, text in _REASONS.items():
        if part in reason:
            whose = {"ours": f"our certificate {ours}", "ends": day(ours.not_after), "issuer": ours.issuer, "now": day(now)}
            return text.format(**whose)
    return f"TLS failed: {reason}"


def clock_skew(skew: float) -> str:
    """C{3 m ahead of} or C{3 m behind}."""
    return f"{show_duration(abs(skew))} {'ahead of' if skew > 0 else 'behind'}"


def _describe(certificate: x509.Certificate) -> str:
    """Its identity, or its serial number where it has none: an unverified certificate may name itself anything."""
    try:
        return str(PeerCertificate.read(certificate))
    except IdentityError:
        return f"with serial {short(pki.serial_of(certificate))}"


def short(serial: str) -> str:
    """The first digits of a serial number: enough to tell two certificates apart in a log."""
    return serial[:8]


def day(seconds: float) -> str:
    """C{2026-11-30 04:17 UTC}."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
