"""A fake engine over several nodes: C{python -m llmgw.testing.ranked_engine --rank R --nodes N --head H --head-port P --port P}.

Rank 0 waits at the head's address for all others and then serves as L{llmgw.testing.fake_engine} does; the others join it, say
C{llmgw: ready}, serve no HTTP, and end when the head does. Without its other ranks the head never serves, and it ends when one
is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from llmgw.testing import fake_engine
from llmgw.testing.fake_engine import say

RETRY = 0.1


def ranks(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This program's own options, and the fake engine's."""
    add = (parser := argparse.ArgumentParser("ranked_engine", description=__doc__, allow_abbrev=False)).add_argument
    add("--rank", type=int, required=True)
    add("--nodes", type=int, required=True)
    add("--head", required=True)
    add("--head-port", type=int, required=True)
    return parser.parse_known_args(arguments)


class Head(fake_engine.Engine):
    """Rank 0."""

    def __init__(self, settings: argparse.Namespace, key: str | None, group: argparse.Namespace) -> None:
        super().__init__(settings, key)
        self.group = group
        self.joined: set[int] = set()
        self.whole = asyncio.Event()

    async def load(self) -> None:
        """Nothing is loaded before all ranks are there."""
        self.meeting = await asyncio.start_server(self.member, self.group.head, self.group.head_port)
        say("llmgw: joining ranks")
        if self.group.nodes > 1:
            await self.whole.wait()
        await super().load()

    async def member(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One other rank, for as long as it lives."""
        rank = int((await reader.readline()).strip() or 0)
        self.joined.add(rank)
        say(f"rank {rank} has joined")
        if self.joined == set(range(1, self.group.nodes)):
            self.whole.set()
        await reader.read()
        say(f"rank {rank} is lost")
        os._exit(1)


async def follow(group: argparse.Namespace) -> None:
    """Ranks above 0: join the head, and end with it."""
    say("llmgw: joining ranks")
    while True:
        try:
            reader, writer = await asyncio.open_connection(group.head, group.head_port)
            break
        except OSError:
            await asyncio.sleep(RETRY)
    writer.write(b"%d\n" % group.rank)
    say("llmgw: ready")
    await reader.read()
    say("the head is lost")
    os._exit(1)


def main() -> None:
    """The program."""
    group, rest = ranks(sys.argv[1:])
    if group.rank:
        asyncio.run(follow(group))
        return

    async def made() -> fake_engine.Engine:
        return Head(fake_engine.options(rest), os.environ.get("LLMGW_ENGINE_KEY"), group)

    fake_engine.serve(asyncio.run(made()))


if __name__ == "__main__":
    main()
