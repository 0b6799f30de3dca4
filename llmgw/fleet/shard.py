"""Replicas and their shards: names, states, what is ordered and what is reported.

Three things are kept apart. What is wanted is a L{ShardOrder}; what a node said is a L{ShardReport}; what the leader
concludes is a L{ShardState} in its own record. Reports are ordered by C{(attempt, serial)}; only the leader raises
C{attempt}, so an agent that lost its memory can never start a second copy by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from attrs import field, frozen

from llmgw.fleet.model import Profile
from llmgw.fleet.node import IllegalTransition
from llmgw.fleet.tensors import TensorBytes


def replica_id(model: str, number: int) -> str:
    """C{llama-70b/2}. Model names may hold slashes: read ids from the right."""
    return f"{model}/{number}"


def shard_id(replica: str, rank: int) -> str:
    """C{llama-70b/2/0}."""
    return f"{replica}/{rank}"


def replica_of(shard: str) -> str:
    """The replica that a shard id belongs to."""
    return shard.rpartition("/")[0]


class Wanted(StrEnum):
    """What the leader wants of a shard. Absence is never an order."""

    RUN = "run"
    DRAIN = "drain"
    STOP = "stop"
    SLEEP = "sleep"


class ShardState(StrEnum):
    """The states of a shard; C{unknown} covers any of them while its node is away."""

    PENDING = "pending"
    PLACED = "placed"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    STOPPING = "stopping"
    STOPPED = "stopped"
    BACKOFF = "backoff"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @property
    def live(self) -> bool:
        """Whether an engine process may exist in this state."""
        return self in _LIVE


_LIVE = frozenset(
    {
        ShardState.STARTING,
        ShardState.LOADING,
        ShardState.READY,
        ShardState.DRAINING,
        ShardState.SLEEPING,
        ShardState.STOPPING,
        ShardState.UNKNOWN,
    }
)

# From the best to the worst: a replica of several shards is as its worst one.
_WORST = (
    ShardState.READY,
    ShardState.DRAINING,
    ShardState.SLEEPING,
    ShardState.LOADING,
    ShardState.STARTING,
    ShardState.PLACED,
    ShardState.STOPPING,
    ShardState.STOPPED,
    ShardState.UNKNOWN,
    ShardState.BACKOFF,
    ShardState.FAILED,
    ShardState.PENDING,
)

_S = ShardState
# The legal edges (facts: replica lifecycle). An edge from a state to itself is always legal and means nothing.
_SHARD: dict[ShardState, frozenset[ShardState]] = {
    _S.PENDING: frozenset({_S.PLACED, _S.FAILED, _S.STOPPED}),
    _S.PLACED: frozenset(
        {_S.STARTING, _S.LOADING, _S.READY, _S.BACKOFF, _S.FAILED, _S.PENDING, _S.STOPPING, _S.STOPPED, _S.UNKNOWN}
    ),
    _S.STARTING: frozenset({_S.LOADING, _S.READY, _S.BACKOFF, _S.FAILED, _S.STOPPING, _S.STOPPED, _S.UNKNOWN}),
    _S.LOADING: frozenset({_S.READY, _S.BACKOFF, _S.FAILED, _S.STOPPING, _S.STOPPED, _S.UNKNOWN}),
    _S.READY: frozenset({_S.SLEEPING, _S.DRAINING, _S.LOADING, _S.BACKOFF, _S.FAILED, _S.STOPPING, _S.STOPPED, _S.UNKNOWN}),
    _S.DRAINING: frozenset({_S.SLEEPING, _S.STOPPING, _S.STOPPED, _S.BACKOFF, _S.FAILED, _S.UNKNOWN}),
    _S.SLEEPING: frozenset({_S.LOADING, _S.READY, _S.BACKOFF, _S.FAILED, _S.STOPPING, _S.STOPPED, _S.UNKNOWN}),
    _S.STOPPING: frozenset({_S.STOPPED, _S.BACKOFF, _S.FAILED, _S.UNKNOWN}),
    _S.STOPPED: frozenset({_S.PLACED, _S.PENDING}),
    _S.BACKOFF: frozenset({_S.PLACED, _S.PENDING, _S.FAILED, _S.STOPPED, _S.UNKNOWN}),
    _S.FAILED: frozenset({_S.PENDING, _S.PLACED, _S.STOPPED, _S.UNKNOWN}),
    _S.UNKNOWN: frozenset(_S) - {_S.PENDING},
}


def move_shard(now: ShardState, then: ShardState) -> ShardState:
    """C{then}, if the table allows going there.

    @raise IllegalTransition: it does not; the caller logs it and keeps C{now}.
    """
    if may_become(now, then):
        return then
    raise IllegalTransition(f"a shard that is {now} cannot become {then}")


def may_become(now: ShardState, then: ShardState) -> bool:
    """Whether the table allows going there."""
    return then is now or then in _SHARD[now]


def worst(states: list[ShardState]) -> ShardState:
    """The state of a replica with these shards; C{pending} for one that has none yet."""
    return max(states, key=_WORST.index, default=ShardState.PENDING)


@frozen
class Allocation:
    """What placement gave one shard on its node.

    C{ports[0]} is the engine's HTTP port on rank 0; the rest are the engine's own. C{head} and C{peers} are addresses on
    the fabric where the replica has one, else the nodes' own. C{memory} is the device memory claimed per device.
    C{device_total} and C{device_free} are what the agent sees of the smallest of the devices just before a launch, C{hip} the
    numbers that ROCm then has for those of AMD; None on a node that has no AMD device.
    """

    node: str
    rank: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    devices: tuple[str, ...] = ()
    memory: int | None = None
    host_memory: int = 0
    ports: tuple[int, ...] = ()
    head: str = ""
    head_port: int = 0
    peers: tuple[str, ...] = ()
    interface: str | None = None
    device_total: int | None = None
    device_free: int | None = None
    hip: tuple[int, ...] | None = None


@frozen
class ShardOrder:
    """One entry of C{desired}: the shard, what is wanted of it, and all that an agent needs to start it.

    C{operation} names the effect: the agent answers a repeated one as it did the first time. C{deadline} is how many
    seconds a drain may take. C{served} are the names the engine must answer to, the model's own first. A stop leaves the engine
    alone for C{patience} seconds, since its rank 0 is ending and tells it to; ordered again with less, it goes on at once.
    C{doubted}: its requests fail, so its engine is to be asked for a token now and then.
    """

    shard: str
    model: str
    generation: str
    attempt: int
    wanted: Wanted
    operation: str
    profile: Profile
    allocation: Allocation
    served: tuple[str, ...] = ()
    deadline: float = 600.0
    grace: float = 20.0
    patience: float = 0.0
    doubted: bool = False


@frozen
class EngineLoad:
    """What an engine says of its load; None is unknown. C{kv_used} is a fraction. C{tokens} only grows: progress."""

    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    tokens: int | None = None


@frozen
class ShardExit:
    """How an engine ended. C{code} and C{signal} are both None when nobody saw it: unknown is never 0.

    C{oom_kills} is how many of its processes the kernel killed for want of memory, by its cgroup's C{memory.events}.
    """

    code: int | None = None
    signal: int | None = None
    at: float | None = None
    forced: bool = False
    oom_kills: int = 0

    def __str__(self) -> str:
        if self.signal is not None:
            return f"killed by signal {self.signal}"
        return "exit status unknown" if self.code is None else f"exit status {self.code}"


@frozen
class Diagnosis:
    """Why an engine failed, in one sentence, and what to do.

    @ivar cause: C{configuration}, C{retry}, C{clean_and_retry}, C{node}, C{disk_full}, C{source} or C{unknown}.
    """

    cause: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.text.rstrip('.')}. {self.advice}" if self.advice else self.text


@frozen
class ShardLora:
    """An adapter of an engine: what it has, or why it has not what was ordered.

    C{served} is the name that the engine itself knows it by. C{problem} is empty when it is loaded; C{anew}: an engine that is
    started anew would load it.
    """

    name: str
    weights: str
    served: str = ""
    problem: str = ""
    anew: bool = False


# A condition: the engine ended with its machine, which is nobody's failure.
NODE_RESTARTED = "node_restarted"
# A cause, and why an order is declined: a disk of the node is full, which passes when somebody makes room.
DISK_FULL = "disk_full"
# A condition: it listens at an address that its node has lost, so nobody reaches it.
ADDRESS_GONE = "address_gone"


@frozen
class ShardReport:
    """What an agent knows of one shard. C{serial} grows with every change of this shard on this agent.

    C{key} is the engine's own secret and travels only inside the link and the routing table. C{progress} is 0 to 1.
    C{sleeps}: its engine can give its memory back and take it again without being started anew.
    C{loras} are the adapters that its engine has, and those that it should have and does not; None of an agent that does not
    tell. C{fixed} is why they cannot be changed while it runs, empty where they can.
    C{conditions} are standing remarks, e.g. C{shim_lost}, C{held_by_pid 812}.
    """

    shard: str
    model: str
    generation: str
    attempt: int
    state: ShardState
    serial: int = 0
    rank: int = 0
    pid: int | None = None
    since: float = 0.0
    url: str = ""
    key: str = ""
    devices: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    installation: str = ""
    version: str | None = None
    progress: float | None = None
    phase: str = ""
    reason: str = ""
    exit: ShardExit | None = None
    diagnosis: Diagnosis | None = None
    load: EngineLoad = EngineLoad()
    healthy: bool = True
    conditions: tuple[str, ...] = ()
    limit: int | None = None
    order: ShardOrder | None = None
    sleeps: bool = False
    loras: tuple[ShardLora, ...] | None = None
    fixed: str = ""


@frozen
class WeightFiles:
    """What an agent's C{inspect} found of a model's weights; never a path on the server.

    C{found} False with C{looked} lists the paths that were tried. C{config} is config.json as parsed, C{generation} the same of
    generation_config.json; C{gguf} the header's key-values; C{bytes} the size of the tensors and C{tensors} where they stand
    (None unknown); C{revision} the commit of a Hugging Face cache. C{loras} is what was found of the profile's adapters, in
    their order; their C{config} is adapter_config.json. C{fetching}: they are being downloaded, so what is there is not whole.
    C{tokenizer} is whether one stands beside safetensors (None: not looked).
    """

    weights: str
    found: bool
    path: str = ""
    looked: tuple[str, ...] = ()
    format: str = ""
    bytes: int | None = None
    config: Mapping[str, object] = field(factory=dict)
    gguf: Mapping[str, object] = field(factory=dict)
    problem: str = ""
    generation: Mapping[str, object] = field(factory=dict)
    tensors: TensorBytes | None = None
    revision: str = ""
    loras: tuple[WeightFiles, ...] = ()
    tokenizer: bool | None = None
    fetching: bool = False
