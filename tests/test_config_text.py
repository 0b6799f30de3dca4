"""YAML to items: what a scalar means, where a value stands, and what is refused before anything is read from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.config.text import MAX_BYTES, Item, parse, read_file
from llmgw.errors import Invalid

FILE = Path("/x/a.yaml")


def tree(text: str) -> Item:
    item, problems = parse(FILE, text)
    assert not problems
    return item


def refused(text: str) -> str:
    """The only problem of a text that is no configuration at all."""
    with pytest.raises(Invalid) as caught:
        parse(FILE, text)
    (problem,) = caught.value.problems
    return str(problem)


def plain(item: Item):
    if isinstance(item.value, dict):
        return {key: plain(value) for key, value in item.value.items()}
    return [plain(value) for value in item.value] if isinstance(item.value, list) else item.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a", "a"), ("on", "on"), ("no", "no"), ("1:30", "1:30"), ("010", "010"), ("1_000", "1_000"), ("0x10", "0x10"),
        ("2026-01-01", "2026-01-01"), ("1e5", "1e5"), ("true", True), ("False", False), ("~", None), ("", None), ("null", None),
        ("12", 12), ("-3", -3), ("0.90", 0.9), ("1.5e+3", 1500.0), ('"12"', "12"), ("'true'", "true"), ("!!str 5", "5"),
        (".inf", ".inf"), ("99999999999999999999", "99999999999999999999"), ("٣", "٣"),
    ],
)  # fmt: skip
def test_scalars_mean_what_yaml_1_2_says(text, value):
    """No text becomes a truth, an octal or sexagesimal number or a date behind the operator's back."""
    found = tree(f"k: {text}").get("k").value
    assert found == value
    assert type(found) is type(value)


def test_every_value_knows_its_line_and_path():
    """A problem can name where it is: the key's line, and models by their names."""
    item = tree("a: 1\nmodels:\n  - name: smol\n    profile:\n      context: 4\n  - [x]\n")
    assert (item.get("a").where, item.get("a").path) == ("/x/a.yaml:1", "a")
    context = item.get("models").value[0].get("profile", "context")
    assert (context.where, context.path) == ("/x/a.yaml:5", "models.smol.profile.context")
    assert item.get("models").value[1].value[0].path == "models.1.0"
    assert item.get("models").where == "/x/a.yaml:2"


def test_a_key_that_stands_twice_is_a_problem():
    """YAML parsers let the last one win unseen."""
    _, problems = parse(FILE, "a: 1\nb: 2\na: 3\n")
    assert [str(problem) for problem in problems] == ["/x/a.yaml:3: a stands twice, first in line 1"]


def test_anchors_and_merge_keys_work():
    """Fifty models may share one profile; what stands in the section itself wins."""
    item = tree("b: &b {x: 1, y: 2}\nc: {<<: *b, y: 3}\nd: {<<: [{x: 7}, *b]}\ne: *b\n")
    assert plain(item) == {"b": {"x": 1, "y": 2}, "c": {"x": 1, "y": 3}, "d": {"x": 7, "y": 2}, "e": {"x": 1, "y": 2}}


def test_aliases_cannot_expand_without_bound():
    """The billion laughs end early, and so does a list that holds itself."""
    text = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
    text += "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    assert "values once its aliases are filled in" in refused(text)
    assert "nested too deeply" in refused("a: &a [*a]")
    assert "nested too deeply" in refused("a: &a {<<: *a}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1,\n", "/x/a.yaml:2: is not YAML: while parsing a flow"),
        ("a: b\n---\nc: d\n", "/x/a.yaml:2: is not YAML: expected a single document"),
        ("a: b\nc: \x01\n", "/x/a.yaml:2: is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("- " * 5000, "is not YAML"),
        ("router:\n  listen: [::1]:8080\n", 'did not find expected node content: put the address in quotes: "[::1]:8080"'),
        ("x" * (MAX_BYTES + 1), "is larger than 4 MiB"),
    ],
    ids=["half", "two", "control", "deep", "blocks", "address", "large"],
)  # fmt: skip
def test_what_is_no_yaml_is_refused_with_its_line(text, says):
    """A half-written file names the line where it ends, and the commonest mistake its cure."""
    assert says in refused(text)


def test_no_tag_makes_a_python_object():
    """A foreign tag is a problem and nothing is built from it."""
    _, problems = parse(FILE, "a: !!python/object/apply:os.system [true]\nb: !mine x\n")
    assert problems and all(problem.code == "tag" for problem in problems)


def test_an_empty_file_is_an_empty_section():
    """Comments only, nothing at all: every key is missing, no more."""
    assert tree("").value == {} == tree("# nothing\n").value


def test_reading_a_file_says_what_is_wrong_with_it(tmp_path):
    """Missing, a folder, not UTF-8: one sentence each; a byte order mark is no part of the text."""
    for path, says in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(Invalid, match=says):
            read_file(path)
    (tmp_path / "latin").write_bytes(b"a: \xe4\n")
    with pytest.raises(Invalid, match="is not UTF-8: byte 3 is 0xe4"):
        read_file(tmp_path / "latin")
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_file(tmp_path / "bom") == "a: 1\n"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(min_size=1), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(min_size=1), VALUES, max_size=4))
def test_whatever_yaml_wrote_is_read_as_it_was(value):
    """Texts that look like numbers, truths or dates come back as texts: the writer quotes more than we need."""
    assert plain(tree(yaml.safe_dump(value))) == value


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_is_a_tree_or_one_refusal(text):
    """No input makes a traceback."""
    try:
        parse(FILE, text)
    except Invalid as error:
        assert error.problems[0].where.startswith("/x/a.yaml")
