"""Asks the kernel's log what befell GPUs and prints one JSON object; run as a child, since a log may be long or its reader hang.

C{{"faults": {BUS: SENTENCE}, "problem": ...}}, a bus being C{0000:3b:00}. NVIDIA's driver writes an Xid with a number and AMD's
a reset; the last of each GPU counts. The log is C{/dev/kmsg}, which takes CAP_SYSLOG on most machines, or the journal, which
takes the group systemd-journal or adm; that neither can be read is a C{problem}, never an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable

XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:]+)[^)]*\): (?P<number>\d+)(?P<rest>.*)")
AMD = re.compile(
    r"amdgpu (?P<bus>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2})\.\d: (?:amdgpu: )?(?P<what>.*(?:reset|lost|hang|RAS|ECC).*)", re.I
)
PROCESS = re.compile(r"(?:pid|name)=('[^']*'|[^,\s]+),?\s*")
JOURNAL = ("journalctl", "--dmesg", "--boot", "--quiet", "--no-pager", "--lines=20000", "--output=cat")
LIMIT = 16 * 2**20
WITHIN = 5.0


def bus_of(address: str) -> str:
    """C{0000:3b:00} from any way in which NVML, amdsmi and the kernel write a PCI address."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest.split('.')[0]}"


def faults(lines: Iterable[str]) -> dict[str, str]:
    """What the log says last of each GPU, by its bus."""
    found = {}
    for line in lines:
        if xid := XID.search(line):
            text = PROCESS.sub("", xid["rest"]).strip(" ,.")[:120]
            found[bus_of(xid["bus"])] = f"Xid {xid['number']}" + (f": {text}" if text else "")
        elif amd := AMD.search(line):
            found[bus_of(amd["bus"])] = amd["what"].strip()[:120]
    return found


def kmsg(path: str) -> str:
    """All that the kernel still has; one read is one record.

    @raise OSError: it cannot be read.
    """
    parts, size = [], 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.closing(os.fdopen(descriptor, "rb", buffering=0)) as file:
        while size < LIMIT:
            try:
                part = os.read(file.fileno(), 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # A record was overwritten before it was read; the next one follows.
                continue
            if not part:
                break
            parts.append(part)
            size += len(part)
    return b"".join(parts).decode(errors="replace")


def journal() -> str:
    """The same from the journal.

    @raise OSError: there is none, or it may not be read.
    """
    try:
        done = subprocess.run(JOURNAL, check=False, capture_output=True, text=True, errors="replace", timeout=WITHIN)
    except subprocess.TimeoutExpired:
        raise OSError(0, f"journalctl gave no answer in {WITHIN:g} s") from None
    if done.returncode or not done.stdout.strip():
        raise OSError(0, (done.stderr.strip().splitlines() or ["it has nothing of the kernel for this user"])[-1][:200])
    return done.stdout


def ask(path: str) -> dict[str, object]:
    """What the log says, or why it could not be read."""
    try:
        return {"faults": faults(kmsg(path).splitlines()), "problem": ""}
    except OSError as error:
        refused = f"{path}: {error.strerror}"
    try:
        return {"faults": faults(journal().splitlines()), "problem": ""}
    except OSError as error:
        return {"faults": {}, "problem": f"the kernel's log cannot be read ({refused}; journal: {error.strerror})"}


if __name__ == "__main__":
    json.dump(ask(sys.argv[1] if len(sys.argv) > 1 else "/dev/kmsg"), sys.stdout)
