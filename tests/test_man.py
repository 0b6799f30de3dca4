"""The manual says everything there is and nothing that is not: options, commands, keys, defaults; and it is clean roff."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType

import click
import pytest
from attrs import fields

from llmgw.cli.main import COMMANDS, llmgw
from llmgw.config import agent, server
from llmgw.config.settings import RouterSettings, Timeouts
from llmgw.config.shape import Section
from llmgw.fleet.timing import Timing
from llmgw.fleet.units import parse_duration, parse_size

MAN = Path(__file__).resolve().parent.parent / "man"
PAGES = sorted(MAN.iterdir())
COMMON = {"--json", "--help", "-h"}


def source(name):
    return (MAN / name).read_text()


def words(line):
    """A line of roff without macros, fonts, quotes and escaped hyphens."""
    line = re.sub(r"\\f.|\\&", "", line).replace("\\-", "-")
    return re.sub(r"^\.[A-Z]+ ?", "", line).replace('"', "").strip()


def subsections(text):
    """Title to tagged paragraphs of every .SS: the line behind each .TP."""
    found = {}
    for part in re.split(r"^\.SS ", text, flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        body = re.split(r"^\.S[HS] ", body, flags=re.M)[0]
        found[words(title)] = [words(tag) for tag in re.findall(r"^\.TP\n(.*)$", body, flags=re.M)]
    return found


def commands(group=llmgw, path=()):
    names = COMMANDS if group is llmgw else group.commands
    for name in names:
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def options(command):
    named = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {text for parameter in named for text in parameter.opts} - COMMON


def test_every_command_is_in_the_manual_with_its_options():
    """llmgw(1) has a subsection for each command with its arguments and exactly its options."""
    documented = {}
    for title, tags in subsections(source("llmgw.1")).items():
        path = tuple(word for word in title.split() if word.islower())
        said = {word.strip(",") for tag in tags for word in tag.split() if word.startswith("-")}
        documented[path] = (title.split()[len(path) :], said)
    real = {}
    for path, command in commands():
        arguments = [each.make_metavar(click.Context(command)) for each in command.params if isinstance(each, click.Argument)]
        real[path] = (arguments, options(command))
    assert documented == real


def test_the_commands_own_options_are_in_the_manual():
    """Options before the command's name, too, and no others."""
    section = source("llmgw.1").partition(".SH OPTIONS")[2].partition(".SH ")[0]
    said = {
        word.strip(",")
        for tag in re.findall(r"^\.TP\n(.*)$", section, flags=re.M)
        for word in words(tag).split()
        if word[0] == "-"
    }
    assert said == {text for parameter in llmgw.params for text in parameter.opts} | COMMON


@pytest.mark.parametrize("name", ["server", "agent"])
def test_every_daemon_option_is_in_the_manual(name):
    """The daemon's page has each of its options with its short form and default, and no others."""
    taken = import_module(f"llmgw.{name}_tap").Options
    section = source(f"llmgw-{name}.8").partition(".SH OPTIONS")[2].partition(".SH ")[0]
    said = {
        word.strip(",")
        for tag in re.findall(r"^\.TP\n(.*)$", section, flags=re.M)
        for word in words(tag).split()
        if word[0] == "-"
    }
    real = {"--version", "--help"}
    for long, short, default, *_ in (
        *getattr(taken, "optParameters", ()),
        *((*flag[:2], None) for flag in getattr(taken, "optFlags", ())),
    ):
        real |= {f"--{long}", f"-{short}"} if short else {f"--{long}"}
        assert default is None or str(default) in words(section)
    assert said == real


def names_in(code):
    """The names that a function uses, in its comprehensions, too."""
    nested = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names, *(name for each in nested for name in names_in(each))}


def inner(reader, seen=()):
    """The sections that a reader reads into: itself, or those in a function's closure and among the names it uses."""
    if isinstance(reader, Section):
        return [reader]
    if not isinstance(reader, FunctionType) or reader in seen:
        return []
    cells = [cell.cell_contents for cell in reader.__closure__ or ()]
    named = [reader.__globals__.get(name) for name in names_in(reader.__code__)]
    ours = [each for each in named if isinstance(each, Section) or getattr(each, "__module__", "").startswith("llmgw.config.")]
    return [found for each in (*cells, *ours) for found in inner(each, (*seen, reader))]


def walk(keys, path):
    """Every section's keys by its path."""
    yield path, set(keys)
    top = path in ("server", "agent")
    for key, reader in keys.items():
        for section in inner(reader):
            name = key if path == "server" else f"{path}.{key}"
            yield from walk(section.keys, name)
    assert top or keys


def real_keys():
    agent_keys = dict(agent._KEYS) | {"ports": None}
    return dict(walk(server._SHAPE.keys, "server")) | dict(walk(agent_keys, "agent"))


def documented_keys():
    return {path: {tag.split()[0]: tag for tag in tags} for path, tags in subsections(source("llmgw.yaml.5")).items()}


def test_every_key_is_in_the_manual():
    """llmgw.yaml(5) has a subsection per section of both files, with exactly the keys that its reader knows."""
    real = real_keys()
    assert "models.profile.parallel" in real and "agent.engines" in real
    assert {path: set(tags) for path, tags in documented_keys().items()} == real


@pytest.mark.parametrize("path, kind", [("router.timeouts", Timeouts), ("timing", Timing), ("router", RouterSettings)])
def test_defaults_in_the_manual_are_the_real_ones(path, kind):
    """Each number in parentheses is what the settings say."""
    tags, checked = documented_keys()[path], 0
    for field in fields(kind):
        found = re.search(r"\(([^)]*)\)", tags[field.name])
        if found and isinstance(field.default, int | float) and found[1][0].isdigit():
            parse = parse_size if found[1].endswith("B") else parse_duration if found[1][-1].isalpha() else float
            assert parse(found[1]) == field.default, field.name
            checked += 1
    assert checked >= 1 and (path == "router" or checked == len(fields(kind)))


@pytest.mark.skipif(not shutil.which("groff"), reason="no groff here")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_clean_roff(page):
    """groff has nothing to warn about, and no line of an example is too long for a terminal of 100 columns."""
    done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-rLL=100n", page], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    plain = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", done.stdout)
    assert not [line for line in plain.splitlines() if len(line) > 110]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_refer_to_pages_that_are_there(page):
    """SEE ALSO names our other pages; every page has name, description and the sections people look for."""
    text = source(page.name)
    for other in PAGES:
        name, _, section = other.name.rpartition(".")
        if other != page:
            assert f".BR {name} ({section})".replace("-", "\\-") in text
    for section in ("NAME", "SYNOPSIS", "DESCRIPTION", "SEE ALSO"):
        assert f".SH {section}" in text
    assert page.suffix in (".5", ".7") or ".SH EXIT STATUS" in text
