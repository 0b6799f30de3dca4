"""The folder tree is the architecture: who may import whom, read from the sources with ast."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "llmgw"

# A room may import itself and rooms named before it, never later ones; what is forbidden besides stands in FORBIDDEN.
ORDER = [
    "errors", "fleet", "interfaces", "planning", "config", "engines", "wire", "store", "router",
    "agent", "server", "admin", "cli", "testing",
]  # fmt: skip
FORBIDDEN = {
    ("server", "agent"),
    ("admin", "agent"),
    ("router", "store"),
    ("router", "wire"),
    ("agent", "store"),
    ("agent", "router"),
}
PURE = {"errors", "fleet", "planning", "config", "engines"}
PURE_MAY_NOT = {
    "twisted.internet",
    "twisted.protocols",
    "twisted.web",
    "asyncio",
    "socket",
    "subprocess",
    "threading",
    "random",
    "time",
}
TOP = {
    "server_tap": 99,
    "agent_tap": 99,
    "pki": ORDER.index("wire") - 0.6,
    "pkifolder": ORDER.index("wire") - 0.5,
    "daemon": ORDER.index("wire"),
    "logs": ORDER.index("wire"),
    "holders": ORDER.index("wire"),
    "sdnotify": ORDER.index("wire"),
}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def rank(name: str) -> int:
    return TOP.get(name) if name in TOP else ORDER.index(name)


def imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [(node.lineno, node.module), *((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)]
    return found


SOURCES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py" or path.parent != ROOT)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_from_rooms_above(path):
    """A module imports only its own room and rooms before it in the list."""
    here = room(path)
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] != "llmgw" or len(parts) < 2 or parts[1] == "__version__":
            continue
        there = parts[1]
        assert there == here or rank(there) < rank(here), f"{path}:{line}: {here} imports {there}"
        assert (here, there) not in FORBIDDEN, f"{path}:{line}: {here} may not import {there}"


# A program of its own, which no module imports: it is the engine where there is no llama-server.
PROGRAMS = {"engines/llamacpp_server.py"}
PURE_SOURCES = [path for path in SOURCES if room(path) in PURE and str(path.relative_to(ROOT)) not in PROGRAMS]


@pytest.mark.parametrize("path", PURE_SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pure_rooms_do_no_io(path):
    """Pure rooms import nothing that reads clocks, sockets, processes or randomness."""
    for line, name in imports(path):
        assert not any(name == bad or name.startswith(bad + ".") for bad in PURE_MAY_NOT), f"{path}:{line}: {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_reactor_is_never_imported_at_module_level(path):
    """Importing the reactor installs it, and --reactor= would then fail."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module == "twisted.internet":
            assert all(alias.name != "reactor" for alias in node.names), f"{path}:{node.lineno}"


def test_drop_in_imports_nothing_of_llmgw():
    """twistd imports every drop-in for every command of every project."""
    text = (ROOT.parent / "twisted" / "plugins" / "llmgw_plugin.py").read_text()
    assert not any(name.startswith("llmgw") for name in (n for _, n in imports_of(text)))


def imports_of(text):
    return [(n.lineno, a.name) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names] + [
        (n.lineno, n.module) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)
    ]


def test_no_package_file_beside_the_drop_in():
    """An __init__.py there would hide the drop-in, or all of Twisted."""
    assert not list((ROOT.parent / "twisted").rglob("__init__.py"))


@pytest.mark.parametrize("folder", ["llmgw", "tests", "bench"])
def test_no_file_is_longer_than_450_lines(folder):
    """A longer file is two things."""
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT.parent / folder).rglob("*.py")}
    assert lengths
    long = {str(path.relative_to(ROOT.parent)): length for path, length in lengths.items() if length > 450}
    assert not long
