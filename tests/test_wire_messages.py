"""The protocol's docstring is the protocol: its tables and words are held to the code that speaks it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import attrs
import pytest

import llmgw
from llmgw.wire import messages
from llmgw.wire.messages import FROM_AGENT, FROM_SERVER

TEXT = messages.__doc__
ROOT = Path(llmgw.__file__).parent
RULE = re.compile(r"^=+  =+  =+  =+$", re.MULTILINE)


def rows():
    """The table, by type: from, carries, answered by; lines that go on are joined."""
    bars = [len(bar) for bar in RULE.search(TEXT)[0].split("  ")]
    starts = [sum(bars[:number]) + 2 * number for number in range(4)]
    found = []
    for line in RULE.split(TEXT)[2].strip("\n").splitlines():
        cells = [line[start : start + bar].strip() for start, bar in zip(starts, bars, strict=True)]
        if cells[0]:
            found.append(cells)
        else:
            found[-1] = [f"{old} {new}".strip() for old, new in zip(found[-1], cells, strict=True)]
    return {re.sub(r"C\{(\w+)\}", r"\1", kind): rest for kind, *rest in found}


def paragraph(start):
    """The words marked as code in the paragraphs from C{start} to the next unindented one."""
    after = TEXT[TEXT.index(start) :]
    return re.split(r"\n\n(?! )", after)[0]


def listed(start):
    """The reasons that a list of C{ - C{word}: why} gives, several to a line or not."""
    return set(re.findall(r"(?:^ - |\. )C\{(\w+)\}:", paragraph(start), re.MULTILINE))


def first_arguments(*names):
    """Every literal that one of C{names} is called with first, in the code of both daemons."""
    found = set()
    for path in [file for room in ("wire", "server", "agent") for file in (ROOT / room).glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in names and node.args:
                found |= {one.value for one in ast.walk(node.args[0]) if isinstance(one, ast.Constant) and one.value}
    return found


def test_every_message_has_its_row_and_every_row_its_message():
    """With the side that may say it; the leader is a server."""
    found = rows()
    assert set(found) == {*FROM_SERVER, *FROM_AGENT}
    for kind, (side, _, answers) in found.items():
        assert (side == "agent") == (kind in FROM_AGENT), kind
        assert set(re.findall(r"C\{(\w+)\}", answers)) <= {*FROM_SERVER, *FROM_AGENT}, kind


@pytest.mark.parametrize("kind", [*FROM_SERVER, *FROM_AGENT])
def test_a_row_names_exactly_what_its_message_carries(kind):
    """In the order of the class; what it means may follow a colon."""
    carried = rows()[kind][1].partition(":")[0].split(", ")
    assert carried == [field.name for field in attrs.fields({**FROM_SERVER, **FROM_AGENT}[kind])]


def test_the_diagram_shows_every_message_and_no_other():
    """C{refused} apart, which may come at several places."""
    diagram = TEXT[TEXT.index("    server    ") : RULE.search(TEXT).start()]
    sent = re.findall(r"-> ([a-z_/ ]+?)(?:,| \(|  |$)", diagram, re.MULTILINE)
    answered = re.findall(r"([a-z_]+(?:, [a-z_]+)*) <-", diagram)
    said = {word for some in sent for word in some.split(" / ")} | {word for some in answered for word in some.split(", ")}
    assert said == {*FROM_SERVER, *FROM_AGENT} - {"refused"}


def test_the_reasons_of_refusals_are_those_in_the_code():
    """What the docstring lists is said somewhere, and nothing else is."""
    said = first_arguments("Refused")
    assert listed("Reasons of C{refused}") == said
    assert {"standby", "name_in_use", "certificate"} <= said


def test_what_a_server_only_notes_is_told_apart():
    """Reasons that no message carries, in the log and in C{refusals} alone."""
    noted = set(re.findall(r"C\{(\w+)\}", paragraph("What a server cannot say")))
    source = (ROOT / "server" / "fleetport.py").read_text()
    assert noted == {"crowded", "tls", "link"}
    assert all(f'"{reason}"' in source for reason in noted)
    assert not noted & listed("Reasons of C{refused}")


def test_the_reasons_of_goaway_are_those_in_the_code():
    """C{removed} comes from the operator's command, which hands it on."""
    text = paragraph("Reasons of C{goaway}").partition("Errors of")[0]
    listed_here = set(re.findall(r"C\{(\w+)\}", text)) - {"goaway"}
    assert listed_here == first_arguments("Goaway") | {"removed"}
    assert '"removed"' in (ROOT / "server" / "operations.py").read_text()


def test_the_links_own_errors_are_those_in_the_code():
    """Each is a literal of the agent's end; what the node answers beyond is its own."""
    text = paragraph("Reasons of C{goaway}").partition("Errors of")[2].partition("any other")[0]
    named = set(re.findall(r"C\{(\w+)\}", text)) - {"done"}
    files = ("agent/talk.py", "agent/fence.py", "wire/agent_end.py")
    source = "".join((ROOT / file).read_text() for file in files)
    assert {error for error in named if f'"{error}"' not in source} == set()
    assert "unsupported" in named and len(named) == 7


def test_the_limits_are_those_in_the_code():
    """The numbers in the first paragraph."""
    assert f"at most {messages.MAX_LINE // 2**20} MiB a line" in TEXT
    assert f"{messages.MAX_DEPTH} levels deep" in TEXT.replace("\n", " ")
    assert f"ALPN C{{{messages.ALPN.decode()}}}" in TEXT and f"C{{llmgw/{messages.PROTOCOL}}}" in TEXT
