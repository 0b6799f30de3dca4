"""Which endpoint answers a request: policies over what is in flight, and a word for the access log saying why.

Least cost is the default because it alone kept both the caches and the loads in order on real traces: the cost of an
endpoint is the prompt's blocks that it would have to prefill, plus a price for the requests in flight there above the
least loaded one. (Following the longest prefix alone made one endpoint three times as hot as the mean; hashing spread
the requests in flight three times as wide.) One request above costs a little less than a block, so that the prefix decides
between nearly equal loads; each further one costs more than the one before, so that even a prefix of hundreds of blocks
draws only some dozens.

Of endpoints that cost the same, the one with the least recent work wins, not a random one: sessions stay where they
began, so that chance alone would make one endpoint a tenth hotter than the others for hours. Nor does a prefix draw as much
to an endpoint that has had clearly more than its share lately: a prefix that many share gets a second home, and from then
on the loads decide between the two. (A session stays.) Work is counted by each worker for itself: if every worker is even,
all are. It begins at 0 whenever the model's endpoints change, so that a replica that has just come up is not flooded.

What may surprise: the loads are read once per choice, for all candidates together, and only the endpoint that wins is
looked at for its breaker and limit. Only if it may not be taken are the others examined. So a healthy group costs a few
microseconds whatever its size, and only one with something wrong pays for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from llmgw.router.breaker import Breaker
from llmgw.router.scoreboard import Scoreboard

REQUEST_BLOCKS = 0.8
"""What one request in flight above the least loaded endpoint is worth, in blocks of prompt."""

CROWD = 8
"""How many requests above the least loaded endpoint cost twice as much each."""

WORK_BLOCKS = 60
"""How many blocks to prefill count as much as a request, when recent work is compared."""

HALF_LIFE = 1800.0
"""After how many seconds work counts half."""

SHARE = 1.02
SHARE_WORK = 12
"""An endpoint's share of recent work: this times the mean, plus this many requests, which a lone conversation may have."""

HOT_BLOCKS = 4
HOT_MOST = 16
"""What each request above the share costs a prefix there, in blocks, and what all cost at most: a long prompt stays even so.

With C{python -m bench.prefix_real} on the synthetic trace the hottest of 8 endpoints got 1.05 of the mean, before it 1.04 to
1.17, with the same hit ratio and spread of requests in flight.
"""

SESSION_BLOCKS = 8
"""The least that a session counts for, in blocks: a short prompt's session, too, outweighs a few requests in flight."""

PRESSED_FOR = 1.0
PRESSED_LOAD = 16
NEVER = 1 << 40
NOTHING: Mapping[int, int] = {}

Random = Callable[[], float]


class Candidate:
    """An endpoint as a worker sees it. Subclass it to add what connecting needs.

    @ivar id: its name in logs and metrics.
    @ivar row: its row in the scoreboard.
    @ivar limit: how many requests may be in flight there, over all workers; 0 means no limit.
    @ivar share: its weight under the policy C{weighted}.
    @ivar pressed_until: while it turned requests away (429, 503) a moment ago, the monotonic time until which others are
        preferred. A replica that fails fast is always the least loaded one, and would otherwise draw all requests.
    """

    __slots__ = ("breaker", "id", "limit", "pressed_until", "row", "share")

    def __init__(self, id: str, row: int, limit: int = 0, share: int = 1) -> None:
        self.id, self.row, self.limit, self.share = id, row, limit, share
        self.breaker = Breaker()
        self.pressed_until = 0.0

    def press(self, now: float) -> None:
        """It has just answered that it is too busy."""
        self.pressed_until = now + PRESSED_FOR


class Group:
    """The candidates of one model with the model's policy. Made anew when a table changes the model; breakers move over."""

    def __init__(self, board: Scoreboard, candidates: Sequence[Candidate], policy: str, random: Random) -> None:
        self.candidates = list(candidates)
        self.rows = [candidate.row for candidate in candidates]
        self._board, self._random = board, random
        self._shares = [max(0, candidate.share) for candidate in candidates]
        self._turn = int(random() * len(self.candidates)) if candidates else 0
        # Never equal, so that the first ties are broken at random.
        self._recent = [random() * 0.1 for _ in candidates]
        self._work = sum(self._recent)
        self._halved = 0.0
        self._find = POLICIES.get(policy, Group._least_cost)  # a table of a newer release may name another

    def choose(
        self,
        now: float,
        held: Mapping[int, int] = NOTHING,
        blocks: int = 0,
        session: int | None = None,
        excluded: Collection[Candidate] = (),
    ) -> tuple[Candidate | None, str]:
        """The endpoint to try next, and why it.

        Nothing is counted here: the caller enters the endpoint's row (and, if that fails, excludes it and chooses again).

        @param now: the monotonic clock, for breakers.
        @param held: by candidate's index, how many of the prompt's first blocks it likely holds (router/prefixes.py).
        @param blocks: how many blocks the prompt has.
        @param session: the index of the candidate that the request's session was at last.
        @param excluded: endpoints already tried, or found full.
        @return: C{(candidate, reason)}; reasons are C{only}, C{session}, C{prefix}, C{spill} (another one holds more of
            the prompt but is too busy, or has had more than its share), C{least}, C{turn}, C{share}, C{probe}; or
            C{(None, reason)} with C{full} (one will have room), C{open} (all usable ones are broken), C{none} (there is
            nothing to try).
        """
        if not self.candidates:
            return None, "none"
        loads = self._board.loads(self.rows)
        if now - self._halved > HALF_LIFE:
            self._recent = [count / 2 for count in self._recent]
            self._work /= 2
            self._halved = now
        index, reason = self._find(self, loads, held, blocks, session)
        found = self.candidates[index]
        if found.breaker.blocked_until or found.pressed_until > now or found in excluded or 0 < found.limit <= loads[index]:
            index, reason = self._second_choice(loads, now, held, blocks, session, excluded)
            if index < 0:
                return None, reason
            found = self.candidates[index]
        work = 1 + (blocks - held.get(index, 0)) / WORK_BLOCKS
        self._recent[index] += work
        self._work += work
        return found, reason

    def _second_choice(
        self,
        loads: list[int],
        now: float,
        held: Mapping[int, int],
        blocks: int,
        session: int | None,
        excluded: Collection[Candidate],
    ) -> tuple[int, str]:
        """The choice among those that may be taken; the others count as endlessly loaded."""
        why = "none"
        usable = 0
        for index, candidate in enumerate(self.candidates):
            if candidate in excluded:
                loads[index] = NEVER
            elif candidate.breaker.blocked_until > now:
                loads[index] = NEVER
                why = "open" if why == "none" else why
            elif self._is_full(candidate, loads[index]):
                loads[index] = NEVER
                why = "full"
            else:
                usable += 1
                if candidate.pressed_until > now:
                    loads[index] += PRESSED_LOAD
        if not usable:
            return -1, why
        index, reason = self._find(self, loads, held, blocks, session)
        if self.candidates[index].breaker.blocked_until:
            return index, "probe"
        return index, "only" if usable == 1 else reason

    def state(self, now: float) -> str:
        """Whether there is C{room} at some endpoint; if not, why: C{full}, C{open} or C{none}, as of L{choose}."""
        why = "none"
        for candidate, load in zip(self.candidates, self._board.loads(self.rows), strict=True):
            if candidate.breaker.blocked_until > now:
                why = "open" if why == "none" else why
            elif self._is_full(candidate, load):
                why = "full"
            else:
                return "room"
        return why

    def _is_full(self, candidate: Candidate, load: int) -> bool:
        """Load that others send straight to an engine takes none of our places there, or they could shut us out."""
        return 0 < candidate.limit <= load and candidate.limit <= self._board.total(candidate.row)

    # Policies: (loads, held, blocks, session) -> (index, reason). A load of NEVER is not to be chosen.

    def _least(self, loads: list[int]) -> int:
        least = min(loads)
        count = loads.count(least)
        if count == 1:
            return loads.index(least)
        return min([index for index, load in enumerate(loads) if load == least], key=self._recent.__getitem__)

    def _least_inflight(self, loads: list[int], held: Mapping[int, int], blocks: int, session: int | None) -> tuple[int, str]:
        return self._least(loads), "least"

    def _least_cost(self, loads: list[int], held: Mapping[int, int], blocks: int, session: int | None) -> tuple[int, str]:
        if session is not None:
            held = {**held, session: max(blocks, SESSION_BLOCKS)}
            blocks = max(blocks, SESSION_BLOCKS)
        if not held:
            return self._least(loads), "least"
        least, share = min(loads), SHARE_WORK + SHARE * self._work / len(loads)
        best: float = blocks
        winners: list[int] = []
        longest = 0
        for index, depth in held.items():
            above = loads[index] - least
            cost = blocks - depth + REQUEST_BLOCKS * above * (1 + above / CROWD)
            if index != session and (hot := self._recent[index] - share) > 0:
                cost += min(HOT_MOST, HOT_BLOCKS * hot)
            if depth > longest and loads[index] < NEVER:
                longest = depth
            if cost < best:
                best, winners = cost, [index]
            elif cost == best and winners:
                winners.append(index)
        if not winners:
            return self._least(loads), "spill" if longest else "least"
        index = winners[0] if len(winners) == 1 else min(winners, key=self._recent.__getitem__)
        if index == session:
            return index, "session"
        return index, "prefix" if held[index] == longest else "spill"

    def _round_robin(self, loads: list[int], held: Mapping[int, int], blocks: int, session: int | None) -> tuple[int, str]:
        count = len(loads)
        for _ in range(count):
            self._turn = (self._turn + 1) % count
            if loads[self._turn] < NEVER:
                break
        return self._turn, "turn"

    def _weighted(self, loads: list[int], held: Mapping[int, int], blocks: int, session: int | None) -> tuple[int, str]:
        shares = [share if load < NEVER else 0 for share, load in zip(self._shares, loads, strict=True)]
        total = sum(shares)
        if not total:
            return self._least(loads), "least"
        point = self._random() * total
        for index, share in enumerate(shares):
            point -= share
            if point < 0:
                return index, "share"
        return max(range(len(shares)), key=shares.__getitem__), "share"


POLICIES = {
    "least_cost": Group._least_cost,
    "least_inflight": Group._least_inflight,
    "round_robin": Group._round_robin,
    "weighted": Group._weighted,
}
