"""Bad files, keys and disks: one clear sentence each, nothing lost, the daemon standing or refusing to start."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
from pathlib import Path

import pytest
from attrs import evolve

from llmgw.config.catalog import dump_catalog, load_catalog, read_catalog
from tests.end_to_end.fleet import BIN, fake_model, processes, until


def refused(fleet, kind: str, config: str) -> tuple[int, str]:
    """The exit status and output of a daemon that should not start."""
    command = [BIN / "twistd", "-n", "--pidfile=", "--logger=llmgw.logs.text", f"llmgw-{kind}", "--config", config]
    done = subprocess.run([str(part) for part in command], cwd=fleet.folder, capture_output=True, text=True, timeout=20)
    return done.returncode, done.stdout + done.stderr


def test_a_half_written_configuration(fleet):
    """Exit status 2 and every problem with its line; check says the same."""
    path = fleet.write_server(fake_model())
    path.write_text(path.read_text().replace("fleet:", "flet:", 1).replace("replicas: 1", "replicas: many"))
    code, text = refused(fleet, "server", "server.yaml")
    assert code == 2
    assert "server.yaml:2:" in text and "fleet" in text
    assert "replicas" in text and "Traceback" not in text
    done = fleet.command("check", "server.yaml")
    assert done.returncode == 2
    assert "server.yaml:2:" in done.stdout + done.stderr


def test_a_key_that_others_can_read(fleet):
    """Both daemons refuse it and say what to type."""
    fleet.write_server(fake_model())
    fleet.write_agent("n1")
    os.chmod(fleet.folder / "pki" / "cp1.key", 0o644)
    os.chmod(fleet.folder / "pki" / "n1.key", 0o640)
    for kind, config, key in (("server", "server.yaml", "cp1.key"), ("agent", "n1.yaml", "n1.key")):
        code, text = refused(fleet, kind, config)
        assert code in (1, 2)
        assert key in text and "chmod" in text and "Traceback" not in text


@pytest.mark.parametrize(("kind", "config", "name"), [("server", "server.yaml", "cp1"), ("agent", "n1.yaml", "n1")])
@pytest.mark.parametrize("fault", ["missing", "mismatched"])
def test_a_missing_or_mismatched_key(fleet, fault, kind, config, name):
    """The sentence names the file, and for a mismatch both."""
    fleet.write_server(fake_model())
    fleet.write_agent("n1")
    key = fleet.folder / "pki" / f"{name}.key"
    if fault == "missing":
        key.unlink()
    else:
        key.write_bytes((fleet.folder / "pki" / "n2.key").read_bytes())
    code, text = refused(fleet, kind, config)
    assert code in (1, 2)
    assert key.name in text and "Traceback" not in text
    assert fault == "missing" or f"{name}.pem" in text


def test_a_model_that_no_link_carries(fleet):
    """Refused where it is applied. One that a store has all the same fails with the reason, and the rest of its node goes on."""
    models = fake_model("small")
    huge = fake_model("huge", more="\n      environment: {PAD: '" + "x" * 600_000 + "'}")
    fleet.write_server(models)
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent()
    fleet.ready("small")
    (fleet.folder / "huge.yaml").write_text(f"models:{huge}")
    said = fleet.llmgw("apply", "huge.yaml", code=None)
    assert "models.huge: takes 600" in said and "shorten the profile's arguments, environment or argv" in said
    fleet.end("server")
    put_into_store(fleet.folder / "state" / "llmgw.db", fake_model("huge"), PAD="x" * 600_000)
    fleet.write_server(fake_model("small", 2))
    fleet.start_server()
    fleet.ready("small", 2)
    (shard,) = until(lambda: [one for one in fleet.shards("huge") if one["state"] in ("backoff", "failed")], "huge is given up")
    assert "its order takes 60" in shard["reason"] and "huge's profile have to be shorter" in shard["reason"]
    assert "its order takes 60" in fleet.llmgw("events")
    fleet.ready("small", 2)


def put_into_store(database, text: str, **environment: str) -> None:
    """As if an earlier version had taken it: the model of C{text} with this environment, in the catalog's newest revision."""
    (new,) = read_catalog(Path("models.yaml"), f"models:{text}").models
    assert new.profile is not None
    new = evolve(new, profile=evolve(new.profile, environment=environment))
    with contextlib.closing(sqlite3.connect(database)) as store, store:
        number, kept = store.execute("select number, text from catalog order by number desc").fetchone()
        catalog = load_catalog(kept)
        changed = dump_catalog(evolve(catalog, models=(*catalog.models, new)))
        store.execute("update catalog set text = ? where number = ?", (changed, number))


def test_a_port_that_is_taken(fleet):
    """One sentence with the address, and a status that is not 0."""
    fleet.write_server(fake_model())
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", fleet.fleet))
        holder.listen()
        code, text = refused(fleet, "server", "server.yaml")
    assert code not in (0, -9)
    assert f"127.0.0.1:{fleet.fleet}" in text and "Traceback" not in text
    until(lambda: not processes(str(fleet.folder)), "no router is left behind", 5)


def test_a_router_outlives_a_server_that_cannot_start(fleet):
    """The workers of a killed server go on answering when the next server finds its port taken, and when that has passed."""
    fleet.write_server(fake_model())
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready()
    until(lambda: fleet.ask()[0] == 200, "routed")
    fleet.end("server", signal.SIGKILL)
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        until(lambda: holder.bind(("127.0.0.1", fleet.fleet)) is None, "the port is free")
        holder.listen()
        assert fleet.daemon("server", "server", fleet.folder / "server.yaml").wait(10) not in (0, -9)
        assert [fleet.ask()[0] for _ in range(20)] == [200] * 20
    fleet.start_server()
    assert [fleet.ask()[0] for _ in range(20)] == [200] * 20


def test_a_second_server_on_one_store_is_refused(fleet):
    """It names the holder's pid."""
    fleet.write_server(fake_model())
    process = fleet.start_server()
    second = fleet.folder / "second.yaml"
    text = (fleet.folder / "server.yaml").read_text()
    second.write_text(
        text.replace(str(fleet.fleet), str(fleet.fleet + 1))
        .replace(f":{fleet.router},", f":{fleet.router + 1},")
        .replace("admin.sock", "admin2.sock")
    )
    code, out = refused(fleet, "server", "second.yaml")
    assert code not in (0, -9)
    assert str(process.pid) in out and "Traceback" not in out


def test_an_admin_socket_that_is_taken(fleet):
    """One sentence, and no router goes on for a server that never was one."""
    fleet.write_server(fake_model())
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(str(fleet.socket))
        holder.listen()
        code, text = refused(fleet, "server", "server.yaml")
    assert code not in (0, -9)
    assert "admin.sock" in text and "Traceback" not in text
    until(lambda: not processes(str(fleet.folder)), "no router is left behind", 5)


def test_a_second_agent_on_one_state_folder_is_refused(fleet):
    """It names the holder's pid."""
    fleet.write_server(fake_model())
    fleet.write_agent("n1")
    process = fleet.start_agent("n1")
    until(lambda: (fleet.folder / "state" / "n1").exists() and fleet.log("n1"), "the first agent is up")
    code, out = refused(fleet, "agent", "n1.yaml")
    assert code not in (0, -9)
    assert str(process.pid) in out and "Traceback" not in out


def test_an_empty_database_file_is_refused(fleet):
    """SQLite would take 0 bytes as a new database; we say what to do instead."""
    fleet.write_server(fake_model())
    (fleet.folder / "state").mkdir(exist_ok=True)
    (fleet.folder / "state" / "llmgw.db").touch(mode=0o600)
    code, out = refused(fleet, "server", "server.yaml")
    assert code not in (0, -9)
    assert "llmgw.db" in out and "empty" in out and "Traceback" not in out


@pytest.fixture
def tiny_disk(fleet):
    """A file system of 4 MiB at state/, which a test can fill."""
    state = fleet.folder / "state"
    state.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(state)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr}")
    yield state
    fleet.close()
    subprocess.run(["umount", "-l", str(state)], check=True)


def fill(disk):
    """To the last byte; returns the file that does."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    with open(filler, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x")
    return filler


def stands_or_says(fleet, name: str, start) -> None:
    """The daemon started on a full disk either serves or ends with one sentence about the disk."""
    seen = len(fleet.log(name))
    with contextlib.suppress(AssertionError):
        start()
    process = fleet.running[name]
    said = lambda: fleet.log(name)[seen:]  # noqa: E731
    until(lambda: process.poll() is not None or "is up" in said() or "linked to" in said(), f"{name} is up or has ended")
    assert process.poll() is None or "No space left" in said() or "disk" in said(), said()
    assert "Traceback" not in said(), said()


@pytest.mark.slow
def test_daemons_that_start_on_a_full_disk_lose_nothing(fleet, tiny_disk):
    """kill -9 of both while the disk is full: each stands or says why not; with room again the same engine serves."""
    fleet.write_server(fake_model())
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    before = fleet.ready()[0]
    filler = fill(tiny_disk)
    for name, start in (("n1", fleet.start_agent), ("server", fleet.start_server)):
        fleet.end(name, signal.SIGKILL)
        stands_or_says(fleet, name, start)
        assert fleet.ask()[0] == 200
    filler.unlink()
    for name, start in (("server", fleet.start_server), ("n1", fleet.start_agent)):
        if fleet.running[name].poll() is not None:
            start()
    after = until(lambda: (s := fleet.ready()[0]) and fleet.status()["nodes"][0]["state"] == "ready" and s, "adopted", 40)
    assert (after["pid"], after["attempt"]) == (before["pid"], before["attempt"])
    until(lambda: fleet.llmgw("key", "create", "x"), "keys can be made again")


def test_a_full_disk_stops_nothing(fleet, tiny_disk):
    """Serving and heartbeats go on, what needed the disk says so, and it heals when there is room again."""
    fleet.write_server(fake_model())
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    before = fleet.ready()[0]
    filler = fill(tiny_disk)
    assert fleet.ask()[0] == 200
    answer = fleet.llmgw("key", "create", "x", code=None)
    until(lambda: "disk" in answer or "space" in answer or "disk" in fleet.log("server"), "the server names the disk")
    assert fleet.ask()[0] == 200
    assert fleet.ready()[0]["pid"] == before["pid"]
    filler.unlink()
    until(lambda: fleet.llmgw("key", "create", "y"), "keys can be made again")
    assert fleet.ready()[0]["pid"] == before["pid"]


@pytest.mark.slow
def test_a_full_disk_of_a_node_is_the_reason_that_its_engine_does_not_start(fleet, tiny_disk):
    """The engine dies while its agent's disk is full: status names the disk; with room again it starts by itself."""
    path = fleet.write_server(fake_model())
    path.write_text(path.read_text().replace("sqlite:///state/llmgw.db", "sqlite:///store/llmgw.db"))
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    before = fleet.ready()[0]
    filler = fill(tiny_disk)
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: "free some space on n1" in fleet.llmgw("status"), "the operator is told of the disk")
    assert "Traceback" not in fleet.log("n1")
    filler.unlink()
    after = until(lambda: fleet.ready()[0]["attempt"] > before["attempt"] and fleet.ready()[0], "a new attempt", 40)
    assert after["pid"] != before["pid"] and fleet.ask()[0] == 200
