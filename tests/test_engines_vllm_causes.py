"""What vLLM's output tells: causes after an end, how far a start is, the load of a running engine."""

from __future__ import annotations

import pytest

from llmgw.engines.vllm import vllm
from llmgw.fleet.shard import EngineLoad, ShardExit
from llmgw.interfaces import Phase

CONSEQUENCES = (
    "Traceback (most recent call last):",
    '  File "core.py", line 1, in run',
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
)


CORE = "(EngineCore pid=7) ERROR 11-30 12:00:00 [core.py:7] "


@pytest.mark.parametrize(
    ("code", "line", "cause", "said"),
    [
        (2, "vllm: error: unrecognized arguments: --no-such-flag 1", "configuration", "it does not know --no-such-flag 1"),
        (2, "vllm serve: error: argument --max-model-len: invalid human_readable_int_or_auto value: 'abc'", "configuration", "the value of --max-model-len"),  # noqa: E501
        (1, "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder", "source", "cannot find the weights"),  # noqa: E501
        (1, "  Value error, User-specified max_model_len (999999) is greater than the derived max_model_len (max_position_embeddings=2048.0 or model_max_length=None in model's config.json). [type=value_error]", "configuration", "context 999999 is more than the 2048 tokens"),  # noqa: E501
        (1, "  Value error, Total number of attention heads (4) must be divisible by tensor parallel size (3). [type=value_error]", "configuration", "4 attention heads cannot be divided over tensor 3"),  # noqa: E501
        (1, "OSError: [Errno 98] Address already in use", "retry", "a port it was given is in use"),
        (1, CORE + "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which is larger than the available KV cache memory (3.5 GiB). Based on the available memory, the estimated maximum model length is 28672.", "configuration", "131072 tokens need 16.0 GiB, 3.5 GiB are left"),  # noqa: E501
        (1, CORE + "ValueError: Free memory on device cuda:0 (20.1/79.2 GiB) on startup is less than desired GPU memory utilization (0.92, 72.9 GiB).", "clean_and_retry", "it wants 72.9 GiB of a device that has 20.1 of 79.2 GiB free"),  # noqa: E501
        (1, CORE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "configuration", "out of device memory"),  # noqa: E501
        (1, CORE + "ValueError: No available memory for the cache blocks.", "configuration", "no device memory for a KV cache"),
        (1, "  Value error, Model architectures ['NewForCausalLM'] are not supported for now.", "configuration", "'NewForCausalLM'"),  # noqa: E501
        (1, "  Value error, The quantization method fp8 is not supported for the current GPU. Minimum capability: 75. Current capability: 70.", "configuration", "quantization fp8 needs"),  # noqa: E501
        (1, "RuntimeError: Failed to infer device type", "node", "it sees no GPU"),
        (1, CORE + "Worker proc VllmWorker-0 died unexpectedly (exit code: -4), shutting down executor.", "node", "used an instruction that"),  # noqa: E501
        (1, CORE + "Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.", "clean_and_retry", "VllmWorker-0 died (exit code ?)"),  # noqa: E501
        (1, CORE + "RuntimeError: Worker proc VllmWorker-1 died unexpectedly (exit code: -9)", "clean_and_retry", "worker VllmWorker-1"),  # noqa: E501
        (1, "OSError: [Errno 28] No space left on device", "disk_full", "disk of the node is full"),
        (1, "  Value error, Unknown quantization method: awqq. Must be one of ['awq', 'fp8']. [type=value_error]", "configuration", "does not know the quantization awqq"),  # noqa: E501
        (1, CORE + "ValueError: Available memory on node 0 (18.4/23.59 GiB) on startup is less than desired CPU memory utilization (0.92, 21.7 GiB). On the CPU backend, the", "configuration", "wants 21.7 GiB of the host's memory, of which 18.4 of 23.59 GiB are free"),  # noqa: E501
        (1, CORE + "ValueError: Available memory on node 0 (18.4/23.59 GiB) on kv cache allocation is less than requested memory for kv (40.0 GiB). Decrease", "configuration", "KV cache of 40.0 GiB does not fit"),  # noqa: E501
        (1, "  Value error, Sleep mode is not supported on current platform. [type=value_error]", "configuration", "cannot sleep"),  # noqa: E501
        (1, CORE + "ValueError: nobody has seen this one", "configuration", "nobody has seen this one"),
    ],
)  # fmt: skip
def test_causes(code, line, cause, said):
    """Of pages of traceback the line that tells why, as a sentence; never the consequence that stands below it."""
    told = vllm.diagnose(ShardExit(code), ("INFO starting", CONSEQUENCES[0], line, *CONSEQUENCES))
    assert (told.cause, said in told.text) == (cause, True), told
    assert told.advice


def test_a_warning_about_a_low_limit_is_no_cause():
    """vLLM names the error that a low limit of open files may lead to when it starts, whatever it fails of later."""
    warned = "WARNING [system_utils.py:255] Found ulimit of 20000. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`. Consider"  # noqa: E501
    said = "  Input should be less than or equal to 1 [type=less_than_equal, input_value=1.5]"
    lines = ("pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig", "gpu_memory_utilization", said)
    told = vllm.diagnose(ShardExit(1), (warned, *lines))
    assert told.text == "vLLM: it cannot use the value of gpu_memory_utilization (Input should be less than or equal to 1)"
    assert vllm.diagnose(ShardExit(1), (warned, "it is gone")).text == "vLLM ended with exit status 1"
    full = vllm.diagnose(ShardExit(1), (warned, "OSError: [Errno 24] Too many open files: '/dev/shm/x'"))
    assert full.text == "vLLM: it ran out of file descriptors"


def test_an_engine_core_that_was_killed():
    """Only the server tells of it, as of any other end of its core: what that said itself comes first."""
    ends = (
        "(APIServer pid=7) WARNING [core_client.py:817] [shutdown] MPClient: engine core exited unexpectedly; starting cleanup",
    )
    ends += (
        "(APIServer pid=7) ERROR [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    )
    told = vllm.diagnose(ShardExit(0), ("INFO serving", *ends))
    assert (told.cause, told.text) == ("retry", "vLLM: its engine core was killed or crashed without a word")
    spoke = vllm.diagnose(ShardExit(0), (CORE + "KeyError: 'nobody has seen this one'", *ends))
    assert "nobody has seen this one" in spoke.text


def test_the_cause_of_nothing_known():
    """Status 0 of an engine that should run, a signal, and the first exception."""
    assert "ended by itself with exit status 0" in vllm.diagnose(ShardExit(0), ()).text
    assert "SIGKILL" in vllm.diagnose(ShardExit(signal=9), ("INFO fine",)).text
    assert "KeyError: 'x'" in vllm.diagnose(ShardExit(1), ("KeyError: 'x'",)).text


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("INFO [model.py:1] Resolved architecture: LlamaForCausalLM", Phase("configured", 0.02)),
        ("(Worker) INFO Starting to load model /models/llama...", Phase("weights", 0.05)),
        ("\rLoading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01]", Phase("weights", 0.325)),
        ("Loading safetensors checkpoint shards:   0% | 0/4\rLoading safetensors checkpoint shards: 100% | 4/4", Phase("weights", 0.6)),  # noqa: E501
        ("INFO torch.compile took 20.1 s in total", Phase("compiled", 0.75)),
        ("INFO GPU KV cache size: 100,000 tokens", Phase("cache", 0.8)),
        ("INFO Graph capturing finished in 10 secs", Phase("graphs", 0.95)),
        ("INFO:     Application startup complete.", Phase("ready", 1.0)),
        ("INFO: 127.0.0.1 - GET /health 200", None),
    ],
)  # fmt: skip
def test_phases(line, phase):
    """How far a start is, from the lines of its log."""
    assert vllm.phase(line) == phase


def test_load():
    """Requests over all data parallel ranks, the fullest cache, all tokens; no number where vLLM gave none."""
    text = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prompt_tokens_total{engine="0",model_name="m"} 1e3
vllm:generation_tokens_total{engine="0",model_name="m"} 20
"""
    assert vllm.load(text) == EngineLoad(running=7, waiting=1, kv_used=0.75, tokens=1020)
    assert vllm.load("vllm:num_requests_running NaN\n").running is None
