"""One round of dialing: every address once, a leader that somebody names first, and why each of them failed. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from attrs import define, field, frozen

from llmgw.config.settings import Address

MOST_HINTS = 2
_LONGEST_PAUSE = 60.0
_CLAUSES = ("it ", "its ", "the ", "we ", "our ")


@frozen
class Target:
    """Somebody to dial: the name as configured, which the certificate has to match, and one of its addresses.

    C{ip} is empty while the name has not been looked up.
    """

    address: Address
    ip: str = ""
    label: str = ""

    def __str__(self) -> str:
        return self.label or str(self.address)


def parse_address(text: str) -> Address | None:
    """C{cp1.example:7443} or C{[::1]:7443} out of a hint; None if it is neither."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or len(host) > 253 or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        return None
    return Address(host, int(port))


@define
class Round:
    """What is left to try, and what came of the others.

    A hint may name an address that is not configured: whoever answers there must show a server's certificate of our fleet.
    At most two are followed, or two servers could send us back and forth.

    @ivar stood_by: whether a server said that it stands by.
    """

    _left: deque[Target]
    _seen: set[Address]
    _failed: list[tuple[str, str]] = field(factory=list)
    _pauses: list[float] = field(factory=list)
    _hints: int = 0
    stood_by: bool = False

    @classmethod
    def over(cls, addresses: Iterable[Address], first: Iterable[str] = ()) -> Round:
        """A round over these addresses, those hinted at in C{first} before the others."""
        configured = list(dict.fromkeys(addresses))
        begun = cls(deque(map(Target, configured)), set())
        begun.hint(first)
        return begun

    def next(self) -> Target | None:
        """Whom to dial now; None when the round is over."""
        if not self._left:
            return None
        target = self._left.popleft()
        self._seen.add(target.address)
        return target

    def found(self, target: Target, ips: Iterable[str]) -> None:
        """The name in C{target} has these addresses: they are next, each by itself."""
        several = [*ips]
        for ip in reversed(several):
            label = f"{target.address} ({ip})" if len(several) > 1 else ""
            self._left.appendleft(Target(target.address, ip, label))

    def failed(self, target: Target, reason: str, pause: float = 0.0) -> None:
        """C{target} did not take us; C{pause} is how long it asked to be left alone."""
        self._failed.append((str(target), reason))
        self._pauses.append(pause)

    def hint(self, addresses: Iterable[str]) -> None:
        """Somebody says that the leader is at one of C{addresses}: try that next, unless it has been tried."""
        wanted = next((address for address in map(parse_address, addresses) if address and address not in self._seen), None)
        if wanted is None or self._hints >= MOST_HINTS:
            return
        self._hints += 1
        rest = [target for target in self._left if target.address != wanted]
        self._left = deque([Target(wanted), *rest])

    @property
    def several(self) -> bool:
        """Whether more than one was tried."""
        return len(self._seen) > 1

    @property
    def pause(self) -> float:
        """How long everybody wants to be left alone; 0 as long as one of them did not say so."""
        return min(min(self._pauses, default=0.0), _LONGEST_PAUSE)

    def summary(self) -> str:
        """Each address with its reason, in one line."""
        told = [f"{who}{':' if reason.startswith(_CLAUSES) else ''} {reason}" for who, reason in self._failed]
        return told[0] if len(told) == 1 else "no leader: " + ", ".join(told)
