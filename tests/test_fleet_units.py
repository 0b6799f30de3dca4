"""Durations and sizes as operators write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.fleet.units import parse_duration, parse_size, show_duration, show_size


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("5s", 5), ("1.5m", 90), ("10m", 600), ("1h", 3600), ("90d", 90 * 86400)]
)
def test_durations(text, seconds):
    """Each unit of the manual is read."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5 s", "s", "-5s", "1_0s", "٥s", "5S", "5s\n", "1e3s", "5sec"])
def test_what_is_not_a_duration_is_refused(text):
    """A bare number has no unit, and other scripts' digits are not digits here."""
    with pytest.raises(ValueError, match="is not a duration: write"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "count"), [("64MiB", 2**26), ("20GiB", 20 * 2**30), ("80GB", 80 * 10**9), ("1.5KiB", 1536)])
def test_sizes(text, count):
    """Binary and decimal units differ."""
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "64", "64M", "64 MiB", "-1MiB", "64mib"])
def test_what_is_not_a_size_is_refused(text):
    """A size has a unit, spelled as in the manual."""
    with pytest.raises(ValueError, match="is not a size: write"):
        parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.42, "0.4 s"), (3, "3 s"), (131, "2 m 11 s"), (120, "2 m"), (6 * 86400 + 5, "6 d"), (3661, "1 h 1 m")]
)
def test_durations_shown(seconds, text):
    """At most two units."""
    assert show_duration(seconds) == text


@given(st.integers(0, 2**50))
def test_a_shown_size_is_near(count):
    """Rounded to one decimal, never another unit's magnitude."""
    number, unit = show_size(count).split(" ")
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert abs(float(number) * factor - count) <= factor * 0.051
