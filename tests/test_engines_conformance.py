"""Every adapter that is found keeps the promises of its interface; the check itself finds breaches."""

from __future__ import annotations

import time

import pytest
from attrs import evolve

from llmgw.engines.command import Command, command
from llmgw.engines.registry import adapters
from llmgw.errors import Problem
from llmgw.interfaces import Needs
from llmgw.testing.conformance import KEY, check

FOUND = adapters()


def test_the_adapters_that_are_shipped():
    """Five, found by name."""
    assert {"command", "llamacpp", "sglang", "trtllm", "vllm"} <= set(FOUND)


@pytest.mark.parametrize("name", sorted(FOUND))
def test_adapter_conforms(name):
    """Key, port, needs, problems, phases, load and diagnoses are as promised."""
    check(FOUND[name])
    assert FOUND[name].name == name


def leak(*asked):
    launch = command.launch(*asked)
    return evolve(launch, argv=(*launch.argv, "--api-key", KEY))


def default_key(*asked):
    launch = command.launch(*asked)
    return evolve(launch, environment={}, defaults={"KEY": KEY})


def own_port(*asked):
    return evolve(command.launch(*asked), url="http://127.0.0.1:8000")


def lost_secret(*asked):
    launch = command.launch(*asked)
    return evolve(launch, argv=(*launch.argv, "--key-file", "{secret:key}"))


def slow(*_):
    time.sleep(0.06)
    return []


def failing(*_):
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("method", "instead", "said"),
    [
        ("launch", leak, "the key stands in argv"),
        ("launch", default_key, "neither by environment nor by a secret file"),
        ("launch", own_port, "not the address and port that were allocated"),
        ("launch", lost_secret, "secret files are named but not given: key"),
        ("problems", slow, "it must not wait"),
        ("problems", lambda *_: ["text"], "no list of Problems"),
        ("problems", lambda *_: [Problem("never", "", "x")], "a plain profile is refused"),
        ("needs", lambda *_: Needs(devices=7), "7 devices where the profile says 0"),
        ("load", failing, "raised ValueError: no such thing"),
        ("diagnose", lambda *_: None, "needs a text"),
        ("version_argv", lambda *_: ["vllm"], "does not begin with the installation's command"),
    ],
)
def test_a_breach_is_named(method, instead, said):
    """Each broken promise is told in a sentence, with the adapter's name."""
    broken = Command()
    setattr(broken, method, instead)
    with pytest.raises(AssertionError, match="adapter command: ") as caught:
        check(broken)
    assert said in str(caught.value)


class Unreadable(Command):
    """Its C{load} takes nothing, not even C{self}, which zope.interface stumbles over."""

    name = "unreadable"

    def load(*_):  # type: ignore[override]
        """Whatever."""


def test_an_adapter_that_cannot_be_verified_takes_no_other_with_it():
    """It is left out; the others stay."""
    assert list(adapters([Unreadable(), command])) == ["command"]
    with pytest.raises(AssertionError, match="cannot be verified"):
        check(Unreadable())
