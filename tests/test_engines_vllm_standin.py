"""A stand-in for vLLM, run for real by the adapter's own argv: it takes vLLM's options and behaves as vLLM was seen to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from attrs import evolve

from llmgw.engines.vllm import vllm
from llmgw.fleet.model import Parallel, Profile
from llmgw.fleet.node import Installation
from llmgw.fleet.shard import Allocation, EngineLoad, ShardExit
from llmgw.interfaces import Phase
from llmgw.testing.standin_vllm import human_readable_int_or_auto
from tests.ports import free_port
from tests.running_engine import RunningEngine, until
from tests.test_engines_vllm import launch

STANDIN = Installation("vllm", "vllm", (sys.executable, "-m", "llmgw.testing.standin_vllm"), "0.33.0")


def started(folder, profile=None, served=("llama-8b", "default"), **environment):
    """The stand-in, by the adapter's own argv."""
    allocation = Allocation("n1", ports=(free_port(),))
    made = launch(profile or Profile("vllm", "llama", context=4096), allocation, served=served, installation=STANDIN)
    return RunningEngine(made, folder, environment)


def core_of(pid):
    """The pid of the child titled as vLLM's engine, once it has its title."""
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        for child in children.read().split():
            with open(f"/proc/{child}/comm") as comm:
                if comm.read().startswith("VLLM::EngineCor"):
                    return int(child)
    return None


def test_the_stand_in_serves_by_the_adapters_argv(tmp_path):
    """Refused until ready, phases in order, names listed, key on /v1 only, an answer, a stream, its load, and SIGTERM."""
    with started(tmp_path, STANDIN="--load-seconds 0.3") as engine:
        until(lambda: any("Starting to load" in line for line in engine.lines))
        assert engine.request("/health") == (0, "")
        engine.ready(5)
        names = [row["id"] for row in json.loads(engine.request("/v1/models")[1])["data"]]
        assert names == ["llama-8b", "default"]
        assert [engine.request(path, key=False)[0] for path in ("/v1/models", "/health", "/metrics")] == [401, 200, 200]
        ask = {"model": "default", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        assert engine.request("/v1/chat/completions", ask, key=False)[0] == 401
        status, text = engine.request("/v1/chat/completions", ask)
        assert (status, json.loads(text)["choices"][0]["message"]["content"]) == (200, "once upon a")
        assert engine.request("/v1/chat/completions", ask | {"model": "other"})[0] == 404
        stream = engine.request("/v1/chat/completions", ask | {"stream": True})[1]
        assert stream.count("data: ") == 5 and stream.rstrip().endswith("data: [DONE]")
        assert vllm.load(engine.request("/metrics")[1]) == EngineLoad(running=0, waiting=0, kv_used=0.0, tokens=8)
        phases = [phase.progress for line in engine.lines if (phase := vllm.phase(line))]
        assert phases == sorted(phases) and phases[-1] == 1.0
        assert engine.terminate() == 0


def test_the_stand_in_leaves_its_engine_behind_when_killed(tmp_path):
    """SIGKILL of the server leaves VLLM::EngineCore; SIGTERM does not; without its engine the server ends, with status 0."""
    with started(tmp_path) as engine:
        engine.ready(5)
        core = until(lambda: core_of(engine.process.pid))
        engine.process.kill()
        engine.process.wait(5)
        os.kill(core, 0)
        os.kill(core, signal.SIGKILL)
    with started(tmp_path) as engine:
        engine.ready(5)
        os.kill(until(lambda: core_of(engine.process.pid)), signal.SIGKILL)
        until(lambda: engine.request("/health")[0] in (503, 0))
        assert engine.process.wait(5) == 0
    with started(tmp_path) as engine:
        engine.ready(5)
        core = until(lambda: core_of(engine.process.pid))
        assert engine.terminate() == 0
        with contextlib.suppress(ProcessLookupError):
            until(lambda: os.kill(core, 0), 2)


def test_sigterm_is_ignored_while_it_loads_and_waits_for_requests(tmp_path):
    """As vLLM does by --shutdown-timeout: a stream ends whole, health stays good, and new requests fail meanwhile."""
    with started(tmp_path, STANDIN="--load-seconds 1 --interval 0.1 --events 10") as engine:
        until(lambda: any("Starting to load" in line for line in engine.lines))
        engine.process.terminate()
        engine.ready(10)
        ask = {"model": "default", "messages": [{"role": "user", "content": "x"}], "stream": True}
        with ThreadPoolExecutor() as pool:
            stream = pool.submit(engine.request, "/v1/chat/completions", ask)
            until(lambda: vllm.load(engine.request("/metrics")[1]).running == 1)
            engine.process.terminate()
            until(lambda: engine.request("/v1/chat/completions", ask)[0] == 500)
            assert engine.request("/health")[0] == 200
            assert stream.result(10)[1].rstrip().endswith("data: [DONE]")
        assert engine.process.wait(5) == 0


def test_a_headless_rank_listens_nowhere(tmp_path):
    """It tells that it has joined, the head's readiness is all there is more, and it refuses connections."""
    port = free_port()
    profile = Profile("vllm", "llama", parallel=Parallel(pipeline=2, nodes=2))
    allocation = Allocation("n2", 1, 2, ports=(port,), head="127.0.0.1", head_port=port, peers=("127.0.0.1", "127.0.0.1"))
    with RunningEngine(launch(profile, allocation, installation=STANDIN), tmp_path) as engine:
        until(lambda: any(vllm.phase(line) == Phase("ready", 1.0) for line in engine.lines))
        engine.launch = evolve(engine.launch, url=f"http://127.0.0.1:{port}")
        assert engine.request("/health") == (0, "")
        assert engine.terminate() == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"no-such-flag": 1}, "it does not know --no-such-flag 1"),
        ({"max-num-seqs": "many"}, "it cannot use the value of --max-num-seqs (invalid int value: 'many')"),
    ],
)
def test_what_the_stand_in_refuses_is_diagnosed(tmp_path, arguments, said):
    """As vLLM does: status 2, and a text whose cause is the profile."""
    with started(tmp_path, Profile("vllm", "llama", arguments=arguments)) as engine:
        status = engine.process.wait(10)
        told = vllm.diagnose(ShardExit(status), engine.lines)
    assert status == 2
    assert (told.cause, told.text) == ("configuration", f"vLLM: {said}")


def test_numbers_as_vllm_reads_them():
    """Suffixes of ten and of two, and auto."""
    assert [human_readable_int_or_auto(text) for text in ("4096", "32k", "1.5K", "auto")] == [4096, 32000, 1536, -1]
    with pytest.raises(ValueError, match="abc"):
        human_readable_int_or_auto("abc")
