"""The command adapter, what all adapters share, and the fake engine that most tests run through it."""

from __future__ import annotations

import json
import sys

import pytest

from llmgw.engines.command import command
from llmgw.engines.launch import child_environment, commas, fill, http_url, joined, long_options, words
from llmgw.engines.llamacpp import llamacpp
from llmgw.fleet.model import Lora, Parallel, Profile, Resources
from llmgw.fleet.node import Installation
from llmgw.fleet.shard import Allocation, ShardExit, WeightFiles
from llmgw.interfaces import Flags, Phase, ShardLaunch
from tests.ports import free_port
from tests.running_engine import RunningEngine, until

BARE = Installation("command", "command")
FAKE = (sys.executable, "-m", "llmgw.testing.fake_engine", "--port", "{port}", "--name", "{model}")


def launch(*argv, allocation=None, files=None, installation=BARE, **profile):
    chosen = Profile("command", argv=argv, **profile)
    return command.launch(chosen, allocation or Allocation("n1", ports=(20001,)), installation, files, ("m", "alias"), "the-key")


def codes(profile, files=None):
    return [problem.code for problem in command.problems(profile, files, None, BARE, Flags())]


def test_every_placeholder_is_filled():
    """On a rank of two, with weights where the agent found them."""
    allocation = Allocation("n2", 1, 2, "10.0.0.2", ("GPU-a", "GPU-b"), ports=(20001, 20002), head="10.9.0.1", head_port=20007)
    files = WeightFiles("m.gguf", True, "/models/m.gguf")
    text = "{host} {port} {model} {weights} {rank} {nodes} {head} {head_port}"
    made = launch("run", text, allocation=allocation, files=files, extra_argv=("--rank={rank}",))
    assert made.argv == ("run", "10.0.0.2 20001 m /models/m.gguf 1 2 10.9.0.1 20007", "--rank=1")
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert (made.url, made.ready, made.metrics) == ("", None, None)


def test_rank_zero_serves():
    """Its health path is the profile's; a wrapper of the installation stands in front; the key is in the environment only."""
    made = launch("run", installation=Installation("c", "command", ("nice", "-n5")), health="/up", environment={"A": "b"})
    assert made.argv == ("nice", "-n5", "run")
    assert (made.url, made.ready, made.models) == ("http://127.0.0.1:20001", "/up", "")
    assert made.environment["LLMGW_ENGINE_KEY"] == "the-key" and made.environment["A"] == "b"
    assert made.environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("word", ['{"a": {"port": 1}}', "${port}", "{unknown}", "{PORT}", "{}", "{secret:token}"])
def test_what_is_no_placeholder_stays(word):
    """JSON, the shell's variables and secret files pass unharmed."""
    assert fill([word], {"port": 1}) == [word]


def test_problems():
    """Each with its own code; a program without arguments of ours takes what it likes."""
    assert codes(Profile("command", argv=("run", "{port}"))) == []
    assert codes(Profile("command")) == ["argv"]
    assert codes(Profile("command", argv=("run", "{prot}"))) == ["placeholder"]
    assert codes(Profile("command", argv=("run",), arguments={"x": 1})) == ["unknown_argument"]
    assert codes(Profile("command", argv=("run",), environment={"NOTIFY_SOCKET": "/x"})) == ["environment"]
    assert codes(Profile("command", argv=("run",), environment={"PYTHONPATH": "/x"})) == []
    assert codes(Profile("command", argv=("run", "{weights}")), WeightFiles("x", False)) == ["weights_missing"]
    [warning] = command.warnings(Profile("command", argv=("run",)), None, None, BARE, Flags())
    assert "{port}" in warning.text


def test_needs():
    """Devices as written, else none for one rank and the ranks of one node for several; a second port where ranks meet."""
    assert command.needs(Profile("command"), None).devices == 0
    assert command.needs(Profile("command", resources=Resources(devices=2)), None).devices == 2
    several = command.needs(Profile("command", parallel=Parallel(tensor=4, nodes=2)), None)
    assert (several.devices, several.ports) == (2, 2)


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("llmgw: loading 40 %", Phase("loading", 0.4)),
        ("llmgw: loading 400%", Phase("loading", 1.0)),
        ("llmgw: ready", Phase("ready")),
        ("llmgw is loading 40 %", None),
        ("", None),
    ],
)
def test_phases(line, phase):
    """Only lines that are meant for us count."""
    assert command.phase(line) == phase


def test_load_under_any_engine_names():
    """A vLLM behind a wrapper is read like vLLM; nothing is made up."""
    assert command.load('vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 4\n').running == 7
    assert command.load("llmgw:requests_running 2\nllmgw:tokens_total 9\n").tokens == 9
    assert command.load("something_else 1\n").running is None


def test_long_options():
    """Text, numbers, switches, lists in three manners, maps as JSON; a dash in front of a value cannot start an option."""
    arguments = {"a": "x", "b": 2, "c": 0.5, "d": True, "e": False, "f": None, "g": {"h": [1]}, "i": -1, "j": ["-x"]}
    assert long_options(arguments) == [
        "--a", "x", "--b", "2", "--c", "0.5", "--d", "--no-e", "--g", '{"h":[1]}', "--i=-1", "--j", '["-x"]',
    ]  # fmt: skip
    manners = {"x": words, "y": commas, "z": joined}
    listed = long_options({"x": [1, {"a": 2}], "y": [1, 2], "z": ["a"]}, lambda name: manners[name])
    assert listed == ["--x", "1", '{"a":2}', "--y", "1,2", "--z", '["a"]']


def test_environment_in_layers():
    """The harmless part of ours, then defaults, agent, installation, launch; what belongs to the daemon never passes."""
    made = ShardLaunch(("x",), {"A": "launch"}, {"A": "default", "B": "default", "C": "default"})
    own = {"PATH": "/bin", "LC_ALL": "C", "SECRET": "x", "NOTIFY_SOCKET": "/run/x", "VLLM_PORT": "tcp://x", "https_proxy": "x"}
    agent, installation = {"A": "agent", "B": "agent", "LISTEN_FDS": "3", "https_proxy": "p"}, {"B": "installation"}
    assert child_environment(own, agent, installation, made) == {
        "PATH": "/bin", "LC_ALL": "C", "A": "launch", "B": "installation", "C": "default", "https_proxy": "p",
    }  # fmt: skip


def test_addresses():
    """Brackets round IPv6."""
    assert http_url("::1", 80) == "http://[::1]:80" and http_url("n1", 80) == "http://n1:80"


@pytest.mark.parametrize(
    ("exit", "tail", "cause", "part"),
    [
        (ShardExit(code=0), ["bye"], "unknown", "ended by itself with exit status 0"),
        (ShardExit(signal=9), [], "unknown", "out-of-memory"),
        (ShardExit(signal=9, forced=True), [], "unknown", "did not end when asked to"),
        (ShardExit(signal=34), [], "unknown", "killed by signal 34"),
        (ShardExit(), [], "unknown", "exit status unknown"),
        (ShardExit(code=1), ["OSError: [Errno 98] Address already in use"], "retry", "in use"),
        (ShardExit(code=1), ["  File x", "KeyError: 'tokens'", "RuntimeError: engine failed"], "unknown", "KeyError: 'tokens'"),
        (ShardExit(code=1), ["No space left on device", "CUDA out of memory"], "disk_full", "disk"),
        (ShardExit(code=1), ["CUDA out of memory", "No space left on device"], "configuration", "device memory"),
    ],
)
def test_the_first_cause_is_told(exit, tail, cause, part):
    """By what stands furthest up, then by signal, first exception and status."""
    found = command.diagnose(exit, tail)
    assert (found.cause, part in found.text) == (cause, True), found


def start(tmp_path, *more):
    return RunningEngine(launch(*FAKE, *more, allocation=Allocation("n1", ports=(free_port(),))), tmp_path)


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_fake_engine_speaks_openai(tmp_path):
    """Key, models, whole and streamed answers, metrics, and an end on SIGTERM."""
    with start(tmp_path, "--events", "3").ready() as engine:
        assert engine.request("/v1/models", key=False)[0] == 401
        assert json.loads(engine.request("/v1/models")[1])["data"][0]["id"] == "m"
        answer = json.loads(engine.request("/v1/chat/completions", CHAT)[1])
        assert answer["choices"][0]["message"]["content"] == "once upon a"
        assert engine.request("/v1/chat/completions", {**CHAT, "model": "other"})[0] == 404
        events = engine.request("/v1/chat/completions", {**CHAT, "stream": True})[1].split("\n\n")
        assert events[-2] == "data: [DONE]" and len(events) == 6
        load = command.load(engine.request("/metrics")[1])
        assert (load.running, load.tokens) == (0, 6)
        assert command.phase(engine.lines[-1]) == Phase("ready")
        assert engine.terminate(2) == 0


def test_fake_engine_loads(tmp_path):
    """503 while loading where asked for, and phases on the way."""
    with start(tmp_path, "--load-seconds", "0.5", "--503-while-loading") as engine:
        until(lambda: engine.request("/health")[0] == 503)
        engine.ready()
        assert any(phase and phase.name == "loading" for phase in map(command.phase, engine.lines))


def test_fake_engine_dies_as_told(tmp_path):
    """With its code and its last words."""
    with start(tmp_path, "--exit-after", "0.1", "--exit-code", "7", "--say", "CUDA out of memory") as engine:
        assert until(lambda: engine.process.poll()) == 7
        assert "CUDA out of memory" in engine.lines


def test_fake_engine_ignores_sigterm(tmp_path):
    """It says so and goes on."""
    with start(tmp_path, "--ignore-term").ready() as engine:
        engine.process.terminate()
        until(lambda: "ignored SIGTERM" in engine.lines)
        assert engine.request("/health")[0] == 200


def test_adapters_that_nobody_would_serve_are_refused():
    """A request for one would get the base model's answer; so for llama.cpp."""
    loras = (Lora("tuned", "x"),)
    assert codes(Profile("command", argv=("run",), loras=loras)) == ["loras"]
    found = llamacpp.problems(Profile("llamacpp", "m.gguf", loras=loras), None, None, None, Flags())
    assert [problem.code for problem in found] == ["loras"] and "vllm or sglang" in found[0].text
