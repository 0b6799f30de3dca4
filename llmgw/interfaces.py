"""The seams: what an engine adapter, an inventory, a store and a leadership must do.

Adapters are found with C{twisted.plugin} in C{llmgw.engines} and by their C{name}; a distribution of its own may add one
by shipping C{llmgw/engines/NAME.py} without an C{__init__.py} beside it. Adapters do no I/O: no file, no process, no
clock. So their authors test them by calling them, and C{llmgw.testing.conformance} checks the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen
from twisted.internet.defer import Deferred
from zope.interface import Attribute, Interface

from llmgw.errors import Problem
from llmgw.fleet.estimate import Estimate
from llmgw.fleet.events import FleetEvent
from llmgw.fleet.model import Profile
from llmgw.fleet.node import Installation, Inventory, NodeFacts
from llmgw.fleet.shard import Allocation, Diagnosis, EngineLoad, ShardExit, WeightFiles


@frozen
class Needs:
    """What one shard of a profile takes on its node, as its adapter reckons it.

    C{memory} is bytes per device, None unknown. C{ports} is how many consecutive ports it wants, the first for HTTP.
    C{context} is the tokens of one request that C{memory} was reckoned for, None unknown or without influence on it.
    C{fixed}: the engine takes what it needs and no more, so that what it was seen to use is better than what was reckoned.
    """

    devices: int = 0
    memory: int | None = None
    host_memory: int = 0
    ports: int = 1
    context: int | None = None
    fixed: bool = False


@frozen
class Flags:
    """The long options an installed engine prints in its help: C{names} with dashes; C{switches} take no value.

    An empty C{names} means that nobody could ask: then arguments are passed on with a warning instead of refused.
    """

    names: frozenset[str] = frozenset()
    switches: frozenset[str] = frozenset()


@frozen
class SecretFile:
    """A file that the agent writes 0600 into the shard's folder before launch; argv names it as C{{secret:NAME}}."""

    name: str
    text: str


@frozen
class LoraDoor:
    """How adapters get into an engine that runs, and out of it.

    POST to C{load} takes C{lora_name} and C{lora_path}, to C{unload} C{lora_name}; both empty where it cannot, then C{fixed} says
    why. C{rank} is the highest that it was started for, C{most} how many it holds, both None unbounded or unknown; C{highest} the
    rank that no engine of the kind takes more than. C{served} is an adapter's name inside the engine, with C{{name}} in it.
    """

    load: str = ""
    unload: str = ""
    fixed: str = "its engine takes adapters only at its start"
    rank: int | None = None
    most: int | None = None
    highest: int | None = None
    served: str = "{name}"


@frozen
class ShardLaunch:
    """How to start one shard. C{environment} wins over what agent.yaml sets, C{defaults} give way to it; see
    C{engines.launch.child_environment}. C{{secret:NAME}} in argv or environment stands for a secret file's path.

    C{ready} is the path that answers 200 when the engine serves, C{models} the path whose answer must list the served
    name (empty: this engine has none). Both None on a rank that serves no HTTP: ready is then "alive and C{phase} said so".
    C{probe} is the smallest question that it must answer before it counts as serving: C{completion}, C{embedding} or C{none}; a
    refusal (4xx) is an answer.
    C{limit} is how many requests the engine runs at once, None unknown. POST to C{sleep} has the engine give most of its memory
    back while nobody uses it, POST to C{wake} has it serve again; both empty where it cannot.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(factory=dict)
    defaults: Mapping[str, str] = field(factory=dict)
    secrets: tuple[SecretFile, ...] = ()
    url: str = ""
    ready: str | None = "/health"
    models: str | None = "/v1/models"
    metrics: str | None = "/metrics"
    probe: str = "completion"
    limit: int | None = None
    grace: float = 20.0
    key: str = ""
    sleep: str = ""
    wake: str = ""
    loras: LoraDoor = LoraDoor()


@frozen
class Phase:
    """What a line of an engine's output says about its start: a word for people, and how far it is (0 to 1)."""

    name: str
    progress: float | None = None


class IEngineAdapter(Interface):
    """One kind of inference engine. Every method is pure and takes milliseconds."""

    name: str = Attribute("The adapter's name, e.g. C{vllm}; also the name of its default installation.")
    default_command: tuple[str, ...] = Attribute("What is run when the agent's configuration names no command.")

    def version_argv(command: Sequence[str]) -> list[str] | None:
        """The command that prints the installed version, or None where there is none."""

    def version(output: str) -> str | None:
        """The version in that output, None if it is not there."""

    def flags_argv(command: Sequence[str]) -> list[str] | None:
        """The command that prints every flag; run once per installation and cached. None where there is none."""

    def flags(output: str) -> Flags:
        """The flags in that output."""

    def needs(profile: Profile, files: WeightFiles | None) -> Needs:
        """What one shard takes. C{files} None means that nobody has looked at the weights yet."""

    def problems(
        profile: Profile, files: WeightFiles | None, node: NodeFacts | None, installation: Installation | None, flags: Flags
    ) -> list[Problem]:
        """Everything that would make this engine refuse this profile, before anything is started.

        Called with whatever is known: on the server for a whole catalog (no node), on the agent before a launch (all of it).
        """

    def warnings(
        profile: Profile, files: WeightFiles | None, node: NodeFacts | None, installation: Installation | None, flags: Flags
    ) -> list[Problem]:
        """What works but worse than meant, or could not be checked. Shown, never a reason to refuse."""

    def launch(
        profile: Profile,
        allocation: Allocation,
        installation: Installation,
        files: WeightFiles | None,
        served: Sequence[str],
        key: str,
    ) -> ShardLaunch:
        """argv, environment and URLs of one shard. C{key} must go by environment or secret file, never by argv."""

    def phase(line: str) -> Phase | None:
        """What this line of output says about the start, None for most lines."""

    def load(metrics: str) -> EngineLoad:
        """The load in a Prometheus text answer of this engine; unknown fields stay None."""

    def diagnose(exit: ShardExit, tail: Sequence[str]) -> Diagnosis:
        """Why it ended, from its status and the end of its output: the first cause, not the last line."""


class IMemoryEstimator(Interface):
    """What an adapter provides beside L{IEngineAdapter} if it can tell what a replica takes part by part. Pure, too."""

    def estimate(profile: Profile, files: WeightFiles | None) -> Estimate:
        """What one replica takes. C{files} None means that nobody has looked at the weights yet."""


class IServedNames(Interface):
    """What an adapter provides beside L{IEngineAdapter} if its engine cannot serve under every name. Pure, too."""

    def name_problems(served: Sequence[str]) -> list[Problem]:
        """What is wrong with these names, of which the first is the model's own."""


class IInventory(Interface):
    """What a node's hardware is. Implementations do their I/O in a child process with a deadline."""

    def take() -> Deferred[Inventory]:
        """The inventory now.

        A sick device or library never fails the whole: its device carries a C{problem}, or the inventory does.
        """


class IStore(Interface):
    """What survives a restart. Every method runs off the reactor thread and answers in a Deferred.

    Records are plain attrs values of C{llmgw.store.records}. Each write of a leader carries its epoch and fails with
    C{NotLeader}, having changed nothing, when the lease row says otherwise. Every error is a C{StoreError} with a sentence.
    """

    def open() -> Deferred[Any]:
        """Lock, check and migrate; returns a C{store.records.Opened} (fleet id, fresh or not, what was found)."""

    def load() -> Deferred[Any]:
        """All that a new leader needs at once: a C{store.records.Snapshot}."""

    def commit(epoch: int, changes: Iterable[Any]) -> Deferred[int]:
        """Write these records in one transaction, in order; returns the new state revision."""

    def events(after: int, limit: int) -> Deferred[list[FleetEvent]]:
        """Events with numbers above C{after}, the oldest first."""

    def add_usage(batch: str, usage: Sequence[Any]) -> Deferred[bool]:
        """Add up a batch of C{store.records.UsageRow}, once for each batch id; any server may, leading or not."""

    def usage(since: float, until: float, by: Sequence[str]) -> Deferred[list[Any]]:
        """Usage of that span, summed; C{by} names what is kept apart: hour, key, model."""

    def close() -> Deferred[None]:
        """Finish what runs, bounded in time, and let go of the lock."""


class ILeadership(Interface):
    """Who may command. Ask at the moment of emission; never keep the answer."""

    epoch: int = Attribute("The epoch of the leadership held or last seen.")
    leader: str = Attribute("The holder's name, as agents get it.")
    addresses: tuple[str, ...] = Attribute("Where agents reach that one.")
    problem: str = Attribute("Why who leads cannot be found out or kept, empty while it can.")

    def may_act() -> bool:
        """Whether this process may send a command right now."""

    def watch(changed: Callable[[], None]) -> None:
        """Have C{changed} called each time leadership was won, lost, raised or seen to move; then ask C{may_act}, C{epoch}."""

    def start() -> Deferred[None]:
        """Begin to contend; fires when that has begun, not when it has been won."""

    def outrank(epoch: int) -> Deferred[int]:
        """Raise the held epoch above C{epoch}, which an agent has seen: a store that was lost or restored begins too low.

        @return: the new epoch.
        @raise LlmgwError: not the holder, or the jump is larger than 1,000,000 (nobody may burn the counter).
        """

    def release() -> Deferred[None]:
        """Let go on purpose, so that another can take over at once."""
