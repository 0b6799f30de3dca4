"""Hints about who holds which prefix: found again, bounded, and harmless when wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.router.prefixes import (
    BLOCK,
    ENTRY,
    MAX_BLOCKS,
    NO_HINT,
    Hints,
    Prefixes,
    block_hashes,
    owners_of,
    seed_of,
    session_hash,
)
from llmgw.router.scoreboard import WIDTH

ROWS = [number * WIDTH for number in (3, 0, 7, 9, 40, 41)]
PLACES = owners_of(ROWS)
SEED = seed_of("m")


@pytest.fixture
def table(tmp_path):
    table = Prefixes(tmp_path / "prefixes", entries=1 << 12)
    yield table
    table.close()


def text(*parts: int, size: int = BLOCK) -> bytes:
    """One block of text for each number."""
    return b"".join(b"%08d" % part * (size // 8) for part in parts)


def test_deepest_common_prefix_is_found(table):
    """Each endpoint is known for as many blocks as a prompt has in common with what it got."""
    table.insert(block_hashes(text(1, 2, 3, 4), SEED), ROWS[0], 1.0)
    table.insert(block_hashes(text(1, 2, 9), SEED), ROWS[2], 2.0)
    assert table.held(block_hashes(text(1, 2, 3, 4, 5), SEED), PLACES) == {0: 4, 2: 2}
    assert table.held(block_hashes(text(1, 2), SEED), PLACES) == {0: 2, 2: 2}
    assert table.held(block_hashes(text(2, 3), SEED), PLACES) == {}


def test_conversation_keeps_its_prefix_from_turn_to_turn(table):
    """The next turn's messages begin with the bytes of the last one's, but for their end."""
    turn = b'[{"role":"user","content":"' + b"x" * 5000 + b'"}]'
    later = turn[:-1] + b',{"role":"assistant","content":"y"}]'
    table.insert(block_hashes(turn, SEED), ROWS[1], 1.0)
    assert table.held(block_hashes(later, SEED), PLACES) == {1: len(turn) // BLOCK}


def test_short_prompts_have_no_blocks():
    """What is not a whole block is left out."""
    assert block_hashes(b"x" * (BLOCK - 1), SEED) == []
    assert len(block_hashes(memoryview(b"x" * BLOCK), SEED)) == 1


def test_endless_prompts_are_cut():
    """A 64 MiB prompt costs no more than its first megabyte."""
    assert len(block_hashes(b"x" * BLOCK * (MAX_BLOCKS + 5), SEED)) == MAX_BLOCKS


def test_i11_models_share_nothing(table):
    """I11: the same prompt for another model, adapter or set of tools is another prefix."""
    table.insert(block_hashes(text(1, 2), SEED), ROWS[0], 1.0)
    for seed in (seed_of("other"), seed_of("m", b'[{"type":"function"}]')):
        assert table.held(block_hashes(text(1, 2), seed), PLACES) == {}


def test_endpoints_that_are_gone_are_not_named(table):
    """A hint at a row that is not among today's candidates is no hint."""
    table.insert(block_hashes(text(1), SEED), 100 * WIDTH, 1.0)
    assert table.held(block_hashes(text(1), SEED), PLACES) == {}


def test_last_eight_owners_are_kept(table):
    """Of nine endpoints that got a prefix, the one longest ago is forgotten; one that gets it again is not forgotten first."""
    rows = [number * WIDTH for number in range(20, 30)]
    places, hashes = owners_of(rows), block_hashes(text(1), SEED)
    for place in (0, 1, 2, 3, 4, 5, 6, 7, 0, 8):
        table.insert(hashes, rows[place], 1.0)
    assert set(table.held(hashes, places)) == {0, 2, 3, 4, 5, 6, 7, 8}


def test_session_goes_to_the_last_endpoint(table):
    """A session key names the endpoint that got it last."""
    session = session_hash(b"user-1", SEED)
    assert table.session(session, PLACES) is None
    table.insert([session], ROWS[2], 1.0)
    table.insert([session], ROWS[1], 2.0)
    assert table.session(session, PLACES) == 1
    assert table.session(session_hash(b"user-1", seed_of("other")), PLACES) is None


def test_old_entries_give_way(tmp_path):
    """A full table forgets what has not been used for long, and keeps what is used all the time."""
    table = Prefixes(tmp_path / "small", entries=256)
    hot = block_hashes(text(*range(8)), SEED)
    for now in range(2000):
        table.insert(block_hashes(text(10_000 + now), SEED), ROWS[0], float(now))
        table.insert(hot, ROWS[1], float(now))
    assert table.held(hot, PLACES) == {1: 8}
    assert table.evicted > 1000
    assert table.used() <= 256
    table.close()


def test_gap_hides_nothing(table):
    """A block that has been overwritten does not hide the deeper ones behind it."""
    hashes = block_hashes(text(1, 2, 3), SEED)
    table.insert(hashes, ROWS[0], 1.0)
    at = hashes[1] & table._mask
    for way in (at, at ^ 1):
        table._tags[way] = 0
    assert table.held(hashes, PLACES) == {0: 3}


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=4096), st.integers(0, 2**32))
def test_any_bits_are_harmless(tmp_path_factory, junk, seed):
    """Whatever bits stand in the table, a lookup answers with places that exist and depths that fit."""
    path = tmp_path_factory.mktemp("junk") / "prefixes"
    path.write_bytes((junk or b"\xff") * (256 * ENTRY // max(1, len(junk)) + 1))
    os.truncate(path, 256 * ENTRY)
    table = Prefixes(path, entries=256)
    draw = random.Random(seed)
    hashes = [draw.getrandbits(64) for _ in range(40)]
    for hashed in hashes:
        tags = table._tags
        tags[hashed & 255] = hashed >> 32
    held = table.held(hashes, PLACES)
    assert all(0 <= place < len(ROWS) and 1 <= depth <= 40 for place, depth in held.items())
    table.insert(hashes, ROWS[0], 5.0)
    assert table.session(hashes[-1], PLACES) == 0
    table.close()


def test_i9_hints_are_seen_by_other_processes(table, tmp_path):
    """What one worker inserts, another one finds, though it hashes by itself."""
    program = (
        "import sys; from pathlib import Path; from tests.test_router_prefixes import *;"
        "t = Prefixes(Path(sys.argv[1]), entries=1 << 12); t.insert(block_hashes(text(5, 6), SEED), ROWS[2], 1.0)"
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "prefixes")], check=True, cwd=root, timeout=30)
    assert table.held(block_hashes(text(5, 6, 7), SEED), PLACES) == {2: 2}


def test_table_of_another_size_is_replaced(tmp_path):
    """An upgrade that changes the size makes a new table; workers that have the old one go on with it."""
    old = Prefixes(tmp_path / "prefixes", entries=256)
    new = Prefixes(tmp_path / "prefixes", entries=512)
    hashes = block_hashes(text(1), SEED)
    old.insert(hashes, ROWS[0], 1.0)
    assert new.held(hashes, PLACES) == {} and old.held(hashes, PLACES) == {0: 1}
    old.close()
    new.close()


def test_hints_of_a_model(table):
    """What a group is told of a request, and what it tells back: prefix, session and how much was likely cached."""
    hints = Hints(table, "m", ROWS)
    assert hints.look(b"short") is NO_HINT
    first = hints.look(text(1, 2), session=b"s")
    assert (first.held, first.blocks, first.session) == ({}, 2, None)
    hints.sent(first, 3, 1.0)
    again = hints.look(text(1, 2, 3), session=b"s")
    assert (again.held, again.blocks, again.session) == ({3: 2}, 3, 3)
    hints.sent(again, 3, 2.0)
    assert (hints.blocks, hints.found) == (5, 2)
    assert hints.look(text(1, 2, 3), before=b"tools").held == {}
    assert Hints(table, "other", ROWS).look(text(1, 2), session=b"s").session is None


def test_session_of_a_short_prompt(table):
    """A session is kept even if its prompt is shorter than a block."""
    hints = Hints(table, "m", ROWS)
    hints.sent(hints.look(b"hi", session=b"s"), 1, 1.0)
    assert hints.look(b"hello", session=b"s").session == 1
