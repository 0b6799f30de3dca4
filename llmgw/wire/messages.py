"""The protocol of the link, C{llmgw/1}: what is said, by whom, and what answers it.

UTF-8 JSON objects over mutual TLS 1.3 (ALPN C{llmgw/1}), one per line, C{\\n} at the end, at most 1 MiB a line without it and
32 levels deep. Every object has a C{type}; its other keys are those in the table, and a key that has a default may be left
out. Unknown keys are ignored. An unknown type on an accepted link is answered C{done} with C{error: unsupported} by an agent
and left unanswered by a server; before that it breaks the protocol, as does anything out of turn. Durations are seconds, sizes
bytes, clocks seconds since 1970 (shown, never compared for a decision).

    server                                        agent
      -> welcome                                    (the agent writes nothing before it)
                                  register <-       after its adoption scan
      -> accepted                                   from here on the agent is this session's
                                    report <-
      -> desired (part 1/2), desired (2/2)
                                    report <-       at once after the last part
                                      done <-       per operation, when its effect is there or cannot be
                             event, report <-       at each transition: the event at once, the reports of one turn together
      -> beat                                       each heartbeat
                                    report <-       with its serial
      -> inspect / fetch_log / fetch
                                      done <-       with the same operation id
      -> goaway, then close                         or: bye <-, then close

=============  ========  =======================================================================================  =============
type           from      carries                                                                                  answered by
=============  ========  =======================================================================================  =============
C{welcome}     server    minimum, maximum, server, fleet, epoch, heartbeat, spread, clock                         C{register}
C{refused}     server    reason, text, leader, addresses, retry_after: at any time before C{accepted}, then a     -
                         clean close
C{register}    agent     protocol, node, instance, boot, epoch, leader, facts, shards, fleet, clock, version      C{accepted} or
                                                                                                                  C{refused}
C{accepted}    server    session, epoch, leader, revision                                                         C{report}
C{desired}     leader    epoch, leader, revision, part, parts, orders: one L{ShardOrder} each                     C{done} each,
                                                                                                                  C{report}
C{report}      agent     epoch, revision, shards, inventory, beat, clock, installations, fetches: epoch and       -
                         revision as last applied, all shards (none is news), inventory and installations when
                         they changed, else null; the serial of the beat that it answers, else 0; all downloads
                         under way and the last that are over
C{event}       agent     shard, attempt, before, after, reason, diagnosis, tail, at                               -
C{inspect}     leader    operation, epoch, leader, weights, engine                                                C{done}
C{fetch_log}   leader    operation, epoch, leader, shard, attempt, offset, limit                                  C{done}
C{fetch}       leader    operation, epoch, leader, weights, cancel: begin to download, or end that                C{done}
C{done}        agent     operation, ok, error, result                                                             -
C{beat}        server    serial, epoch, clock, spread                                                             C{report}
C{goaway}      server    reason, leader, addresses, text: then a clean close                                      -
C{bye}         agent     reason, running: the shards left running; then a clean close                             -
=============  ========  =======================================================================================  =============

Reasons of C{refused}; in the server's log all but the first two name the certificate:

 - C{standby}: another server leads, or may; C{leader} and C{addresses} where that is known.
 - C{starting}: this server will lead, stops, or has failed over this very agent; come again.
 - C{certificate}: it carries no identity, several, or a purpose that is not its role's.
 - C{wrong_role}: it is no node's. C{wrong_fleet}: it is of another fleet, or the agent says that it is.
 - C{name_mismatch}: the registration is for another node than the certificate.
 - C{name_in_use}: another agent of that name answers, or had it when it was lost.
 - C{revoked}: an operator removed the node.
 - C{protocol}: no common version. C{malformed}: it broke the protocol.

What a server cannot say in a message it only notes as a refusal of its own: C{crowded} (too many wait, closed before TLS), C{tls}
(there was no TLS) and C{link} (TLS was there, but no registration in time).

Reasons of C{goaway}: C{standby}, C{stopping}, C{replaced} (the same agent came again, or another while this one did not answer),
C{removed}, C{malformed}. Errors of C{done} from the link: C{stale_epoch}, C{epoch_conflict}, C{stale_revision}, C{fence} (the new
leader cannot be noted on disk), C{unsupported}, C{unsendable} and C{failed}; any other is the node's, as C{port_in_use}.

Rules that are easy to break:

 - C{register.shards} and C{report.shards} are always the whole list. A shard missing from it is gone only when the report's
   C{(epoch, revision)} is not older than the placement of that shard, or when the node had said before that it runs.
 - A C{desired} counts only when all its parts, of one C{(epoch, revision)}, have come in order; a part 1 begins anew, so a server
   may drop the rest of one for the next. A shard that no entry names is left as it is.
 - The agent refuses a lower epoch than its own, and its own epoch from another leader: C{done} with C{error: stale_epoch} or
   C{epoch_conflict} per operation (one with an empty operation where there is none), its own epoch and leader in C{result}. It
   stores a higher one on disk before it acts on it. A lower revision of the same epoch is C{stale_revision}.
 - In a report the C{order} of a shard is left out (null) if the report or registration before it on this link had the same, or
   where a line has no room for it: a later report has it.
 - C{done} for an operation that was done before is the same C{done} again, without a second effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from llmgw.fleet.fetch import Fetch
from llmgw.fleet.node import Installation, Inventory, NodeFacts
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
    installations: tuple[Installation, ...] | None = None
    fetches: tuple[Fetch, ...] = ()


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
class FetchWeights:
    """Download these weights into the node's cache, or C{cancel} that; the result's C{fetch} is the L{Fetch} as it is by then.

    It is answered when it has begun and what it takes is known, not when it is over: reports tell how it goes on.
    """

    operation: str
    epoch: int
    leader: str
    weights: str
    cancel: bool = False


@frozen
class Done:
    """The outcome of an operation. C{error} is a stable word, C{result} what belongs to it (a text under C{text})."""

    operation: str
    ok: bool
    error: str = ""
    result: Mapping[str, Any] = field(factory=dict)


@frozen
class Beat:
    """The server is there; a report with this serial says that the agent is, too.

    C{spread} is that of the welcome as it would be said now: the first nodes of a fleet are welcomed when there are few.
    """

    serial: int
    epoch: int
    clock: float = 0.0
    spread: float = 0.0


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
    "fetch": FetchWeights,
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
ServerMessage = Welcome | Refused | Accepted | Desired | Inspect | FetchLog | FetchWeights | Beat | Goaway
AgentMessage = Register | Report | Event | Done | Bye
