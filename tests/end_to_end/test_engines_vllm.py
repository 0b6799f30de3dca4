"""vLLM itself on this machine's processor, through real daemons: C{make test-engines}, some minutes.

In the file's order one model is loaded, serves, loses its engine, is killed, stopped while it loads, and stopped while it
streams; each test waits for what it needs, so that each also runs alone.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time

import openai
import pytest

from llmgw.agent.ports import holder, port_is_free
from llmgw.agent.weights import WeightFinder
from llmgw.engines.vllm import vllm
from llmgw.fleet.model import Parallel, Profile, Resources
from llmgw.fleet.node import Installation
from llmgw.fleet.shard import Allocation, ShardExit
from tests.end_to_end.fleet import until
from tests.end_to_end.real_vllm import NEEDS_VLLM, PATIENCE, TIMING, apply, model, of_vllm, start, vllm_command
from tests.ports import free_port
from tests.running_engine import RunningEngine

pytestmark = NEEDS_VLLM
ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, request):
    """One for all tests: a start of vLLM takes half a minute or more."""
    before, found = request.session.testsfailed, None
    try:
        found = start(tmp_path_factory.mktemp("vllm"))
        yield found
    finally:
        if found is not None:
            found.close()
            for log in sorted((found.folder / "log").glob("*.log")) if request.session.testsfailed > before else ():
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}")


def say(capsys, text: str) -> None:
    with capsys.disabled():
        print(f"    {text}", flush=True)


def client_of(fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{fleet.router}/v1", api_key="none", max_retries=0, timeout=120)


def served(fleet) -> dict:
    """The shard that serves and has answered once; asks for one where the last test wanted none.

    On processors with AMX a vLLM that did not warm up (C{enforce-eager}) dies of SIGILL by a first prompt of few words, since its
    attention uses AMX, for which only the product of larger matrices has asked the kernel.
    """
    if "replicas: 0" in (fleet.folder / "server.yaml").read_text():
        apply(fleet, model())
    found = fleet.ready("tiny", seconds=PATIENCE)[0]
    messages = [{"role": "user", "content": "once upon a time " * 20}]
    client_of(fleet).chat.completions.create(model="tiny", messages=messages, max_tokens=2)
    return found


def events(fleet) -> str:
    return "\n".join(json.loads(line)["text"] for line in fleet.llmgw("events", "--json").splitlines())


def gone(fleet, pids, seconds: float, what: str) -> float:
    """Seconds until none of these, and nothing else of vLLM's, is there."""
    begin = time.monotonic()
    until(lambda: not (set(of_vllm(fleet)) & set(pids)), what, seconds)
    return time.monotonic() - begin


def test_it_is_placed_loads_by_its_phases_and_serves(fleet, capsys):
    """Placed without a device, its milestones in order in the status, then ready with its name and its adapter's."""
    seen: list[tuple[float, str]] = []
    begin = time.monotonic()

    def ready():
        found = fleet.shards("tiny")
        for shard in found:
            if shard["state"] == "loading" and shard["phase"] not in ("", *(phase for _, phase in seen[-1:])):
                seen.append((shard["progress"] or 0.0, shard["phase"]))
        return [shard for shard in found if shard["state"] == "ready"]

    (shard,) = until(ready, "ready", PATIENCE)
    say(capsys, f"ready after {time.monotonic() - begin:.0f} s by {', '.join(phase for _, phase in seen)}")
    assert [progress for progress, _ in seen] == sorted(progress for progress, _ in seen)
    assert {"configured", "joining ranks"} <= {phase for _, phase in seen}
    titles = [words for words in of_vllm(fleet).values() if words.startswith("VLLM::")]
    assert any("EngineCor" in words for words in titles) and any("Worker" in words for words in titles), of_vllm(fleet)
    assert shard["pid"] in of_vllm(fleet)
    assert {"tiny", "tiny-tuned"} <= {row.id for row in client_of(fleet).models.list()}


def test_a_stream_its_usage_its_load_and_its_metrics(fleet):
    """By the official client through the router; vLLM's own counts in the usage, and its metrics where Prometheus is sent."""
    served(fleet)
    client = client_of(fleet)
    texts = {}
    for name in ("tiny", "tiny-tuned"):
        more = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": ENDLESS, "temperature": 0}
        messages = [{"role": "user", "content": "once"}]
        rows = list(client.chat.completions.create(model=name, messages=messages, max_tokens=20, **more))
        texts[name] = "".join(choice.delta.content or "" for row in rows for choice in row.choices)
        assert [choice.finish_reason for row in rows for choice in row.choices if choice.finish_reason] == ["length"]
        assert rows[-1].usage.completion_tokens == 20
        assert {row.model for row in rows} == {name}
    assert texts["tiny"] != texts["tiny-tuned"], "the adapter answers otherwise than its base"

    def used() -> dict[str, dict] | None:
        rows = {row["model"]: row for row in json.loads(fleet.llmgw("usage", "--by", "model", "--json"))["usage"]}
        return rows if texts.keys() <= rows.keys() else None

    rows = until(used, "usage")
    assert rows["tiny"]["completion_tokens"] >= 20 and rows["tiny"]["prompt_tokens"] > 0, rows
    stream = fleet.stream("tiny", tokens=3500)

    def load():
        (row,) = [one for one in json.loads(fleet.llmgw("top", "--json"))["models"] if one["name"] == "tiny"]
        return row["replicas"][0]["engine_running"]

    until(lambda: load() == 1, "its load is known", 30)
    (target,) = fleet.asked("/targets")
    assert target["labels"]["model"] == "tiny"
    host, _, port = target["targets"][0].partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", target["labels"]["__metrics_path__"])
    text = connection.getresponse().read().decode()
    connection.close()
    found = vllm.load(text)
    assert (found.running, found.waiting) == (1, 0) and 0 < found.kv_used < 1 and found.tokens > 40
    stream.whole(120)


def test_without_its_core_it_ends_by_itself_and_is_started_again(fleet, capsys):
    """SIGKILL of VLLM::EngineCore: the front says 503 and ends with status 0 some seconds later, which is a failure here."""
    before = served(fleet)
    (core,) = [pid for pid, words in of_vllm(fleet).items() if words.startswith("VLLM::EngineCor")]
    pids, begin = list(of_vllm(fleet)), time.monotonic()
    os.kill(core, signal.SIGKILL)
    until(lambda: fleet.shards("tiny")[0]["attempt"] > before["attempt"], "another attempt", 60)
    say(capsys, f"another attempt {time.monotonic() - begin:.1f} s after SIGKILL of its core")
    gone(fleet, pids, 5, "nothing of the old one is left")
    said = [line for line in events(fleet).splitlines() if "tiny/1" in line or "vLLM" in line]
    assert any("vLLM" in line for line in said), said
    say(capsys, next(line for line in reversed(said) if "vLLM" in line))
    assert fleet.ready("tiny", seconds=PATIENCE)[0]["pid"] not in pids


def test_a_killed_front_leaves_nothing_behind(fleet, capsys):
    """SIGKILL of the server process: vLLM's core and workers would run on with all their memory; here they do not."""
    before = served(fleet)
    pids, begin = list(of_vllm(fleet)), time.monotonic()
    assert len(pids) >= 3
    stream = fleet.stream("tiny", tokens=3500)
    until(lambda: len(stream.pieces) > 3, "it streams")
    os.kill(before["pid"], signal.SIGKILL)
    took = gone(fleet, pids, 20, "nothing of the old one is left")
    say(capsys, f"{len(pids)} processes were gone {took:.1f} s after SIGKILL of the front")
    stream.join(20)
    assert stream.error is not None and not stream.done
    until(lambda: fleet.shards("tiny")[0]["attempt"] > before["attempt"], "another attempt", 60)
    assert "SIGKILL" in events(fleet), events(fleet)
    assert time.monotonic() - begin < 60


def test_a_stop_while_it_loads_ends_it_in_time(fleet, capsys):
    """vLLM ignores SIGTERM then; the grace of 4 s ends it all."""
    if any(shard["state"] == "ready" for shard in fleet.shards("tiny")):
        fleet.llmgw("restart", "tiny", "--allow-outage")
    pids = until(lambda: fleet.shards("tiny")[0]["state"] == "loading" and of_vllm(fleet), "it loads", PATIENCE)
    begin = time.monotonic()
    apply(fleet, model(replicas=0))
    until(lambda: not fleet.shards("tiny"), "the replica is gone", 30)
    assert not of_vllm(fleet), of_vllm(fleet)
    say(capsys, f"{len(pids)} processes were gone {time.monotonic() - begin:.1f} s after the order to stop")


def test_a_drain_lets_a_stream_finish_and_cuts_what_outlasts_it(fleet, capsys):
    """Routers first, then the engine: a short stream ends whole, one beyond the deadline with an error, and nothing is left."""
    served(fleet)
    short, long = fleet.stream("tiny", tokens=100), fleet.stream("tiny", tokens=3900)
    until(lambda: len(short.pieces) > 3 and len(long.pieces) > 3, "both stream", 60)
    pids, begin = list(of_vllm(fleet)), time.monotonic()
    fleet.llmgw("drain", "n1", "--deadline", "4s", "--allow-outage")
    short.whole(60)
    long.join(60)
    assert not long.done and len(long.pieces) > len(short.pieces), long.error
    gone(fleet, pids, 30, "nothing of it is left")
    say(
        capsys,
        f"the long stream ended with {long.error}; {len(pids)} processes gone {time.monotonic() - begin:.1f} s after the order",
    )
    fleet.llmgw("uncordon", "n1")
    apply(fleet, model(replicas=0))
    until(lambda: not fleet.shards("tiny") and not of_vllm(fleet), "no more of it", 60)


BAD = {
    "an unknown argument": ({"arguments": {"no-such-flag": 1}}, "has no option --no-such-flag", "does not know --no-such-flag"),
    "a bad value": ({"arguments": {"max-num-seqs": "many"}}, "max-num-seqs is a whole number", "value of --max-num-seqs"),
    "a missing model": ({"weights": "no-such-model"}, "no-such-model is not on the node", "cannot find the weights"),
    "a context too large": ({"context": 999999}, "context 999999", "context 999999 is more than the 4096 tokens"),
    "heads that tensor does not divide": ({"parallel": Parallel(tensor=3)}, "tensor 3 does not divide", "divided over tensor 3"),
    "sleep on a processor": ({"arguments": {"enable-sleep-mode": True}}, "cannot sleep", "cannot sleep"),
    "a device for a build that has none": ({"resources": Resources()}, "set `resources: {devices: 0}`", None),
}


def known(fleet):
    """What the agent knows of its vLLM: the installation and its options, once it has asked."""
    kept = fleet.folder / "state" / "n1" / "installations.json"
    command = (str(vllm_command()),)

    def read():
        found = json.loads(kept.read_text())
        return {key.partition(" ")[0]: text for key, text in found.items() if command[0] in key} if len(found) > 1 else None

    found = until(lambda: (rows := read()) and {"version", "flags"} <= rows.keys() and rows, "its options are known", PATIENCE)
    return Installation("vllm", "vllm", command, vllm.version(found["version"])), vllm.flags(found["flags"])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_profile_is_refused_in_milliseconds_where_vllm_takes_long(fleet, capsys, name, tmp_path):
    """The agent's own check against what is installed, then the same profile given to vLLM all the same."""
    change, refusal, diagnosis = BAD[name]
    installation, flags = known(fleet)
    finder, given = WeightFinder([fleet.folder / "models"]), {"weights": "tiny-llama", "resources": Resources(devices=0)} | change
    profile = Profile("vllm", **given)
    took, told = [], []
    for _ in range(5):
        begin = time.thread_time()
        told = vllm.problems(profile, finder.inspect(profile.weights), None, installation, flags)
        took.append(time.thread_time() - begin)
    assert refusal in "; ".join(map(str, told)), told
    assert min(took) < 0.05
    say(capsys, f"{name}: {1000 * min(took):.1f} ms: {told[0]}")
    if diagnosis is None:
        return
    files = finder.inspect(profile.weights)
    launch = vllm.launch(profile, Allocation("n1", ports=(free_port(),)), installation, files, ("x",), "key")
    begin = time.monotonic()
    with RunningEngine(launch, tmp_path) as engine:
        status = engine.process.wait(PATIENCE)
        found = vllm.diagnose(ShardExit(status), engine.lines)
    say(capsys, f"    vLLM itself: {time.monotonic() - begin:.0f} s, status {status}: {found.text}")
    assert status and diagnosis in found.text, (found, engine.lines[-20:])


def test_a_port_in_use_is_told_in_milliseconds(capsys):
    """Before anything is started, with who holds it. Time is the thread's own, here as above: others may use the machine, too."""
    with socket.create_server(("127.0.0.1", free_port())) as held:
        port = held.getsockname()[1]
        took = []
        for _ in range(5):
            begin = time.thread_time()
            assert not port_is_free("127.0.0.1", port)
            said = holder(port)
            took.append(time.thread_time() - begin)
    say(capsys, f"a port in use: {1000 * min(took):.1f} ms: {said}")
    assert str(os.getpid()) in said and min(took) < 0.05


def test_bad_profiles_through_the_daemons_start_nothing(fleet):
    """What needs no node to be seen is refused with the catalog; of the rest status says what to change, and nothing starts."""
    known(fleet)
    value = fleet.write_server(model(replicas=0) + model("value", max_num_seqs="many"), timing=TIMING)
    assert "max-num-seqs is a whole number, found 'many'" in fleet.llmgw("apply", str(value), code=2)
    bad = model("flag", no_such_flag=1) + model("context", context=999999) + model("heads", tensor=3)
    bad += model("asleep", enable_sleep_mode="true")
    apply(fleet, model(replicas=0) + bad)
    said = ("no option --no-such-flag", "context 999999", "does not divide", "cannot sleep")
    names = ("flag", "context", "heads", "asleep")

    def told():
        rows = {row["name"]: json.dumps(row) for row in fleet.status()["models"]}
        return all(words in rows[name] for name, words in zip(names, said, strict=True))

    until(told, "all are refused", 60)
    assert not [shard for name in names for shard in fleet.shards(name) if shard["pid"]]
    apply(fleet, model(replicas=0))
