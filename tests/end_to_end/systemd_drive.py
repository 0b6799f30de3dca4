"""Runs as a unit of the systemd of L{tests.end_to_end.systemd_boot}: what an operator types, and what is seen of it.

    python -m tests.end_to_end.systemd_drive FOLDER

Everything that was seen is written to C{FOLDER/seen.json} after each step; the tests judge it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.end_to_end.fleet import Stream, until

UNITS = ("llmgw-server", "llmgw-agent")
AGENT, SERVER = UNITS[1], UNITS[0]
WATCHDOG = 90.0


def systemctl(*words: str) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    done = subprocess.run(["systemctl", *words], capture_output=True, text=True, timeout=120)
    if done.returncode:
        status = subprocess.run(["systemctl", "status", "-l", *words[1:]], capture_output=True, text=True).stdout
        raise RuntimeError(f"systemctl {' '.join(words)}: {done.stderr}{status}")
    return time.monotonic() - began


def show(unit: str, *names: str) -> dict[str, str]:
    said = subprocess.run(["systemctl", "show", unit, "-p", ",".join(names)], capture_output=True, text=True, timeout=30).stdout
    return dict(line.split("=", 1) for line in said.splitlines())


def pid(unit: str) -> int:
    return int(show(unit, "MainPID")["MainPID"])


def status() -> dict[str, Any]:
    connection = http.client.HTTPConnection("admin", timeout=10)
    with socket.socket(socket.AF_UNIX) as connection.sock:
        connection.sock.settimeout(10)
        connection.sock.connect("/run/llmgw/admin.sock")
        connection.request("GET", "/v1/status")
        found: dict[str, Any] = json.loads(connection.getresponse().read())
    return found


def engine() -> list[int]:
    """Pid and attempt of the one shard once it is ready on a linked node, judged by a server that has heard of it."""

    def look() -> list[int] | None:
        now = status()
        shards = [shard for replica in now["models"][0]["replicas"] for shard in replica["shards"]]
        if [node["state"] for node in now["nodes"]] != ["ready"] or [shard["state"] for shard in shards] != ["ready"]:
            return None
        return [shards[0]["pid"], shards[0]["attempt"]] if shards[0]["pid"] else None

    return until(look, "one engine is ready", 90) or []


def alive(one: int) -> bool:
    state = Path(f"/proc/{one}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def killed(unit: str, number: int, seconds: float = 60) -> dict[str, Any]:
    """Send a signal to the daemon and wait until systemd has another; what C{Result} said meanwhile."""
    before, began, results = pid(unit), time.monotonic(), set()
    os.kill(before, number)

    def another() -> bool:
        now = show(unit, "Result", "MainPID", "ActiveState")
        results.add(now["Result"])
        return now["ActiveState"] == "active" and int(now["MainPID"]) not in (0, before)

    until(another, f"another {unit}", seconds)
    return {"seconds": time.monotonic() - began, "results": sorted(results)}


def mistaken(unit: str) -> list[Any]:
    """What C{systemctl reload} ends with where the file has a mistake in it, and whether the daemon is the same after it."""
    file = Path(f"/etc/llmgw/{unit.removeprefix('llmgw-')}.yaml")
    before, good = pid(unit), file.read_text()
    file.write_text(f"{good}\nmistake: 1\n")
    done = subprocess.run(["systemctl", "reload", unit], capture_output=True, text=True, timeout=120)
    file.write_text(good)
    return [done.returncode, pid(unit) == before, show(unit, "ActiveState")["ActiveState"]]


class Drive:
    def __init__(self, folder: Path) -> None:
        self._file = folder / "seen.json"
        self._seen: dict[str, Any] = {}

    def saw(self, **what: Any) -> None:
        self._seen |= what
        self._file.write_text(json.dumps(self._seen))

    def run(self) -> None:
        self.saw(started={unit: systemctl("start", unit) for unit in UNITS})
        engine()
        until(lambda: "linked" in show(AGENT, "StatusText")["StatusText"], "the agent's status line", 60)
        kept = ("Type", "ActiveState", "SubState", "StatusText", "NRestarts", "WatchdogUSec")
        self.saw(up={unit: show(unit, *kept) for unit in UNITS}, engine=engine())
        first = pid(AGENT)
        self.saw(restart=systemctl("restart", AGENT), agents=[first, pid(AGENT)], after_restart=engine())
        self.saw(crash=killed(AGENT, signal.SIGKILL), after_crash=engine())
        stream = Stream(8080, "m", 300)
        until(lambda: len(stream.pieces) > 3, "a stream")
        self.saw(server_restart=systemctl("restart", SERVER), after_server_restart=engine())
        stream.join(60)
        self.saw(stream=[stream.done, repr(stream.error), len(stream.pieces)])
        self.saw(reload={unit: systemctl("reload", unit) for unit in UNITS})
        self.saw(mistaken={unit: mistaken(unit) for unit in UNITS})
        self.saw(hung={unit: killed(unit, signal.SIGSTOP, WATCHDOG) for unit in (AGENT, SERVER)}, after_hung=engine())
        self.saw(stop={unit: systemctl("stop", unit) for unit in (AGENT, SERVER)})
        self.saw(after_stop=alive(self._seen["engine"][0]), over=True)


def main() -> None:
    drive = Drive(Path(sys.argv[1]))
    try:
        drive.run()
    except BaseException as error:
        journal = [Path(f"/proc/{p}/cmdline").read_bytes().decode() for p in os.listdir("/proc") if p.isdigit()]
        drive.saw(error=repr(error), running=[line.replace("\0", " ")[:200] for line in journal if line])
        raise
    finally:
        subprocess.run(["systemctl", "exit", "--force", "--force"], timeout=30)


if __name__ == "__main__":
    main()
