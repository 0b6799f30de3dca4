"""C{llmgw drain --wait}: tells how far a drain is until the nodes are empty. It only looks: a drain goes on without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import click

from llmgw.cli.client import Answer, Client, Unreachable
from llmgw.cli.render import count
from llmgw.errors import LlmgwError
from llmgw.fleet.line import escape
from llmgw.fleet.units import show_duration

POLL = 0.5
# What stopping takes after the deadline: the engines' grace, and the next looks.
BEYOND = 120.0


class NotDrained(LlmgwError):
    """A drain was ended, or nodes are not empty long after its deadline."""


def wait_until_drained(client: Client, nodes: Sequence[str], deadline: float, say: Callable[[str], None] | None = None) -> None:
    """Return when nothing runs on the nodes; C{deadline} is the drain's, in seconds from now.

    @raise NotDrained: that will not be.
    """
    say = say or (lambda text: click.echo(escape(text), err=True))
    until, said = time.monotonic() + deadline + BEYOND, dict[str, str]()
    while True:
        found = _look(client, nodes)
        for node, text in found.items():
            if said.get(node) != text:
                say(text)
        said |= found
        if all(text.endswith(": drained") for text in found.values()):
            return
        if time.monotonic() >= until:
            raise NotDrained(f"not drained {show_duration(deadline + BEYOND)} after the order: {'; '.join(found.values())}")
        time.sleep(POLL)


def _look(client: Client, nodes: Sequence[str]) -> dict[str, str]:
    """By node, where it stands."""
    try:
        status = client.get("/v1/status")
    except Unreachable as error:
        return dict.fromkeys(nodes, f"{error}; asking again")
    known = {node["name"]: node for node in status.get("nodes") or ()}
    return {name: _standing(name, known.get(name), status) for name in nodes}


def _standing(name: str, node: Answer | None, status: Answer) -> str:
    if node is None or node.get("state") == "removed":
        return f"{name}: drained"
    if "draining" not in (node.get("flags") or ()):
        raise NotDrained(f"{name} does not drain any more: somebody said llmgw uncordon {name}")
    left = list(_left(name, status))
    if not left:
        return f"{name}: drained"
    away = f" ({name} is {node['state']})" if node.get("state") != "ready" else ""
    return f"{name}: {count(len(left), 'replica')} left{away}: {', '.join(left)}"


def _left(node: str, status: Answer) -> Iterator[str]:
    """Each replica with a shard there, and what it is doing."""
    for model in status.get("models") or ():
        for replica in model.get("replicas") or ():
            if any(shard.get("node") == node for shard in replica.get("shards") or ()):
                running = f", {replica['in_flight']} in flight" if replica.get("in_flight") else ""
                yield f"{replica.get('id')} {replica.get('state')}{running}"
