"""The SGLang adapter: golden argv, checks before a start, and a stand-in that takes SGLang's own options."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import pytest
from attrs import evolve

from llmgw.engines.sglang import PORTS, memory_fraction, sglang
from llmgw.engines.sglang_checks import RESERVED
from llmgw.fleet.model import Lora, Parallel, Profile, Resources
from llmgw.fleet.node import Device, Installation, Inventory, NodeFacts
from llmgw.fleet.shard import Allocation, EngineLoad, ShardExit, WeightFiles
from llmgw.interfaces import Flags, Phase
from llmgw.testing.standin_sglang import asked, option_rows, parser, with_config
from tests.ports import free_port
from tests.running_engine import RunningEngine, until

GIB = 2**30
SGLANG = Installation("sglang", "sglang", ("sglang",), "0.5.23")
STANDIN = Installation("sglang", "sglang", (sys.executable, "-m", "llmgw.testing.standin_sglang"), "0.5.23")
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "hidden_size": 4096, "max_position_embeddings": 131072,
}  # fmt: skip
FILES = WeightFiles("llama", True, "/models/llama", format="safetensors", bytes=16 * GIB, config=LLAMA_8B)
FLAGS = sglang.flags(parser().format_help())
BLOCK = tuple(range(20001, 20001 + PORTS))
QUIET = ("--uvicorn-access-log-exclude-prefixes", "/metrics", "/health", "/ready", "--enable-metrics")


def launch(profile, allocation=None, files=FILES, served=("llama-8b", "default"), installation=SGLANG):
    return sglang.launch(profile, allocation or Allocation("n1", ports=BLOCK), installation, files, served, "the-key")


def problems(files=FILES, node=None, flags=FLAGS, **changes):
    return sglang.problems(evolve(Profile("sglang", "llama"), **changes), files, node, SGLANG, flags)


def config(**changes):
    return evolve(FILES, config={**LLAMA_8B, **changes})


def test_argv_of_one_node():
    """Weights by path, one served name, parallelism, every port that SGLang would choose itself, arguments in order."""
    profile = Profile(
        "sglang",
        "llama",
        context=32768,
        parallel=Parallel(tensor=2, pipeline=2, expert=True),
        arguments={"max-running-requests": 64, "disable-radix-cache": True, "cuda-graph-bs-decode": [1, 2], "seed": None},
        extra_argv=("--log-level", "info"),
    )
    devices = tuple(f"GPU-{n}" for n in range(8))
    made = launch(profile, Allocation("n1", address="10.0.0.1", devices=devices, ports=BLOCK))
    assert made.argv == (
        "sglang", "serve", "/models/llama", "--config", "{secret:sglang.yaml}", "--host", "10.0.0.1", "--port", "20001",
        "--served-model-name", "llama-8b", "--tp-size", "2", "--pp-size", "2", "--ep-size", "2",
        "--dist-init-addr", "127.0.0.1:20002", "--nccl-port", "20017", "--context-length", "32768", *QUIET,
        "--max-running-requests", "64", "--disable-radix-cache", "--cuda-graph-bs-decode", "1", "2", "--log-level", "info",
    )  # fmt: skip
    assert made.environment["CUDA_VISIBLE_DEVICES"] == ",".join(devices)
    assert (made.url, made.limit, made.ready, made.models) == ("http://10.0.0.1:20001", 64, "/ready", "/v1/models")
    taken = parser().parse_args(["--model-path", *made.argv[2:]])
    assert (taken.tp_size, taken.nccl_port, taken.max_running_requests) == (2, 20017, 64)


def test_data_parallel_copies_choose_their_ports():
    """Told one rendezvous or one port of NCCL's, the second copy would find it taken by the first."""
    argv = launch(Profile("sglang", "llama", parallel=Parallel(tensor=2, data=2))).argv
    assert argv[argv.index("--tp-size") :][:4] == ("--tp-size", "2", "--dp-size", "2")
    assert not {"--nccl-port", "--dist-init-addr"} & set(argv)


def test_argv_over_nodes():
    """One argv but for address, rank and own ports; the head's rendezvous for all; followers serve no HTTP."""
    profile = Profile("sglang", "llama", parallel=Parallel(tensor=16, nodes=2))
    first = Allocation(
        "n1", 0, 2, "10.0.0.1", ports=BLOCK, head="10.9.0.1", head_port=20002, peers=("10.9.0.1", "10.9.0.2"), interface="ib0"
    )
    theirs = tuple(range(21001, 21001 + PORTS))
    head, other = launch(profile, first), launch(profile, evolve(first, node="n2", rank=1, address="10.0.0.2", ports=theirs))
    at = head.argv.index("--nnodes")
    assert head.argv[at : at + 6] == ("--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "10.9.0.1:20002")
    assert other.argv[at : at + 6] == ("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.9.0.1:20002")
    assert other.argv[at + 6 : at + 8] == ("--nccl-port", "21017")
    assert (other.url, other.ready, other.models, other.metrics) == ("", None, None, None)
    assert other.secrets == head.secrets, "every rank compares the key's presence"
    assert {(other.defaults | dict(other.environment))[f"{what}_SOCKET_IFNAME"] for what in ("NCCL", "GLOO", "TP")} == {"ib0"}
    assert (head.environment["SGLANG_HOST_IP"], other.environment["SGLANG_HOST_IP"]) == ("10.9.0.1", "10.9.0.2")
    assert {made.environment["SGLANG_TCP_STORE_PORT"] for made in (head, other)} == {"20014"}
    six = launch(profile, evolve(first, head="fd00::1"))
    assert "[fd00::1]:20002" in six.argv


SAVED = {"enable-memory-saver": True, "enable-weights-cpu-backup": True}


@pytest.mark.parametrize(
    ("given", "nodes", "sleeps"),
    [
        (SAVED, 1, True),
        ({"enable-memory-saver": True}, 1, False),
        (SAVED, 2, False),
        ({**SAVED, "speculative-algorithm": "EAGLE"}, 1, False),
        ({**SAVED, "speculative-algorithm": "EAGLE", "enable-draft-weights-cpu-backup": True}, 1, True),
    ],
)
def test_it_sleeps_only_where_all_its_weights_are_kept_on_the_host(given, nodes, sleeps):
    """Its memory saver alone forgets them: it would wake up and answer noise."""
    made = launch(Profile("sglang", "llama", arguments=given), Allocation("n1", nodes=nodes, ports=BLOCK))
    paths = ("/release_memory_occupation", "/resume_memory_occupation") if sleeps else ("", "")
    assert (made.sleep, made.wake) == paths


def test_the_key_is_in_a_file_only(tmp_path):
    """Neither argv nor environment, which others can read, has it; SGLang reads it from there."""
    made = launch(Profile("sglang", "llama"))
    assert "the-key" not in " ".join((*made.argv, made.url, *made.environment.values(), *made.defaults.values()))
    [secret] = made.secrets
    (path := tmp_path / secret.name).write_text(secret.text)
    assert with_config(["--port", "1", "--config", str(path)]) == ["--api-key", "the-key", "--port", "1"]


@pytest.mark.parametrize(
    ("version", "path"),
    [("0.5.23", "/ready"), ("0.6.0", "/ready"), (None, "/ready"), ("0.5.22", "/health"), ("0.4.9", "/health")],
)
def test_ready_by_version(version, path):
    """The cheap flag where the version has it, the generated token where not."""
    assert launch(Profile("sglang", "llama"), installation=evolve(SGLANG, version=version)).ready == path


@pytest.mark.parametrize(
    ("resources", "given", "fraction"),
    [
        (Resources(), {"memory": 40 * GIB}, None),
        (Resources(share=True), {"memory": 22 * GIB}, 0.25),
        (Resources(device_memory=42 * GIB), {"memory": 42 * GIB}, 0.5),
        (Resources(device_memory=42 * GIB), {"memory": 42 * GIB, "device_free": 50 * GIB}, 0.8),
        (Resources(device_memory=80 * GIB), {"memory": 80 * GIB, "device_free": 60 * GIB}, 0.95),
        (Resources(share=True), {"memory": 22 * GIB, "device_total": None}, None),
    ],
)
def test_memory_fraction(resources, given, fraction):
    """What is claimed, less what comes on top, as a part of what is free; SGLang's own share where nothing is claimed."""
    allocation = Allocation("n1", **{"devices": ("GPU-a",), "ports": BLOCK, "device_total": 80 * GIB, **given})
    profile = Profile("sglang", "llama", resources=resources)
    assert memory_fraction(profile, allocation) == fraction
    assert ("--mem-fraction-static" in launch(profile, allocation).argv) == (fraction is not None)


def test_needs_and_estimate():
    """A device a rank and a block of ports; data parallel copies share nothing; unknown weights are unknown."""
    needs = sglang.needs(Profile("sglang", "llama", context=8192, parallel=Parallel(tensor=4, pipeline=2, nodes=2)), FILES)
    weights, cache = 16 * GIB // 8, 2 * 16 * 2 * 128 * 2 * 8192
    assert (needs.devices, needs.ports) == (4, PORTS)
    assert weights + cache < needs.memory < weights + cache + 4 * GIB
    found = sglang.estimate(Profile("sglang", "llama", parallel=Parallel(data=3)), FILES)
    assert len(found.ranks) == 3 and found.ranks[0].weights == 16 * GIB
    assert sglang.needs(Profile("sglang", "llama"), None).memory is None


def test_flags_and_version():
    """Every option of 0.5.23 by the form of its help."""
    takes = {name: kind for names, kind in option_rows() for name in names}
    assert FLAGS.names >= set(takes)
    assert {name for name in takes if name in FLAGS.switches} == {n for n, kind in takes.items() if kind in ("switch", "flag")}
    assert sglang.version("WARNING x\nsglang version: 0.5.23\ngit revision: abc\n") == "0.5.23"
    assert sglang.version("ModuleNotFoundError: No module named 'torch'") is None


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_arguments(name):
    """What llmgw sets is refused with what to use instead, in arguments and in extra_argv."""
    for changes in ({"arguments": {name.replace("-", "_"): "x"}}, {"extra_argv": (f"--{name}", "x")}):
        found = problems(flags=Flags(), **changes)
        assert [problem.code for problem in found] == ["reserved_argument"], changes
        assert RESERVED[name] in found[0].text


AWQ = config(quantization_config={"quant_method": "awq"})


@pytest.mark.parametrize(
    ("files", "changes", "where", "figures"),
    [
        (FILES, {"arguments": {"max-runing-requests": 3}}, "arguments.max-runing-requests", ("did you mean max-running-",)),
        (FILES, {"arguments": {"disable-radix-cache": 3}}, "arguments.disable-radix-cache", ("takes no value, found 3",)),
        (FILES, {"parallel": Parallel(tensor=3)}, "parallel.tensor", ("3", "32", "1, 2, 4, 8, 16, 32")),
        (FILES, {"parallel": Parallel(tensor=2, data=2, nodes=2)}, "parallel.data", ("one node", "replicas")),
        (FILES, {"parallel": Parallel(tensor=4, nodes=3)}, "parallel.nodes", ("4", "3 nodes")),
        (FILES, {"parallel": Parallel(pipeline=40)}, "parallel.pipeline", ("40", "32")),
        (FILES, {"parallel": Parallel(expert=True)}, "parallel.expert", ("no experts",)),
        (FILES, {"parallel": Parallel(balance="hybrid")}, "parallel.balance", ("leave balance out",)),
        (FILES, {"parallel": Parallel(tensor=4), "arguments": {"attn-dp-size": 3}}, "arguments.attn-dp-size", ("3", "1, 2, 4")),
        (FILES, {"context": 200000}, "context", ("200000", "131072")),
        (FILES, {"arguments": {"quantization": "gguf2"}}, "arguments.quantization", ("gguf2", "awq_marlin")),
        (AWQ, {"arguments": {"quantization": "gptq"}}, "arguments.quantization", ("gptq", "awq")),
        (FILES, {"arguments": {"mem-fraction-static": 90}}, "arguments.mem-fraction-static", ("90",)),
        (FILES, {"arguments": {"max-queued-requests": "many"}}, "arguments.max-queued-requests", ("'many'",)),
        (FILES, {"loras": (Lora("a:b", "x"),)}, "loras", ("a:b", "':'")),
        (evolve(FILES, config={}), {}, "weights", ("config.json",)),
        (WeightFiles("llama", False, looked=("/a/llama",)), {}, "weights", ("/a/llama",)),
        (FILES, {"environment": {"CUDA_VISIBLE_DEVICES": "0"}}, "environment.CUDA_VISIBLE_DEVICES", ("llmgw's own to set",)),
    ],
)  # fmt: skip
def test_refused_before_a_start(files, changes, where, figures):
    """Each mistake at its place, with its figures and the way out, and nothing besides."""
    [problem] = problems(files=files, **changes)
    assert problem.where == where
    assert [figure for figure in figures if figure not in problem.text] == [], problem.text


def test_a_node_that_cannot_run_it():
    """GPU and driver are compared with what the build wants."""
    device = Device("GPU-a", 0, "V100", 32 * GIB, capability=(7, 0))
    old = NodeFacts("n1", "10.0.0.1", Inventory(8, 64 * GIB, devices=(device,), driver="535.1"))
    assert [problem.code for problem in problems(node=old)] == ["capability", "driver_too_old"]


def test_names_that_it_cannot_serve():
    """V27: a colon is refused with its reason; aliases never reach the engine."""
    [problem] = sglang.name_problems(("org/m:8b", "x"))
    assert "org/m:8b" in problem.text
    assert sglang.name_problems(("m", "x:y")) == []


def test_load_counts_each_request_once():
    """Tensor ranks tell the same requests again, data parallel ranks others."""
    row = 'sglang:{}{{model_name="m",engine_type="unified",tp_rank="{}",pp_rank="0",dp_rank="{}"}} {}\n'.format
    text = "".join(
        row(name, tp, dp, value)
        for name, value in (
            ("num_running_reqs", 3.0),
            ("num_queue_reqs", 1.0),
            ("token_usage", 0.5),
            ("generation_tokens_total", 9),
        )
        for tp in (0, 1)
        for dp in (0, 1)
    )
    assert sglang.load(text) == EngineLoad(running=6, waiting=2, kv_used=0.5, tokens=18)


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("[TP0] server_args=ServerArgs(model_path='x', node_rank=0)", Phase("configured", 0.02)),
        ("[TP8] server_args=ServerArgs(model_path='x', node_rank=1)", Phase("ready", 1.0)),
        ("[TP0] Load weight begin. avail mem=78.00 GB", Phase("weights", 0.05)),
        ("Loading safetensors checkpoint shards:  50% Completed | 2/4", Phase("weights", 0.325)),
        ("[TP0] Load weight end. type=X, avail mem=60 GB", Phase("weights", 0.6)),
        ("[TP0] max_total_num_tokens=100000, chunked_prefill_size=8192", Phase("cache", 0.8)),
        ("[TP0] Capture cuda graph begin. This can take up to several minutes.", Phase("graphs", 0.85)),
        ("The server is fired up and ready to roll!", Phase("ready", 1.0)),
        ("[TP0] Decode batch. #running-req: 1", None),
    ],
)
def test_phases(line, phase):
    """How far a start is; a rank above 0 has nothing more to tell than that it has begun."""
    assert sglang.phase(line) == phase


def started(folder, profile=None, allocation=None, served=("llama-8b", "default"), files=FILES, **environment):
    """The stand-in, by the adapter's own argv, with its secret file."""
    made = launch(
        profile or Profile("sglang", "llama"), allocation or Allocation("n1", ports=(free_port(),)), files, served, STANDIN
    )
    [secret] = made.secrets
    (path := folder / secret.name).write_text(secret.text)
    argv = tuple(word.replace(f"{{secret:{secret.name}}}", str(path)) for word in made.argv)
    return RunningEngine(evolve(made, argv=argv), folder, environment)


def test_the_stand_in_serves_by_the_adapters_argv(tmp_path):
    """Refused while it loads, 503 while it warms up, key on /v1 only, an answer, its load, phases in order, SIGTERM."""
    with started(tmp_path, STANDIN="--load-seconds 0.3", STANDIN_WARMUP="0.3") as engine:
        until(lambda: any("Load weight begin" in line for line in engine.lines))
        assert engine.request("/ready") == (0, "")
        seen = {until(lambda: engine.request("/ready")[0])}
        engine.ready(5)
        assert seen == {503}
        assert [row["id"] for row in json.loads(engine.request("/v1/models")[1])["data"]] == ["llama-8b"]
        assert [engine.request(path, key=False)[0] for path in ("/v1/models", "/ready", "/metrics")] == [401, 200, 200]
        ask = {"model": "llama-8b", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        assert engine.request("/v1/chat/completions", ask)[0] == 200
        assert sglang.load(engine.request("/metrics")[1]) == EngineLoad(running=0, waiting=0, kv_used=0.0, tokens=4)
        phases = [phase.progress for line in engine.lines if (phase := sglang.phase(line))]
        assert phases == sorted(phases) and phases[-1] == 1.0
        assert engine.terminate() == 0


def test_f38_a_follower_is_healthy_for_ever_and_ignores_sigterm(tmp_path):
    """Its health paths say nothing, which is why the adapter gives none; only a kill ends it."""
    port = free_port()
    profile = Profile("sglang", "llama", parallel=Parallel(tensor=2, nodes=2))
    allocation = Allocation("n2", 1, 2, ports=(port,), head="127.0.0.1", head_port=port, peers=("127.0.0.1", "127.0.0.1"))
    with started(tmp_path, profile, allocation) as engine:
        until(lambda: any(sglang.phase(line) == Phase("ready", 1.0) for line in engine.lines))
        engine.launch = evolve(engine.launch, url=f"http://127.0.0.1:{port}")
        until(lambda: engine.request("/health")[0] == 200)
        assert engine.request("/v1/models")[0] == 404
        engine.process.terminate()
        until(lambda: any("waiting for the rank-0 ShutdownReq" in line for line in engine.lines))
        assert engine.process.poll() is None


def test_f36_f37_a_dead_child_kills_all_and_a_killed_server_leaves_its_scheduler(tmp_path):
    """The end by its own SIGKILL is told from the kernel's; SIGKILL of the front leaves a process behind."""
    with started(tmp_path) as engine:
        engine.ready(5)
        os.kill(child_of(engine.process.pid), signal.SIGKILL)
        assert engine.process.wait(5) == -signal.SIGKILL
        told = sglang.diagnose(ShardExit(signal=9), engine.lines)
        assert "one of its processes died and it killed itself" in told.text
    with started(tmp_path) as engine:
        engine.ready(5)
        left = child_of(engine.process.pid)
        engine.process.kill()
        engine.process.wait(5)
        os.kill(left, signal.SIGKILL)


def child_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return int(children.read().split()[0])


def test_sigterm_drains_without_limit(tmp_path):
    """While a request runs it says 503 and lives; so the agent's grace is what ends it."""
    with started(tmp_path, STANDIN="--first-token 60") as engine:
        engine.ready(5)
        ask = {"model": "llama-8b", "messages": [], "max_tokens": 1}
        threading.Thread(target=lambda: engine.request("/v1/chat/completions", ask), daemon=True).start()
        until(lambda: sglang.load(engine.request("/metrics")[1]).running == 1)
        engine.process.terminate()
        until(lambda: engine.request("/ready")[0] == 503)
        assert engine.process.poll() is None


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (Profile("sglang", "m", arguments={"no-such-flag": 1}), "it does not know --no-such-flag 1"),
        (Profile("sglang", "m", arguments={"max-queued-requests": "x"}), "it cannot use the value of --max-queued-requests"),
        (Profile("sglang", "m", parallel=Parallel(tensor=3, nodes=2)), "ranks cannot be shared equally"),
    ],
)
def test_what_the_stand_in_refuses_is_diagnosed(tmp_path, profile, said):
    """As SGLang does; the cause is the profile."""
    nodes = profile.parallel.nodes
    allocation = Allocation("n1", 0, nodes, ports=(free_port(),), head="127.0.0.1", head_port=1, peers=("127.0.0.1",) * nodes)
    with started(tmp_path, profile, allocation) as engine:
        told = sglang.diagnose(ShardExit(engine.process.wait(10)), engine.lines)
    assert told.cause == "configuration" and said in told.text


def test_loras_are_given_at_launch(tmp_path):
    """By path where it takes none later, and listed as models."""
    loras = (Lora("tuned", "loras/tuned"),)
    files = evolve(FILES, loras=(WeightFiles("loras/tuned", True, "/models/loras/tuned", config={"r": 16, "peft_type": "LORA"}),))
    with started(tmp_path, Profile("sglang", "llama", loras=loras, parallel=Parallel(data=2)), files=files) as engine:
        assert "tuned=/models/loras/tuned" in engine.launch.argv
        engine.ready(5)
        assert {row["id"] for row in json.loads(engine.request("/v1/models")[1])["data"]} == {"llama-8b", "tuned"}
        assert asked(["m", "--lora-paths", "a=b"]).lora_paths == ["a=b"]
