"""The TensorRT-LLM adapter: golden argv and settings, checks before a start, and a stand-in that takes its own options."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from attrs import evolve

from llmgw.engines.trtllm import cache_fraction, trtllm
from llmgw.engines.trtllm_checks import OPTIONS, RESERVED
from llmgw.fleet.model import Lora, Parallel, Profile, Resources
from llmgw.fleet.node import Device, Installation, Inventory, NodeFacts
from llmgw.fleet.shard import Allocation, EngineLoad, ShardExit, WeightFiles
from llmgw.interfaces import Flags, Phase
from llmgw.testing.standin_trtllm import command, option_rows
from tests.ports import free_port
from tests.running_engine import RunningEngine, until

GIB = 2**30
TRTLLM = Installation("trtllm", "trtllm", ("trtllm-serve",), "1.3.0rc25")
STANDIN = Installation("trtllm", "trtllm", (sys.executable, "-m", "llmgw.testing.standin_trtllm"), "1.3.0rc25")
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "hidden_size": 4096, "max_position_embeddings": 131072,
}  # fmt: skip
FILES = WeightFiles("llama", True, "/models/llama", format="safetensors", bytes=16 * GIB, config=LLAMA_8B)
FLAGS = trtllm.flags(command().get_help(command().make_context("serve", ["m"])))


def launch(profile, allocation=None, files=FILES, served=("llama-8b", "default"), installation=TRTLLM):
    return trtllm.launch(profile, allocation or Allocation("n1", ports=(20001,)), installation, files, served, "the-key")


def settings(made):
    [secret] = made.secrets
    return json.loads(secret.text)


def problems(files=FILES, node=None, flags=FLAGS, **changes):
    return trtllm.problems(evolve(Profile("trtllm", "llama"), **changes), files, node, TRTLLM, flags)


def test_each_value_stands_in_one_place():
    """The server's options in argv, everything of the LLM API in the file; which of the two wins differs by version."""
    profile = Profile(
        "trtllm",
        "llama",
        context=32768,
        parallel=Parallel(tensor=2, pipeline=2, expert=True),
        arguments={
            "max-batch-size": 64,
            "tool_parser": "qwen3",
            "kv_cache_config": {"dtype": "fp8"},
            "custom_module_dirs": ["/a", "/b"],
            "generation-config": "auto",
            "trust_remote_code": True,
        },
        extra_argv=("--log_level", "debug"),
    )
    made = launch(profile, Allocation("n1", address="10.0.0.1", devices=("GPU-1", "GPU-2"), ports=(20001,)))
    assert made.argv == (
        "trtllm-serve", "serve", "/models/llama", "--host", "10.0.0.1", "--port", "20001", "--served_model_name", "llama-8b",
        "--no-telemetry", "--config", "{secret:trtllm.yaml}", "--tool_parser", "qwen3", "--custom_module_dirs", "/a",
        "--custom_module_dirs", "/b", "--generation-config", "auto", "--log_level", "debug",
    )  # fmt: skip
    assert settings(made) == {
        "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "moe_expert_parallel_size": 2, "max_seq_len": 32768,
        "enable_iter_perf_stats": True, "return_perf_metrics": True, "max_batch_size": 64, "kv_cache_config": {"dtype": "fp8"},
        "trust_remote_code": True,
    }  # fmt: skip
    assert (made.limit, made.ready, made.models, made.metrics) == (64, "/health", "/v1/models", "/prometheus/metrics")
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    command().make_context("serve", list(made.argv[2:]))


def test_it_has_no_key():
    """It would take none: nothing of one reaches it, and the router sends none; whoever runs it is warned."""
    made = launch(Profile("trtllm", "llama"))
    assert made.key == ""
    assert "the-key" not in " ".join((*made.argv, *made.environment.values(), *(s.text for s in made.secrets)))
    node = NodeFacts("n1", "10.0.0.1", Inventory(8, 64 * GIB))
    warned = trtllm.warnings(Profile("trtllm", "llama"), None, node, TRTLLM, FLAGS)
    assert [row.code for row in warned] == ["no_key"]
    assert trtllm.warnings(Profile("trtllm", "llama"), None, evolve(node, address="127.0.0.1"), TRTLLM, FLAGS) == []


@pytest.mark.parametrize(
    ("version", "models", "file"),
    [
        ("1.3.0", "/v1/models", "--config"),
        ("1.2.1", "", "--config"),
        ("1.1.0", "", "--extra_llm_api_options"),
        (None, "/v1/models", "--config"),
    ],
)
def test_lines_differ(version, models, file):
    """Before 1.3 it cannot be given a name, so none is looked for; before 1.2 its file had another option."""
    made = launch(Profile("trtllm", "llama"), installation=evolve(TRTLLM, version=version))
    assert (made.models, file in made.argv, "--served_model_name" in made.argv) == (models, True, bool(models))


@pytest.mark.parametrize(
    ("resources", "given", "fraction"),
    [
        (Resources(), {"memory": 40 * GIB}, None),
        (Resources(share=True), {"memory": 29 * GIB}, 0.163),
        (Resources(device_memory=80 * GIB), {"memory": 80 * GIB}, 0.95),
        (Resources(share=True), {"memory": 29 * GIB, "device_total": None}, None),
    ],
)
def test_cache_fraction(resources, given, fraction):
    """Of what the weights leave; what the profile says of the cache beside stays."""
    allocation = Allocation("n1", **{"devices": ("GPU-a",), "ports": (20001,), "device_total": 80 * GIB, **given})
    profile = Profile("trtllm", "llama", resources=resources, arguments={"kv_cache_config": {"dtype": "fp8"}})
    assert cache_fraction(profile, allocation, FILES) == fraction
    told = settings(launch(profile, allocation))["kv_cache_config"]
    assert told == ({"dtype": "fp8"} | ({} if fraction is None else {"free_gpu_memory_fraction": fraction}))


def test_needs_and_estimate():
    """A device a rank; unknown weights are unknown; a cache of fp8 takes half."""
    needs = trtllm.needs(Profile("trtllm", "llama", context=8192, parallel=Parallel(tensor=4)), FILES)
    assert (needs.devices, needs.ports) == (4, 1)
    assert trtllm.needs(Profile("trtllm", "llama"), None).memory is None
    small = Profile("trtllm", "llama", arguments={"kv_cache_config": {"dtype": "fp8", "free_gpu_memory_fraction": 0.5}})
    found, whole = trtllm.estimate(small, FILES), trtllm.estimate(Profile("trtllm", "llama"), FILES)
    assert (found.share, whole.share) == (0.5, 0.9)
    assert 2 * found.ranks[0].cache == whole.ranks[0].cache


def test_flags_and_version():
    """Every option of the 1.3 line by the form of its help, and the banner that every start prints."""
    takes = {name: kind for names, kind in option_rows() for name in names}
    assert FLAGS.names >= set(takes)
    assert {name for name in takes if name in FLAGS.switches} == {n for n, kind in takes.items() if kind in ("switch", "flag")}
    assert {name.replace("-", "_") for name in OPTIONS} <= {flag.lstrip("-").replace("-", "_") for flag in FLAGS.names}
    assert trtllm.version("[TensorRT-LLM] TensorRT LLM version: 1.3.0rc25\nUsage: ...") == "1.3.0rc25"
    assert trtllm.version("ModuleNotFoundError: No module named 'tensorrt_llm'") is None


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_arguments(name):
    """What llmgw sets is refused with what to use instead, in arguments and in extra_argv."""
    for changes in ({"arguments": {name.replace("-", "_"): "x"}}, {"extra_argv": (f"--{name.replace('-', '_')}", "x")}):
        found = problems(**changes)
        assert [problem.code for problem in found] == ["reserved_argument"], changes
        assert RESERVED[name] in found[0].text


@pytest.mark.parametrize(
    ("files", "changes", "where", "figures"),
    [
        (FILES, {"arguments": {"tool_parsr": "x"}}, "arguments.tool_parsr", ("did you mean tool_parser?", "trtllm 1.3.0rc25")),
        (FILES, {"arguments": {"kv_cache_conf": {}}}, "arguments.kv_cache_conf", ("did you mean kv_cache_config?",)),
        (FILES, {"parallel": Parallel(tensor=2, nodes=2)}, "parallel.nodes", ("MPI", "one node")),
        (FILES, {"parallel": Parallel(data=2)}, "parallel.data", ("replicas",)),
        (FILES, {"parallel": Parallel(tensor=3)}, "parallel.tensor", ("3", "32", "1, 2, 4, 8, 16, 32")),
        (FILES, {"context": 200000}, "context", ("200000", "131072")),
        (FILES, {"arguments": {"max_batch_size": "many"}}, "arguments.max_batch_size", ("'many'",)),
        (FILES, {"arguments": {"kv_cache_config": 5}}, "arguments.kv_cache_config", ("a section",)),
        (FILES, {"arguments": {"kv_cache_config": {"free_gpu_memory_fraction": 90}}}, "arguments.kv_cache_config", ("90",)),
        (FILES, {"loras": (Lora("a", "x"),)}, "loras", ("leave `loras` out",)),
        (evolve(FILES, format="gguf"), {}, "weights", ("GGUF", "llamacpp")),
        (WeightFiles("llama", False, looked=("/a/llama",)), {}, "weights", ("/a/llama",)),
        (FILES, {"environment": {"CUDA_VISIBLE_DEVICES": "0"}}, "environment.CUDA_VISIBLE_DEVICES", ("llmgw's own to set",)),
    ],
)
def test_refused_before_a_start(files, changes, where, figures):
    """Each mistake at its place, with its figures and the way out, and nothing besides."""
    [problem] = problems(files=files, **changes)
    assert problem.where == where
    assert [figure for figure in figures if figure not in problem.text] == [], problem.text
    assert problems(flags=Flags(), arguments={"whatever": 1}) == []


def test_a_node_that_cannot_run_it():
    """Its kernels want newer GPUs than the others'."""
    device = Device("GPU-a", 0, "T4", 16 * GIB, capability=(7, 5))
    [problem] = problems(node=NodeFacts("n1", "10.0.0.1", Inventory(8, 64 * GIB, devices=(device,), driver="580.1")))
    assert problem.code == "capability" and "8.0" in problem.text


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("[TensorRT-LLM] TensorRT LLM version: 1.3.0", Phase("configured", 0.02)),
        ("[TRT-LLM] [I] Loading weights concurrently", Phase("weights", 0.1)),
        ("[TRT-LLM] [I] Model init total -- 9.00s", Phase("weights", 0.6)),
        ("INFO:     Application startup complete.", Phase("ready", 1.0)),
        ("[TRT-LLM] [I] Hello", None),
    ],
)
def test_phases(line, phase):
    """How far a start is."""
    assert trtllm.phase(line) == phase


def started(folder, profile=None, port=None, served=("org/llama-8b",), **environment):
    """The stand-in, by the adapter's own argv, with its settings' file."""
    made = launch(profile or Profile("trtllm", "llama"), Allocation("n1", ports=(port or free_port(),)), FILES, served, STANDIN)
    [secret] = made.secrets
    (path := folder / secret.name).write_text(secret.text)
    argv = tuple(word.replace(f"{{secret:{secret.name}}}", str(path)) for word in made.argv)
    return RunningEngine(evolve(made, argv=argv), folder, environment)


def test_the_stand_in_serves_by_the_adapters_argv(tmp_path):
    """Bound but refused while it loads, its name listed, no key asked, load under its own path, SIGTERM."""
    with started(tmp_path, STANDIN="--load-seconds 0.3") as engine:
        until(lambda: any("Loading weights" in line for line in engine.lines))
        assert engine.request("/health") == (0, "")
        engine.ready(5)
        assert [row["id"] for row in json.loads(engine.request("/v1/models")[1])["data"]] == ["org/llama-8b"]
        ask = {"model": "org/llama-8b", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        assert engine.request("/v1/chat/completions", ask, key=False)[0] == 200
        assert trtllm.load(engine.request("/prometheus/metrics")[1]) == EngineLoad(running=0, waiting=0, kv_used=0.0)
        assert engine.request("/metrics")[1] == "[]"
        assert engine.terminate() == 128 + signal.SIGTERM


def test_f43_after_the_crash_of_a_rank_it_answers_503_for_ever(tmp_path):
    """The front end survives; its output tells which way it went. Its workers are in sessions of their own."""
    with started(tmp_path) as engine:
        engine.ready(5)
        with open(f"/proc/{engine.process.pid}/task/{engine.process.pid}/children") as children:
            worker = int(children.read().split()[0])
        assert os.getsid(worker) != os.getsid(engine.process.pid)
        os.kill(worker, signal.SIGKILL)
        until(lambda: engine.request("/health")[0] == 503)
        assert engine.process.poll() is None
        told = trtllm.diagnose(ShardExit(signal=9), engine.lines)
        assert told.cause == "clean_and_retry" and "one of its 8 ranks crashed" in told.text


@pytest.mark.parametrize(
    ("profile", "said", "cause"),
    [
        (Profile("trtllm", "m", extra_argv=("--no_such_flag", "1")), "it does not know --no_such_flag", "configuration"),
        (
            Profile("trtllm", "m", extra_argv=("--max_beam_width", "x")),
            "it cannot use the value of --max_beam_width",
            "configuration",
        ),
        (Profile("trtllm", "m", arguments={"no_such_setting": 1}), "its settings have no no_such_setting", "configuration"),
    ],
)
def test_what_the_stand_in_refuses_is_diagnosed(tmp_path, profile, said, cause):
    """As TensorRT-LLM does; the cause is the profile."""
    with started(tmp_path, profile) as engine:
        told = trtllm.diagnose(ShardExit(engine.process.wait(10)), engine.lines)
    assert (told.cause, said in told.text) == (cause, True), told


def test_f10_a_taken_port_is_told_before_it_loads(tmp_path):
    """Two engines cannot bind one port, since it is bound without reuse."""
    with started(tmp_path) as first:
        first.ready(5)
        (other := tmp_path / "other").mkdir()
        port = int(first.launch.url.rpartition(":")[2])
        with started(other, port=port) as second:
            told = trtllm.diagnose(ShardExit(second.process.wait(10)), second.lines)
    assert (told.cause, "is in use" in told.text) == ("retry", True)
