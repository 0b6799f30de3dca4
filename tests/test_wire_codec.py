"""Messages to lines and back: everything comes back equal, wrong types are refused with their path, unknown ones are values."""

from __future__ import annotations

import json

import pytest

from llmgw.fleet.fetch import Fetch, FetchState
from llmgw.fleet.node import Device, DeviceProcess, Inventory, NodeFacts
from llmgw.fleet.shard import Diagnosis, EngineLoad, ShardExit, ShardReport, ShardState, WeightFiles
from llmgw.wire.codec import Unknown, decode_from_agent, decode_from_server, encode, from_plain, to_plain
from llmgw.wire.framing import Malformed, Unsendable
from llmgw.wire.messages import (
    FROM_AGENT,
    FROM_SERVER,
    Accepted,
    Beat,
    Bye,
    Desired,
    Done,
    Event,
    FetchLog,
    FetchWeights,
    Goaway,
    Inspect,
    Refused,
    Register,
    Report,
    Welcome,
)
from tests.fleetlink import order

DEVICE = Device("GPU-1", 0, "H100", 80 * 2**30, capability=(9, 0), processes=(DeviceProcess(812, "python3", 5, "m/1/0"),))
FACTS = NodeFacts("n1", "10.0.0.5", Inventory(8, 2**36, devices=(DEVICE,)), labels={"pool": "a"})
SHARD = ShardReport(
    "m/1/0", "m", "g", 2, ShardState.BACKOFF, exit=ShardExit(signal=9), load=EngineLoad(running=3, kv_used=0.5),
    diagnosis=Diagnosis("node", "text", "advice"), order=order(), conditions=("shim_lost",),
)  # fmt: skip
SERVER = [
    Welcome(1, 1, "cp1", "f1", 7, 5.0, 0.5, 1.5),
    Refused("standby", "text", "cp2", ("cp2:7443",), 2.0),
    Accepted("7.1", 7, "cp1", 11),
    Desired(7, "cp1", 11, 1, 2, (order(),)),
    Inspect("o1", 7, "cp1", "m.gguf", "llamacpp"),
    FetchLog("o2", 7, "cp1", "m/1/0", 0, -4096, 4096),
    FetchWeights("o3", 7, "cp1", "hf:org/name", True),
    Beat(3, 7, 1.5),
    Goaway("stopping", "cp2", ("cp2:7443",), "text"),
]
AGENT = [
    Register(1, "n1", "i", "b", 7, "cp1", FACTS, (SHARD,), "f1", 1.5, "0.1"),
    Report(7, 11, (SHARD,), FACTS.inventory, 3, 1.5, fetches=(Fetch("hf:org/name", FetchState.FAILED, 1, 2, error="gated"),)),
    Event("m/1/0", 2, "loading", "backoff", "reason", Diagnosis("retry", "text"), ("line 1", "line 2"), 1.5),
    Done("o1", False, "failed", {"text": "x", "deep": [{"a": None}]}),
    Bye("stopping", ("m/1/0",)),
]


@pytest.mark.parametrize("message", SERVER, ids=lambda message: type(message).__name__)
def test_server_messages_come_back_equal(message):
    """Encoding and decoding a server's message changes nothing."""
    assert decode_from_server(encode(message)[:-1], "p") == message


@pytest.mark.parametrize("message", AGENT, ids=lambda message: type(message).__name__)
def test_agent_messages_come_back_equal(message):
    """Encoding and decoding an agent's message changes nothing, enumerations included."""
    again = decode_from_agent(encode(message)[:-1], "p")
    assert again == message
    assert type(getattr(again, "shards", (SHARD,))[0]) is type(getattr(message, "shards", (SHARD,))[0])


def test_every_message_is_covered_above():
    """A message added to the protocol without a test here is noticed."""
    assert {type(message) for message in SERVER + AGENT} == {*FROM_SERVER.values(), *FROM_AGENT.values()}


def changed(message, path, value):
    plain = json.loads(encode(message))
    *way, last = path
    inner = plain
    for step in way:
        inner = inner[step]
    inner[last] = value
    return json.dumps(plain).encode()


WRONG = [
    (("epoch",), True),
    (("epoch",), "7"),
    (("epoch",), 7.0),
    (("epoch",), 2**63),
    (("epoch",), None),
    (("node",), 5),
    (("clock",), "1.5"),
    (("clock",), True),
    (("facts",), []),
    (("facts", "labels"), ["pool"]),
    (("facts", "labels", "pool"), 1),
    (("facts", "ports"), [20000]),
    (("facts", "ports"), "ab"),
    (("facts", "inventory", "devices"), {"a": 1}),
    (("facts", "inventory", "devices", 0, "capability"), [9, "0"]),
    (("shards",), "abc"),
    (("shards",), {}),
    (("shards", 0), "m/1/0"),
    (("shards", 0, "state"), "dancing"),
    (("shards", 0, "state"), 3),
    (("shards", 0, "healthy"), 1),
    (("shards", 0, "load"), []),
    (("shards", 0, "conditions"), "shim_lost"),
    (("shards", 0, "order", "wanted"), "maybe"),
    (("shards", 0, "order", "profile", "parallel", "tensor"), "2"),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=lambda part: str(part)[:40])
def test_a_wrong_type_is_refused_with_its_path(path, value):
    """Nothing is coerced; the refusal names where it is and not what was there."""
    with pytest.raises(Malformed) as error:
        decode_from_agent(changed(AGENT[0], path, value), "10.0.0.5:1")
    text = str(error.value)
    assert text.startswith("10.0.0.5:1 sent a wrong register: ")
    assert f"register.{path[0]}" in text


def test_a_missing_key_is_refused_and_an_unknown_one_ignored():
    """Newer peers may add keys; keys without default must be there."""
    plain = json.loads(encode(AGENT[0]))
    plain["colour"] = "blue"
    plain["facts"]["colour"] = "blue"
    assert decode_from_agent(json.dumps(plain).encode(), "p") == AGENT[0]
    del plain["instance"]
    with pytest.raises(Malformed, match="required field missing @ register.instance"):
        decode_from_agent(json.dumps(plain).encode(), "p")


def test_an_unknown_type_is_a_value():
    """It carries the operation, so that it can be answered; a message of the other direction is unknown, too."""
    assert decode_from_server(b'{"type":"dance","operation":"o9"}', "p") == Unknown("dance", "o9")
    assert decode_from_server(b'{"type":"dance","operation":5}', "p") == Unknown("dance")
    assert decode_from_agent(encode(SERVER[0])[:-1], "p") == Unknown("welcome")


@pytest.mark.parametrize("line", [b"{}", b'{"type":5}', b'{"type":null}', b'{"type":["register"]}'])
def test_an_object_without_type_is_refused(line):
    """There is no guessing."""
    with pytest.raises(Malformed, match="without a type"):
        decode_from_agent(line, "p")


@pytest.mark.parametrize("value", [2**70, float("inf"), {1: 2, "1": 3}, "x" * 2**20])
def test_a_result_that_the_reader_would_refuse_is_not_sent(value):
    """A model's own config may hold anything; the agent notices before the server drops the link for it."""
    with pytest.raises(Unsendable):
        encode(Done("o1", True, result={"config": value}))


def test_plain_values_come_back():
    """What a done carries under result can be read back with strict types."""
    files = WeightFiles("m.gguf", True, bytes=5, config={"a": [1]})
    assert from_plain(to_plain(files), WeightFiles, "inspect", "n1") == files
    with pytest.raises(Malformed, match=r"n1 sent a wrong inspect: .*expected bool @ inspect.found"):
        from_plain({"weights": "m", "found": "yes"}, WeightFiles, "inspect", "n1")
