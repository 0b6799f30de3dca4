"""What every test is held to: no unhandled or logged failure, no delayed call, no process and no shared memory left over.

pytest-twisted by itself lets all of them pass. A test that expects a failure to be logged says so
with C{expect_failures}.
"""

from __future__ import annotations

import gc
import os
import signal
import time

import hypothesis
import pytest
from twisted.logger import globalLogPublisher

from tests.shared_files import shared_files

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


class _Seen(list):
    def __call__(self, event):
        if event.get("log_failure") is not None:
            self.append(event)


def _children() -> set[int]:
    try:
        with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
            return {int(pid) for pid in file.read().split()}
    except OSError:
        return set()


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def _left(before: set[int]) -> dict[int, str]:
    """Our children that still run. On a busy machine it takes a moment until one that was killed does not."""
    deadline = time.monotonic() + 2.0
    while (left := {pid for pid in _children() - before if _state(pid) not in ("Z", "gone")}) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {pid: _name(pid) for pid in left}


@pytest.fixture(autouse=True)
def no_leftovers(request):
    """Fails a test that leaves something behind, and cleans up after it."""
    from twisted.internet import reactor

    seen = _Seen()
    globalLogPublisher.addObserver(seen)
    calls_before = set(reactor.getDelayedCalls())
    children_before = _children()
    gc.freeze()  # What the test makes is looked through afterwards; all that was imported would take half of the suite's time.
    yield
    gc.collect()
    globalLogPublisher.removeObserver(seen)
    expected = getattr(request.node, "expected_failures", ())
    failures = [event for event in seen if not any(event["log_failure"].check(kind) for kind in expected)]
    calls = [call for call in reactor.getDelayedCalls() if call not in calls_before and call.active()]
    for call in calls:
        call.cancel()
    children = _left(children_before)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    folder = request.node.funcargs.get("tmp_path")
    shared = shared_files(folder) if folder else []  # No other run's are looked at.
    for path in shared:
        path.unlink(missing_ok=True)
    problems = [f"logged failure: {event['log_failure'].getTraceback()}" for event in failures]
    problems += [f"delayed call left: {call}" for call in calls]
    problems += [f"process left: {pid} {name}" for pid, name in children.items()]
    problems += [f"shared memory left: {path}" for path in shared]
    if problems:
        pytest.fail("\n".join(problems))


@pytest.fixture
def reactor():
    """The reactor that pytest-twisted runs."""
    from twisted.internet import reactor

    return reactor


@pytest.fixture
def expect_failures(request):
    """Call it with exception types whose logging this test expects."""

    def expect(*kinds: type[BaseException]) -> None:
        request.node.expected_failures = kinds

    return expect
