"""What installed engines say of themselves: asked once, kept on disk, asked again when they change, never waited for."""

from __future__ import annotations

import json
import os
import stat
import sys

import pytest
import pytest_twisted
from twisted.logger import globalLogPublisher

from llmgw.agent.child import run_child
from llmgw.agent.installations import Installations
from llmgw.config.agent import EngineSettings
from llmgw.engines.vllm import vllm
from llmgw.interfaces import Flags
from tests.agent_rig import alive, until

ADAPTERS = {"vllm": vllm}
STANDIN = """#!/bin/sh
echo "$*" >> {asked}
{first}
exec {python} -m llmgw.testing.standin_vllm "$@"
"""


@pytest.fixture
def logged():
    """Events logged during the test."""
    events = []
    globalLogPublisher.addObserver(events.append)
    yield events
    globalLogPublisher.removeObserver(events.append)


class Engine:
    """A script that notes what it is asked before it becomes the stand-in."""

    def __init__(self, folder):
        self.path, self.asked, self.cache = folder / "vllm", folder / "asked", folder / "installations.json"
        self.changes = 0
        self.write()

    def write(self, first=""):
        self.path.write_text(STANDIN.format(asked=self.asked, python=sys.executable, first=first))
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    def questions(self):
        return self.asked.read_text().splitlines() if self.asked.exists() else []

    def installations(self, engines=None, deadline=20.0, path=None):
        from twisted.internet import reactor

        rows = [EngineSettings("vllm", "vllm", (str(self.path),))] if engines is None else engines
        environment = {"PATH": os.environ["PATH"] if path is None else path}
        return Installations(reactor, rows, ADAPTERS, self.cache, environment, self.changed, deadline)

    def changed(self):
        self.changes += 1


@pytest.fixture
def engine(tmp_path):
    return Engine(tmp_path)


def known(found):
    """Whether version and flags of the one installation are known."""
    (row,) = found.all()
    return row.version and found.flags(row).names


@pytest_twisted.ensureDeferred
async def test_version_and_flags_are_asked_once(reactor, engine):
    """In the background, one after the other; nobody waits; the answers arrive with a change told."""
    found = engine.installations()
    found.start()
    (row,) = found.all()
    assert (row.version, found.flags(row), row.problem) == (None, Flags(), "")
    await until(reactor, lambda: known(found))
    assert found.all()[0].version == "0.33.0"
    assert "--tensor-parallel-size" in found.flags(row).names
    assert "--headless" in found.flags(row).switches
    assert engine.questions() == ["--version", "serve --help=all"]
    assert engine.changes == 1
    found.stop()


@pytest_twisted.ensureDeferred
async def test_answers_are_kept(reactor, engine):
    """After a restart they are there at once and nobody is asked."""
    found = engine.installations()
    found.start()
    await until(reactor, lambda: known(found))
    again = engine.installations()
    again.start()
    assert known(again)
    assert len(engine.questions()) == 2
    assert not engine.cache.with_suffix(".new").exists()


@pytest_twisted.ensureDeferred
async def test_a_changed_file_is_asked_again(reactor, engine):
    """Another time of the command's file is another installation."""
    found = engine.installations()
    found.start()
    await until(reactor, lambda: known(found))
    os.utime(engine.path, (1, 1))
    again = engine.installations()
    again.start()
    assert again.all()[0].version is None
    await until(reactor, lambda: known(again))
    assert len(engine.questions()) == 4


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00\xff", "[" * 100_000], ids=["empty", "half", "list", "binary", "deep"])
@pytest_twisted.ensureDeferred
async def test_a_damaged_cache_only_costs_the_asking(reactor, engine, text):
    """Whatever is in the file: engines are asked again and it is written anew."""
    engine.cache.write_bytes(text.encode("latin-1"))
    found = engine.installations()
    found.start()
    await until(reactor, lambda: known(found))
    assert len(json.loads(engine.cache.read_text())) == 2


def test_a_missing_command_is_a_problem(engine, tmp_path):
    """It is shown with its name, not asked, and no adapter's own command is there without being on PATH."""
    nowhere = str(tmp_path / "no-vllm")
    found = engine.installations([EngineSettings("vllm", "vllm", (nowhere,))])
    found.start()
    (row,) = found.all()
    assert row.problem == f"{nowhere} is not there or not executable"
    assert found.flags(row) == Flags()
    assert engine.installations([], path="/nowhere").all() == ()
    assert engine.installations([], path=str(tmp_path)).all()[0].command == ("vllm",)


def test_an_unknown_adapter_is_a_problem(engine):
    """It names those that there are; asking it for flags or starting changes nothing."""
    found = engine.installations([EngineSettings("trt", "tensorrt", ("trt",))])
    found.start()
    (row,) = found.all()
    assert row.problem == "there is no adapter tensorrt; there are vllm"
    assert found.flags(row) == Flags()


@pytest_twisted.ensureDeferred
async def test_a_hanging_command_is_killed(reactor, engine, logged):
    """After the deadline; its version stays unknown, the log says why, and the next question is still asked."""
    engine.write(first='[ "$1" = --version ] && exec sleep 600')
    found = engine.installations(deadline=1.5)
    found.start()
    await until(reactor, lambda: any("gave no answer in 1.5 s" in str(event.get("error")) for event in logged))
    assert found.all()[0].version is None
    await until(reactor, lambda: found.flags(found.all()[0]).names)
    assert [key.split()[0] for key in json.loads(engine.cache.read_text())] == ["flags"]


@pytest_twisted.ensureDeferred
async def test_a_failing_command_is_not_kept(reactor, engine, logged):
    """Its last line is logged; the next start asks again."""
    engine.write(first="echo Traceback; echo 'ImportError: libcudart.so.13'; exit 1")
    found = engine.installations()
    found.start()
    await until(reactor, lambda: sum("libcudart.so.13" in str(event.get("last")) for event in logged) == 2)
    assert not engine.cache.exists()
    engine.write()
    again = engine.installations()
    again.start()
    await until(reactor, lambda: known(again))
    assert again.all()[0].version == "0.33.0"


@pytest_twisted.ensureDeferred
async def test_a_stop_ends_what_is_asked(reactor, engine):
    """The child is killed with the agent's stop, nothing is logged as a failure, nothing is left."""
    engine.write(first=f"echo $$ > {engine.asked}; exec sleep 600")
    found = engine.installations()
    found.start()
    await until(reactor, lambda: engine.questions() and engine.questions()[0].isdigit())
    (pid,) = map(int, engine.questions())
    found.stop()
    await until(reactor, lambda: not alive(pid))
    assert found.all()[0].version is None


@pytest_twisted.ensureDeferred
async def test_the_last_words_of_a_child_are_read(reactor):
    """All that it printed, however soon it ended, and what it left behind cannot hold up the answer."""
    for _ in range(20):
        said = await run_child(reactor, ["/bin/sh", "-c", "echo one; echo two; exit 3"], {}, 10.0)
        assert (said.text, said.status) == ("one\ntwo\n", 3)
    said = await run_child(reactor, ["/bin/sh", "-c", "sleep 3 & echo one"], {"PATH": os.environ["PATH"]}, 2.0)
    assert (said.text, said.status) == ("one\n", 0)
