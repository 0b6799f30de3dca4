"""How engines over PyTorch end, whichever they are: the part of vLLM's and SGLang's failure tables that both share.

Texts are those of PyTorch, NCCL, Transformers, huggingface_hub, FlashInfer and NVIDIA's libraries.
"""

from __future__ import annotations

from llmgw.engines.failures import Failure, failure
from llmgw.fleet.causes import CLEAN, CONFIGURATION, NODE, RETRY, SOURCE

ANY_TORCH: tuple[Failure, ...] = (
    failure(
        r"has model type `?(?P<what>\S+?)`? but Transformers does not recognize this architecture",
        CONFIGURATION,
        "its transformers library does not know the model type {what}",
        "Use a newer vLLM installation.",
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
        id="F30",
    ),
    failure(
        r"429 Client Error",
        SOURCE,
        "the Hugging Face hub is refusing requests for a while",
        "Set HF_HUB_OFFLINE=1 in agent.yaml once the weights are on the node.",
        id="F29",
    ),
    failure(
        r"nvcc fatal\s*: (?P<why>.+)",
        CONFIGURATION,
        "the node's nvcc does not fit this vLLM ({why})",
        "Install the CUDA toolkit of the wheel's version.",
        id="F55",
    ),
    failure(
        r"(?:Could not find nvcc|ninja: build stopped)",
        CONFIGURATION,
        "it wanted to compile a kernel and could not",
        "Install gcc and the CUDA toolkit of the wheel's version, or set VLLM_USE_FLASHINFER_SAMPLER=0.",
        id="F25",
    ),
    failure(
        r"(?:Failed to infer device type|No CUDA GPUs are available|no CUDA-capable device is detected)",
        NODE,
        "it sees no GPU",
        "Check the driver with nvidia-smi; a CPU build needs `resources: {{devices: 0}}`.",
        id="F14",
    ),
    failure(
        r"(?:Gloo connectFullMesh failed|Unable to resolve hostname .* Using the loopback address)",
        CONFIGURATION,
        "its ranks cannot reach each other",
        "Name the fabric's interface in agent.yaml: fabrics: {{NAME: {{address: ..., interface: ...}}}}.",
        id="F41",
    ),
    failure(
        r"DistStoreError: Timed out after (?P<time>\d+) seconds waiting for clients",
        CONFIGURATION,
        "not all ranks came together in {time} s",
        "See that every node of the replica runs one vLLM version and reaches the head's port.",
        id="F9",
    ),
    failure(
        r"ibv_reg_mr\S* failed.*Cannot allocate memory",
        NODE,
        "InfiniBand may not lock memory",
        "Set LimitMEMLOCK=infinity for llmgw-agent.",
        id="F52",
    ),
    failure(
        r"(?:Detected mismatch between collectives|Mismatched collective|collective mismatch)",
        CONFIGURATION,
        "its ranks do not run the same: their arguments or versions differ",
        "Install one version of the engine, of torch and of NCCL on every node of the replica.",
        id="F42",
    ),
    failure(
        r"(?:ncclSystemError|ncclInternalError|ncclRemoteError|NCCL WARN .*[Cc]onnect .*failed|Watchdog caught collective "
        r"operation timeout|socketStartConnect)",
        CONFIGURATION,
        "its ranks could not talk to each other over NCCL",
        "Name the fabric's interface in agent.yaml, see that nothing blocks its ports, and set NCCL_DEBUG=INFO for one more try.",
        id="F8",
    ),
    failure(
        r"(?:IMEX|MNNVL|mnnvl).*(?:not|fail|error|Error)|CUDA_ERROR_NOT_PERMITTED.*fabric",
        NODE,
        "the IMEX domain of the rack is not up",
        "Start nvidia-imex on every node of it; NCCL_MNNVL_ENABLE=0 goes around it.",
        id="F53",
    ),
    failure(
        r"(?:NVMLError_NotFound|invalid literal for int\(\) with base 10: '(?:GPU|MIG)-)",
        CONFIGURATION,
        "it cannot use the device by the UUID that it was given",
        "Use a newer engine; MIG instances may need one that knows them.",
        id="F54",
    ),
    failure(
        r"(?:wake_up|resume_memory_occupation).*(?:out of memory|OutOfMemory)",
        RETRY,
        "its memory was taken by another process while it slept",
        "Keep other programs off its devices; it is started anew.",
        id="F49",
    ),
    failure(
        r"flashinfer.{0,200}(?:build_and_load|cached_ops|ninja).{0,200}(?:[Ee]rror|fail)|"
        r"(?:[Ee]rror|fail).{0,80}\.cache/flashinfer",
        CLEAN,
        "a kernel that FlashInfer compiles at the start is broken",
        "Delete ~/.cache/flashinfer; install nvcc of the wheel's CUDA version and gcc.",
        id="F25",
    ),
    failure(
        r"(?:PYTORCH|torch\._inductor\S*|InductorError|BackendCompilerFailed)[^\n]*(?:[Ee]rror|[Ff]ailed)",
        CLEAN,
        "torch.compile failed, most often on a cache of another version",
        "Delete its compile cache (TORCHINDUCTOR_CACHE_DIR, ~/.cache/vllm/torch_compile_cache); it is built again.",
        id="F26",
    ),
)


# Said by what is left when another rank has gone: never the cause where any other is known.
RANK_LOST = failure(
    r"Failed to check the \"should dump\" flag on TCPStore|(?:recvValue|sendBytes) failed on SocketImpl",
    RETRY,
    "the rank that it met at the start, rank 0, is gone",
    "Read that one's output, `llmgw logs MODEL/NUMBER/0`; ranks are always started anew together.",
    id="F7",
)


def raised(*kinds: str) -> Failure:
    """A guess by what one of these exceptions of Python says."""
    advice = "Correct the profile, if this is about a setting; else read its output."
    return failure(rf"(?:{'|'.join(kinds)}): (?P<why>.+)", CONFIGURATION, "{why}", advice)
