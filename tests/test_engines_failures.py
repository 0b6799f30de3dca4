"""How engines end, by the catalogue of failures seen in the field: from status, signal, cgroup and output to one sentence.

Each that leaves a text stands here under its number. The others are the agent's and leader's to notice, and are tested there:

    F1   test_the_stand_in_leaves_its_engine_behind_when_killed in test_engines_vllm_standin.py, and that what a dead engine left
         is ended: test_death_of_the_engine_takes_what_it_left in test_agent_supervisor.py; its words are F23's, of the next start
    F3   test_f3_what_dies_below_an_engine_leaves_no_zombie in test_agent_causes.py
    F4   test_f4_what_hangs_in_the_kernel_is_named in test_agent_causes.py
    F5   test_an_engine_that_is_well_but_makes_no_token_is_ended_as_hung in test_agent_turns.py
    F7   test_a_lost_head_takes_the_other_rank_and_both_return in end_to_end/test_engines_nodes.py, and here
    F16  test_f16_weights_that_do_not_come_end_a_start in test_agent_causes.py, and here
    F35  here, and test_f35_what_the_kernel_killed_is_told_by_the_cgroups_own_count in test_agent_causes.py
    F37  as F1: test_stop_takes_a_grandchild_in_its_own_session in test_agent_supervisor.py
    F38  test_engines_over_pytorch in end_to_end/test_engines_nodes.py: no rank above 0 is asked for its health
    F39  test_f39_an_engine_that_stays_unhealthy_is_ended in test_agent_causes.py
    F48  as F1, for any program; SIGTERM comes first: test_a_stopped_engine_is_ended_gently in test_agent_supervisor.py
    F56  as F5: a health path that says 200 is not believed while no token is made
"""

# ruff: noqa: E501  (engines print long lines)

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from llmgw.engines import failures, llamacpp, sglang_failures, torch_failures, trtllm_failures, vllm_failures
from llmgw.engines.registry import adapters
from llmgw.fleet.shard import ShardExit

CONFIGURATION, RETRY, CLEAN, NODE, SOURCE = "configuration", "retry", "clean_and_retry", "node", "source"
FOUND = adapters()
CORE = "(EngineCore pid=7) ERROR 11-30 12:00:00 [core.py:7] "
TESTS = Path(__file__).parent
BEFORE = ("INFO 11-30 12:00:00 starting", "INFO 11-30 12:00:01 loading")
CONSEQUENCES = (
    "Traceback (most recent call last):",
    '  File "core.py", line 1, in run',
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    "EngineCore failed to start.",
    "Some other Error: cudaErrorUnknown",
)
STORE = "[c10d] recvValue failed on SocketImpl(fd=99, addr=[::ffff:10.9.0.6]:38760, remote=[::ffff:10.9.0.5]:42643): Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
ROWS = [
    ("F2", "vllm", "(ApiServer_2 pid=39384) TimeoutError: Timed out waiting for engines to send initial message on input socket.", CLEAN, "gave up waiting for its engine, which still warmed up"),
    ("F5", "sglang", "[TP0] Watchdog TimeoutError: self.watchdog_last_forward_ct=3", RETRY, "a forward pass hung"),
    ("F6", "vllm", CORE + "TimeoutError: RPC call to sample_tokens timed out.", RETRY, "a rank stopped answering"),
    ("F6", "vllm", "No available shared memory broadcast block found in 60 seconds. This typically happens", RETRY, "silent for minutes"),
    ("F7", "vllm", "[rank30]:[W111 00:54:10.905768298 TCPStore.cpp:125] " + STORE, RETRY, "rank 0, is gone"),
    ("F7", "sglang", '[rank8]:[W516 12:46:57.499514954 ProcessGroupNCCL.cpp:1826] [PG ID 0 PG GUID 0 Rank 8] Failed to check the "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Connection reset by peer', RETRY, "rank 0, is gone"),
    ("F8", "vllm", CORE + "torch.distributed.DistBackendError: NCCL error ... ncclSystemError: System call failed", CONFIGURATION, "NCCL"),
    ("F9", "vllm", CORE + "DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.", CONFIGURATION, "in 601 s"),
    ("F10", "vllm", "OSError: [Errno 98] Address already in use", RETRY, "a port it was given is in use"),
    ("F10", "sglang", "ERROR:    [Errno 98] error while attempting to bind on address ('10.0.0.5', 20000): address already in use", RETRY, "a port it was given is in use"),
    ("F10", "trtllm", "RuntimeError: Failed to bind socket to 10.0.0.5:20000: [Errno 98] in use", RETRY, "its port 10.0.0.5:20000 is in use"),
    ("F11", "sglang", "ValueError: metrics_port at 20005 is not available in 30 seconds. The port is used. It is used by a process already.", RETRY, "port 20005 (metrics_port)"),
    ("F12", "vllm", "RuntimeError: Failed to initialize NVML: Driver/library version mismatch", NODE, "driver was updated"),
    ("F12", "sglang", "NCCL: RM has detected an NVML/RM version mismatch", NODE, "driver was updated"),
    ("F13", "vllm", "pynvml: Failed to initialize NVML: Unknown Error", NODE, "has lost the GPUs"),
    ("F14", "vllm", "RuntimeError: Failed to infer device type, please set the environment variable", NODE, "it sees no GPU"),
    ("F14", "trtllm", "ValueError: No GPU devices found on the node", CONFIGURATION, "it sees no GPU"),
    ("F15", "vllm", CORE + "NVML_ERROR_GPU_IS_LOST", NODE, "fallen off the bus"),
    ("F17", "vllm", "TimeoutError: Timed out waiting for engine core processes to start.", RETRY, "gave up waiting for its own engine"),
    ("F18", "sglang", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", CONFIGURATION, "no device memory for a KV cache"),
    ("F18", "sglang", "RuntimeError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.5. Raise --mem-fraction-static above 0.71", CONFIGURATION, "no device memory for a KV cache"),
    ("F19", "vllm", CORE + "ValueError: No available memory for the cache blocks. Try increasing", CONFIGURATION, "no device memory for a KV cache"),
    ("F20", "vllm", CORE + "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache (28672).", CONFIGURATION, "28672 fit"),
    ("F21", "vllm", CORE + "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.", CONFIGURATION, "1024 requests"),
    ("F22", "vllm", CORE + "AssertionError: Error in memory profiling. Initial free memory 10 GiB, current free memory 20 GiB.", RETRY, "another process took or freed"),
    ("F23", "vllm", CORE + "ValueError: Free memory on device cuda:0 (20.1/79.2 GiB) on startup is less than desired GPU memory utilization (0.92, 72.9 GiB).", CLEAN, "72.9 GiB"),
    ("F24", "sglang", "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate", CONFIGURATION, "capturing graphs"),
    ("F25", "vllm", CORE + "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist", CONFIGURATION, "wanted to compile a kernel"),
    ("F25", "sglang", "FAILED: /home/llm/.cache/flashinfer/0.7.2/90a/cached_ops/sampling.o failed", CLEAN, "FlashInfer"),
    ("F26", "vllm", CORE + "AssertionError: failed to get the hash of the compiled graph", CLEAN, "compile cache is damaged"),
    ("F26", "sglang", "torch._inductor.exc.InductorError: RuntimeError: Failed to run autotuning", CLEAN, "torch.compile failed"),
    ("F27", "vllm", "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-ab12 (size 9637888)", NODE, "/dev/shm is too small"),
    ("F28", "vllm", "OSError: [Errno 28] No space left on device: '/dev/shm/vllm_offload_7'", CLEAN, "what killed engines left"),
    ("F29", "vllm", "requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url", SOURCE, "refusing requests for a while"),
    ("F30", "sglang", "OSError: You are trying to access a gated repo. Make sure to have access to it", SOURCE, "refuses the weights"),
    ("F30", "trtllm", "HTTPError: 401 Client Error: Unauthorized for url", SOURCE, "refuses the weights"),
    ("F31", "sglang", "RuntimeError: The NVIDIA driver on your system is too old (found version 12080).", NODE, "CUDA 12080"),
    ("F32", "vllm", CORE + "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device", CONFIGURATION, "no kernels for this GPU"),
    ("F33", "trtllm", "RuntimeError: CUDA unknown error: Error 802: system not yet initialized", NODE, "802"),
    ("F34", "vllm", CORE + "RuntimeError: CUDA error: an illegal memory access was encountered", RETRY, "memory that is not its own"),
    ("F36", "sglang", "SIGQUIT received. signum=None, frame=None. It usually means one child failed.", "unknown", "killed itself"),
    ("F40", "sglang", "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic", RETRY, "20 s"),
    ("F41", "sglang", "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc]", CONFIGURATION, "cannot reach each other"),
    ("F41", "vllm", "Unable to resolve hostname to a (local) address. Using the loopback address as fallback", CONFIGURATION, "cannot reach each other"),
    ("F42", "sglang", "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective", CONFIGURATION, "arguments or versions differ"),
    ("F43", "trtllm", "[TRT-LLM] [E] Executor loop crashed on this rank; hard-killing all 8 ranks in 9.99947s", CLEAN, "one of its 8 ranks"),
    ("F44", "trtllm", "RuntimeError: Failed to initialize executor on rank 3", CLEAN, "MPI's start"),
    ("F45", "trtllm", "RuntimeError: Executor creation failed due to insufficient GPU memory. The following component could not be created: KV cache", CONFIGURATION, "device memory does not suffice"),
    ("F46", "llamacpp", "Remote RPC server crashed or returned malformed response", RETRY, "RPC"),
    ("F47", "llamacpp", "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 900 MiB on device 0: cudaMalloc failed: out of memory", CONFIGURATION, "out of device memory"),
    ("F48b", "command", "Error: llama runner process has terminated: cudaMalloc failed: out of memory", CONFIGURATION, "out of device memory"),
    ("F49", "vllm", "in wake_up: torch.OutOfMemoryError: CUDA out of memory at csrc/cumem_allocator.cpp", RETRY, "while it slept"),
    ("F50", "vllm", "vllm: error: unrecognized arguments: --swap-space 4", CONFIGURATION, "it does not know --swap-space 4"),
    ("F50", "sglang", "sglang serve: error: unrecognized arguments: --no-such 4", CONFIGURATION, "it does not know --no-such 4"),
    ("F50", "trtllm", "Error: No such option: --no_such Did you mean --host?", CONFIGURATION, "it does not know --no_such"),
    ("F51", "vllm", "  Value error, Total number of attention heads (28) must be divisible by tensor parallel size (8). [type=x]", CONFIGURATION, "28 attention heads"),
    ("F51", "vllm", CORE + "AssertionError: n_physical_experts=256 must be divisible by ep_size=3", CONFIGURATION, "256 experts"),
    ("F51", "sglang", "AssertionError: 28 is not divisible by 8", CONFIGURATION, "28 cannot be divided over 8"),
    ("F52", "vllm", "NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory", NODE, "may not lock memory"),
    ("F53", "vllm", "NCCL WARN MNNVL: failed to export fabric handle", NODE, "IMEX"),
    ("F54", "vllm", "pynvml.NVMLError_NotFound: Not Found", CONFIGURATION, "by the UUID"),
    ("F54", "vllm", "ValueError: invalid literal for int() with base 10: 'MIG-1234'", CONFIGURATION, "by the UUID"),
    ("F55", "vllm", "nvcc fatal   : Unknown option '-static-global-template-stub=false'", CONFIGURATION, "nvcc does not fit"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "engine", "line", "cause", "said"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_f_rows(row, engine, line, cause, said):
    """Found between what came before and pages of consequences, with its class, a sentence with its figures, and advice."""
    told = FOUND[engine].diagnose(ShardExit(1), (*BEFORE, line, *CONSEQUENCES))
    assert (told.cause, said in told.text, bool(told.advice)) == (cause, True, True), told
    assert "{" not in told.text + told.advice.replace("{NAME", "").replace("{devices", "").replace("{address", "")


def test_f7_is_never_the_cause_where_another_is_known():
    """What the ranks say when one has gone may come before that one's own last words."""
    tail = (
        "[rank1]:[W1] TCPStore.cpp:125] " + STORE,
        CORE + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    )
    told = FOUND["vllm"].diagnose(ShardExit(1), tail)
    assert (told.cause, "out of device memory" in told.text) == (CONFIGURATION, True)


SLOW = (
    "(EngineCore pid=7) INFO 11-30 12:00:02 [gpu_model_runner.py:2602] Starting to load model /nfs/models/llama-70b...",
    "Loading safetensors checkpoint shards:   0% Completed | 0/30 [00:00<?, ?it/s]",
)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_f16_a_start_that_is_given_up_while_it_reads_weights(engine):
    """Its output names no cause: what it was at does. One that does name a cause is believed."""
    phases = [found.name for line in SLOW if (found := FOUND[engine].phase(line))]
    silent = FOUND[engine].diagnose(ShardExit(), (*BEFORE, *SLOW))
    told = failures.given_up("start_timeout", "not ready after 30m", phases[-1], silent)
    assert (told.cause, told.text, "file system" in told.advice) == (CLEAN, "not ready after 30m", True)
    other = failures.given_up("start_timeout", "not ready after 30m", "", silent)
    assert (other.cause, "Raise `start_timeout`" in other.advice) == (RETRY, True)
    said = (*BEFORE, "NCCL WARN socketStartConnect: Connect to 10.9.0.5<40000> failed", *SLOW)
    told = failures.given_up("start_timeout", "not ready after 30m", "weights", FOUND[engine].diagnose(ShardExit(), said))
    assert told.cause == CONFIGURATION and told.text.startswith("not ready after 30m. ") and "NCCL" in told.text


def test_the_table_names_tests_that_exist():
    """A test that is renamed or deleted does not leave its row behind."""
    assert __doc__ is not None
    found = re.findall(r"(test_\w+)\s+in\s+((?:end_to_end/)?test_\w+\.py)", __doc__)
    assert len(found) >= 12
    for name, file in found:
        assert f"def {name}(" in (TESTS / file).read_text(), name


def test_every_row_with_a_number_has_a_test():
    """A new row is not forgotten here."""
    tables = (failures.ANY_ENGINE, torch_failures.ANY_TORCH, vllm_failures.FAILURES, vllm_failures.GUESSES)
    tables += (sglang_failures.FAILURES, sglang_failures.GUESSES, trtllm_failures.FAILURES, llamacpp.FAILURES)
    numbered = {known.id for table in tables for known in table if known.id}
    assert numbered - {row[0] for row in ROWS} == set()


@pytest.mark.parametrize("engine", sorted(FOUND))
def test_f35_the_kernels_out_of_memory_killer(engine):
    """By the cgroup's count, whatever the front process' own status was and whatever it went on to say."""
    for ended in (ShardExit(signal=9, oom_kills=1), ShardExit(1, oom_kills=2)):
        told = FOUND[engine].diagnose(ended, CONSEQUENCES)
        assert told.cause == "configuration"
        assert f"killed {ended.oom_kills} of its processes" in told.text and "resources.host_memory" in told.advice
    unknown = FOUND[engine].diagnose(ShardExit(signal=9), ())
    assert "SIGKILL" in unknown.text and unknown.cause == "unknown"


def test_f36_a_child_that_failed_is_the_cause_not_the_suicide():
    """SGLang's own SIGKILL is told from the kernel's, and the first traceback explains both."""
    tail = (
        "RuntimeError: Detected mismatch between collectives on ranks.",
        "SIGQUIT received. It usually means one child failed.",
    )
    told = FOUND["sglang"].diagnose(ShardExit(signal=9), tail)
    assert told.cause == "configuration" and "arguments or versions differ" in told.text


def test_the_first_cause_and_not_the_last_line():
    """Of two known failures the one further up is the cause."""
    first, second = (next(row for row in ROWS if row[0] == wanted) for wanted in ("F24", "F10"))
    for one, other in ((first, second), (second, first)):
        assert one[4] in FOUND["sglang"].diagnose(ShardExit(1), (one[2], other[2])).text


@pytest.mark.parametrize("engine", sorted(FOUND))
@pytest.mark.parametrize("line", ["x" * 10_000, "1" * 10_000, "error " * 1700, "flashinfer " * 900, "a.b " * 2500])
def test_odd_output_costs_no_time(engine, line):
    """Patterns are tried at each character of whatever an engine prints; none may grow with its square."""
    begin = time.thread_time()
    FOUND[engine].diagnose(ShardExit(1), (line,) * 20)
    assert time.thread_time() - begin < 1.0
