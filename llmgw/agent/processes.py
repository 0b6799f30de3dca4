"""Processes: who one is, when it ends, and which ones belong to an attempt.

Surprising:
 - A pid alone names nobody. A L{ProcessId} is boot id, pid and start time, and a signal goes out only through a pidfd that was
   opened before the start time was compared, so that a reused pid is never hit.
 - A pidfd becomes readable when its process ends, also for processes that are not our children: no polling.
 - C{kill(pid, 0)} succeeds on a zombie. A zombie counts as ended here.
 - A process that called setsid and whose parent is gone is still found: its forefather, the shim, is a subreaper, it is in the
   attempt's cgroup if there is one, and it has inherited the marks in its environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import field, frozen
from twisted.internet.interfaces import IReadDescriptor
from twisted.logger import Logger
from zope.interface import implementer

log = Logger()


def boot_id() -> str:
    """The kernel's id of this boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


@frozen
class ProcessId:
    """One process and never another: C{start} is in ticks since boot."""

    boot: str
    pid: int
    start: int


def oom_kills(cgroup: str | None = None) -> int | None:
    """How many processes the kernel has killed for lack of memory: of this cgroup so far, else of the machine since the boot.

    @return: None for a cgroup that does not count (any more).
    """
    try:
        with open(f"{cgroup}/memory.events" if cgroup else "/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError):
        return None


@frozen
class Stat:
    """What C{/proc/PID/stat} says. C{alive} is False for a zombie none of whose threads runs on."""

    pid: int
    parent: int
    start: int
    alive: bool


def read_stat(pid: int) -> Stat | None:
    """The process's line, None if there is no such process. The command may hold blanks and parentheses: split at the last."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            part = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return Stat(pid, int(part[1]), int(part[19]), part[0] not in b"ZX" or int(part[17]) > 1)


def hanging(pid: int) -> str:
    """The process, and where in the kernel it hangs, if that may be read: C{pid 12 (in uvm_spin_loop)} is the driver's fault."""
    where = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        where = file.read().strip("\0\n 0")
    return f"pid {pid} (in {where})" if where else f"pid {pid}"


def process_table() -> dict[int, Stat]:
    """Every process there is. Takes about 20 microseconds each."""
    return {int(name): stat for name in os.listdir("/proc") if name.isdigit() and (stat := read_stat(int(name)))}


def identify(pid: int) -> ProcessId | None:
    """Who C{pid} is now; None if nobody is or it has ended."""
    stat = read_stat(pid)
    return ProcessId(boot_id(), pid, stat.start) if stat and stat.alive else None


def same_pid_namespace(pid: int) -> bool:
    """Whether C{pid} counts its processes as we do; True where the kernel will not say."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return True


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs."""
    return identify(process.pid) == process and same_pid_namespace(process.pid)


def open_pidfd(process: ProcessId) -> int | None:
    """A pidfd of exactly this process, None if it has ended. The caller closes it."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return None
    if is_alive(process):
        return descriptor
    os.close(descriptor)
    return None


def send_signal(process: ProcessId, number: int) -> bool:
    """Signal exactly this process; False if it is gone, not ours to signal, or one that nobody should."""
    if process.pid <= 1 or process.pid == os.getpid() or (descriptor := open_pidfd(process)) is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except OSError as error:
        log.warn("cannot send signal {number} to pid {pid}: {error}", number=number, pid=process.pid, error=error.strerror)
        return False
    finally:
        os.close(descriptor)
    return True


@implementer(IReadDescriptor)
class ExitWatch:
    """Calls C{ended} once, when the process has ended. One watch for each start.

    @param ended: called from the reactor, never from within C{start}.
    """

    def __init__(self, reactor: Any, process: ProcessId, ended: Callable[[], None]) -> None:
        self.process = process
        self._reactor = reactor
        self._ended = ended
        self._descriptor = -1
        self._soon: Any = None

    def start(self) -> None:
        """Begin to watch; a process that has ended already is told of in the next turn of the reactor."""
        descriptor = open_pidfd(self.process)
        if descriptor is None:
            self._soon = self._reactor.callLater(0, self._tell)
            return
        self._descriptor = descriptor
        self._reactor.addReader(self)

    def stop(self) -> None:
        """Watch no more; does nothing the second time."""
        if self._soon is not None and self._soon.active():
            self._soon.cancel()
        if self._descriptor >= 0:
            self._reactor.removeReader(self)
            os.close(self._descriptor)
            self._descriptor = -1

    def _tell(self) -> None:
        self.stop()
        self._ended()

    def fileno(self) -> int:
        """The pidfd."""
        return self._descriptor

    def doRead(self) -> None:
        """It ended."""
        self._tell()

    def connectionLost(self, reason: object) -> None:
        """The reactor drops its readers when it ends."""
        self.stop()

    def logPrefix(self) -> str:
        """For the reactor's log."""
        return f"watch of pid {self.process.pid}"


def _children(table: dict[int, Stat]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for stat in table.values():
        found.setdefault(stat.parent, []).append(stat.pid)
    return found


def _environ_has(pid: int, marks: frozenset[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return marks.issubset(file.read().split(b"\0"))
    except OSError:
        return False


def marks_of(instance: str, shard: str, attempt: int) -> dict[str, str]:
    """What every process of an attempt has in its environment. C{instance} is the agent's: a machine may have two agents."""
    return {"LLMGW_AGENT": instance, "LLMGW_SHARD": f"{shard}/{attempt}"}


def marked(marks: Mapping[str, str], table: dict[int, Stat] | None = None) -> set[int]:
    """The pids, shim included, that carry all C{marks} and that we may look at.

    Reading an environment can block on a process that hangs in the kernel: call it in a thread.
    """
    wanted = frozenset(f"{name}={value}".encode() for name, value in marks.items())
    stats = process_table() if table is None else table
    return {pid for pid, stat in stats.items() if stat.alive and pid != os.getpid() and _environ_has(pid, wanted)}


@frozen
class Tree:
    """All processes of one attempt: what the shim and the engine begot, and what carries the marks or is in the cgroup."""

    marks: Mapping[str, str]
    shim: ProcessId | None = None
    engine: ProcessId | None = None
    cgroup: str | None = None
    boot: str = field(factory=boot_id)

    def _roots(self, table: dict[int, Stat]) -> Iterator[int]:
        for process in (self.shim, self.engine):
            stat = table.get(process.pid) if process else None
            if process and stat and (stat.start, self.boot) == (process.start, process.boot):
                yield process.pid

    def _in_cgroup(self) -> set[int]:
        with contextlib.suppress(OSError):
            if self.cgroup:
                with open(f"{self.cgroup}/cgroup.procs") as file:
                    return {int(line) for line in file}
        return set()

    def members(self, deep: bool = True) -> frozenset[ProcessId]:
        """Those alive now, without the shim.

        @param deep: look at environments, too: finds what has fled from a shim that died, and may block (use a thread).
        """
        table = process_table()
        children = _children(table)
        found: set[int] = set()
        waiting = [*self._roots(table), *self._in_cgroup(), *(marked(self.marks, table) if deep else ())]
        while waiting:
            if (pid := waiting.pop()) not in found:
                found.add(pid)
                waiting += children.get(pid, ())
        found -= {0, 1, os.getpid(), self.shim.pid if self.shim else 0}
        return frozenset(ProcessId(self.boot, pid, table[pid].start) for pid in found if pid in table and table[pid].alive)

    def memory(self) -> int:
        """Resident bytes of all of them together: moves while weights are read."""
        return sum(_resident(process.pid) for process in self.members(deep=False))


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
