"""C{twistd llmgw-agent}: options and the wiring of the node daemon, nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twisted.application.service import MultiService
from twisted.python import usage

from llmgw.agent.service import make_agent
from llmgw.config.agent import AgentSettings, read_agent
from llmgw.config.text import read_file
from llmgw.daemon import Lifecycle, SystemdNotify, awake_clock, refuse_configuration
from llmgw.errors import LlmgwError


class Options(usage.Options):
    """Command line of llmgw-agent."""

    synopsis = "twistd llmgw-agent --config FILE"
    longdesc = "Keeps inference engines running on this node, as llmgw-server asks. See llmgw-agent(8) and llmgw.yaml(5)."
    optParameters = [["config", "c", "/etc/llmgw/agent.yaml", "The agent's configuration file."]]

    settings: AgentSettings

    def postOptions(self) -> None:
        """Read the file; every problem of it goes to stderr, and the exit status is 2."""
        try:
            self.settings = load(Path(self["config"]))
        except LlmgwError as error:
            refuse_configuration(error)


def load(path: Path) -> AgentSettings:
    """The settings in C{path}."""
    path = path.absolute()
    return read_agent(path, read_file(path))


def makeService(options: Options, reactor: Any = None) -> MultiService:
    """The agent's services; nothing is opened before they start."""
    if reactor is None:
        from twisted.internet import reactor

        awake_clock(reactor)
    settings = options.settings
    top = MultiService()
    agent = make_agent(settings, reactor)
    lifecycle = Lifecycle(reactor, SystemdNotify(os.environ), lambda: agent.reload(load(settings.path)), agent.status)
    agent.when_up(lifecycle.ready)
    lifecycle.setServiceParent(top)
    agent.setServiceParent(top)
    return top
