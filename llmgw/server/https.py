"""The router's own certificate (C{router.tls}), as the control plane sees it: is it usable, and when does it end.

The workers read the files themselves. That happens when they start and after SIGHUP, so what was read here then is what they
show to clients. A worker could not start with files that cannot be used, and would say so in its own log only: they are tried
here first.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from llmgw import pki
from llmgw.config.settings import TlsFiles
from llmgw.errors import LlmgwError
from llmgw.router.worker import server_context
from llmgw.wire.expiry import LOOK_EVERY, ExpiryWatch

SOON = 2  # a stage of pki.expiry_stage: at most 14 days


class BadCertificate(LlmgwError):
    """C{router.tls} cannot be used; the text says which file and why."""


class HttpsCertificate:
    """What clients are shown; nothing at all where C{files} is None.

    @ivar expires: wall clock at which it ends; None before it has been read.
    """

    log = Logger()

    def __init__(self, files: TlsFiles | None, reactor: Any, wall: Callable[[], float]) -> None:
        self._files = files
        self._wall = wall
        self._certificate: x509.Certificate | None = None
        self._problem = ""
        self._watch = ExpiryWatch()
        self._looking = LoopingCall(self._look)
        self._looking.clock = reactor

    @property
    def expires(self) -> float | None:
        """When it ends, wall clock; None without one."""
        return self._certificate.not_valid_after_utc.timestamp() if self._certificate is not None else None

    def start(self) -> None:
        """Read it, and look once an hour whether it comes to its end.

        @raise BadCertificate: it cannot be used.
        """
        if self._files is not None:
            self.read()
            self._looking.start(LOOK_EVERY, now=False).addErrback(lambda failure: self.log.failure("looking at it", failure))

    def stop(self) -> None:
        """Look no more."""
        if self._looking.running:
            self._looking.stop()

    def read(self) -> None:
        """Read the files again.

        @raise BadCertificate: they cannot be used; the one before is still in force, and L{notes} say both.
        """
        files = self._files
        if files is None:
            return
        try:
            server_context(files.certificate, files.key)
            self._certificate = x509.load_pem_x509_certificates(files.certificate.read_bytes())[0]
        except (OSError, ssl.SSLError, ValueError) as error:
            self._problem = f"router.tls: {files.certificate} with {files.key} cannot be used: {error}"
            raise BadCertificate(self._problem) from None
        self._problem = ""
        self._look()

    def notes(self) -> list[str]:
        """What somebody should read of it now."""
        found = [f"{self._problem}; the one before is shown to clients until a worker has to start"] if self._problem else []
        now = datetime.fromtimestamp(self._wall(), UTC)
        if self._certificate is not None and pki.expiry_stage(self._certificate, now) >= SOON:
            found.append(f"router.tls: {pki.expiry_warning(self._certificate, now)}, then SIGHUP")
        return found

    def _look(self) -> None:
        if self._certificate is not None and self._files is not None:
            self._watch.look([(f"the router's certificate ({self._files.certificate})", self._certificate)], self._wall())
