"""The list of faults of leadership and link, F01 to F40, against the tests: each is in the name of one, or here with a reason.

Some are tested twice: in the test's process, by the minute or by the thousand cases, and through real daemons. Where a fault is
about processes and the database, the second is what counts; most of those are slow (`make test-all`).

====  ==========================================================================================================
F08   the list skips this number
F10   twenty rather than three: against the row itself, since twenty daemons on one machine would test the machine
F13   the list skips this number
F14   no statement asks the database's clock, which is what is tested; so none has to be faked
F17   the end by WATCHDOG is systemd's and needs a booted one: see end_to_end/test_systemd.py
F24   the list skips this number
F27   one direction at a time, over the network in memory: cutting one direction of a real one needs root and netns
F30   the list skips this number
F31   doubled and reordered in the simulator as well (test_chaos)
F36   one slow peer and not 500: each has a deadline of its own, and F37's crowd shows that many keep nobody out
F37   500 connections and not 10,000, in memory: more would test the machine's limits; large fleets are in bench/
====  ==========================================================================================================
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# Other lists count from F01, too: what engines and rollouts are known to suffer from.
OTHER_LISTS = re.compile(r"engines|planning|rollout")


def test_every_fault_of_the_list_has_a_test_or_a_reason():
    """A fault that is dropped from either is found here."""
    reasons = dict(re.findall(r"^(F\d\d)  +(\S.*)$", __doc__, re.MULTILINE))
    tested = set()
    for path in TESTS.rglob("test_*.py"):
        if not OTHER_LISTS.search(path.stem):
            for name in re.findall(r"^(?:async )?def (test_f\d\d_\w+)", path.read_text(), re.MULTILINE):
                tested |= {number.upper() for number in re.findall(r"(?<=_)f\d\d(?=_)", name)}
    wanted = {f"F{number:02}" for number in range(1, 41)}
    assert wanted - tested == {number for number, reason in reasons.items() if "skips" in reason}
    assert reasons.keys() <= wanted
