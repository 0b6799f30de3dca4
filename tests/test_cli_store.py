"""llmgw store as typed: backups beside a running server, and a fleet that moves to PostgreSQL."""

from __future__ import annotations

import json
import signal

import pytest

from llmgw.cli.main import run
from llmgw.store.backend import make_backend
from tests.end_to_end.conftest import *  # noqa: F403
from tests.end_to_end.fleet import fake_model
from tests.store_fixtures import *  # noqa: F403


@pytest.fixture
def small(fleet):
    """A server with one agent, a replica that is ready, and a key."""
    fleet.write_server(fake_model("m", 1))
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready()
    fleet.llmgw("key", "create", "alice")
    return fleet


def test_a_backup_beside_a_running_server_is_brought_back_after_a_loss(small):
    """Catalog, keys and placements are back; the engine has run all the while and still belongs to its replica.

    Takes some seconds, since two servers and an engine start.
    """
    shard = small.ready()[0]
    said = json.loads(small.llmgw("store", "backup", "backup.db", "--config", "server.yaml", "--json"))
    assert said["bytes"] == (small.folder / "backup.db").stat().st_size and said["file"] == "backup.db"
    assert "is there already: a backup overwrites nothing" in small.llmgw(
        "store", "backup", "backup.db", "--config", "server.yaml", code=1
    )
    assert small.end("server", signal.SIGKILL) == -signal.SIGKILL
    for file in (small.folder / "state").glob("llmgw.db*"):
        file.unlink()
    small.llmgw("store", "copy", "--from", "sqlite:///backup.db", "--to", "sqlite:///state/llmgw.db")
    small.start_server()
    back = small.ready()[0]
    assert (back["pid"], back["attempt"], back["id"]) == (shard["pid"], shard["attempt"], shard["id"])
    assert [key["name"] for key in json.loads(small.llmgw("key", "list", "--json"))["keys"]] == ["alice"]
    assert not small.status()["orphans"]


@needs_postgres  # noqa: F405
def test_a_fleet_moves_to_postgresql(small, postgres):
    """Refused while the server runs; then all is copied and counted, and the same engine serves on under the new store.

    Takes some seconds, since two servers and an engine start.
    """
    before = small.ready()[0]
    old, new = f"sqlite:///{small.folder}/state/llmgw.db", postgres.database()
    assert "is locked by pid" in small.llmgw("store", "copy", "--from", old, "--to", new, code=1)
    small.end("server")
    said = small.llmgw("store", "copy", "--from", "sqlite:///state/llmgw.db", "--to", new)
    assert f"store: {new}" in said and "1 catalog, 1 nodes, 1 shards, 1 keys" in said
    assert "is not new" in small.llmgw("store", "copy", "--from", old, "--to", new, code=1)
    path = small.write_server(fake_model("m", 1))
    path.write_text(path.read_text().replace("sqlite:///state/llmgw.db", f"'{new}'") + f"state: {small.folder}/state\n")
    small.start_server()
    after = small.ready()[0]
    assert (after["pid"], after["attempt"], small.status()["server"]["epoch"]) == (before["pid"], before["attempt"], 2)
    assert "is in use, cp1 leads over it" in small.llmgw("store", "copy", "--from", new, "--to", "sqlite:///b.db", code=1)
    backed = json.loads(small.llmgw("store", "backup", "pg.db", "--from", new, "--json"))
    assert backed["store"] == new.partition("?")[0]
    for place in (new, f"sqlite:///{small.folder}/pg.db"):
        backend = make_backend(place)
        with backend.reading() as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM keys").scalar() == 1
        backend.close()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["copy", "--from", "mysql://x/y", "--to", "sqlite:///b.db"], "--from: found 'mysql://x/y', want sqlite:///FILE"),
        (["copy", "--from", "sqlite:///a.db", "--to", "postgresql://u:word@h/d"], "holds a password"),
        (["copy", "--from", "sqlite:///a.db", "--to", "sqlite:///a.db"], "are the same store"),
        (["copy", "--from", "sqlite:///a.db"], "Missing option '--to'"),
    ],
)
def test_a_wrong_address_is_misuse(arguments, said, capsys):
    """Exit status 2, with what is allowed; nothing is opened and no password is repeated."""
    assert run(["store", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err and "u:word" not in err


def test_failures_are_one_sentence_and_status_1(tmp_path, monkeypatch, capsys):
    """No store there, nothing reachable: a sentence on standard error, and as JSON where that is asked for."""
    monkeypatch.chdir(tmp_path)
    assert run(["store", "copy", "--from", "sqlite:///a.db", "--to", "sqlite:///b.db"]) == 1
    assert capsys.readouterr().err == f"llmgw: there is no store at {tmp_path}/a.db: nothing to copy\n"
    assert run(["--json", "store", "backup", "b.db", "--from", "postgresql://u@127.0.0.1:1/d"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "unreachable"
    assert run(["store", "backup", "b.db", "--config", "none.yaml"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_only_the_store_of_a_configuration_has_to_be_right(tmp_path, capsys):
    """A backup is taken whatever else is wrong with the file; the address is relative to it."""
    (tmp_path / "etc").mkdir()
    config = tmp_path / "etc" / "server.yaml"
    config.write_text("store: sqlite:///../a.db\nrooter: {}\n")
    assert run(["store", "backup", str(tmp_path / "b.db"), "--config", str(config)]) == 1
    assert f"{tmp_path}/etc/../a.db: No such file" in capsys.readouterr().err
    backend = make_backend(f"sqlite:///{tmp_path}/a.db")
    backend.open()
    backend.close()
    assert run(["store", "backup", str(tmp_path / "b.db"), "--config", str(config)]) == 0
    assert (tmp_path / "b.db").stat().st_mode & 0o777 == 0o600
