"""The classes of causes that an engine fails for, and what each of them asks for.

An adapter's table of failures names the class of what an engine printed; what an agent declines before it starts anything has a
code instead, which has a class as well.
"""

from __future__ import annotations

# The profile's: trying again changes nothing. RETRY: it passes. CLEAN: what is left of the engine has to go first, which an agent
# sees to after every end. NODE: the machine's, and only another one helps. SOURCE: the weights'. UNKNOWN: nobody can tell.
CONFIGURATION, RETRY, CLEAN, NODE, SOURCE, UNKNOWN = (
    "configuration",
    "retry",
    "clean_and_retry",
    "node",
    "source",
    "unknown",
)

# What may be the node's. Whoever writes a wrong profile, or weights that nobody has, makes no node sick.
SUSPECT = frozenset({RETRY, CLEAN, NODE, UNKNOWN})

# So many failures on one node lead to another one, where a replica fits. What is the profile's for one engine or device may be
# well with another, so its one confirmation is rather made there.
MOVES_AFTER = {NODE: 1, CONFIGURATION: 1, SOURCE: 1, CLEAN: 2}
OTHERS_MOVE_AFTER = 3

_DECLINED = {
    "invalid": CONFIGURATION,
    "unsendable": CONFIGURATION,
    "weights_missing": SOURCE,
    "device_in_use": RETRY,
    "port_in_use": RETRY,
    "start_timeout": RETRY,
    "hung": CLEAN,
} | dict.fromkeys(
    (
        "no_installation",
        "no_adapter",
        "user",
        "device_sick",
        "device_missing",
        "port_unusable",
        "start_failed",
        "spawn_timeout",
    ),
    NODE,
)


def cause_of(code: str) -> str:
    """The class behind an agent's word for why it could not start or keep a shard."""
    return _DECLINED.get(code, UNKNOWN)


def moves_after(cause: str) -> int:
    """How many failures on one node are enough to look for another."""
    return MOVES_AFTER.get(cause, OTHERS_MOVE_AFTER)
