"""Placement: where replicas go, what refuses them, and that what is said about it is true."""

from __future__ import annotations

from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmgw.fleet.model import Parallel, Place, Profile, Resources
from llmgw.fleet.node import Device, DeviceProcess, Fabric, Installation, Inventory, NodeFacts, NodeState
from llmgw.fleet.shard import WeightFiles
from llmgw.interfaces import Needs
from llmgw.planning.checks import Want
from llmgw.planning.explanation import Explanation, heading
from llmgw.planning.hints import with_hints
from llmgw.planning.placement import Ledger, Placement
from llmgw.planning.room import Candidate, Claim

GIB = 2**30


def device(node, index, total=80, used=0, processes=(), **more):
    return Device(f"{node}-{index}", index, "H100", total * GIB, memory_used=used * GIB, processes=processes, **more)


def candidate(name, devices=2, *, memory=64, engines=("vllm",), labels=(), fabrics=(), ports=(20000, 20099), **more):
    found = devices if isinstance(devices, tuple) else tuple(device(name, index) for index in range(devices))
    facts = NodeFacts(
        name,
        f"{name}.example",
        Inventory(8, memory * GIB, memory * GIB, found),
        ports,
        dict(labels),
        tuple(Fabric(fabric, f"{fabric}.{name}", "ib0") for fabric in fabrics),
        tuple(Installation(engine, engine) for engine in engines),
    )
    return Candidate(name, facts, **more)


def want(replica="m/1", devices=1, memory=20, *, ports=1, host=0, nodes=1, engine="vllm", share=False, weights=None, **place):
    profile = Profile(engine, weights, parallel=Parallel(nodes=nodes), resources=Resources(share=share), place=Place(**place))
    needs = Needs(devices, memory * GIB if memory is not None else None, host * GIB, ports)
    return Want(replica, replica.rpartition("/")[0], profile, needs)


def nodes_of(result):
    assert isinstance(result, Placement), result.line()
    return [allocation.node for allocation in result.allocations]


def refusal(ledger, wanted):
    result = ledger.place(wanted)
    assert isinstance(result, Explanation)
    full = ledger.explain(wanted)
    assert full.line() == result.line(), "the short form and the full one say the same"
    return full


def test_binpack_takes_the_node_with_fewest_free_devices_that_fits():
    """Whole nodes stay free for large replicas."""
    ledger = Ledger([candidate("a", 8), candidate("b", 2), candidate("c", 1)])
    assert nodes_of(ledger.place(want("m/1", devices=2))) == ["b"]
    assert nodes_of(ledger.place(want("m/2", devices=1))) == ["c"]
    assert nodes_of(ledger.place(want("m/3", devices=1))) == ["a"]


def test_devices_of_two_makers_never_serve_one_engine():
    """Whatever their order; where no maker has enough of them, that is the reason."""
    mixed = (device("a", 0, total=40), *(device("a", index, kind="amd") for index in (1, 2)))
    ledger = Ledger([candidate("a", mixed)])
    placed = ledger.place(want("m/1", devices=2))
    assert [allocation.devices for allocation in placed.allocations] == [("a-1", "a-2")]
    assert (
        "too few devices of one maker (need 2, most free 1)"
        in refusal(Ledger([candidate("a", mixed[:2])]), want("m/2", devices=2)).line()
    )


def test_copies_of_one_model_go_to_different_nodes_among_equals():
    """Two copies on one machine die together, so equal nodes are told apart by what they run."""
    ledger = Ledger([candidate("a", 0), candidate("b", 0)])
    assert nodes_of(ledger.place(want("m/1", devices=0))) == ["a"]
    assert nodes_of(ledger.place(want("m/2", devices=0))) == ["b"]
    assert nodes_of(ledger.place(want("m/3", devices=0))) == ["a"]


def test_spread_takes_the_emptiest_node():
    """H12: with spread, three replicas of a model on three nodes run on three nodes."""
    ledger = Ledger([candidate("a", 8), candidate("b", 4), candidate("c", 4)])
    placed = [nodes_of(ledger.place(want(f"m/{n}", spread=True)))[0] for n in range(1, 4)]
    assert placed == ["a", "b", "c"]


def test_a_device_belongs_to_one_shard_unless_both_share():
    """A device claimed without C{share} is not offered again, whatever memory it has left."""
    ledger = Ledger([candidate("a", 1)])
    nodes_of(ledger.place(want("m/1", memory=20, share=True)))
    nodes_of(ledger.place(want("n/1", memory=20, share=True)))
    said = refusal(ledger, want("o/1", memory=20))
    assert said.line() == "0/1 nodes can run this: 1 too few devices (need 1, most free 0)"
    assert "m/1, n/1" in said.lines()[0]


def test_a_build_for_processors_is_told_from_a_lack_of_devices():
    """A profile that asks for devices of an engine that can use none hears what to change."""
    node = candidate("a", 0)
    built = Installation("vllm", "vllm", version="0.32.0+cpu")
    node = evolve(node, facts=evolve(node.facts, installations=(built,)))
    wanted = want("m/1")
    said = refusal(Ledger([node]), evolve(wanted, profile=evolve(wanted.profile, engine="vllm")))
    assert "set `resources: {devices: 0}`" in "\n".join(said.lines())


def test_foreign_memory_is_respected_and_named_with_its_pid():
    """H3: 72 of 80 GiB are used by somebody else: the device is avoided, and the explanation says who."""
    other = DeviceProcess(8123, "python3", 72 * GIB)
    said = refusal(Ledger([candidate("a", (device("a", 0, used=72, processes=(other,)),))]), want())
    assert said.line() == "0/1 nodes can run this: 1 too little device memory (need 20.0 GiB on 1 device, most free 8.0)"
    assert said.lines() == [
        "  a  device memory  need 20.0 GiB on 1 device, most free 8.0 (gpu 0; 72.0 GiB held by pid 8123 python3, not ours)"
    ]


def test_every_failed_check_of_a_node_is_told_and_the_nearest_miss_first():
    """With need, have and holder; the nearest is a value for programs, too."""
    far, near = candidate("a", 1, memory=10), candidate("b", 2, labels={"pool": "x"})
    nodes_of((ledger := Ledger([far, near])).place(want("o/1", labels={"pool": "x"})))
    said = refusal(ledger, want("m/1", 2, 40, host=30, labels={"pool": "x"}))
    assert [[check.name for check in verdict.checks] for verdict in said.verdicts] == [
        ["labels", "devices", "host_memory"],
        ["devices"],
    ]
    first, *rest = said.lines()
    assert first.split()[:2] == ["b", "devices"] and "need 2, most free 1 (o/1)" in first
    assert [row.split()[0] for row in rest[:3]] == ["a", "devices", "host"] and "need 30.0 GiB, most free 10.0" in rest[2]
    assert said.data()["nearest"] == said.data()["nodes"][1] and said.data()["nearest"]["node"] == "b"


def test_memory_of_an_ended_engine_is_not_offered_before_it_is_back():
    """T1: the claim is gone, but our engine's process is still seen holding the memory."""
    ours = DeviceProcess(7, "vllm", 70 * GIB, shard="old/1/0")
    ledger = Ledger([candidate("a", (device("a", 0, used=70, processes=(ours,)),))])
    assert refusal(ledger, want()).verdicts[0].checks[0].have == 10 * GIB


def test_observed_use_within_the_claim_counts_once():
    """A running engine's memory is its claim; it is not taken for somebody else's as well."""
    claim = Claim("old/1/0", ("a-0",), 40 * GIB, share=True, resident=True)
    for processes in ((), (DeviceProcess(7, "vllm", 38 * GIB, shard="old/1/0"),)):
        node = candidate("a", (device("a", 0, used=38, processes=processes),), claims=(claim,))
        assert nodes_of(Ledger([node]).place(want(memory=40, share=True))) == ["a"]


def test_unknown_memory_takes_a_whole_unused_device():
    """Unknown is unknown, never 0: an engine of unknown need gets a device that nobody uses."""
    busy = candidate("a", (device("a", 0, used=30),))
    assert "1 with other use of the device" in refusal(Ledger([busy]), want(memory=None)).line()
    idle = candidate("b", 1)
    assert nodes_of(Ledger([busy, idle]).place(want(memory=None))) == ["b"]


def test_sick_missing_and_parent_devices_are_not_used():
    """H7, H8: a device with a problem, one that is missing and a GPU cut into instances take nothing."""
    devices = (
        device("a", 0, problem="Xid 79"),
        device("a", 1, missing_since=5.0),
        device("a", 2),
        device("a", 3, parent="a-2"),
    )
    ledger = Ledger([candidate("a", devices)])
    placed = ledger.place(want())
    assert placed.allocations[0].devices == ("a-3",)
    assert "gpu 0: Xid 79" in refusal(ledger, want("n/1")).lines()[0]


def test_every_kind_of_refusal_is_counted_and_adds_up():
    """One line tells the commonest reason first, and the counts are all nodes looked at."""
    fleet = [
        candidate("a", 1),
        candidate("b", 1),
        candidate("c", 4, draining=True),
        candidate("d", 4, state=NodeState.UNREACHABLE, note="2 m 11 s"),
        candidate("e", 4, engines=("llamacpp",)),
        Candidate("f", None, NodeState.JOINING),
    ]
    said = refusal(Ledger(fleet), want(devices=2))
    assert said.line() == (
        "0/6 nodes can run this: 2 too few devices (need 2, most free 1), "
        "1 draining, 1 joining, 1 unreachable, 1 without engine vllm"
    )
    assert sum(said.data()["counts"].values()) == said.looked == 6
    assert "  d  unreachable" in said.lines()[3] and "2 m 11 s" in said.lines()[3]


def test_no_node_at_all_is_said():
    """An empty fleet has its own words."""
    said = refusal(Ledger([]), want())
    assert said.line() == "0/0 nodes can run this: no node has registered yet"
    assert "llmgw pki node" in said.lines()[0] and "llmgw refusals" in said.lines()[0]


def test_a_node_without_folders_of_weights_is_told_apart():
    """A new node's agent.yaml names none: the key to write is named, not a file that is missing."""
    nowhere = candidate("a", weights={"w.gguf": WeightFiles("w.gguf", found=False)})
    assert "(models: [" in refusal(Ledger([nowhere]), want(weights="w.gguf")).lines()[0]


def test_labels_fabric_weights_and_exclusion_are_checked():
    """Each is a check with its own words."""
    looked = WeightFiles("w.gguf", found=False, looked=("/m/w.gguf",))
    nodes = [
        candidate("a", labels={"pool": "b"}.items()),
        candidate("b", labels={"pool": "a"}.items()),
        candidate("c", labels={"pool": "a"}.items(), fabrics=("f",)),
        candidate("d", labels={"pool": "a"}.items(), fabrics=("f",), weights={"w.gguf": looked}),
        candidate("e", labels={"pool": "a"}.items(), fabrics=("f",), weights={"w.gguf": WeightFiles("w.gguf", True)}),
    ]
    wanted = evolve(want(weights="w.gguf", labels={"pool": "a"}, fabric="f"), excluded={"e": "it crashed there 3 times"})
    texts = [verdict.checks[0].text for verdict in refusal(Ledger(nodes), wanted).verdicts]
    assert texts == [
        "without label pool=a",
        "not on fabric f",
        "not yet searched for the weights",
        "without the weights",
        "excluded for now",
    ]


def test_ports_rest_before_they_are_used_again():
    """The port used longest ago comes first, so that a dead engine's port is not taken at once."""
    node = candidate("a", 0, ports=(20000, 20003), claims=(Claim("x/1/0", ports=(20001,)),), last_port=20001)
    ledger = Ledger([node])
    taken = [ledger.place(want(f"m/{n}", devices=0)).allocations[0].ports for n in range(1, 4)]
    assert taken == [(20002,), (20003,), (20000,)]
    assert "1 without free ports in a row (need 1, most free 0)" in refusal(ledger, want("m/4", devices=0)).line()
    assert ledger.ports("a", 1) is None


def test_a_replica_of_two_nodes_stays_inside_one_fabric():
    """Equal shares on nodes of one fabric, the head's address on it, all or nothing."""
    fleet = [candidate("a", 4, fabrics=("f",)), candidate("b", 4, fabrics=("g",)), candidate("c", 4, fabrics=("f", "g"))]
    ledger = Ledger(fleet)
    first = ledger.place(want("m/1", devices=4, nodes=2, ports=3))
    assert nodes_of(first) == ["a", "c"]
    head, tail = first.allocations
    assert head.head == tail.head == "f.a" and tail.peers == ("f.a", "f.c") and tail.interface == "ib0"
    assert head.head_port == head.ports[1] and tail.rank == 1 and tail.nodes == 2
    said = refusal(ledger, want("m/2", devices=4, nodes=2))
    assert said.counts().keys() == {"too few devices", "with too few such nodes on one fabric"}
    assert nodes_of(ledger.place(want("n/1", devices=4))) == ["b"], "nothing is held for what was refused"


def test_twenty_race_for_the_last_device():
    """H11: one is placed, nineteen are explained."""
    ledger = Ledger([candidate("a", 1)])
    results = [ledger.place(want(f"m{n}/1")) for n in range(20)]
    assert sum(isinstance(result, Placement) for result in results) == 1
    assert all(result.model == f"m{n}" for n, result in enumerate(results) if isinstance(result, Explanation))


def test_the_same_weights_are_fetched_and_the_same_node_left_out_each_for_its_own_model():
    """What is remembered of a refusal is not handed to a model whose words would differ."""
    node = candidate("a", 0, weights={"hf:org/x": WeightFiles("hf:org/x", found=False, looked=("/m",))})
    ledger = Ledger([node, candidate("b", 0)])
    for model in ("m", "n"):
        wanted = evolve(want(f"{model}/1", devices=0, weights="hf:org/x"), excluded={"b": f"{model} crashed there"})
        result = ledger.place(wanted)
        details = [verdict.checks[0].detail for verdict in result.verdicts]
        assert details == [f"hf:org/x is not at /m: llmgw fetch {model} --node a", f"{model} crashed there"]


def test_hints_name_what_would_help_and_only_that():
    """Every hint was placed; a change that does not suffice is not offered."""
    other = DeviceProcess(8123, "python3", 72 * GIB)
    fleet = [
        candidate("a", (device("a", 0, used=72, processes=(other,)),)),
        candidate("b", 1, state=NodeState.UNREACHABLE),
        candidate("c", 0, state=NodeState.UNREACHABLE),
        candidate("d", 1, claims=(Claim("old/1/0", ("d-0",), 60 * GIB, resident=True),)),
    ]
    ledger = Ledger(fleet)
    said = with_hints(refusal(ledger, want()), ledger, want())
    assert {hint.text for hint in said.hints} == {"pid 8123 on a ended", "b came back", "old/1 on d stopped"}
    assert said.lines()[-1].startswith("It would fit if:  ")
    assert heading(said, 2, 1) == "m wants 2 replicas and has 1. The second cannot be placed: 0/4 nodes can run this."


def test_a_cordoned_device_takes_nothing_and_that_it_were_open_is_a_hint():
    """With who closed it in the explanation; a missing one closed beside it is no hint, since opening it would not help."""
    devices = (device("a", 0), device("a", 1, missing_since=1.0))
    cordons = {"a-0": "cordoned by alice: fan", "a-1": "missing"}
    ledger = Ledger([candidate("a", devices, device_cordons=cordons)])
    said = with_hints(refusal(ledger, want()), ledger, want())
    assert said.verdicts[0].checks[0].detail == "gpu 0: cordoned by alice: fan; gpu 1: missing"
    assert [hint.text for hint in said.hints] == ["gpu 0 on a were uncordoned"]


def test_a_variant_of_the_profile_is_a_hint_when_it_fits():
    """A smaller context is offered once it has been placed."""
    ledger = Ledger([candidate("a", (device("a", 0, total=24),))])
    wanted = want(memory=40)
    variants = [(want(memory=30), "context were at most 16384"), (want(memory=20), "context were at most 8192 (now 32768)")]
    said = with_hints(refusal(ledger, wanted), ledger, wanted, variants)
    assert [hint.text for hint in said.hints] == ["context were at most 8192 (now 32768)"]


GPUS = st.lists(st.tuples(st.integers(8, 80), st.integers(0, 80), st.sampled_from(["", "", "Xid 79"])), max_size=4)
FLEET = st.lists(
    st.tuples(GPUS, st.sampled_from(list(NodeState)), st.booleans(), st.sampled_from(["vllm", "other"]), st.integers(0, 2)),
    max_size=5,
)
WANTS = st.lists(
    st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(1, 80)), st.booleans(), st.integers(1, 2), st.booleans()),
    min_size=1,
    max_size=8,
)


# Ports run out between two wants of one kind, so the second is refused for another reason than the first.
PORTS_LEFT = [([(8, 0, ""), (8, 0, "")], NodeState.READY, False, "vllm", 1)]
LAST_PORTS = [(0, None, False, 1, False)] * 5 + [(2, None, True, 2, False), (0, None, False, 1, False), (2, None, True, 2, False)]
# The same for one node: fewer devices are left when it is asked again.
DEVICES_LEFT = [([(80, 0, "")] * 2, NodeState.READY, False, "vllm", 0)]
LAST_DEVICES = [(3, 1, False, 1, False), (1, 1, False, 1, False), (3, 1, False, 1, False)]


def build(fleet):
    for number, (gpus, state, cordoned, engine, fabrics) in enumerate(fleet):
        name = f"n{number}"
        devices = tuple(
            device(name, index, total, min(used, total), problem=problem) for index, (total, used, problem) in enumerate(gpus)
        )
        yield candidate(
            name, devices, engines=(engine,), state=state, cordoned=cordoned, fabrics=("f", "g")[:fabrics], ports=(20000, 20005)
        )


@given(FLEET, WANTS)
@example(PORTS_LEFT, LAST_PORTS)
@example(DEVICES_LEFT, LAST_DEVICES)
@settings(max_examples=200, deadline=None)
def test_laws_of_placement(fleet, wants):
    """Refusals have a check whose need exceeds its have, counts add up, claims never overlap, hints fit."""
    ledger = Ledger(build(fleet))
    held, ports = {}, set()
    for number, (devices, memory, share, nodes, spread) in enumerate(wants):
        wanted = want(f"m{number}/1", devices, memory, share=share, nodes=nodes, spread=spread)
        result = ledger.place(wanted)
        if isinstance(result, Explanation):
            assert result.looked == len(fleet) == sum(len(checks) for checks in result.counts().values())
            full = ledger.explain(wanted)
            assert full.line() == result.line()
            assert all(check.need > check.have for verdict in full.verdicts for check in verdict.checks)
            assert all(verdict.checks for verdict in full.verdicts)
            for hint in with_hints(full, ledger, wanted).hints:
                assert hint.text
            continue
        assert len({allocation.node for allocation in result.allocations}) == nodes
        for allocation in result.allocations:
            assert len(set(allocation.devices)) == devices
            for uuid in allocation.devices:
                assert all(other and share for other in held.get(uuid, []))
                held.setdefault(uuid, []).append(share)
            for port in allocation.ports:
                assert (allocation.node, port) not in ports
                ports.add((allocation.node, port))


@given(FLEET, WANTS)
@settings(max_examples=50, deadline=None)
def test_placement_is_deterministic(fleet, wants):
    """The same fleet and wants, in whatever order the nodes come, give the same plan."""
    wanted = [want(f"m{n}/1", d, m, share=s, nodes=k, spread=p) for n, (d, m, s, k, p) in enumerate(wants)]
    one, two = Ledger(build(fleet)), Ledger(reversed(list(build(fleet))))
    assert [one.place(w) for w in wanted] == [two.place(w) for w in wanted]
