"""How vLLM ends, as data: the texts it prints, the class of the cause, the sentence and the advice.

Texts change between versions: old and new forms stand side by side. What only follows from something else (C{Engine core
initialization failed}, C{EngineDeadError}) is not here, so that it never hides the cause above it.
"""

from __future__ import annotations

from llmgw.engines.failures import Failure, failure
from llmgw.engines.torch_failures import ANY_TORCH, RANK_LOST, raised
from llmgw.fleet.causes import CLEAN, CONFIGURATION, NODE, RETRY

_FRACTION = "Lower `context` or `max-num-seqs`, use more devices, or claim more with `resources.device_memory`."
_NEEDS_CACHE = (
    r"To serve at least one request with the model's max seq len \((?P<length>\d+)\), \(?(?P<need>[\d.]+) GiB KV cache is needed, "  # noqa: E501
    r"which is larger than the available KV cache memory \((?P<have>[\d.]+) GiB\)"
)
_LOGS = "Read its output: `llmgw logs SHARD`."

FAILURES: tuple[Failure, ...] = (
    failure(
        r"unrecognized arguments: (?P<what>.+)",
        CONFIGURATION,
        "it does not know {what}",
        "Correct `arguments` or `extra_argv`; `vllm serve --help=all` lists what this version has.",
        id="F50",
    ),
    failure(
        r"error: argument (?P<what>\S+): (?P<why>.+)",
        CONFIGURATION,
        "it cannot use the value of {what} ({why})",
        "Correct it in the profile.",
    ),
    failure(
        r"User-specified max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len "
        r"\((?:[^)]*?=)?(?P<most>\d+)",
        CONFIGURATION,
        "context {asked} is more than the {most} tokens that the model can do",
        "Set `context` to at most that.",
        id="F20",
    ),
    failure(
        r"Total number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<ranks>\d+)\)",
        CONFIGURATION,
        "{heads} attention heads cannot be divided over tensor {ranks}",
        "Set `parallel.tensor` to a divisor of {heads}.",
        id="F51",
    ),
    failure(
        r"n_physical_experts=(?P<experts>\d+) must be divisible by ep_size=(?P<ranks>\d+)",
        CONFIGURATION,
        "{experts} experts cannot be divided over {ranks} ranks",
        "Choose tensor times data so that it divides the experts.",
        id="F51",
    ),
    failure(
        r"is not divisible by weight quantization block_[nk] = (?P<block>\d+)",
        CONFIGURATION,
        "a rank's part of the weights is not a multiple of the quantization block ({block})",
        "Lower `parallel.tensor`, or set `parallel.expert: true`.",
    ),
    failure(
        r"World size \((?P<world>\d+)\) is larger than the number of available GPUs \((?P<have>\d+)\)",
        CONFIGURATION,
        "it wants {world} GPUs and sees {have}",
        "Let `resources.devices` follow from `parallel`.",
    ),
    failure(
        _NEEDS_CACHE + r".*estimated maximum model length is (?P<fits>\d+)",
        CONFIGURATION,
        "its KV cache does not fit: {length} tokens need {need} GiB, {have} GiB are left beside the weights",
        "Lower `context` to {fits}, or use a higher `parallel.tensor`.",
        id="F20",
    ),
    failure(
        _NEEDS_CACHE,
        CONFIGURATION,
        "its KV cache does not fit: {length} tokens need {need} GiB, {have} GiB are left beside the weights",
        "Lower `context`, or use a higher `parallel.tensor`.",
        id="F20",
    ),
    failure(
        r"max seq len \((?P<length>\d+)\) is larger than the maximum number of tokens that can be stored in KV cache \((?P<fits>\d+)\)",  # noqa: E501
        CONFIGURATION,
        "its KV cache does not fit: {length} tokens are asked for, {fits} fit",
        "Lower `context` to {fits}, or use a higher `parallel.tensor`.",
        id="F20",
    ),
    failure(
        r"No available memory for the cache blocks",
        CONFIGURATION,
        "the weights leave no device memory for a KV cache",
        _FRACTION,
        id="F19",
    ),
    failure(
        r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than (?:desired GPU|the engine)[^(]*"  # noqa: E501
        r"\((?P<share>[\d.]+), (?P<want>[\d.]+) GiB\)",
        CLEAN,
        "it wants {want} GiB of a device that has {free} of {total} GiB free",
        "Somebody else holds the memory: see `llmgw status` for its pid; end that, or claim less with `resources.device_memory`.",
        id="F23",
    ),
    failure(
        r"Available memory on node \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired CPU memory "
        r"utilization \((?P<share>[\d.]+), (?P<want>[\d.]+) GiB\)",
        CONFIGURATION,
        "it wants {want} GiB of the host's memory, of which {free} of {total} GiB are free",
        "Say how large its KV cache is by VLLM_CPU_KVCACHE_SPACE (GiB) in `environment`, not by gpu-memory-utilization.",
    ),
    failure(
        r"Available memory on node \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on kv cache allocation is less than requested "
        r"memory for kv \((?P<want>[\d.]+)",
        CONFIGURATION,
        "its KV cache of {want} GiB does not fit into the host's memory, of which {free} of {total} GiB are free",
        "Lower VLLM_CPU_KVCACHE_SPACE in `environment`, or place it on a larger node.",
    ),
    failure(
        r"Sleep mode is not supported on current platform",
        CONFIGURATION,
        "it cannot sleep on this hardware",
        "Leave the argument enable-sleep-mode out.",
    ),
    failure(
        r"Error in memory profiling",
        RETRY,
        "another process took or freed device memory while it measured",
        "It is tried again; start engines on one device one after the other.",
        id="F22",
    ),
    failure(
        r"CUDA out of memory occurred when warming up sampler with (?P<count>\d+) dummy requests",
        CONFIGURATION,
        "it ran out of memory warming up with {count} requests at once",
        "Lower the argument `max-num-seqs`.",
        id="F21",
    ),
    failure(
        r"Model architectures \[(?P<what>[^\]]*)\] (?:are not supported|failed to be inspected)",
        CONFIGURATION,
        "this version does not know the architecture {what}",
        "Use a newer vLLM installation.",
    ),
    failure(
        r"Pipeline parallelism is not supported for this model",
        CONFIGURATION,
        "this model cannot be cut into pipeline stages",
        "Set `parallel.pipeline` to 1 and raise `parallel.tensor`.",
    ),
    failure(
        r"Unknown quantization method: (?P<what>\S+?)\.?(?:\s|$)",
        CONFIGURATION,
        "it does not know the quantization {what}",
        "Leave the argument `quantization` out for weights that are quantized already.",
    ),
    failure(
        r"Quantization method specified in the model config \((?P<model>[^)]*)\) does not match .*\((?P<asked>[^)]*)\)",
        CONFIGURATION,
        "the weights are quantized as {model}, the profile says {asked}",
        "Leave the argument `quantization` out.",
    ),
    failure(
        r"max_num_batched_tokens \((?P<have>\d+)\) must be greater than or equal to max_num_seqs \((?P<need>\d+)\)",
        CONFIGURATION,
        "max-num-batched-tokens {have} is less than max-num-seqs {need}",
        "Raise the one or lower the other.",
    ),
    failure(
        r"--enable-auto-tool-choice requires --tool-call-parser",
        CONFIGURATION,
        "enable-auto-tool-choice is set without a tool-call-parser",
        "Set the argument `tool-call-parser` for this model.",
    ),
    failure(
        r"appears to be a URI",
        NODE,
        "VLLM_PORT in its environment is not a number (Kubernetes sets it so for a service named vllm)",
        "Remove it from the environment in agent.yaml.",
    ),
    failure(
        r"(?:failed to get the hash of the compiled graph|torch_compile_cache.*(?:Error|corrupt))",
        CLEAN,
        "its compile cache is damaged",
        "Delete torch_compile_cache in VLLM_CACHE_ROOT (~/.cache/vllm); it is built again.",
        id="F26",
    ),
    failure(
        r"(?:RPC call to (?:execute_model|sample_tokens) timed out|EngineDeadError: .*timed out)",
        RETRY,
        "a rank stopped answering",
        "Look for a GPU error (Xid) in the kernel log of its nodes.",
        id="F6",
    ),
    failure(
        r"Worker proc (?P<what>\S+) died unexpectedly \(exit code: -4\)",
        NODE,
        "worker {what} used an instruction that this CPU does not have, or may not use",
        "Install a build of vLLM for this machine; with AMX leave the argument enforce-eager out.",
    ),
    failure(
        r"Worker proc (?P<what>\S+) died unexpectedly(?: \(exit code: (?P<code>-?\d+)\))?",
        CLEAN,
        "worker {what} died (exit code {code})",
        _LOGS,
    ),
    failure(
        r"Timed out waiting for engines to send ?initial message",
        CLEAN,
        "its API server gave up waiting for its engine, which still warmed up and would have gone on without it",
        "Raise VLLM_ENGINE_READY_TIMEOUT_S in `environment` and `start_timeout` (DeepGEMM compiles for 20 m); keep its caches.",
        id="F2",
    ),
    failure(
        r"(?:Timed out waiting for engine core|[Ee]ngine core.* not ready in (?P<time>\d+))",
        RETRY,
        "it gave up waiting for its own engine, which loads or compiles for long",
        "Raise `start_timeout` and VLLM_ENGINE_READY_TIMEOUT_S, and keep its caches.",
        id="F17",
    ),
    *ANY_TORCH,
)

GUESSES: tuple[Failure, ...] = (
    failure(
        # Killed, it says nothing itself; the server says this, then EngineDeadError, and ends with status 0.
        r"\A(?![\s\S]*(?:EngineCore|Worker)\S* pid=\d+\) ERROR)[\s\S]*engine core exited unexpectedly",
        RETRY,
        "its engine core was killed or crashed without a word",
        "Look for that process in the node's kernel log.",
    ),
    failure(
        r"validation errors? for \w+\n(?P<what>\w+)\n +(?P<why>.+?) \[type=",
        CONFIGURATION,
        "it cannot use the value of {what} ({why})",
        "Correct it in the profile.",
    ),
    failure(r"Value error, (?P<why>.+?)(?: \[type=|$)", CONFIGURATION, "{why}", "Correct the profile."),
    raised("ValueError"),
    RANK_LOST,
    failure(
        r"No available shared memory broadcast block found in 60 seconds",
        RETRY,
        "a rank was silent for minutes: hung, dead, or compiling",
        "Look for a GPU error (Xid) in the kernel log of its nodes.",
        id="F6",
    ),
)
