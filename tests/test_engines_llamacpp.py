"""The llama.cpp adapter: golden argv, checks, and the real thing through the wheel."""

from __future__ import annotations

import json
import sys

import pytest

from llmgw.engines.llamacpp import llamacpp
from llmgw.fleet.model import Parallel, Profile, Resources
from llmgw.fleet.node import Installation, Inventory, NodeFacts
from llmgw.fleet.shard import Allocation, ShardExit, WeightFiles
from llmgw.interfaces import Flags
from llmgw.testing.tiny_gguf import write_tiny_gguf
from tests.ports import free_port
from tests.running_engine import RunningEngine, until

BINARY = Installation("llamacpp", "llamacpp", ("llama-server",), "b11434")
WHEEL = Installation("llamacpp", "llamacpp", (sys.executable, "-m", "llmgw.engines.llamacpp_server"))
FILES = WeightFiles("smol.gguf", True, "/models/smol.gguf", format="gguf", bytes=98 * 2**20)
HELP = """----- common params -----

-h,    --help, --usage                  print usage and exit
-t,    --threads N                      number of CPU threads to use during generation (default: -1)
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
                                        (env: LLAMA_ARG_CTX_SIZE)
--mmap, --no-mmap                       whether to memory-map model
-fa,   --flash-attn [on|off|auto]       set Flash Attention use
-ctk,  --cache-type-k TYPE              KV cache data type for K
--embedding, --embeddings               restrict to only support embedding use case
-np,   --parallel N                     number of server slots
--host HOST                             ip address to listen
--port PORT                             port to listen
--temp N                                temperature --not-an-option (default: 0.8)
"""
FLAGS = llamacpp.flags(HELP)


def codes(problems):
    return [problem.code for problem in problems]


def problems(profile, files=None, node=None, flags=FLAGS):
    return llamacpp.problems(profile, files, node, BINARY, flags)


def node(memory):
    return NodeFacts("n1", "10.0.0.1", Inventory(cpus=8, memory_total=memory))


def test_argv_of_a_cpu_replica():
    """Context times slots, the model's own name, no GPU visible, and the key nowhere but in the environment."""
    profile = Profile("llamacpp", "smol.gguf", context=4096, arguments={"threads": 2, "parallel": 3, "mmap": False})
    launch = llamacpp.launch(profile, Allocation("n1", ports=(20001,)), BINARY, FILES, ("smol", "default"), "the-key")
    assert launch.argv == (
        "llama-server", "--model", "/models/smol.gguf", "--alias", "smol", "--host", "127.0.0.1", "--port", "20001",
        "--ctx-size", "12288", "--parallel", "3", "--metrics", "--n-gpu-layers", "0", "--threads", "2", "--no-mmap",
    )  # fmt: skip
    assert launch.environment["LLAMA_API_KEY"] == "the-key"
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert launch.defaults["LLAMA_ARG_FIT"] == "off"
    assert launch.limit == 3
    assert launch.url == "http://127.0.0.1:20001"


def test_argv_on_devices():
    """Claimed devices by UUID; everything is offloaded; lists are joined by commas; negative values cling to their option."""
    profile = Profile("llamacpp", "x", arguments={"tensor-split": [3, 1], "n-predict": -1}, extra_argv=("--mlock",))
    allocation = Allocation("n1", address="fd00::1", devices=("GPU-a", "GPU-b"), ports=(20001,))
    launch = llamacpp.launch(profile, allocation, BINARY, FILES, ("m",), "k")
    assert launch.argv[-6:] == ("--n-gpu-layers", "999", "--tensor-split", "3,1", "--n-predict=-1", "--mlock")
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert launch.url == "http://[fd00::1]:20001"


def test_flags_are_read_from_the_help_text():
    """Options with their short forms; those without a value are switches; words of a description are neither."""
    assert {"-c", "--ctx-size", "--threads", "--no-mmap", "--flash-attn", "--embeddings", "--temp"} <= FLAGS.names
    assert "--not-an-option" not in FLAGS.names
    assert {"--mmap", "--no-mmap", "--embeddings"} <= FLAGS.switches
    assert not {"--ctx-size", "--flash-attn", "--cache-type-k"} & FLAGS.switches


def test_versions():
    """A build number of the binary, a date of the wheel."""
    assert llamacpp.version("version: 11434 (0c1e5709)\nbuilt with cc") == "b11434"
    assert llamacpp.version("version: 2026.10.11549 (xllamacpp)") == "2026.10.11549"
    assert llamacpp.version("Illegal instruction") is None


def test_unknown_argument_names_the_nearest():
    """As a catalog's author needs it: what is unknown, to which version, what was meant."""
    [problem] = problems(Profile("llamacpp", "x", arguments={"cache-type-kk": "q8_0"}))
    assert problem.code == "unknown_argument"
    assert "llamacpp b11434 has no option --cache-type-kk; did you mean cache-type-k?" in problem.text


@pytest.mark.parametrize(
    ("profile", "code"),
    [
        (Profile("llamacpp"), "weights_missing"),
        (Profile("llamacpp", "x", arguments={"port": 1}), "reserved_argument"),
        (Profile("llamacpp", "x", extra_argv=("-m", "/etc/passwd")), "reserved_argument"),
        (Profile("llamacpp", "x", extra_argv=("--api-key=abc",)), "reserved_argument"),
        (Profile("llamacpp", "x", environment={"LD_PRELOAD": "/tmp/x.so"}), "environment"),
        (Profile("llamacpp", "x", environment={"LLAMA_API_KEY": "x"}), "environment"),
        (Profile("llamacpp", "x", parallel=Parallel(nodes=2, tensor=2)), "nodes"),
        (Profile("llamacpp", "x", parallel=Parallel(data=2)), "data_parallel"),
        (Profile("llamacpp", "x", parallel=Parallel(expert=True)), "expert_parallel"),
        (Profile("llamacpp", "x", arguments={"parallel": "many"}), "argument_value"),
        (Profile("llamacpp", "x", arguments={"mmap": 3}), "argument_value"),
    ],
)
def test_refused_before_a_start(profile, code):
    """Each mistake is found without starting anything, with its own code and nothing else."""
    assert codes(problems(profile)) == [code]


def test_weights_that_are_not_there_name_the_paths():
    """The sentence shows where the agent looked."""
    [problem] = problems(Profile("llamacpp", "x"), WeightFiles("x", False, looked=("/nvme/x", "/mnt/x")))
    assert "/nvme/x, /mnt/x" in problem.text
    [problem] = problems(Profile("llamacpp", "x"), WeightFiles("x", True, "/nvme/x", format="safetensors"))
    assert problem.code == "weights_format"


def test_a_cache_larger_than_the_machine_is_refused_with_what_would_fit():
    """It is allocated whole at the start, so it can be told beforehand."""
    gguf = {
        "general.architecture": "llama", "llama.block_count": 32, "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": 8, "llama.embedding_length": 4096,
    }  # fmt: skip
    files = WeightFiles("x", True, "/x", format="gguf", bytes=2**32, gguf=gguf)
    [problem] = problems(Profile("llamacpp", "x", context=131072), files, node(32 * 2**30))
    assert problem.code == "kv_cache_too_large"
    assert "64.0 GiB" in problem.text and "at most 65536" in problem.text
    assert problems(Profile("llamacpp", "x", context=65536), files, node(32 * 2**30)) == []


def test_needs():
    """Nothing known is nothing claimed; known weights count with cache and buffers, on the host or spread over devices."""
    assert llamacpp.needs(Profile("llamacpp", "x"), None).memory is None
    assert llamacpp.needs(Profile("llamacpp", "x"), None).devices == 0
    gguf = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.attention.head_count": 2, "llama.embedding_length": 64,
    }  # fmt: skip
    files = WeightFiles("x", True, "/x", format="gguf", bytes=1000, gguf=gguf)
    layer = 500 + 4 * 256 * (2 * 2 * 32 * 2)  # one of two: weights, and the cache of four slots, padded to 256 tokens
    assert llamacpp.needs(Profile("llamacpp", "x", context=100), files).host_memory == 2 * layer + 256 * 2**20
    both = llamacpp.needs(Profile("llamacpp", "x", context=100, resources=Resources(devices=2)), files)
    assert (both.devices, both.memory) == (2, 2 * layer + 512 * 2**20), "the first device has both layers, the second the output"


def test_warnings_do_not_refuse():
    """Too many threads and unchecked arguments are told, not refused."""
    profile = Profile("llamacpp", "x", arguments={"threads": 64})
    assert codes(llamacpp.warnings(profile, None, node(2**30), BINARY, Flags())) == ["threads", "unchecked"]
    assert llamacpp.problems(profile, None, node(2**30), BINARY, Flags()) == []


@pytest.mark.parametrize(
    ("line", "cause", "part"),
    [
        ("error: invalid argument: --no-such-flag", "configuration", "--no-such-flag"),
        ('error while handling argument "--port": stoi', "configuration", "--port"),
        ("gguf_init_from_file: failed to open GGUF file '/x' (No such file or directory)", "source", "No such file"),
        ("gguf_init_from_file_impl: invalid magic characters: 'hell', expected 'GGUF'", "source", "not a GGUF"),
        ("gguf_init_from_file_impl: failed to read key-value pairs", "source", "cut short"),
        ("start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 80", "retry", "in use"),
        ("common_init_from_params: failed to create_context with model", "configuration", "context"),
    ],
)
def test_diagnosis_of_what_was_seen(line, cause, part):
    """The measured endings, each with the general line that follows it."""
    tail = ["build: 11434", line, "srv  load_model: exiting due to model loading error"]
    found = llamacpp.diagnose(ShardExit(code=1), tail)
    assert found.cause == cause
    assert part in found.text


def test_wrong_cpu_is_told_by_the_signal():
    """SIGILL leaves no text."""
    assert "another CPU" in llamacpp.diagnose(ShardExit(signal=4), []).text


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    pytest.importorskip("xllamacpp")
    return write_tiny_gguf(tmp_path_factory.mktemp("weights") / "tiny.gguf")


def start(tiny, folder, **profile):
    chosen = Profile("llamacpp", str(tiny), context=128, **profile)
    files = WeightFiles(str(tiny), True, str(tiny), format="gguf", bytes=tiny.stat().st_size)
    allocation = Allocation("n1", ports=(free_port(),))
    return RunningEngine(llamacpp.launch(chosen, allocation, WHEEL, files, ("tiny",), "the-key"), folder)


def test_real_engine_serves_and_stops(tiny, tmp_path):
    """The wheel's server, launched by the adapter: guarded by the key, listing the name, answering, gone on SIGTERM."""
    with start(tiny, tmp_path, arguments={"threads": 1, "parallel": 2}) as engine:
        engine.ready()
        assert "the-key" not in " ".join(engine.launch.argv)
        assert engine.request("/v1/models", key=False)[0] == 401
        status, text = engine.request("/v1/models")
        assert (status, json.loads(text)["data"][0]["id"]) == (200, "tiny")
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
        status, text = engine.request("/v1/completions", body)
        assert status == 200 and json.loads(text)["usage"]["completion_tokens"] >= 1, text
        load = llamacpp.load(engine.request("/metrics")[1])
        assert (load.running, load.waiting) == (0, 0)
        assert "ready" in [phase.name for line in engine.lines if (phase := llamacpp.phase(line))]
        assert engine.terminate(2) in (0, -15)


def test_real_engine_makes_embeddings(tiny, tmp_path):
    """Embeddings, pooling and choices reach the wheel as they would the binary."""
    arguments = {"embeddings": True, "pooling": "mean", "flash-attn": "on", "cache-type-k": "q8_0", "warmup": False}
    with start(tiny, tmp_path, arguments=arguments) as engine:
        engine.ready()
        status, text = engine.request("/v1/embeddings", {"model": "tiny", "input": "abc"})
        assert status == 200 and len(json.loads(text)["data"][0]["embedding"]) == 64, text


def test_real_failure_is_diagnosed(tmp_path):
    """A file that is no model: the sentence names the cause, not the last line."""
    pytest.importorskip("xllamacpp")
    bad = tmp_path / "bad.gguf"
    bad.write_text("hello, I am not a model")
    with start(bad, tmp_path) as engine:
        assert until(lambda: engine.process.poll()) == 1
        found = llamacpp.diagnose(ShardExit(code=1), engine.lines)
        assert found.cause == "source" and "not a GGUF" in found.text, engine.lines


def test_the_wheel_answers_what_an_installation_is_asked(tmp_path):
    """Its help and version are read like the binary's."""
    pytest.importorskip("xllamacpp")
    import subprocess

    ask = lambda argv: subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout  # noqa: E731
    flags = llamacpp.flags(ask(llamacpp.flags_argv(WHEEL.command)))
    assert {"--ctx-size", "--no-warmup", "--pooling", "--n-gpu-layers", "--metrics"} <= flags.names
    assert "--metrics" in flags.switches and "--ctx-size" not in flags.switches
    assert llamacpp.version(ask(llamacpp.version_argv(WHEEL.command))).startswith("20")
