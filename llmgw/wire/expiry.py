"""Says that certificates come to their end, once per stage and certificate. It only says so: no link is ever cut for it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from attrs import define, field
from cryptography import x509
from twisted.logger import Logger

from llmgw import pki

LOOK_EVERY = 3600.0


@define
class ExpiryWatch:
    """Remembers what was said of which certificate, as long as somebody still shows it."""

    log = Logger()
    _said: dict[str, int] = field(factory=dict)

    def look(self, certificates: Iterable[tuple[str, x509.Certificate]], now: float) -> None:
        """Warn about each certificate that has come to a later stage since it was last looked at.

        @param certificates: whose it is, for people, and the certificate.
        @param now: wall clock.
        """
        moment = datetime.fromtimestamp(now, UTC)
        said, self._said = self._said, {}
        for whose, certificate in certificates:
            serial = pki.serial_of(certificate)
            stage = pki.expiry_stage(certificate, moment)
            self._said[serial] = stage
            if stage > said.get(serial, 0):
                warning = pki.expiry_warning(certificate, moment)
                self.log.warn("{whose}: {warning}", whose=whose, warning=warning, event="certificate_expires")
