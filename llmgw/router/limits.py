"""What a key may use: requests and tokens per minute, tokens per day, requests at once; over all workers of this server.

Requests are counted when they are let in; one that is refused uses nothing. Tokens are not known before the end, so an
estimate is reserved and the truth settled afterwards: fifty requests at once against a budget for ten let ten in. A stream
that has begun is never cut by a limit. Keys of a team count in the team's row, and
each limit of the team is the largest that any of its keys was given: it holds for their sum, and for those without a number.

Several servers divide the limits among them. A request larger than the whole limit is let in when nothing else has been
used, since otherwise it never would be.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from msgspec.structs import replace

from llmgw.router import windows
from llmgw.router.scoreboard import Scoreboard
from llmgw.router.table import KeyEntry
from llmgw.router.usage import PROMPT, TOLD, prompt_tokens

ANSWER_TOKENS = 512
_LIMITS = ("rpm", "tpm", "tpd", "concurrency")


class Limited(NamedTuple):
    """A refusal. C{kind} is C{rpm}, C{tpm}, C{tpd} or C{concurrency}; C{retry_after} is in seconds."""

    kind: str
    limit: int
    retry_after: int
    text: str


class Grant:
    """A request that was let in; it must be settled when it ends, however it ends. Settling twice does nothing."""

    __slots__ = ("_allowance", "minute", "reserved")

    def __init__(self, allowance: Allowance | None, minute: int, reserved: int) -> None:
        self._allowance, self.minute, self.reserved = allowance, minute, reserved

    def settle(self, now: float, tokens: int) -> None:
        """The request has ended.

        @param now: wall clock.
        @param tokens: what it used, prompt and answer.
        """
        allowance, self._allowance = self._allowance, None
        if allowance is not None:
            allowance.settle(self, now, tokens)


UNLIMITED = Grant(None, 0, 0)


def estimate(kind: str, prompt_bytes: int, max_tokens: int | None) -> int:
    """The tokens to reserve for a request: its prompt by size, its answer by what the caller allows.

    @param kind: of its usage (see router/surface.py).
    """
    if kind in ("", TOLD):
        return 0
    answer = 0 if kind == PROMPT else ANSWER_TOKENS if max_tokens is None else max(0, max_tokens)
    return prompt_tokens(prompt_bytes) + answer


def _divided(limit: int | None, servers: int) -> int:
    return 0 if limit is None else max(1, ceil(limit / servers))


class Allowance:
    """The limits of one key, or of its team, bound to their row. Made when a key is first used; costs nothing without limits."""

    __slots__ = ("_board", "_limited", "_name", "_row", "concurrency", "rpm", "tpd", "tpm")

    def __init__(self, key: KeyEntry, board: Scoreboard, servers: int = 1) -> None:
        """
        @param servers: how many servers are alive and share the limits.
        """
        self._board = board
        row = board.row(row_name(key))
        self._name = f"team {key.team}" if key.team else f"key {key.name or key.id}"
        self.rpm, self.tpm = _divided(key.rpm, servers), _divided(key.tpm, servers)
        self.tpd, self.concurrency = _divided(key.tpd, servers), _divided(key.concurrency, servers)
        self._limited = row is not None and bool(self.rpm or self.tpm or self.tpd or self.concurrency)
        self._row = row or 0

    def admit(self, now: float, tokens: int) -> Grant | Limited:
        """Let a request in, or say which limit it would break and when to come again.

        @param now: wall clock.
        @param tokens: L{estimate} of it.
        """
        if not self._limited:
            return UNLIMITED
        row, board, minute = self._row, self._board, int(now // 60)
        if not board.enter(row, self.concurrency):
            text = f"{self._name} has {self.concurrency} requests running, which is its limit"
            return Limited("concurrency", self.concurrency, 1, text)
        own = board.own
        windows.roll(own, row, minute)
        own[row + windows.REQUESTS] += 1
        own[row + windows.TOKENS] += tokens
        own[row + windows.TOKENS_TODAY] += tokens
        refused = self._judge(now, minute, tokens)
        if refused is None:
            return Grant(self, minute, tokens)
        own[row + windows.REQUESTS] -= 1
        own[row + windows.TOKENS] -= tokens
        own[row + windows.TOKENS_TODAY] -= tokens
        board.leave(row)
        return refused

    def _judge(self, now: float, minute: int, tokens: int) -> Limited | None:
        """Whether all limits hold with this request already counted."""
        board = self._board
        board.fence()
        requests, requests_before, used, used_before, today = windows.sums(board.every_column(), self._row, minute)
        past = now % 60
        left = 1 - past / 60
        if 0 < self.rpm < requests + requests_before * left:
            wait = _wait(self.rpm, requests - 1, requests_before, 1, past)
            return Limited(
                "rpm", self.rpm, wait, f"{self._name} has made {self.rpm} requests within a minute, which is its limit"
            )
        total = used + used_before * left
        if 0 < self.tpm < total and total > tokens:
            wait = _wait(self.tpm, used - tokens, used_before, tokens, past)
            return Limited(
                "tpm", self.tpm, wait, f"{self._name} has used its {self.tpm} tokens per minute, counting those reserved"
            )
        if 0 < self.tpd < today and today > tokens:
            wait = int(86400 - now % 86400) + 1
            return Limited("tpd", self.tpd, wait, f"{self._name} has used its {self.tpd} tokens of today (UTC)")
        return None

    def settle(self, grant: Grant, now: float, tokens: int) -> None:
        """Called once by L{Grant.settle}."""
        own, row = self._board.own, self._row
        if tokens != grant.reserved:
            windows.roll(own, row, int(now // 60))
            windows.add_tokens(own, row, grant.minute, tokens - grant.reserved)
        self._board.leave(row)


def widest(team: KeyEntry | None, key: KeyEntry) -> KeyEntry:
    """The limits of a team, of which one more key is known now, in the fields of an entry."""
    if team is None:
        return key
    both = {name: (getattr(team, name), getattr(key, name)) for name in _LIMITS}
    return replace(team, **{name: max((one for one in two if one is not None), default=None) for name, two in both.items()})


def is_limited(key: KeyEntry) -> bool:
    """Whether a key has any limit; only then it has a row."""
    return any(getattr(key, name) is not None for name in _LIMITS)


def row_name(key: KeyEntry) -> str:
    """The name of the scoreboard row in which a key counts."""
    return f"team/{key.team}" if key.team else f"key/{key.id}"


def _wait(limit: int, this: float, before: float, wanted: int, past: float) -> int:
    """Seconds until C{wanted} more fit into the sliding minute, if nothing else happens."""
    room = limit - wanted
    if this <= room and before > 0:
        # Within this minute, as the one before slides out.
        return max(1, ceil(60 - past - (max(0.0, room - this)) * 60 / before))
    if this <= 0:
        return 1
    # Into the next minute, as this one slides out of it.
    return max(1, ceil(60 - past + max(0.0, 60 - max(0, room) * 60 / this)))
