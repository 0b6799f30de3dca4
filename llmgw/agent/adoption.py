"""What an agent that starts does with what an earlier one left: nothing that runs is lost, doubled, or mistaken for another.

outcome.json there       it is over; a failure is reported until the leader no longer asks
run.json, engine alive   the same boot, pid and start time: adopted
run.json, engine gone    it ended meanwhile; what is left of its tree is ended, and it has failed
no run.json              it may be about to start: the launch is taken back, what carries its marks is waited for or ended;
                         then it has never been started, and may be
"""

from __future__ import annotations

from collections.abc import Mapping

from twisted.internet.task import deferLater
from twisted.logger import Logger

from llmgw.agent.ending import Ending, scan
from llmgw.agent.processes import Tree, is_alive, marks_of
from llmgw.agent.reports import Surroundings
from llmgw.agent.shardfolder import AttemptFolder, Intent, Run, ShardFolders
from llmgw.agent.supervisor import Supervisor
from llmgw.fleet.shard import ShardState, Wanted
from llmgw.interfaces import IEngineAdapter

SHIM_PATIENCE = 10.0
log = Logger()


async def adopt_all(
    around: Surroundings, folders: ShardFolders, adapters: Mapping[str, IEngineAdapter]
) -> list[tuple[Supervisor, Run | None]]:
    """A supervisor for every attempt that lives or has failed, with who runs, if anybody does. None of them has begun yet.

    One folder that cannot be understood never keeps the others from being adopted.
    """
    found = []
    for attempts in folders.shards():
        for folder in reversed(attempts):
            try:
                intent = folder.intent()
                if intent is None:
                    _nameless(folder)
                elif (made := await _adopt(around, folder, intent, adapters.get(intent.adapter))) is not None:
                    found.append(made)
                    break
                elif folder.outcome() is not None:
                    break
            except Exception:
                log.failure("while adopting {path}", path=str(folder.path))
    return found


def begin(supervisor: Supervisor, run: Run | None) -> None:
    """Let an adopted attempt go on from where it is."""
    if (outcome := supervisor.folder.outcome()) is not None:
        supervisor.restore(outcome)
    elif run is not None and is_alive(run.engine):
        supervisor.adopt(run)
        if supervisor.intent.order.wanted is Wanted.STOP:
            supervisor.stop()
    else:
        supervisor.ended_meanwhile(run)


def _nameless(folder: AttemptFolder) -> None:
    """An intent that was never finished means that nothing was started; one that was spoilt later may have an engine."""
    run = folder.run()
    if run is None:
        folder.remove()
    elif is_alive(run.engine):
        log.error(
            "{path}: intent.json is gone or broken, but its engine runs: it is left alone. End pid {pid} by hand",
            path=str(folder.path),
            pid=run.engine.pid,
        )


async def _adopt(
    around: Surroundings, folder: AttemptFolder, intent: Intent, adapter: IEngineAdapter | None
) -> tuple[Supervisor, Run | None] | None:
    outcome = folder.outcome()
    if outcome is not None and outcome.state is not ShardState.FAILED:
        return None
    run = folder.run()
    if outcome is None and run is None and (run := await _settle(around, folder)) is None:
        log.info("{shard} attempt {attempt} was ordered but never started", shard=folder.shard, attempt=folder.attempt)
        folder.remove()
        return None
    return Supervisor(around, folder, intent, adapter), run


async def _settle(around: Surroundings, folder: AttemptFolder) -> Run | None:
    """Who runs for an attempt without run.json, once its shim has either written it or is gone."""
    reactor = around.reactor
    folder.abandon()
    tree = Tree(marks_of(around.instance, folder.shard, folder.attempt))
    deadline = reactor.seconds() + SHIM_PATIENCE
    while (run := folder.run()) is None and await scan(reactor, tree):
        if reactor.seconds() > deadline:
            await Ending(reactor, tree, 0.0).run()
            return folder.run()
        await deferLater(reactor, 0.05)
    return run or folder.run()
