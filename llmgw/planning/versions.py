"""Engines that run on with a version that was replaced on their node after they had started.

Nothing follows by itself: somebody who upgrades an engine on every node of a fleet does not ask for all of its replicas to be
loaded anew. It is remarked, and taken up when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmgw.fleet.node import Installation
from llmgw.fleet.shard import ShardReport


def outdated(installations: Iterable[Installation], reports: Iterable[ShardReport]) -> dict[tuple[str, str], list[str]]:
    """The shards whose engine is of another version than is installed now, by C{(INSTALLATION, VERSION THAT RUNS)}.

    Where either version is unknown nothing is said.
    """
    now = {installation.name: installation.version for installation in installations if installation.version}
    old: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        if report.state.live and report.version and now.get(report.installation, report.version) != report.version:
            old.setdefault((report.installation, report.version), []).append(report.shard)
    return {key: sorted(shards) for key, shards in sorted(old.items())}
