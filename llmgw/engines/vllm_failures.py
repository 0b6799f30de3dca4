"""How vLLM ends, as data: the texts it prints, the class of the cause, the sentence and the advice.

Texts change between versions: old and new forms stand side by side. What only follows from something else (C{Engine core
initialization failed}, C{EngineDeadError}) is not here, so that it never hides the cause above it.
"""

from __future__ import annotations

from llmgw.engines.failures import CLEAN, CONFIGURATION, NODE, RETRY, SOURCE, Failure, failure

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
    ),
    failure(
        r"Total number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<ranks>\d+)\)",
        CONFIGURATION,
        "{heads} attention heads cannot be divided over tensor {ranks}",
        "Set `parallel.tensor` to a divisor of {heads}.",
    ),
    failure(
        r"n_physical_experts=(?P<experts>\d+) must be divisible by ep_size=(?P<ranks>\d+)",
        CONFIGURATION,
        "{experts} experts cannot be divided over {ranks} ranks",
        "Choose tensor times data so that it divides the experts.",
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
    ),
    failure(
        _NEEDS_CACHE,
        CONFIGURATION,
        "its KV cache does not fit: {length} tokens need {need} GiB, {have} GiB are left beside the weights",
        "Lower `context`, or use a higher `parallel.tensor`.",
    ),
    failure(
        r"max seq len \((?P<length>\d+)\) is larger than the maximum number of tokens that can be stored in KV cache \((?P<fits>\d+)\)",  # noqa: E501
        CONFIGURATION,
        "its KV cache does not fit: {length} tokens are asked for, {fits} fit",
        "Lower `context` to {fits}, or use a higher `parallel.tensor`.",
    ),
    failure(
        r"No available memory for the cache blocks", CONFIGURATION, "the weights leave no device memory for a KV cache", _FRACTION
    ),
    failure(
        r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than (?:desired GPU|the engine)[^(]*"  # noqa: E501
        r"\((?P<share>[\d.]+), (?P<want>[\d.]+) GiB\)",
        CLEAN,
        "it wants {want} GiB of a device that has {free} of {total} GiB free",
        "Somebody else holds the memory: see `llmgw status` for its pid; end that, or claim less with `resources.device_memory`.",
    ),
    failure(
        r"Error in memory profiling",
        RETRY,
        "another process took or freed device memory while it measured",
        "It is tried again; start engines on one device one after the other.",
    ),
    failure(
        r"CUDA out of memory occurred when warming up sampler with (?P<count>\d+) dummy requests",
        CONFIGURATION,
        "it ran out of memory warming up with {count} requests at once",
        "Lower the argument `max-num-seqs`.",
    ),
    failure(
        r"Model architectures \[(?P<what>[^\]]*)\] (?:are not supported|failed to be inspected)",
        CONFIGURATION,
        "this version does not know the architecture {what}",
        "Use a newer vLLM installation.",
    ),
    failure(
        r"has model type `?(?P<what>\S+?)`? but Transformers does not recognize this architecture",
        CONFIGURATION,
        "its transformers library does not know the model type {what}",
        "Use a newer vLLM installation.",
    ),
    failure(
        r"Pipeline parallelism is not supported for this model",
        CONFIGURATION,
        "this model cannot be cut into pipeline stages",
        "Set `parallel.pipeline` to 1 and raise `parallel.tensor`.",
    ),
    failure(
        r"Unknown quantization method: (?P<what>\S+)",
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
        r"quantization method (?P<what>\S+) is not supported for the current GPU\. Minimum capability: (?P<need>\d+)\. "
        r"Current capability: (?P<have>\d+)",
        CONFIGURATION,
        "quantization {what} needs compute capability {need} (tenths), the GPU has {have}",
        "Place it on newer GPUs with `place.labels`, or use other weights.",
    ),
    failure(
        r"Bfloat16 is only supported on GPUs with compute capability of at least",
        CONFIGURATION,
        "the GPU is too old for bfloat16",
        "Set the argument `dtype: half`.",
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
        r"(?:Invalid repository ID or local directory specified|Repository Not Found|LocalEntryNotFoundError|OfflineModeIsEnabled)",  # noqa: E501
        SOURCE,
        "it cannot find the weights",
        "Put them under a model root of the node or into its Hugging Face cache; check `weights`.",
    ),
    failure(
        r"(?:HeaderTooLarge|Error while deserializing header|SafetensorError)",
        SOURCE,
        "a weight file is damaged, or a Git LFS pointer in place of one",
        "Fetch the file again.",
    ),
    failure(
        r"(?:gated repo|You must have access to it|40[13] Client Error)",
        SOURCE,
        "the Hugging Face hub refuses the weights",
        "Accept the model's licence there and give the node a token (environment HF_TOKEN in agent.yaml).",
    ),
    failure(
        r"429 Client Error",
        SOURCE,
        "the Hugging Face hub is refusing requests for a while",
        "Set HF_HUB_OFFLINE=1 in agent.yaml once the weights are on the node.",
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
    ),
    failure(
        r"nvcc fatal\s*: (?P<why>.+)",
        CONFIGURATION,
        "the node's nvcc does not fit this vLLM ({why})",
        "Install the CUDA toolkit of the wheel's version.",
    ),
    failure(
        r"(?:Could not find nvcc|ninja: build stopped)",
        CONFIGURATION,
        "it wanted to compile a kernel and could not",
        "Install gcc and the CUDA toolkit of the wheel's version, or set VLLM_USE_FLASHINFER_SAMPLER=0.",
    ),
    failure(
        r"(?:Failed to infer device type|No CUDA GPUs are available|no CUDA-capable device is detected)",
        NODE,
        "it sees no GPU",
        "Check the driver with nvidia-smi; a CPU build needs `resources: {{devices: 0}}`.",
    ),
    failure(
        r"(?:Gloo connectFullMesh failed|Unable to resolve hostname .* Using the loopback address)",
        CONFIGURATION,
        "its ranks cannot reach each other",
        "Name the fabric's interface in agent.yaml: fabrics: {{NAME: {{address: ..., interface: ...}}}}.",
    ),
    failure(
        r"DistStoreError: Timed out after (?P<time>\d+) seconds waiting for clients",
        CONFIGURATION,
        "not all ranks came together in {time} s",
        "See that every node of the replica runs one vLLM version and reaches the head's port.",
    ),
    failure(
        r"ibv_reg_mr\S* failed.*Cannot allocate memory",
        NODE,
        "InfiniBand may not lock memory",
        "Set LimitMEMLOCK=infinity for llmgw-agent.",
    ),
    failure(
        r"(?:RPC call to (?:execute_model|sample_tokens) timed out|EngineDeadError: .*timed out)",
        RETRY,
        "a rank stopped answering",
        "Look for a GPU error (Xid) in the kernel log of its nodes.",
    ),
    failure(
        r"Worker proc (?P<what>\S+) died unexpectedly(?: \(exit code: (?P<code>[^)]*)\))?",
        CLEAN,
        "worker {what} died (exit code {code})",
        _LOGS,
    ),
)

GUESSES: tuple[Failure, ...] = (
    failure(r"Value error, (?P<why>.+?)(?: \[type=|$)", CONFIGURATION, "{why}", "Correct the profile."),
    failure(
        r"ValueError: (?P<why>.+)",
        CONFIGURATION,
        "{why}",
        "Correct the profile, if this is about a setting; else read its output.",
    ),
)
