"""C{twistd llmgw-server}: options and the wiring of the control plane, its router workers and its admin socket."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twisted.application.service import MultiService
from twisted.internet.defer import Deferred
from twisted.python import usage

from llmgw.admin.api import make_admin
from llmgw.config.server import ServerSettings, read_server
from llmgw.config.text import read_file
from llmgw.daemon import Lifecycle, SystemdNotify, refuse_configuration, steady_clock
from llmgw.errors import LlmgwError
from llmgw.server.service import make_server


class Options(usage.Options):
    """Command line of llmgw-server."""

    synopsis = "twistd llmgw-server --config FILE"
    longdesc = "The control plane and OpenAI-compatible router of llmgw. See llmgw-server(8) and llmgw.yaml(5)."
    optParameters = [["config", "c", "/etc/llmgw/server.yaml", "The server's configuration file."]]

    settings: ServerSettings

    def postOptions(self) -> None:
        """Read the file; every problem of it goes to stderr, and the exit status is 2."""
        try:
            self.settings = load(Path(self["config"]))
        except LlmgwError as error:
            refuse_configuration(error)


def load(path: Path) -> ServerSettings:
    """The settings in C{path}."""
    path = path.absolute()
    return read_server(path, read_file(path))


def makeService(options: Options, reactor: Any = None) -> MultiService:
    """The server's services; nothing is opened before they start."""
    if reactor is None:
        from twisted.internet import reactor

        steady_clock(reactor)
    settings = options.settings
    top = MultiService()
    server = make_server(settings, reactor)
    admin = make_admin(settings, server, reactor)

    def reload() -> Deferred[None]:
        new = load(settings.path)
        taken = server.reload(new)
        admin.reload(new)
        return taken

    lifecycle = Lifecycle(reactor, SystemdNotify(os.environ), reload, server.status, server.interrupted)
    server.when_up(lifecycle.ready)
    lifecycle.setServiceParent(top)
    server.setServiceParent(top)
    admin.setServiceParent(top)
    return top
