"""What both daemons owe the operating system: signals, a bounded stop, systemd's notifications, honest exit codes.

Surprising: SIGTERM is ours, not Twisted's. C{reactor.stop()} waits for ever on a pool thread in a blocking call or on a
shutdown Deferred that never fires, and a second SIGTERM does not help. So the handler first arms C{faulthandler}'s watchdog
(a C thread: it needs neither the reactor nor the interpreter lock), which prints every stack and ends the process if the
stop has not finished in time. Twisted installs its own handlers when the reactor starts to run; ours follow them.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

from twisted.application.service import Service
from twisted.internet.defer import maybeDeferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from llmgw.errors import Invalid, LlmgwError

STOP_BUDGET = 8.0
CLEAN, FAILED, MISCONFIGURED = 0, 1, 2


def _watch_the_stop() -> None:
    """End the process, every stack printed, if it has not ended in time. twistd's C{sys.stderr} is a log without a descriptor."""
    faulthandler.dump_traceback_later(STOP_BUDGET, exit=True, file=2)


class SystemdNotify:
    """The C{sd_notify} protocol: silent where no C{NOTIFY_SOCKET} is set. Abstract sockets begin with C{@}."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        usec = environment.get("WATCHDOG_USEC", "")
        self.watchdog = int(usec) / 1e6 if usec.isascii() and usec.isdigit() else None

    def tell(self, **fields: str) -> None:
        """Send e.g. C{READY="1"}; a supervisor that is not there is not our trouble."""
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in fields.items())
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.setblocking(False)
            try:
                out.sendto(text.encode(), address)
            except OSError:
                Logger().debug("systemd did not take {text}", text=text)


class Lifecycle(Service):
    """Signals and notifications of one daemon.

    @param reload: called on SIGHUP; may answer later. Its errors are logged and stand in the status line until the next one.
    @param status: the one line that C{systemctl status} shows, asked every few seconds.
    @param interrupted: called before the stop when the signal was SIGINT, not SIGTERM.
    """

    log = Logger()

    def __init__(
        self,
        reactor: Any,
        notify: SystemdNotify,
        reload: Callable[[], object],
        status: Callable[[], str],
        interrupted: Callable[[], None] = lambda: None,
    ) -> None:
        self.setName("lifecycle")
        self._reactor = reactor
        self._notify = notify
        self._reload = reload
        self._status = status
        self._interrupted = interrupted
        self._said = self._refused = ""
        self._stopping = False
        self._before: dict[int, Any] = {}
        self._loop = LoopingCall(self._tick)
        self._loop.clock = reactor

    def startService(self) -> None:
        """Take the signals once the reactor runs (it would overwrite them otherwise) and begin to feed the watchdog."""
        super().startService()
        self._reactor.callWhenRunning(self._running)

    def _running(self) -> None:
        if not self.running:
            return
        for number, handler in ((signal.SIGTERM, self._stop), (signal.SIGINT, self._stop), (signal.SIGHUP, self._hang_up)):
            self._before[number] = signal.signal(number, handler)
        every = min(5.0, self._notify.watchdog / 3) if self._notify.watchdog else 5.0
        self._loop.start(every)

    def stopService(self) -> None:
        """Leave the handlers in place when the process is ending: a second signal must still mean "now"."""
        super().stopService()
        self._notify.tell(STOPPING="1")
        if self._loop.running:
            self._loop.stop()
        if not self._stopping:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def ready(self) -> None:
        """Everything that should listen does."""
        self._notify.tell(READY="1", STATUS=self._status())

    def _tick(self) -> None:
        self._notify.tell(WATCHDOG="1")
        try:
            status = self._status() + self._refused
        except Exception:
            self.log.failure("while asking for the status line")
            return
        if status != self._said:
            self._said = status
            self._notify.tell(STATUS=status)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            os._exit(FAILED)
        self._stopping = True
        _limit_stop()
        self._reactor.callFromThread(self._begin_stop, number)

    def _begin_stop(self, number: int) -> None:
        self.log.info("{signal} came: stopping", signal=signal.Signals(number).name)
        if number == signal.SIGINT:
            self._interrupted()
        # The interpreter would look at every object several times before it ends, which takes longer than all of our stop.
        gc.freeze()
        self._reactor.stop()

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        self._reactor.callFromThread(self._reload_guarded)

    def _reload_guarded(self) -> None:
        self._notify.tell(RELOADING="1")
        maybeDeferred(self._reload).addCallbacks(lambda _: self._reloaded(""), self._not_reloaded)
        self._notify.tell(READY="1")

    def _not_reloaded(self, failure: Failure) -> None:
        if failure.check(LlmgwError):
            self.log.error("reload refused: {error}", error=failure.getErrorMessage())
        else:
            self.log.failure("reload failed, what was in force stays", failure)
        first, *more = failure.getErrorMessage().splitlines() or [""]
        self._reloaded(f". Reload refused: {first[:300]}{f' (and {len(more)} more)' if more else ''}")

    def _reloaded(self, refused: str) -> None:
        self._refused = refused
        self._tick()


def _limit_stop() -> None:
    """Begin the time that a stop may take. sys.stderr will not do: twistd puts a log file without a descriptor there."""
    faulthandler.dump_traceback_later(STOP_BUDGET, exit=True, file=sys.__stderr__ or sys.stderr)


def steady_clock(reactor: Any) -> None:
    """Have all timers of this process run by a clock that nobody can set; call it before the first timer.

    It goes on while the process does not run, which leases need. Twisted goes by the wall clock: one that is set back an hour
    would stop every timer for an hour, one that is set forward would end every deadline at once.
    """
    reactor.seconds = time.monotonic


class AwakeClock:
    """Counts the seconds in which this process ran: one that was stopped, or its machine suspended, saw nobody meanwhile.

    By a clock that goes on, all deadlines of that time end at once when it goes on itself, before it has read what had come in
    time; then an engine that is well looks hung. This one has gone on a second, after which the deadlines have as long as before.

    @param monotonic: the clock that nobody can set.
    """

    log = Logger()
    TICK = 1.0

    def __init__(self, reactor: Any, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._last = monotonic()
        self._lost = self._told = 0.0
        self._looks = LoopingCall(self._look)
        self._looks.clock = reactor

    def seconds(self) -> float:
        """The time; it has to be asked for once a C{TICK} while the process runs."""
        now = self._monotonic()
        if now - self._last > 2 * self.TICK:
            self._lost += now - self._last - self.TICK
        self._last = now
        return now - self._lost

    def start(self) -> None:
        """Ask for it that often."""
        self._looks.start(self.TICK, now=False)

    def stop(self) -> None:
        """Ask no more."""
        self._looks.stop()

    def _look(self) -> None:
        lost, self._told = self._lost - self._told, self._lost
        if lost:
            self.log.warn("this process did not run for {lost:.0f} s; no deadline counts them", lost=lost)


def awake_clock(reactor: Any) -> None:
    """Have all timers of this process run by an L{AwakeClock}; call it before the first timer."""
    clock = AwakeClock(reactor)
    reactor.seconds = clock.seconds
    clock.start()


def give_up(reactor: Any, sentence: str, code: int = FAILED) -> None:
    """End the daemon because it cannot do its work: one sentence on stderr and in the log, and exit status C{code}.

    twistd exits 0 after C{reactor.stop()}, whatever happened; so the last act of the shutdown sets the status.
    """
    Logger().critical("{sentence}", sentence=sentence)
    _limit_stop()

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    reactor.addSystemEventTrigger("after", "shutdown", leave)
    reactor.callWhenRunning(reactor.stop)


def refuse_configuration(error: LlmgwError) -> NoReturn:
    """Print every problem, one a line, and exit with 2, which systemd is told not to restart."""
    for line in map(str, error.problems) if isinstance(error, Invalid) else [str(error)]:
        print(line, file=sys.stderr)  # noqa: T201  (before there is a log)
    raise SystemExit(MISCONFIGURED)
