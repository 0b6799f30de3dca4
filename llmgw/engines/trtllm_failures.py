"""How TensorRT-LLM ends, as data: the texts it prints, the class of the cause, the sentence and the advice."""

from __future__ import annotations

from llmgw.engines.failures import PORT_TAKEN, Failure, failure
from llmgw.engines.torch_failures import ANY_TORCH, raised
from llmgw.fleet.causes import CLEAN, CONFIGURATION, RETRY

FAILURES: tuple[Failure, ...] = (
    failure(
        r"Error: No such option:? '?(?P<what>--[\w-]+)",
        CONFIGURATION,
        "it does not know {what}",
        "Correct `arguments` or `extra_argv`; `trtllm-serve serve --help` lists what this version has.",
        id="F50",
    ),
    failure(
        r"Error: Invalid value for '(?P<what>[^']+)': (?P<why>.+)",
        CONFIGURATION,
        "it cannot use the value of {what} ({why})",
        "Correct it in the profile.",
    ),
    failure(
        r"(?m)^(?P<what>[\w.]{1,80})\s{1,4}Extra inputs are not permitted",
        CONFIGURATION,
        "its settings have no {what}",
        "Correct `arguments`.",
    ),
    failure(
        r"Executor creation failed due to insufficient GPU memory(?:.*component could not be created: (?P<what>.+?)\.?$)?",
        CONFIGURATION,
        "device memory does not suffice for what it makes after the weights",
        "Lower `context`, `max_batch_size` or `max_num_tokens`, or use a higher `parallel.tensor`.",
        id="F45",
    ),
    failure(
        r"Executor loop crashed on this rank; hard-killing all (?P<ranks>\d+) ranks",
        CLEAN,
        "one of its {ranks} ranks crashed, and it would have answered 503 for ever",
        "Read its output above that line: `llmgw logs SHARD`.",
        id="F43",
    ),
    failure(
        r"(?:Failed to initialize executor on rank \d+|MPI_ABORT was invoked|[OP]RTE has lost communication)",
        CLEAN,
        "a worker failed and took MPI's start with it",
        "Read its output above that line: `llmgw logs SHARD`.",
        id="F44",
    ),
    failure(
        r"Failed to bind socket to (?P<where>\S+?):? ",
        RETRY,
        "its port {where} " + PORT_TAKEN,
        "It is tried again on other ports; if it goes on, see with `ss -lptn` who holds it.",
        id="F10",
    ),
    failure(
        r"(?:Unsupported|unsupported|Unknown) (?:model )?architecture:? (?P<what>\S+)",
        CONFIGURATION,
        "this version does not know the architecture {what}",
        "Use a newer TensorRT-LLM, or engine vllm or sglang.",
    ),
    failure(
        r"No GPU devices found on the node",
        CONFIGURATION,
        "it sees no GPU",
        "Check the driver with nvidia-smi; it cannot run on the CPU.",
        id="F14",
    ),
    *ANY_TORCH,
)

GUESSES: tuple[Failure, ...] = (raised("AssertionError", "ValueError"),)
