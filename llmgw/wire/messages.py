"""The protocol of the link, C{llmgw/1}: what is said, by whom, and what answers it.

UTF-8 JSON objects over mutual TLS 1.3 (ALPN C{llmgw/1}), one per line, C{\\n} at the end, at most 1 MiB a line and 32 levels
deep. Every object has a C{type}. Unknown keys are ignored; an unknown type is answered C{done} with C{error: unsupported}.
Durations are seconds, sizes bytes, clocks seconds since 1970 (shown, never compared for a decision).

    server                                        agent
      -> welcome                                    (the agent writes nothing before it)
                                  register <-       after its adoption scan
      -> accepted                                   from here on the agent is this session's
      -> desired (part 1/2), desired (2/2)
                                      done <-       per operation, when its effect is there or cannot be
                                    report <-       at once after each desired, each transition, each beat; else each heartbeat
                                     event <-       one transition, with its reason
      -> beat                                       each heartbeat; answered by a report that carries its serial
      -> inspect / fetch_log / fetch / act
                                      done <-       with the same operation id
      -> goaway, then close                         or: bye <-, then close

=============  ========  =========================================================================================  ============
type           from      carries                                                                                    answered by
=============  ========  =========================================================================================  ============
C{welcome}     server    minimum, maximum, server, fleet, epoch, heartbeat, spread, clock                           C{register}
C{refused}     server    reason, text, leader, addresses, retry_after; at any time before C{accepted}, then a       -
                         clean close
C{register}    agent     protocol, node, instance, boot, epoch, leader, fleet, facts, shards, clock, version        C{accepted} or
                                                                                                                    C{refused}
C{accepted}    server    session, epoch, leader, revision                                                           C{report}
C{desired}     leader    epoch, leader, revision, part, parts, orders: one L{ShardOrder} each                       C{done} each,
                                                                                                                    C{report}
C{report}      agent     epoch, revision (both as last applied), beat, shards (full; empty is news), inventory      -
                         (when it changed, else null), clock
C{event}       agent     shard, attempt, before, after, reason, diagnosis, tail                                     -
C{inspect}     leader    operation, epoch, leader, weights, engine                                                  C{done}
C{fetch_log}   leader    operation, epoch, leader, shard, attempt, offset, limit                                    C{done}
C{done}        agent     operation, ok, error, result                                                               -
C{beat}        server    serial, epoch, clock                                                                       C{report}
C{goaway}      server    reason, leader, addresses, text                                                            -
C{bye}         agent     reason, running: the shards left running                                                   -
=============  ========  =========================================================================================  ============

Reasons of C{refused}: C{standby}, C{starting}, C{name_mismatch}, C{name_in_use}, C{revoked}, C{wrong_fleet},
C{protocol}, C{malformed}, C{wrong_role}.

Rules that are easy to break:

 - C{register.shards} and C{report.shards} are always the whole list. A shard missing from it is gone only when the report's
   C{(epoch, revision)} is not older than the placement of that shard.
 - A C{desired} counts only when all its parts, of one C{(epoch, revision)}, have come. A shard that no entry names is left
   as it is.
 - The agent refuses a lower epoch than its own, and its own epoch from another leader: C{done} with C{error: stale_epoch} or
   C{epoch_conflict}, its own epoch and leader in C{result}. It stores a higher one on disk before it acts on it.
 - C{done} for an operation that was done before is the same C{done} again, without a second effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from llmgw.fleet.node import Inventory, NodeFacts
from llmgw.fleet.shard import Diagnosis, ShardOrder, ShardReport

PROTOCOL = 1
ALPN = b"llmgw/1"
MAX_LINE = 2**20
MAX_DEPTH = 32


@frozen
class Welcome:
    """The server's first line of all. C{spread} is over how many seconds redials should be spread."""

    minimum: int
    maximum: int
    server: str
    fleet: str
    epoch: int
    heartbeat: float
    spread: float = 0.0
    clock: float = 0.0


@frozen
class Refused:
    """Why this server does not take this agent now; C{text} is the sentence that both logs show."""

    reason: str
    text: str
    leader: str = ""
    addresses: tuple[str, ...] = ()
    retry_after: float = 0.0


@frozen
class Register:
    """Who the agent is, and everything its node has and runs. C{epoch} and C{leader} are the highest it has seen.

    C{instance} is random and lives in the agent's state folder; C{boot} is the kernel's boot id. C{fleet} is the fleet it
    belongs to by its own disk, empty for a new one.
    """

    protocol: int
    node: str
    instance: str
    boot: str
    epoch: int
    leader: str
    facts: NodeFacts
    shards: tuple[ShardReport, ...]
    fleet: str = ""
    clock: float = 0.0
    version: str = ""


@frozen
class Accepted:
    """The link is the node's: commands may follow."""

    session: str
    epoch: int
    leader: str
    revision: int


@frozen
class Desired:
    """What the leader wants of every shard it has placed on this node; part C{part} (from 1) of C{parts}."""

    epoch: int
    leader: str
    revision: int
    part: int
    parts: int
    orders: tuple[ShardOrder, ...]


@frozen
class Report:
    """All shards of the node as they are now. C{beat} echoes the serial of the beat it answers, else 0."""

    epoch: int
    revision: int
    shards: tuple[ShardReport, ...]
    inventory: Inventory | None = None
    beat: int = 0
    clock: float = 0.0


@frozen
class Event:
    """One transition of a shard; on failure with the end of the engine's output and the adapter's diagnosis."""

    shard: str
    attempt: int
    before: str
    after: str
    reason: str
    diagnosis: Diagnosis | None = None
    tail: tuple[str, ...] = ()
    at: float = 0.0


@frozen
class Inspect:
    """Look at these weights for this engine; the result is a L{llmgw.fleet.shard.WeightFiles} and the adapter's problems."""

    operation: str
    epoch: int
    leader: str
    weights: str
    engine: str


@frozen
class FetchLog:
    """Read C{limit} bytes of an attempt's output from C{offset}; negative counts from the end, attempt 0 is the latest."""

    operation: str
    epoch: int
    leader: str
    shard: str
    attempt: int
    offset: int
    limit: int


@frozen
class Done:
    """The outcome of an operation. C{error} is a stable word, C{result} what belongs to it (a text under C{text})."""

    operation: str
    ok: bool
    error: str = ""
    result: Mapping[str, Any] = field(factory=dict)


@frozen
class Beat:
    """The server is there; a report with this serial says that the agent is, too."""

    serial: int
    epoch: int
    clock: float = 0.0


@frozen
class Goaway:
    """The server ends the link on purpose; C{text} is the sentence for both logs, where C{reason} alone says too little."""

    reason: str
    leader: str = ""
    addresses: tuple[str, ...] = ()
    text: str = ""


@frozen
class Bye:
    """The agent ends the link on purpose; its engines go on."""

    reason: str
    running: tuple[str, ...] = ()


FROM_SERVER: dict[str, type] = {
    "welcome": Welcome,
    "refused": Refused,
    "accepted": Accepted,
    "desired": Desired,
    "inspect": Inspect,
    "fetch_log": FetchLog,
    "beat": Beat,
    "goaway": Goaway,
}
FROM_AGENT: dict[str, type] = {
    "register": Register,
    "report": Report,
    "event": Event,
    "done": Done,
    "bye": Bye,
}
ServerMessage = Welcome | Refused | Accepted | Desired | Inspect | FetchLog | Beat | Goaway
AgentMessage = Register | Report | Event | Done | Bye
