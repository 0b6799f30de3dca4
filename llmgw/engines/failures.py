"""From an exit status and the end of an engine's output to one sentence: the first cause, not the last line.

Engines end in pages of consequences. So of all known failures the one that stands furthest up in the output wins; only
when none is known do the signal, the first exception and the bare status speak, in this order. What the kernel killed for memory
says nothing of it, so its cgroup's count comes before all.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence

from attrs import frozen

from llmgw.fleet.causes import CLEAN, CONFIGURATION, NODE, RETRY, UNKNOWN
from llmgw.fleet.shard import DISK_FULL, Diagnosis, ShardExit


@frozen
class Failure:
    """One known failure: how it looks in the output, its cause's class, sentence and advice (with the pattern's groups).

    C{id} is its number in the catalogue of failures seen in the field, empty for one that is not in there.
    """

    pattern: re.Pattern[str]
    cause: str
    text: str
    advice: str = ""
    id: str = ""


def failure(pattern: str, cause: str, text: str, advice: str = "", id: str = "") -> Failure:
    """A L{Failure} of a pattern in text form; C{.} never crosses a line."""
    return Failure(re.compile(pattern), cause, text, advice, id)


# In every sentence about a port that somebody else has: the agent adds who that is.
PORT_TAKEN = "is in use"

ANY_ENGINE: tuple[Failure, ...] = (
    failure(
        r"(?:[Aa]ddress already in use|EADDRINUSE|couldn't bind HTTP server socket)",
        RETRY,
        f"a port it was given {PORT_TAKEN}",
        "It is tried again on other ports; if it goes on, see with `ss -lptn` who holds them.",
        id="F10",
    ),
    failure(
        r"No space left on device.*/dev/shm/vllm_offload_|/dev/shm/vllm_offload_.*No space left on device",
        CLEAN,
        "/dev/shm is full of what killed engines left there",
        "Delete /dev/shm/vllm_offload_* that no process maps (`fuser -v /dev/shm/*` shows who does).",
        id="F28",
    ),
    failure(
        r"No space left on device",
        DISK_FULL,
        "a disk of the node is full",
        "Free space where the engine writes (cache, TMPDIR, /dev/shm).",
    ),
    failure(
        # Where the limit is low vLLM warns of this at its start, in backquotes, and goes on.
        r"Too many open files(?!`)",
        NODE,
        "it ran out of file descriptors",
        "Raise LimitNOFILE of llmgw-agent to 65535 or more.",
    ),
    failure(
        r"(?:CUDA out of memory|cudaMalloc failed: out of memory|CUDA error: out of memory|torch\.OutOfMemoryError)",
        CONFIGURATION,
        "it ran out of device memory",
        "Lower `context` or the number of requests at once, or use more devices.",
    ),
    failure(
        r"no kernel image is available for execution on the device",
        CONFIGURATION,
        "this build of the engine has no kernels for this GPU",
        "Use an engine build for the GPU's compute capability.",
        id="F32",
    ),
    failure(
        r"NVIDIA driver on your system is too old \(found version (?P<found>\d+)\)",
        NODE,
        "the NVIDIA driver is too old for this engine build (it offers CUDA {found})",
        "Update the driver or use an engine built for an older CUDA.",
        id="F31",
    ),
    failure(
        r"(?:Driver/library version mismatch|NVML/RM version mismatch)",
        NODE,
        "the NVIDIA driver was updated under a running kernel module",
        "Reboot the node.",
        id="F12",
    ),
    failure(
        r"Failed to initialize NVML: Unknown Error",
        NODE,
        "its container has lost the GPUs (a `systemctl daemon-reload` takes them from running containers)",
        "Start the container anew; if the agent runs in it, the agent's.",
        id="F13",
    ),
    failure(
        r"(?:GPU has fallen off the bus|GPU is lost|NVML_ERROR_GPU_IS_LOST)",
        NODE,
        "a GPU has fallen off the bus",
        "Cordon the node and reboot it.",
        id="F15",
    ),
    failure(
        r"(?:[Ee]rror 802|system not yet initialized)",
        NODE,
        "the GPUs' fabric is not up (CUDA error 802)",
        "Start nvidia-fabricmanager of the driver's own version.",
        id="F33",
    ),
    failure(
        r"CUDA error: an illegal memory access was encountered",
        RETRY,
        "a GPU kernel accessed memory that is not its own",
        "If it repeats on one GPU, suspect the GPU; if on several, the engine.",
        id="F34",
    ),
    failure(
        r"(?:shared memory segment /dev/shm/\S*|Bus error \(core dumped\))",
        NODE,
        "/dev/shm is too small or full",
        "Give the node at least 1 GiB of /dev/shm for each engine, and remove segments of dead processes.",
        id="F27",
    ),
)

_SIGNALS = {
    signal.SIGILL: (
        NODE,
        "it used an instruction that this CPU does not have: it was built for another CPU",
        "Build or install the engine for this machine.",
    ),
    signal.SIGBUS: (
        NODE,
        "it hit a bus error: /dev/shm or a mapped file ran out",
        "Look at free space in /dev/shm and the disk.",
    ),
    signal.SIGSEGV: (UNKNOWN, "it crashed by a segmentation fault", "Read its output; try another engine version."),
    signal.SIGABRT: (UNKNOWN, "it aborted itself", "Read its output."),
    signal.SIGKILL: (
        UNKNOWN,
        "it was killed by SIGKILL, and not by llmgw: most often the kernel's out-of-memory killer",
        "Look for `oom` in the kernel log; raise `resources.host_memory` or lower `context`.",
    ),
    signal.SIGTERM: (UNKNOWN, "somebody else sent it SIGTERM", "Stop engines with `llmgw stop` or `llmgw drain`."),
}

# "(EngineCore pid=12) ERROR 10-01 12:00:00 [core.py:7] ValueError: ..." and plain tracebacks alike.
_EXCEPTION = re.compile(r"^(?:.*\] )?(?P<error>(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception)\b: .*\S)", re.MULTILINE)
_COMPLAINT = re.compile(r"^(?!.*\bWARN(?:ING)?\b).*\b(?:error|fatal|panic)\b.*$", re.IGNORECASE | re.MULTILINE)


def diagnosis(
    engine: str, table: Iterable[Failure], exit: ShardExit, tail: Sequence[str], guesses: Iterable[Failure] = ()
) -> Diagnosis:
    """The first cause by C{table} and L{ANY_ENGINE}; else by C{guesses}; else what signal, exceptions and status say.

    @param engine: how the sentence calls the engine, e.g. C{vLLM}.
    @param guesses: texts too general to compete with the others.
    """
    text = "\n".join(tail)
    if exit.oom_kills and not exit.forced:
        return _of_kernel(engine, exit)
    found = _earliest([*table, *ANY_ENGINE], text) or _earliest(list(guesses), text)
    if found:
        known, match = found
        groups = {name: value or "?" for name, value in match.groupdict().items()}
        return Diagnosis(known.cause, f"{engine}: {known.text.format(**groups)}", known.advice.format(**groups))
    return _unknown(engine, exit, text)


def _earliest(table: list[Failure], text: str) -> tuple[Failure, re.Match[str]] | None:
    """The one on the first line that any of them fits; on one line, the one that stands first in the table."""
    hits = [
        (text.count("\n", 0, match.start()), order, known, match)
        for order, known in enumerate(table)
        if (match := known.pattern.search(text))
    ]
    return min(hits, key=lambda hit: hit[:2])[2:] if hits else None


def _unknown(engine: str, exit: ShardExit, text: str) -> Diagnosis:
    if exit.forced:
        return Diagnosis(UNKNOWN, f"{engine}: it was killed because it did not end when asked to")
    if exit.signal is not None and exit.signal in _SIGNALS:
        cause, sentence, advice = _SIGNALS[signal.Signals(exit.signal)]
        return Diagnosis(cause, f"{engine}: {sentence}", advice)
    said = _EXCEPTION.search(text)
    complaint = said["error"] if said else next((m[0].strip() for m in _COMPLAINT.finditer(text)), "")
    ended = f"{engine} ended by itself with {exit}" if exit.code == 0 else f"{engine} ended with {exit}"
    return Diagnosis(UNKNOWN, f"{ended}: {complaint[:300]}" if complaint else ended, "Read its output: `llmgw logs SHARD`.")


def given_up(code: str, text: str, phase: str, judged: Diagnosis) -> Diagnosis:
    """Why the agent ends an engine that does not end by itself: by what its output says, else with what can be done.

    @param code: C{start_timeout}, C{hung} or another word of the agent's; C{text} is its sentence.
    @param phase: what the engine was at.
    @param judged: the adapter's word on its output so far. Of one that served it counts nothing: that is full of others' faults.
    """
    if code == "start_timeout" and judged.cause != UNKNOWN:
        return Diagnosis(judged.cause, f"{text}. {judged.text}", judged.advice)
    if code == "start_timeout" and phase == "weights":
        return Diagnosis(CLEAN, text, _SLOW_WEIGHTS)
    cause, advice = _GIVEN_UP.get(code, (RETRY, "Read its output: `llmgw logs SHARD`."))
    return Diagnosis(cause, text, advice)


_SLOW_WEIGHTS = (
    "See whether the file system of the weights still answers, and how fast it reads; raise `start_timeout` if it is only slow."
)
_GIVEN_UP = {
    "start_timeout": (RETRY, "Raise `start_timeout` if it is only slow; else see what it waits for: `llmgw logs SHARD`."),
    "first_answer": (
        RETRY,
        "Read its output: `llmgw logs SHARD`. If it cannot be asked for a token at all, say so: `probe: none` in its profile.",
    ),
    "hung": (
        CLEAN,
        "All of it is ended and it is started anew. If that repeats, look for a GPU error (Xid) and try another engine version.",
    ),
}


def _of_kernel(engine: str, exit: ShardExit) -> Diagnosis:
    """F35: no text can say so, since who is killed for memory says nothing any more; the cgroup's counter does."""
    return Diagnosis(
        CONFIGURATION,
        f"{engine}: the kernel killed {exit.oom_kills} of its processes because host memory ran out",
        "Raise `resources.host_memory` or the memory limit of llmgw-agent, lower offloading, or place it on a larger node.",
    )
