"""The shim: a small process of its own between the agent and one engine, so that the engine outlives the agent.

Run as C{python -I -S shim.py FOLDER}. It speaks with the agent through files in that folder only, so agent and shim may be of
different versions, and it imports nothing of llmgw, so that it stays small:

 - C{launch.json} is claimed by removing it: an agent that takes it away knows that this shim will never start anything.
 - C{run.json} is on disk before the engine's program is executed: the child waits for a byte, and takes a closed pipe for
   "never". So there is no engine without its C{run.json}, whoever is killed when.
 - C{exit.json} says how the engine ended: C{code}, negative for a signal, and C{error} if it could not be executed.
 - C{output.log} is written by the engine itself (O_APPEND, no pipe: an engine survives its shim). Past the limit its start is
   kept in C{output.0}, its latest in C{output.1}, and it is truncated; C{output.base} counts what was cut off.

As subreaper it inherits what escapes by fork and setsid, and stays until the last is gone: its exit means that nothing is left.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # Importing typing would cost a megabyte in each shim.
    from typing import Any, NoReturn

SUBREAPER = 36


def identity(pid: int) -> dict[str, Any]:
    """pid and start time (in ticks since boot): together with the boot id they never name two processes."""
    with open(f"/proc/{pid}/stat") as file:
        return {"pid": pid, "start": int(file.read().rpartition(")")[2].split()[19])}


def write(path: str, value: Any) -> None:
    """Write JSON so that a reader sees all of it or none, 0600, on disk when this returns."""
    with open(path + ".new", "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".new", path)


def _copy(source: int, start: int, end: int, path: str, mode: str) -> int:
    """Copy C{source} from C{start} to C{end}; its size after that, since it may have grown."""
    with open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600)) as target:
        target.seek(0, os.SEEK_END)  # sendfile takes no file that is opened for appending.
        while start < end and (done := os.sendfile(target.fileno(), source, start, end - start)):
            start += done
    return os.fstat(source).st_size


def keep_bounded(folder: str, limit: int) -> bool:
    """Cut C{output.log} once it is longer than C{limit} bytes; True if it was. A full disk loses the copies, not the bound."""
    with open(f"{folder}/output.log", "r+b", buffering=0) as log:
        if (size := os.fstat(log.fileno()).st_size) <= limit:
            return False
        try:
            if not os.path.exists(f"{folder}/output.0"):
                _copy(log.fileno(), 0, limit, f"{folder}/output.0", "wb")
            grown = _copy(log.fileno(), size - limit, size, f"{folder}/output.1", "wb")
            for _ in range(5):  # What is written between the last look and the cut is lost: let that be microseconds.
                grown, size = _copy(log.fileno(), size, grown, f"{folder}/output.1", "r+b"), grown
        finally:
            log.truncate(0)
    base = f"{folder}/output.base"
    write(base, size + (int(open(base).read()) if os.path.exists(base) else 0))  # noqa: SIM115
    return True


def execute(launch: dict[str, Any], go: int, failed: int) -> NoReturn:
    """In the child: shed what was inherited, wait for the word, become the engine."""
    try:
        os.setsid()
        for path in (launch["cgroup"] and launch["cgroup"] + "/cgroup.procs", "/proc/self/oom_score_adj"):
            with open(path or os.devnull, "w") as file:
                file.write("0")
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (files if 0 < files < 2**20 else 2**20, files))
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        for caught in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(caught, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        output = os.open("output.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for number, source in ((0, os.open("/dev/null", os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, number)
        if user := launch.get("user"):
            os.setgroups(user["groups"])
            os.setgid(user["gid"])
            os.setuid(user["uid"])
        os.chdir(launch["directory"])
        if os.read(go, 1):
            os.execvpe(launch["argv"][0], launch["argv"], launch["environment"])
    except BaseException as error:
        os.write(failed, f"cannot run {launch['argv'][0]}: {getattr(error, 'strerror', None) or error}".encode()[:4000])
    os._exit(127)


def begin(launch: dict[str, Any]) -> tuple[int, str]:
    """Start the engine; its pid, and why it could not be executed (empty if it could)."""
    go, release = os.pipe()
    failed, tell = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(release)
        execute(launch, go, tell)
    os.close(tell)
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    write("run.json", {"boot": boot, "shim": identity(os.getpid()), "engine": identity(pid), "at": time.time()})
    os.write(release, b"g")
    with open(failed) as file:
        return pid, file.read()


def attend(pid: int, error: str, limit: int) -> None:
    """Reap until nothing is left, keep the output bounded, and write down how the engine ended."""
    pause, gone, end = 0.05, False, None
    while not gone or end:
        signal.sigtimedwait({signal.SIGCHLD}, pause)
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == pid:
                    end = {"code": os.waitstatus_to_exitcode(reaped[1]), "at": time.time(), "error": error}
        except ChildProcessError:
            gone = True
        try:
            if end:
                write("exit.json", end)
                end = None
            pause = 0.02 if keep_bounded(".", limit) else min(0.25, pause * 2)
        except OSError:
            pause = 1.0  # A full disk: the next turn tries again.


def main(folder: str) -> None:
    """Claim the launch in C{folder}, start its engine and stay until all of it is gone."""
    os.chdir(folder)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.setsid()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    with open("launch.json") as file:
        launch = json.load(file)
    os.unlink("launch.json")
    attend(*begin(launch), launch["limit"])


if __name__ == "__main__":
    main(sys.argv[1])
