"""What a server asks and orders over a link: each question ends, orders are the newest, and one agent costs no other anything."""

from __future__ import annotations

import pytest
from twisted.internet.defer import CancelledError, Deferred

from llmgw.server.imembers import NodeAway, NotActing, Unanswered
from llmgw.wire.link import MAX_WAITING
from llmgw.wire.messages import Desired, Done, FetchLog, Goaway, Inspect, Report
from llmgw.wire.parts import Joiner
from tests.fleetlink import a_world, order
from tests.fleetport_peers import joined


@pytest.fixture
def world(tmp_path):
    yield from a_world(tmp_path)


def question(operation="o1", weights="m.gguf"):
    return Inspect(operation, 0, "", weights, "llamacpp")


class Asked:
    """The outcome of a question: C{got} is None until it has one."""

    def __init__(self, port, message=None, node="n1", timeout=30.0):
        self.got = None
        self.waiting = port.ask(node, message or question(), timeout)
        self.waiting.addBoth(lambda result: setattr(self, "got", getattr(result, "value", result)))


def test_a_question_carries_the_leadership_of_the_moment_and_gets_its_answer(world):
    """Two at once, of two kinds, each with its own."""
    port, agent = world.server(), world.agent("n1")
    world.linked(port)
    asked = []
    agent.node.answer = lambda message: asked.append(message) or Deferred()
    log = FetchLog("o2", 0, "", "m/1/0", 0, -100, 100)
    one, two = Asked(port), Asked(port, log)
    world.net.run(0.1)
    port.leadership.epoch = 8
    three = Asked(port, question("o3"))
    world.net.run(0.1)
    assert [(message.operation, message.epoch, message.leader) for message in asked] == [
        ("o1", 7, "cp1"),
        ("o2", 7, "cp1"),
        ("o3", 8, "cp1"),
    ]
    assert (one.got, two.got, three.got) == (None, None, None)
    agent.node.send(Done("o2", True, result={"text": "log"}))
    agent.node.send(Done("o1", False, "failed"))
    world.net.run(0.1)
    assert (one.got, two.got) == (Done("o1", False, "failed"), Done("o2", True, result={"text": "log"}))
    three.waiting.cancel()


def test_an_unanswered_question_ends_at_its_deadline_and_its_late_answer_is_nobodys(world):
    """Nor does a second answer to the same question go anywhere."""
    port, peer = world.server(), joined(world)
    late = Asked(port, timeout=2.5)
    world.net.run(2.4)
    assert late.got is None
    world.net.run(0.2)
    assert isinstance(late.got, Unanswered) and str(late.got) == "n1 did not answer in 2.5 s"
    again = Asked(port, question("o2"))
    world.net.run(0.1)
    peer.say(Done("o1", True), Done("o2", True), Done("o2", False))
    world.net.run(0.1)
    assert again.got == Done("o2", True)
    assert port.members.of("done") == []
    assert port.sessions()


def test_an_answer_to_what_nobody_asked_harms_nothing(world):
    """It can only be the outcome of an order, so the control plane sees it; another node's question is not answered by it."""
    port = world.server()
    joined(world, "n1")
    other = joined(world, "n2")
    asked = Asked(port)
    world.net.run(0.1)
    other.say(Done("o1", True), Done("never heard of", True))
    world.net.run(0.1)
    assert asked.got is None
    assert port.members.of("done") == [("n2", "7.2", Done("o1", True)), ("n2", "7.2", Done("never heard of", True))]
    asked.waiting.cancel()


def test_open_questions_are_bounded(world):
    """The 65th is refused at once; answered, late and cancelled ones make room again."""
    port, peer = world.server(), joined(world)
    asked = [Asked(port, question(f"o{number}"), timeout=5 if number < 2 else 30) for number in range(64)]
    assert isinstance(Asked(port, question("more")).got, Unanswered)
    asked[10].waiting.cancel()
    peer.say(Done("o20", True))
    world.net.run(5.1)
    assert isinstance(asked[10].got, CancelledError) and isinstance(asked[0].got, Unanswered)
    more = [Asked(port, question(f"p{number}")) for number in range(4)]
    assert [one.got for one in more] == [None] * 4
    assert isinstance(Asked(port, question("p4")).got, Unanswered)
    peer.say(Done("o10", True))
    world.net.run(0.1)
    assert port.members.of("done") == []
    world.net.connections[0][1].cut()


def test_a_question_twice_under_one_operation_is_refused(world):
    """Its answer could not be told from the other's."""
    port = world.server()
    joined(world)
    first, second = Asked(port), Asked(port)
    assert isinstance(second.got, Unanswered) and first.got is None
    first.waiting.cancel()


def test_a_question_that_fits_no_line_fails_at_once(world):
    """Nothing is sent, and nobody waits for an answer to it."""
    port, peer = world.server(), joined(world)
    asked = Asked(port, question(weights="x" * 2**21))
    assert isinstance(asked.got, Unanswered)
    assert "n1 was not asked: a inspect of 20" in str(asked.got) and "longer than a line may be" in str(asked.got)
    world.net.run(1)
    assert peer.of(Inspect) == [] and port.sessions()


ENDS = {
    "cut": (lambda world, port: world.net.connections[0][1].cut(), "the connection broke"),
    "goaway": (lambda world, port: port.close("n1", Goaway("removed", text="n1 was removed")), "n1 was removed"),
    "replaced": (lambda world, port: joined(world), "replaced by a link from"),
    "silent": (lambda world, port: setattr(world.net.connections[0][0], "reading", False), "nothing was heard from it in 15 s"),
    "stop": (lambda world, port: world.stop(port), "cp1 stops"),
}


@pytest.mark.parametrize(("end", "why"), ENDS.values(), ids=ENDS.keys())
def test_the_end_of_a_link_fails_every_question_that_is_open(world, end, why):
    """Each says why, and none waits for its deadline."""
    port = world.server()
    joined(world)
    asked = [Asked(port, question(f"o{number}"), timeout=600) for number in range(3)]
    end(world, port)
    world.net.run(17, 0.5)
    for one in asked:
        assert isinstance(one.got, NodeAway), one.got
        assert str(one.got).startswith("the link to n1 ended before it answered: ") and why in str(one.got)


def test_nothing_is_asked_or_ordered_without_a_link_or_without_leave(world):
    """Leave is asked for at each emission: a server that lost it a moment ago writes nothing."""
    port, peer = world.server(), joined(world)
    assert isinstance(Asked(port, node="n2").got, NodeAway)
    assert not port.desired("n2", [order()], 12)
    port.leadership.acting = False
    asked = Asked(port)
    assert isinstance(asked.got, NotActing) and str(asked.got) == "cp1 does not lead, so it asks n1 nothing"
    assert not port.desired("n1", [order()], 12)
    world.net.run(1)
    assert peer.of(Inspect) == [] and peer.of(Desired) == []


def wholes(peer):
    """The desired states that became whole at C{peer}."""
    joiner = Joiner()
    return [whole for part in peer.of(Desired) if (whole := joiner.add(part))]


def test_what_is_ordered_while_a_node_joins_follows_its_acceptance(world):
    """The control plane may order at once, and only the newest counts."""
    port = world.server()
    port.members.on_joined = lambda node: [port.desired(node, [order(operation=f"op{n}")], n) for n in (1, 2)]
    peer = joined(world)
    world.net.run(0.1)
    assert [type(message).__name__ for message in peer.heard] == ["Welcome", "Accepted", "Desired"]
    assert [whole.revision for whole in wholes(peer)] == [2]


def big(revision, count=24):
    return [order(f"m/{number}/0", f"r{revision}-{number}", filler="x" * 200_000) for number in range(count)]


def test_a_desired_state_larger_than_the_write_buffer_arrives_whole(world):
    """5 MB in parts to an agent that reads: the bound on what waits is for those who do not."""
    port, agent = world.server(), world.agent("n1")
    world.linked(port)
    assert port.desired("n1", big(12), 12)
    world.net.run(1)
    ((whole,),) = agent.node.of("desired")
    assert len(whole.orders) == 24 and whole.revision == 12
    assert not agent.node.of("disconnected")


def test_an_order_that_fits_no_line_holds_up_no_other_of_its_node(world):
    """It is declined in the node's name, saying how long it is, and the others are followed."""
    port, agent = world.server(), world.agent("n1")
    world.linked(port)
    long = order("m/8/0", "run:m/8/0:1:7.12", filler="x" * 2**20)
    assert port.desired("n1", [order("m/7/0"), long, order("m/9/0")], 12)
    world.net.run(1)
    ((whole,),) = agent.node.of("desired")
    assert [each.shard for each in whole.orders] == ["m/7/0", "m/9/0"]
    ((node, session, done),) = port.members.of("done")
    assert (node, session, done.operation, done.ok, done.error) == ("n1", "7.1", long.operation, False, "unsendable")
    assert done.result["text"].startswith("its order takes 1049") and "m's profile have to be shorter" in done.result["text"]


def test_a_node_that_reads_slowly_gets_the_newest_desired_state(world):
    """Five plans later it is not five states behind, nor does the server hold them; what it gets is whole."""
    port, peer = world.server(), joined(world)
    peer.stop()
    for revision in range(12, 17):
        assert port.desired("n1", big(revision), revision)
    wire, end = next(iter(port._visitors)).wire, world.net.connections[0][1]
    assert wire._waiting_size == 0 and len(wire._latest) <= 24 and len(end._buffer) < 2**20
    peer.end.resume()
    world.net.run(2)
    assert [whole.revision for whole in wholes(peer)] == [16]
    assert len(wholes(peer)[0].orders) == 24
    assert peer.lost is None


def test_orders_to_one_node_are_not_held_up_by_another_that_does_not_read(world):
    """Each link has its own buffer."""
    port, stuck, peer = world.server(), joined(world, "n1"), joined(world, "n2")
    stuck.stop()
    port.desired("n1", big(12), 12)
    port.desired("n2", big(12, 2), 12)
    world.net.run(1)
    assert [whole.revision for whole in wholes(peer)] == [12]


def test_f40_an_agent_that_does_not_read_is_dropped_with_its_reason(world):
    """It talks, so no heartbeat is missed, but more waits for it than may; others go on."""
    port, deaf, other = world.server(), joined(world, "n1"), joined(world, "n2")
    deaf.stop()
    asked = [Asked(port, question(f"o{number}", "x" * 200_000), timeout=600) for number in range(30)]
    deaf.say(Report(7, 11, ()))
    world.net.run(1)
    ((node, _, reason),) = port.members.of("left")
    assert node == "n1" and reason.startswith("it does not read: ") and reason.endswith(" bytes wait for it")
    assert 0 < int(reason.split()[4]) <= MAX_WAITING
    assert all(reason in str(one.got) for one in asked)
    assert world.log.having("info", f"cp1: n1 is gone: {reason}")
    world.net.run(30, 0.5)
    assert not other.lost and list(port.sessions()) == ["n2"]
