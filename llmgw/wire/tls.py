"""TLS of the link: 1.3 only, both sides with certificates of the fleet's one authority, replaceable while links are up.

Session resumption is off: a resumed session skips the verification of the certificate altogether, on TLS 1.3, too. ALPN is
offered, but OpenSSL lets a client in that offers none, so L{llmgw.wire.link} checks what was negotiated. A reload builds and
checks everything before it swaps; links that are up keep what they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import service_identity
from attrs import frozen
from cryptography import x509
from OpenSSL import SSL, crypto
from service_identity.cryptography import verify_certificate_hostname, verify_certificate_ip_address
from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator, IOpenSSLServerConnectionCreator
from twisted.internet.ssl import Certificate, CertificateOptions, TLSVersion, trustRootFromCertificates
from twisted.protocols.tls import TLSMemoryBIOProtocol
from zope.interface import implementer

from llmgw import pki
from llmgw.config.settings import TlsFiles
from llmgw.errors import LlmgwError
from llmgw.pkifolder import read_certificates, read_pair
from llmgw.wire.identity import EXPIRED, NOT_YET_VALID, IdentityError, PeerCertificate, Verdict
from llmgw.wire.messages import ALPN

_NO_AUTO_CHAIN = 0x8  # SSL_MODE_NO_AUTO_CHAIN, which pyOpenSSL does not name
_REQUIRED = SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT


class TlsError(LlmgwError):
    """Our own certificate, key or authority cannot be used for the link."""


@frozen
class TlsIdentity:
    """One side's own certificate chain (leaf first), its key, and the authorities whose certificates it takes."""

    own: PeerCertificate
    chain: Sequence[x509.Certificate]
    key: Any
    authorities: Sequence[x509.Certificate]

    def context(self, protocol: bytes = ALPN) -> SSL.Context:
        """A context for either side, which speaks C{protocol} (of ALPN) over it."""
        roots = [Certificate.loadPEM(pki.certificate_text(authority)) for authority in self.authorities]
        options = CertificateOptions(
            privateKey=self.key,
            certificate=self.chain[0],  # type: ignore[arg-type]  # since pyOpenSSL 24.3 it wants cryptography's own
            extraCertChain=list(self.chain[1:]),  # type: ignore[arg-type]
            trustRoot=trustRootFromCertificates(roots),
            raiseMinimumTo=TLSVersion.TLSv1_3,
            acceptableProtocols=[protocol],
        )
        context = options.getContext()
        # Else OpenSSL adds the authority to what we send; a peer with another one would then complain of it, not of us.
        context.set_mode(_NO_AUTO_CHAIN)
        return context


def read_identity(files: TlsFiles, role: str) -> TlsIdentity:
    """The identity in these files, with its key, its role and its authority checked.

    @param role: C{node} or C{server}: which one a daemon is.
    @raise LlmgwError: one sentence that names the file. An expired certificate is not an error here: the peer will say so.
    """
    if files.authority is None:
        raise TlsError("tls: authority is missing: the link takes only certificates of the fleet's own authority")
    chain, key = read_pair(files.certificate, files.key)
    authorities = read_certificates(files.authority)
    try:
        own = PeerCertificate.read(chain[0])
    except IdentityError as error:
        raise TlsError(f"{files.certificate}: {error}") from None
    if own.role != role:
        raise TlsError(
            f"{files.certificate} is {pki.with_article(own.role)}'s certificate ({own.name}); here a {role}'s is needed"
        )
    _check_chain(files, chain, authorities)
    return TlsIdentity(own, chain, key, authorities)


def _check_chain(files: TlsFiles, chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate]) -> None:
    store = crypto.X509Store()
    for authority in authorities:
        store.add_cert(crypto.X509.from_cryptography(authority))
    leaf, *rest = map(crypto.X509.from_cryptography, chain)
    try:
        crypto.X509StoreContext(store, leaf, rest).verify_certificate()
    except crypto.X509StoreContextError as error:
        if error.errors[0] not in (EXPIRED, NOT_YET_VALID):
            raise TlsError(
                f"{files.certificate} was not issued by the authority in {files.authority} ({error.errors[2]}):"
                f" its issuer is {chain[0].issuer.rfc4514_string()}"
            ) from None


@implementer(IOpenSSLServerConnectionCreator)
class LinkTls:
    """Makes the TLS side of every link, always from the newest identity."""

    def __init__(self, identity: TlsIdentity, protocol: bytes = ALPN) -> None:
        self.protocol = protocol
        self.use(identity)

    def use(self, identity: TlsIdentity) -> None:
        """New links show this identity. If it cannot be used, an error is raised and the old one stays."""
        context = identity.context(self.protocol)
        self.identity, self._context = identity, context

    @property
    def own(self) -> PeerCertificate:
        """Our certificate as it is shown to new peers."""
        return self.identity.own

    def serverConnectionForTLS(self, tlsProtocol: TLSMemoryBIOProtocol) -> SSL.Connection:  # noqa: N803
        """Called by Twisted for each accepted connection."""
        verdict = Verdict()
        connection = SSL.Connection(self._context, None)
        tlsProtocol.verdict = verdict  # type: ignore[attr-defined]  # the connection's own app data is Twisted's
        connection.set_verify(_REQUIRED, verdict.judge)
        return connection

    def towards(self, host: str) -> IOpenSSLClientConnectionCreator:
        """What makes the client's side of a link to C{host}."""
        return _Towards(self, host)


@implementer(IOpenSSLClientConnectionCreator)
class _Towards:
    def __init__(self, tls: LinkTls, host: str) -> None:
        self._tls = tls
        self._host = host

    def clientConnectionForTLS(self, tlsProtocol: TLSMemoryBIOProtocol) -> SSL.Connection:  # noqa: N803
        """Called by Twisted for each connection made. An IP address may not be a server name in TLS."""
        connection = self._tls.serverConnectionForTLS(tlsProtocol)
        connection.set_alpn_protos([self._tls.protocol])
        if not _is_ip(self._host):
            connection.set_tlsext_host_name(self._host.encode("idna"))
        return connection


def check_server(certificate: x509.Certificate, host: str, fleet: str) -> PeerCertificate:
    """The server behind C{certificate}, whose authority OpenSSL has checked already.

    @param host: the name or address that was dialed.
    @raise IdentityError: not a server, of another fleet, or not for this address.
    """
    peer = PeerCertificate.read(certificate)
    if peer.role != "server":
        raise IdentityError(f"its certificate {peer} is {pki.with_article(peer.role)}'s, not a server's")
    if peer.fleet != fleet:
        raise IdentityError(f"its certificate {peer} is of fleet {peer.fleet}, ours is of fleet {fleet}")
    try:
        (verify_certificate_ip_address if _is_ip(host) else verify_certificate_hostname)(certificate, host)
    except (service_identity.VerificationError, service_identity.CertificateError, ValueError):
        # ValueError: what was dialed (2130706433, say) is a name to the system, and can be in no certificate.
        allowed = ", ".join(peer.addresses) or "no address at all"
        raise IdentityError(f"its certificate {peer} is not for {host} but for {allowed}") from None
    return peer


def _is_ip(host: str) -> bool:
    return bool(isIPAddress(host) or isIPv6Address(host))
