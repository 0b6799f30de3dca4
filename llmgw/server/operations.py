"""What operators order: drain, cordon, restart, orphans, nodes. Each is a change of records; the next plan carries it out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attrs import evolve
from twisted.internet.defer import Deferred

from llmgw.errors import LlmgwError
from llmgw.fleet.node import NodeEvent, NodeState, next_node_state
from llmgw.fleet.records import DeviceCordon, NodeRecord
from llmgw.fleet.shard import ShardState, Wanted
from llmgw.planning.adopt import Orphan, adopt, readable
from llmgw.planning.fleetroom import leaving, ledger, want
from llmgw.planning.placement import Ledger, Placement
from llmgw.planning.replicas import Replica, group
from llmgw.planning.rollout import leave
from llmgw.planning.versions import outdated
from llmgw.planning.world import Draft
from llmgw.server.controller import Controller
from llmgw.server.emission import Port
from llmgw.server.imembers import NodeAway
from llmgw.server.truth import differences
from llmgw.store.records import Change, Drop
from llmgw.wire.messages import Done, FetchLog, Goaway

LOG_LIMIT = 2**18
ASK_TIMEOUT = 15.0
OPERATOR = "an operator"


class Unknown(LlmgwError):
    """Nothing has this name."""


class Outage(LlmgwError):
    """It would leave a model without any replica, and nobody said that this is meant."""


class Conflict(LlmgwError):
    """It cannot be done as things stand; the text says why and what to do."""


class Operations:
    """Orders about what runs and where. C{by} is who gave an order, for the event that tells of it."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    # Nodes.

    def drain(
        self, nodes: Sequence[str], deadline: float | None, force: bool, allow_outage: bool, by: str = OPERATOR
    ) -> Deferred[list[str]]:
        """Move what runs on these nodes elsewhere. All of them are closed to new replicas first, so that nothing hops.

        @param deadline: seconds after which what is left is stopped; None is C{timing.node_drain}.
        @param force: everything there begins to drain at once, without waiting for successors.
        @return: sentences on what will happen.
        @raise Outage: models would be without any replica.
        """
        return Deferred.fromCoroutine(self._drain(nodes, deadline, force, allow_outage, by))

    async def _drain(self, nodes: Sequence[str], deadline: float | None, force: bool, outage: bool, by: str) -> list[str]:
        controller = self._controller
        said: list[str] = []

        def make() -> Iterable[Change]:
            now = controller.clocks.wall()
            until = now + (controller.timing.node_drain if deadline is None else deadline)
            records = {
                name: evolve(
                    self._node(name),
                    draining=True,
                    cordoned=True,
                    drain_deadline=until,
                    outage=outage or force,
                    force=force,
                    reason=f"drained by {by}",
                )
                for name in nodes
            }
            draft = Draft(evolve(controller.world(), nodes={**controller.world().nodes, **records}))
            homeless = self._homeless(draft, nodes)
            if homeless and not (outage or force):
                raise Outage(
                    f"{'; '.join(homeless)}. Say --allow-outage to drain all the same, or make room first: llmgw explain MODEL"
                )
            said.extend([f"{name} drains" for name in nodes] + homeless)
            for name in nodes:
                draft.say("drain", name, f"{name}: drain ordered by {by}", name)
            return [*records.values(), *draft.events]

        await controller.change(make)
        return said

    def _homeless(self, draft: Draft, nodes: Sequence[str]) -> list[str]:
        """The models that nobody would serve any more, each with its sentence."""
        room, said = ledger(draft, leaving(draft)), []
        for name, replicas in group(draft.shards.values()).items():
            ready = [replica for replica in replicas if replica.ready]
            staying = [replica for replica in ready if not set(replica.nodes) & set(nodes)]
            if ready and not staying and not self._fits(draft, room, name):
                said.append(f"{name} would be served by nobody: {ready[0].id} runs there and no other node can run it")
        return said

    def _fits(self, draft: Draft, room: Ledger, name: str) -> bool:
        model = draft.catalog.get(name)
        if model is None or model.profile is None:
            return False
        return isinstance(room.place(want(draft, model, draft.number(name) + 1)), Placement)

    def cordon(self, nodes: Sequence[str], on: bool, by: str = OPERATOR) -> Deferred[int]:
        """Close nodes to new replicas, or open them again, which also ends a drain."""

        def make() -> Iterable[Change]:
            draft = Draft(self._controller.world())
            changes: list[Change] = []
            for name in nodes:
                node = self._node(name)
                changes.append(
                    evolve(node, cordoned=True)
                    if on
                    else evolve(
                        node,
                        cordoned=False,
                        draining=False,
                        drain_deadline=None,
                        outage=False,
                        force=False,
                        reason="",
                        quarantined_until=None,
                        failures=(),
                    )
                )
                draft.say("cordon", name, f"{name}: {'cordoned' if on else 'uncordoned'} by {by}", name)
            return [*changes, *draft.events]

        return self._controller.change(make)

    def cordon_device(self, node: str, device: str, on: bool, reason: str = "", by: str = OPERATOR) -> Deferred[int]:
        """Close one device to new replicas, or open it again.

        @param device: its UUID, or so much of its beginning that no other device of the node has the same.
        @raise Unknown: the node has no such device.
        @raise Conflict: it closed by itself and is not well, so that it would close again at once.
        """

        def make() -> Iterable[Change]:
            record, draft = self._node(node), Draft(self._controller.world())
            uuid = self._device(record, device)
            cordons = dict(record.device_cordons)
            known = cordons.pop(uuid, None)
            if on:
                cordons[uuid] = DeviceCordon(reason, self._controller.clocks.wall(), by)
            elif known is not None and known.by_itself:
                raise Conflict(f"{uuid} on {node} closed by itself: {known.reason}. It opens by itself when it is well again")
            draft.say("cordon", node, f"{node}: device {uuid} {'cordoned' if on else 'uncordoned'} by {by}", node)
            return [evolve(record, device_cordons=cordons), *draft.events]

        return self._controller.change(make)

    def _device(self, record: NodeRecord, device: str) -> str:
        here = self._controller.members.present.get(record.name)
        facts = here.facts if here else record.facts
        known = {one.uuid for one in facts.inventory.devices} if facts else set()
        known |= set(record.device_cordons)
        found = [device] if device in known else sorted(uuid for uuid in known if uuid.startswith(device))
        if len(found) == 1:
            return found[0]
        said = f"has several devices that begin with {device}" if found else f"has no device {device}"
        raise Unknown(f"{record.name} {said}; known: {', '.join(found or sorted(known)) or 'none'}")

    def _node(self, name: str) -> NodeRecord:
        record = self._controller.truth.nodes.get(name)
        if record is None:
            known = ", ".join(sorted(self._controller.truth.nodes)) or "none"
            raise Unknown(f"no node is called {name}; known: {known}")
        return record

    def remove(self, name: str, force: bool = False, by: str = OPERATOR) -> Deferred[int]:
        """Refuse a node from now on and forget what ran there. Its engines are not stopped.

        @param force: also while replicas may still run there. A lost node needs none: it has been given up already.
        @raise Conflict: they may.
        """

        def make() -> Iterable[Change]:
            node = self._node(name)
            draft = Draft(self._controller.world())
            left = [r.shard for r in draft.shards.values() if r.allocation and r.allocation.node == name and r.state.live]
            if left and not force and node.state is not NodeState.LOST:
                raise Conflict(
                    f"{name} still runs {', '.join(sorted(left)[:8])}: first llmgw drain {name} --wait. Or --force: then they "
                    "are forgotten, and go on running there until somebody stops them on the machine"
                )
            for replica in [one for found in group(draft.shards.values()).values() for one in found if name in one.nodes]:
                if len(replica.shards) > 1 and not replica.leaving:
                    leave(draft, replica, f"{name} was removed", at_once=True)
            for record in list(draft.shards.values()):
                if record.allocation and record.allocation.node == name:
                    draft.drop(record)
            gone = draft.node(node, next_node_state(node.state, NodeEvent.REMOVE), f"removed by {by}")
            return [gone, *differences(self._controller.truth, self._controller.truth.nodes, draft.shards, draft.events)]

        done = self._controller.change(make)
        return done.addCallback(self._close, name, "removed")

    def reset(self, name: str, by: str = OPERATOR) -> Deferred[int]:
        """Let a node start anew: ends a quarantine, and lets a removed node or a new machine of that name join."""

        def make() -> Iterable[Change]:
            node = self._node(name)
            draft = Draft(self._controller.world())
            draft.say("node_reset", name, f"{name}: reset by {by}", name)
            if node.state is NodeState.REMOVED:
                return [Drop("node", name), *draft.events]
            return [evolve(node, instance="", boot="", quarantined_until=None, failures=()), *draft.events]

        return self._controller.change(make)

    def _close(self, revision: int, node: str, reason: str) -> int:
        port = self._controller.emission.port
        if port is not None and node in port.sessions():
            port.close(node, Goaway(reason, self._controller.leadership.leader))
        return revision

    # Replicas.

    def restart(
        self,
        model: str | None,
        node: str | None,
        number: int | None,
        allow_outage: bool,
        by: str = OPERATOR,
        outdated: bool = False,
    ) -> Deferred[list[str]]:
        """Replace replicas by fresh ones, one at a time; also gives those that failed too often a new budget.

        @param model: whose, None for those of all models.
        @param outdated: only those whose engine runs with another version than is installed on its node by now.
        @return: the replicas concerned; none of them outdated is no error.
        @raise Outage: the only ready replica would go before its successor is there.
        """
        return Deferred.fromCoroutine(self._restart(model, node, number, allow_outage, by, outdated))

    async def _restart(
        self, model: str | None, node: str | None, number: int | None, outage: bool, by: str, outdated: bool
    ) -> list[str]:
        chosen: list[Replica] = []

        def make() -> Iterable[Change]:
            draft = Draft(self._controller.world())
            if node is not None:
                self._node(node)
            found = self._chosen(draft, model, node, number)
            old = self._outdated() if outdated else set()
            chosen.extend(one for one in found if not outdated or old.intersection(_where(one)))
            alone = self._only_ones(draft, chosen)
            if alone and not outage:
                raise Outage(
                    f"{', '.join(alone)}: the only ready replica of its model, and there is no room for its successor beside it. "
                    "To have it stopped first: --allow-outage"
                )
            for replica in chosen:
                for shard in replica.shards:
                    draft.put(evolve(shard, replace=f"restart ordered by {by}", outage=outage))
                draft.say("restart", replica.id, f"{replica.id}: restart ordered by {by}")
            return differences(self._controller.truth, self._controller.truth.nodes, draft.shards, draft.events)

        await self._controller.change(make)
        return [replica.id for replica in chosen]

    def _outdated(self) -> set[tuple[str, str]]:
        """By node, for those that have a link, the shards whose engine has been replaced there."""
        here = self._controller.members.present
        found = {name: outdated(one.facts.installations, one.told.shards.values()) for name, one in here.items()}
        return {(name, shard) for name, versions in found.items() for shards in versions.values() for shard in shards}

    def _chosen(self, draft: Draft, model: str | None, node: str | None, number: int | None) -> list[Replica]:
        models = group(draft.shards.values())
        ours = [one.name for one in draft.catalog.models if one.profile is not None and model in (None, one.name)]
        here = [replica for name in ours for replica in models.get(name, []) if not replica.leaving]
        chosen = [r for r in here if (node is None or node in r.nodes) and (number is None or number == r.number)]
        if not chosen and model is not None:
            if not here:
                raise Unknown(f"{model} has no replica to restart; why it has none says: llmgw explain {model}")
            raise Unknown(f"{model} has no such replica; it has {', '.join(r.id for r in here)}")
        if not chosen and node is not None:
            raise Unknown(f"nothing runs on {node}")
        return chosen

    def _only_ones(self, draft: Draft, chosen: Iterable[Replica]) -> list[str]:
        """Those that nobody would serve for, while their successors start in their place."""
        room, models = ledger(draft, leaving(draft)), group(draft.shards.values())
        return [
            replica.id
            for replica in chosen
            if replica.ready
            and sum(other.ready for other in models[replica.model]) == 1
            and not self._fits(draft, room, replica.model)
        ]

    # Orphans.

    def orphans(self) -> tuple[Orphan, ...]:
        """Engines that run without a record."""
        return self._controller.outcome.orphans if self._controller.outcome else ()

    def adopt(self, shard: str, node: str | None, by: str = OPERATOR) -> Deferred[str]:
        """Make an orphan a replica of its model; it is replaced later where its generation is not the catalog's."""

        def make(draft: Draft, orphan: Orphan) -> None:
            model = draft.catalog.get(orphan.report.model)
            if orphan.report.shard in draft.shards and draft.shards[orphan.report.shard].allocation is not None:
                raise Conflict(f"{shard} on {orphan.node} cannot be adopted: {orphan.why}. Stop it: llmgw stop {shard}")
            if model is None or model.profile is None:
                raise Conflict(f"{shard} cannot be adopted: the catalog runs no model {orphan.report.model}. Apply one first")
            adopt(draft, orphan.node, orphan.report, model.profile)
            draft.say("adopt", shard, f"{shard}: adopted by {by}", orphan.node)

        return self._on_orphan(shard, node, make, "adopted")

    def stop(self, shard: str, node: str | None, by: str = OPERATOR) -> Deferred[str]:
        """Stop an orphan."""

        def make(draft: Draft, orphan: Orphan) -> None:
            known = draft.shards.get(shard)
            if known is not None and known.allocation is not None:
                raise Conflict(f"{shard} also runs on {known.allocation.node} and is wanted there; stop this copy on its node")
            record = adopt(draft, orphan.node, orphan.report, None)
            draft.move(evolve(record, wanted=Wanted.STOP, url="", key=""), ShardState.STOPPING, f"stopped by {by}")

        return self._on_orphan(shard, node, make, "is stopped")

    def _on_orphan(self, shard: str, node: str | None, make_one: object, word: str) -> Deferred[str]:
        return Deferred.fromCoroutine(self._orphan(shard, node, make_one, word))

    async def _orphan(self, shard: str, node: str | None, make_one: object, word: str) -> str:
        assert callable(make_one)
        where: list[str] = []

        def make() -> Iterable[Change]:
            found = [o for o in self.orphans() if o.report.shard == shard and node in (None, o.node)]
            if not found or not readable(shard):
                raise Unknown(self._why_no_orphan(shard))
            if len(found) > 1:
                raise Conflict(f"{shard} runs on {' and '.join(o.node for o in found)}: say which with --node")
            draft = Draft(self._controller.world())
            make_one(draft, found[0])
            where.append(found[0].node)
            return differences(self._controller.truth, self._controller.truth.nodes, draft.shards, draft.events)

        await self._controller.change(make)
        return f"{shard} on {where[0]} {word}"

    def _why_no_orphan(self, shard: str) -> str:
        record = self._controller.truth.shards.get(shard)
        if record is not None and record.allocation is not None:
            return f"{shard} is no orphan: the catalog wants it. Lower its replicas or use llmgw restart {record.model}"
        return f"no orphan is called {shard}: see llmgw orphans"

    # Logs.

    def logs(self, shard: str, attempt: int, offset: int, limit: int, node: str | None = None) -> Deferred[Done]:
        """A piece of a shard's output, asked of its node, or of C{node}.

        @raise Unknown: no node is known to have it.
        @raise NodeAway: its node has no link now.
        @raise NotLeading: all links are the leader's.
        """
        self._controller.commits.must_lead()
        node = node or self.whose(shard)
        if node is None:
            known = ", ".join(sorted(r.shard for r in self._controller.truth.shards.values() if r.allocation)[:8]) or "none"
            raise Unknown(f"no shard is called {shard}; known: {known}")
        port: Port | None = self._controller.emission.port
        leadership = self._controller.leadership
        if port is None or node not in self._controller.members.present:
            raise NodeAway(f"{node} has no link now, so the output of {shard} cannot be read; the engine's log is on the node")
        operation = f"log:{leadership.epoch}:{self._controller.clocks.steady()}"
        message = FetchLog(operation, leadership.epoch, leadership.leader, shard, attempt, offset, max(1, min(limit, LOG_LIMIT)))
        return port.ask(node, message, ASK_TIMEOUT)

    def whose(self, shard: str) -> str | None:
        """The node of a shard that is somewhere."""
        record = self._controller.truth.shards.get(shard)
        if record is not None and record.allocation is not None:
            return record.allocation.node
        told = ((name, here.told) for name, here in self._controller.members.present.items())
        return next((name for name, said in told if shard in said.shards), None)


def _where(replica: Replica) -> Iterable[tuple[str, str]]:
    """Node and name of each of its shards."""
    return ((shard.allocation.node, shard.shard) for shard in replica.shards if shard.allocation)
