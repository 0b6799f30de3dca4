"""The models section: what each key allows, texts for the store, and what a new catalog changes."""

# ruff: noqa: E501 (tables of files and what is said of them)

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.config.catalog import diff_catalogs, dump_catalog, load_catalog, names, read_catalog
from llmgw.config.models import MODEL_NAME
from llmgw.errors import Invalid
from llmgw.fleet.model import (
    Catalog,
    Lora,
    Model,
    Parallel,
    Place,
    Profile,
    Resources,
    Routing,
    Scale,
    StaticEndpoint,
)

FILE = Path("/etc/llmgw/models.yaml")


def read(*models: str) -> Catalog:
    return read_catalog(FILE, "models:\n" + "".join(f"- {model}\n" for model in models))


def problems(*models: str) -> list[str]:
    with pytest.raises(Invalid) as caught:
        read(*models)
    return [str(problem).removeprefix("/etc/llmgw/models.yaml:") for problem in caught.value.problems]


def test_a_file_with_models_only_needs_no_fleet_section():
    """What llmgw apply takes: a models section alone, with relative key files from that file's folder."""
    (model,) = read("{name: a, endpoints: [{url: 'http://h:1/v1/', key_file: k}], profile: {engine: vllm}}").models
    assert model.endpoints == (StaticEndpoint("http://h:1/v1", key_file="/etc/llmgw/k"),)
    assert model.profile == Profile("vllm")


def test_a_whole_server_file_is_taken_and_checked_too():
    """apply server.yaml uses its models and still says what else is wrong in it."""
    text = "router: {workers: 1}\nmodels:\n- {name: a, endpoints: [{url: 'http://h/v1'}]}\n"
    assert [model.name for model in read_catalog(FILE, text).models] == ["a"]
    with pytest.raises(Invalid, match="router.workers"):
        read_catalog(FILE, text.replace("1}", "x}"))


def test_every_key_of_a_model():
    """Each key reaches its field in the fleet's own units."""
    (model,) = read(
        """name: org/a:7b
  aliases: [b, c]
  replicas: {min: 0, max: 4, idle_after: 15m}
  routing: {policy: round_robin, max_in_flight: 8, max_waiting: 0, fallbacks: []}
  loras: [{name: a-lora, weights: loras/a}]
  profile:
    engine: vllm-next
    weights: hf:org/name@main
    context: 131072
    parallel: {tensor: 4, pipeline: 2, data: 2, expert: true, nodes: 2}
    resources: {devices: 8, device_memory: 80GB, host_memory: 1GiB, share: true}
    arguments: {threads: 2, rope-scaling: {type: yarn, factor: 4.0}, enforce-eager: false, x: [a, 1], y: null}
    extra_argv: [--seed, 7]
    environment: {A: 1, B: true, C: 0.90, D: ""}
    place: {labels: {pool: a}, fabric: rack3, spread: true}
    start_timeout: 90m
    health: /healthz
    probe: embedding"""
    ).models
    assert model == Model(
        "org/a:7b",
        ("b", "c"),
        Scale(0, 4, 900.0),
        Profile(
            "vllm-next",
            "hf:org/name@main",
            131072,
            Parallel(4, 2, 2, True, 2),
            Resources(8, 80 * 10**9, 2**30, True),
            {"threads": 2, "rope-scaling": {"type": "yarn", "factor": 4.0}, "enforce-eager": False, "x": ["a", 1], "y": None},
            ("--seed", "7"),
            {"A": "1", "B": "true", "C": "0.90", "D": ""},
            Place({"pool": "a"}, "rack3", True),
            5400.0,
            health="/healthz",
            probe="embedding",
            loras=(Lora("a-lora", "loras/a"),),
        ),
        routing=Routing("round_robin", 8, 0),
    )
    assert names(model) == ("org/a:7b", "b", "c", "a-lora")


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("2", Scale(2, 2)),
        ("0", Scale(0, 0)),
        ("{min: 2}", Scale(2, 2)),
        ("{max: 3}", Scale(1, 3)),
        ("{min: 0}", Scale(0, 1)),
        ("{max: 3, target: 8, up_after: 30s, down_after: 1h}", Scale(1, 3, None, 8, 30.0, 3600.0)),
    ],
)
def test_replica_counts(text, scale):
    """A number is fixed; zero is an order; what is left out follows from what is there."""
    assert read(f"{{name: a, replicas: {text}, profile: {{engine: e}}}}").models[0].replicas == scale


PROFILES = {
    "{}": "engine is missing",
    "{engine: command}": "argv is missing: engine `command` runs what it says",
    "{engine: e, argv: []}": "argv: found a list, want a list of at least 1",
    "{engine: command, argv: [a, {port}]}": 'argv.1: found a section, want text: put it in quotes: "{port}"',
    "{engine: V}": "engine: found 'V', want an installation's name: llamacpp, vllm, vllm-next, sglang, trtllm, command",
    "{engine: e, contxt: 1}": "contxt: unknown key, did you mean context?",
    "{engine: e, devices: 1}": "devices: unknown key, it belongs under resources",
    "{engine: e, context: 4k}": "context: found '4k', want a whole number from 1 to 2147483648",
    "{engine: e, context: true}": "context: found true, want a whole number from 1 to 2147483648",
    "{engine: e, weights: ../x}": "weights: found '../x', want a path under the node's model roots without .., an absolute path, "
    "or hf:ORG/NAME",
    "{engine: e, weights: --x}": "weights: found '--x', want a path under the node's model roots without .., an absolute path, "
    "or hf:ORG/NAME",
    "{engine: e, weights: 'hf:x'}": "weights: found 'hf:x', want hf:ORGANISATION/NAME or hf:ORGANISATION/NAME@REVISION",
    "{engine: e, arguments: {--threads: 2}}": "arguments.--threads: found '--threads' as a name, want an option without its dashes",
    "{engine: e, environment: {A B: 2}}": "environment.A B: found 'A B' as a name, want a variable's name: letters, digits and _",
    "{engine: e, resources: {device_memory: 20}}": "resources.device_memory: found 20, want a size: 64MiB, 20GiB or 80GB",
    "{engine: e, resources: {devices: -1}}": "resources.devices: found -1, want a whole number from 0 to 64",
    "{engine: e, parallel: {tensor: 3, nodes: 2}}": "parallel.nodes: tensor 3 x pipeline 1 x data 1 is 3 ranks, "
    "which cannot be spread evenly over 2 nodes",
    "{engine: e, parallel: {expert: yes}}": "parallel.expert: found 'yes', want true or false",
    "{engine: e, start_timeout: 30}": "start_timeout: found 30, want a duration: 500ms, 5s, 10m, 1h or 90d",
    "{engine: e, health: health}": "health: found 'health', want a path that starts with /",
    "{engine: e, extra_argv: --x}": "extra_argv: found '--x', want a list",
    '{engine: e, extra_argv: ["a\\0b"]}': "extra_argv.0: found 'a\\x00b', want text",
}


@pytest.mark.parametrize(("profile", "problem"), PROFILES.items())
def test_each_problem_of_a_profile(profile, problem):
    """What was found and what is allowed, under the model's name."""
    (found,) = problems(f"{{name: m, profile: {profile}}}")
    where = "2: models.m.profile"
    assert found == (f"{where}: {problem}" if " is missing" in problem else f"{where}.{problem}")


MODELS = {
    "{}": "models.0: name is missing",
    "{name: a}": "models.a: has neither a profile (llmgw runs it) nor endpoints (it runs elsewhere)",
    "{name: a, endpoints: []}": "models.a.endpoints: found a list, want a list of at least 1",
    "{name: a, profile: {engine: e}, replicas: -1}": "models.a.replicas: found -1, want a whole number from 0 to 10000 or "
    "{min, max, idle_after, target, up_after, down_after}",
    "{name: a, profile: {engine: e}, replicas: {min: 2, max: 1}}": "models.a.replicas.max: max is 1, min is 2: max may not be below min",
    "{name: a, profile: {engine: e}, replicas: {min: 2, max: 2, idle_after: 5m}}": "models.a.replicas.idle_after: has no effect where "
    "min is max",
    "{name: a, profile: {engine: e}, replicas: {max: 1, target: 5}}": "models.a.replicas.target: has no effect where min is max",
    "{name: a, profile: {engine: e}, replicas: {max: 2, target: 0}}": "models.a.replicas.target: found 0, want a whole number from 1 "
    "to 100000",
    "{name: a, endpoints: [{url: 'http://h/v1'}], replicas: 2}": "models.a.replicas: replicas needs a profile: llmgw does not run what "
    "is behind endpoints",
    "{name: a, endpoints: [{url: 'http://h'}]}": "models.a.endpoints.0.url: found 'http://h', want an address that ends in /v1: "
    "http://h/v1",
    "{name: a, profile: {engine: e}, routing: {policy: least_costs}}": "models.a.routing.policy: found 'least_costs', want least_cost "
    "or least_inflight or round_robin or weighted (did you mean least_cost?)",
    "{name: a, profile: {engine: e}, routing: {fallbacks: [b]}}": "models.a.routing.fallbacks: found 'b', want the name of another "
    "model of this file",
    "{name: a, profile: {engine: e}, aliases: [a]}": "models.a.aliases: the name a is taken by a (line 2)",
    "5": "models.0: found 5, want a section with aliases, drain, endpoints, loras, name, profile, reconcile, replicas, rollout, routing",
}


@pytest.mark.parametrize(("model", "problem"), MODELS.items())
def test_each_problem_of_a_model(model, problem):
    """What was found and what is allowed."""
    assert problems(model) == [f"2: {problem}"]


def test_a_model_that_fits_in_no_order_is_refused():
    """Everything that goes to a node counts, aliases, too; what is only routed does not."""
    long = "x" * 100_000
    argv = f"{{engine: command, argv: [a, {long}, {long}, {long}]}}"
    (found,) = problems(f"{{name: m, profile: {argv}}}")
    assert found == (
        "2: models.m: takes 300065 bytes of JSON, at most 262144 go to a node with an order: shorten the profile's arguments, "
        "environment or argv"
    )
    (found,) = problems(f"{{name: m, profile: {{engine: e}}, aliases: [{', '.join(f'a{n}' for n in range(40_000))}]}}")
    assert found.startswith("2: models.m: takes ")
    read(f"{{name: m, endpoints: [{', '.join(['{url: http://h/v1}'] * 12_000)}]}}")
    read(f"{{name: m, profile: {{engine: command, argv: [a, {long}, {long}]}}}}")


def test_names_are_unique_over_the_whole_file():
    """Names, aliases and names of LoRA adapters live in one space, since clients ask in one."""
    assert problems(
        "{name: a, aliases: [x], profile: {engine: e}}",
        "{name: x, profile: {engine: e}}",
        "{name: b, aliases: [a], profile: {engine: e}, loras: [{name: x, weights: w}]}",
    ) == [
        "3: models.x.name: the name x is taken by a (line 2)",
        "4: models.b.aliases: the name a is taken by a (line 2)",
        "4: models.b.loras: the name x is taken by a (line 2)",
    ]


@pytest.mark.parametrize("url", ["ftp://h/v1", "http:///v1", "http://u:p@h/v1", "http://h/v1?x", "http://h/v1#x", "h/v1", "http://[::1/v1",
                                 "http://h:0/v1", "http://h:99999/v1", "http://h /v1", "http://h\u00e4/v1"])  # fmt: skip
def test_urls_that_are_none(url):
    """No user, query or fragment, a port that exists, no spaces, nothing beyond ASCII."""
    assert "want http://HOST:PORT/v1" in problems(f"{{name: a, endpoints: [{{url: '{url}'}}]}}")[0]


@pytest.mark.parametrize(
    "name", ["a", "llama-70b", "org/name", "a:7b", "gpt-4.1", "Qwen/Qwen2.5-7B-Instruct-AWQ", "a@b", "a+b", "7b", "a/1b"]
)
def test_names_that_models_have(name):
    """What model hubs and clients use."""
    assert MODEL_NAME.match(name)


@pytest.mark.parametrize(
    "name", ["", "-a", "a b", "a//b", "a/../b", "a/.", "a/", "a/1", "12", "/a", "a\n", "a.", "ä", "a" * 129, "a,b", "a?b"]
)
def test_names_that_models_may_not_have(name):
    """C{a/1} would read as the first replica of C{a}; dots as steps in a folder."""
    assert not MODEL_NAME.match(name)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
TEXTS = st.text(max_size=8)
SOME = st.integers(1, 2**31)
PROFILE = st.builds(
    Profile,
    engine=TEXTS,
    weights=st.none() | TEXTS,
    context=st.none() | SOME,
    parallel=st.builds(Parallel, SOME, SOME, SOME, st.booleans(), SOME),
    resources=st.builds(Resources, st.none() | SOME, st.none() | SOME, st.none() | SOME, st.booleans()),
    arguments=st.dictionaries(TEXTS, PLAIN, max_size=3),
    extra_argv=st.lists(TEXTS, max_size=2).map(tuple),
    environment=st.dictionaries(TEXTS, TEXTS, max_size=2),
    place=st.builds(Place, st.dictionaries(TEXTS, TEXTS, max_size=2), st.none() | TEXTS, st.booleans()),
    start_timeout=st.floats(0, 1e9),
    argv=st.lists(TEXTS, max_size=2).map(tuple),
    health=TEXTS,
    probe=st.sampled_from(("", "completion", "embedding", "none")),
    loras=st.lists(st.builds(Lora, TEXTS, TEXTS), max_size=2).map(tuple),
)
MODEL = st.builds(
    Model,
    name=TEXTS,
    aliases=st.lists(TEXTS, max_size=2).map(tuple),
    replicas=st.builds(Scale, SOME, SOME, st.none() | st.floats(0, 1e9)),
    profile=st.none() | PROFILE,
    endpoints=st.lists(st.builds(StaticEndpoint, TEXTS, st.none() | TEXTS, st.none() | TEXTS, SOME), max_size=2).map(tuple),
    routing=st.builds(Routing, TEXTS, st.none() | SOME, SOME, st.lists(TEXTS, max_size=2).map(tuple)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(MODEL, max_size=3).map(tuple))
def test_a_catalog_survives_its_text(models):
    """What the store keeps is the catalog, to the last number and generation."""
    catalog = Catalog(models)
    again = load_catalog(dump_catalog(catalog))
    assert again == catalog
    assert dump_catalog(again) == dump_catalog(catalog)
    assert [model.generation for model in again.models] == [model.generation for model in models]


def test_texts_of_other_versions():
    """A newer one's unknown key is ignored; defaults are not written, so that new fields change no old text."""
    assert load_catalog('{"models":[{"name":"a","colour":"red"}]}') == Catalog((Model("a"),))
    assert dump_catalog(Catalog((Model("a"),))) == '{"models":[{"name":"a"}]}'
    for text in ("", "{", "[]", '{"models":[{}]}', '{"models":[{"name":"a","replicas":{"min":"x"}}]}'):
        with pytest.raises(Invalid, match="the store's catalog cannot be read"):
            load_catalog(text)


A = Model("a", profile=Profile("vllm", weights="w", arguments={"max-num-seqs": 256}))
B = Model("b", ("bee",), endpoints=(StaticEndpoint("http://h/v1"),))


def test_a_diff_says_what_becomes_of_each_model():
    """Added, replaced, adjusted, unchanged and kept are told apart, with the keys that differ."""
    faster = evolve(A, profile=evolve(A.profile, arguments={"max-num-seqs": 512}))
    scaled = evolve(A, replicas=Scale(3, 3))
    c = Model("c", profile=Profile("e"))
    diff = diff_catalogs(Catalog((A, B)), Catalog((c, faster)))
    assert (diff.added, diff.kept, diff.removed, diff.unchanged) == ((c,), (B,), (), ())
    (change,) = diff.changed
    assert (change.name, change.replaced, change.facts) == ("a", True, (("arguments.max-num-seqs", 256, 512),))
    assert diff.catalog == Catalog((c, faster, B))
    (change,) = diff_catalogs(Catalog((A, B)), Catalog((scaled, B))).changed
    assert (change.replaced, change.facts) == (False, (("replicas.max", 1, 3), ("replicas.min", 1, 3)))


def test_absence_is_not_an_order():
    """A missing model is kept unless removals are allowed; an empty file removes nothing."""
    assert diff_catalogs(Catalog((A, B)), Catalog()).empty
    assert diff_catalogs(Catalog((A, B)), Catalog()).catalog == Catalog((A, B))
    diff = diff_catalogs(Catalog((A, B)), Catalog((A,)), allow_removals=True)
    assert (diff.removed, diff.catalog, diff.empty) == ((B,), Catalog((A,)), False)


def test_the_order_of_models_changes_nothing():
    """Moving a section in the file is no change."""
    assert diff_catalogs(Catalog((A, B)), Catalog((B, A))).empty


def test_a_kept_models_name_cannot_be_given_away():
    """Renaming a model and giving its old name to the new one as an alias needs the removal said."""
    with pytest.raises(Invalid, match="b is missing and would be kept, but its name bee is now a's"):
        diff_catalogs(Catalog((A, B)), Catalog((evolve(A, aliases=("bee",)),)))
    assert diff_catalogs(Catalog((A, B)), Catalog((evolve(A, aliases=("bee",)),)), allow_removals=True).removed == (B,)


def test_a_generation_covers_what_makes_an_engine_different_and_nothing_else():
    """Aliases, placement and counts cost nobody a reload; nor do fields that only have their default."""
    profile = Profile("vllm")
    same = [
        evolve(profile, place=Place({"a": "b"}, "f", True)), evolve(profile, start_timeout=1.0),
        evolve(profile, loras=(Lora("l", "w"),)), evolve(profile, resources=Resources(host_memory=5)),
    ]  # fmt: skip
    other = [
        evolve(profile, context=5), evolve(profile, parallel=Parallel(2)), evolve(profile, arguments={"a": 1}),
        evolve(profile, resources=Resources(devices=0)), evolve(profile, extra_argv=("a",)), evolve(profile, environment={"A": "b"}),
        evolve(profile, weights="w"), evolve(profile, argv=("a",)), Profile("vllm-next"),
    ]  # fmt: skip
    assert {one.generation("m") for one in same} == {profile.generation("m")}
    assert len({one.generation("m") for one in [profile, *other]} | {profile.generation("n")}) == len(other) + 2
