"""What the uplink asks of the node and tells it."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import Deferred
from zope.interface import Interface

from llmgw.wire.messages import AgentMessage, Desired, Done, FetchLog, FetchWeights, Inspect, Register, Report


class INode(Interface):
    """What the uplink asks of the node and tells it. No method may block; none need guard against a stale leader.

    Order on one link: C{register}, then C{accepted}, C{connected}, any number of the others, C{disconnected}. A link that
    is refused ends after C{register} without C{disconnected}.
    """

    def register(fleet: str, local_address: str) -> Register:
        """The whole node as it is now: facts from the inventory already taken, every shard.

        C{epoch}, C{leader}, C{protocol}, C{fleet} and C{clock} may be left at anything: the uplink fills them in.

        @param fleet: the fleet that server and certificate agree on.
        @param local_address: the link's own address here, for routers where the settings name none.
        """

    def accepted(epoch: int, leader: str, revision: int) -> None:
        """This leader took the registration; the fence holds its epoch on disk already."""

    def connected(send: Callable[[AgentMessage], None]) -> None:
        """C{send} writes an Event, a Report or a Done to this link; after C{disconnected} it does nothing.

        It never raises and never blocks: the link's own buffer is bounded, and a link that cannot keep up is dropped.
        """

    def disconnected(reason: str) -> None:
        """The link is gone; engines go on."""

    def desired(message: Desired) -> None:
        """A complete desired state: one message with all orders, whatever parts it came in.

        The uplink sends a C{report} after this returns; a C{done} per operation is the node's to send.
        """

    def inspect(message: Inspect) -> Deferred[Done]:
        """Look at weights; the uplink sends the result. A failure is answered C{done} with C{error: failed}."""

    def fetch_log(message: FetchLog) -> Deferred[Done]:
        """Read an engine's output; the uplink sends the result."""

    def fetch(message: FetchWeights) -> Deferred[Done]:
        """Begin a download or end one; the uplink sends the result."""

    def report(beat: int = 0) -> Report:
        """All shards as they are now; C{epoch}, C{revision} and C{clock} are the uplink's to fill in."""
