"""Waits that grow, and desired states in parts."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.wire.backoff import Backoff
from llmgw.wire.codec import encode
from llmgw.wire.messages import MAX_LINE, Desired
from llmgw.wire.parts import MAX_ORDER, MAX_PARTS, Joiner, split
from tests.fleetlink import order


def test_the_ceiling_doubles_up_to_the_cap():
    """1, 2, 4, 8, then 15 s for ever, times a random part of it."""
    backoff = Backoff(lambda: 1.0)
    assert [backoff.next() for _ in range(7)] == [1, 2, 4, 8, 15, 15, 15]
    backoff = Backoff(lambda: 0.25)
    assert [backoff.next() for _ in range(3)] == [0.25, 0.5, 1.0]


def test_ten_thousand_failures_do_not_overflow():
    """A node that is refused for weeks still waits 15 s."""
    backoff = Backoff(lambda: 1.0, failures=10_000)
    assert backoff.next() == 15


def test_only_a_link_that_lasted_resets_it():
    """59 s are a failure like any other; 60 s begin anew."""
    backoff = Backoff(lambda: 1.0)
    assert [backoff.next(), backoff.next()] == [1, 2]
    assert backoff.lasted(59.9) is False
    assert backoff.next() == 4
    assert backoff.lasted(60.0) is True
    assert backoff.next() == 1


@given(st.lists(st.integers(0, 200_000), max_size=30))
def test_parts_fit_and_make_the_whole_again(sizes):
    """Every part fits in a line, and joining gives all orders in their order."""
    orders = [order(f"m/{n}/0", f"op{n}", filler="x" * size) for n, size in enumerate(sizes)]
    parts = split(7, "cp1", 11, orders, none_too_long)
    assert all(len(encode(part)) <= MAX_LINE for part in parts)
    joiner = Joiner()
    wholes = [whole for part in parts if (whole := joiner.add(part))]
    assert wholes == [Desired(7, "cp1", 11, 1, 1, tuple(orders))]


def none_too_long(order, size):
    raise AssertionError(f"{order.shard}: {size}")


def parts_of(revision, epoch=7):
    return split(epoch, "cp1", revision, [order(f"m/{n}/0", filler="x" * 200_000) for n in range(3)], none_too_long)


@given(
    st.lists(st.sampled_from([10, 300_000, MAX_ORDER - 1000, MAX_ORDER, 2**20, 2**21]), max_size=8),
    st.sampled_from("x\u00e9\x01\U0001f600"),
)
def test_an_order_that_fits_no_line_is_left_out_of_the_others(sizes, letter):
    """Whatever its letters take as JSON; what goes fits in lines and is all but those that are named."""
    orders = [order(f"m/{n}/0", f"op{n}", filler=letter * size) for n, size in enumerate(sizes)]
    out = []
    parts = split(7, "cp1", 11, orders, lambda order, size: out.append((order, size)))
    assert all(len(encode(part)) <= MAX_LINE for part in parts)
    assert all(size > MAX_ORDER for _, size in out)
    assert [each for part in parts for each in part.orders] == [each for each in orders if each not in [left for left, _ in out]]
    assert {each.operation for each, _ in out} >= {f"op{n}" for n, size in enumerate(sizes) if size >= MAX_ORDER}


def test_parts_of_two_states_are_never_mixed():
    """A newer state that begins before the older one is whole throws the older one away."""
    old, new = parts_of(11), parts_of(12)
    joiner = Joiner()
    assert len(old) == len(new) == 3
    assert [joiner.add(part) for part in (old[0], old[1], new[0], old[2], new[1], new[2])] == [None] * 6
    assert [bool(joiner.add(part)) for part in new] == [False, False, True]


def test_a_missing_or_repeated_part_makes_no_whole():
    """Half a truth is no truth: it would stop engines."""
    parts, joiner = parts_of(11), Joiner()
    for sequence in ([0, 2], [1, 2], [0, 0, 2], [2, 1, 0]):
        assert not any(joiner.add(parts[n]) for n in sequence)
    assert [bool(joiner.add(part)) for part in parts] == [False, False, True]


def test_absurd_part_numbers_are_ignored():
    """Part 0, part 3 of 2, and more parts than anybody sends."""
    whole = Desired(7, "cp1", 11, 1, 1, ())
    for part, parts in ((0, 1), (3, 2), (-1, 1), (1, MAX_PARTS + 1)):
        assert Joiner().add(evolve(whole, part=part, parts=parts)) is None
    assert Joiner().add(whole) == whole
