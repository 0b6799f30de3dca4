"""How SGLang ends, as data: the texts it prints, the class of the cause, the sentence and the advice.

When a child dies SGLang kills its whole tree with SIGKILL, itself included: that looks like the kernel's out-of-memory killer
but for C{SIGQUIT received} in the output, which is a consequence, so it stands among the guesses.
"""

from __future__ import annotations

from llmgw.engines.failures import PORT_TAKEN, Failure, failure
from llmgw.engines.torch_failures import ANY_TORCH, RANK_LOST, raised
from llmgw.fleet.causes import CONFIGURATION, RETRY, UNKNOWN

FAILURES: tuple[Failure, ...] = (
    failure(
        r"(?:launch_server\.py|sglang(?: serve)?|launch_server): error: unrecognized arguments: (?P<what>.+)",
        CONFIGURATION,
        "it does not know {what}",
        "Correct `arguments` or `extra_argv`; `sglang serve --help` lists what this version has.",
        id="F50",
    ),
    failure(
        r"error: argument (?P<what>\S+): (?P<why>.+)",
        CONFIGURATION,
        "it cannot use the value of {what} ({why})",
        "Correct it in the profile.",
    ),
    failure(
        r"(?:Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=(?P<share>[\d.]+)"
        r"(?:.*?Raise --mem-fraction-static above (?P<least>[\d.]+))?|Not enough memory\. Please try to increase "
        r"--mem-fraction-static)",
        CONFIGURATION,
        "the weights leave no device memory for a KV cache",
        "Raise the argument `mem-fraction-static` (above {least}), use a higher `parallel.tensor`, or smaller weights.",
        id="F18",
    ),
    failure(
        r"Capture (?:cuda )?graph failed: (?P<why>.*out of memory.*)",
        CONFIGURATION,
        "it ran out of device memory capturing graphs",
        "Lower the argument `mem-fraction-static` or `cuda-graph-max-bs`.",
        id="F24",
    ),
    failure(
        r"\b(?P<what>\w{1,40}) at (?P<port>\d+) is not available in \d+ seconds.*is used by a process already",
        RETRY,
        "port {port} ({what}) " + PORT_TAKEN,
        "It is tried again on other ports; if it goes on, see with `ss -lptn` who holds them.",
        id="F11",
    ),
    failure(
        r"tp_size must be divisible by number of nodes",
        CONFIGURATION,
        "its ranks cannot be shared equally by the nodes",
        "Choose tensor times pipeline as a multiple of `parallel.nodes`.",
    ),
    failure(
        r"\b(?P<heads>\d+) is not divisible by (?P<ranks>\d+)",
        CONFIGURATION,
        "{heads} cannot be divided over {ranks} ranks",
        "Set `parallel.tensor` to a divisor of the model's heads.",
        id="F51",
    ),
    failure(
        r"User-specified context_length \((?P<asked>\d+)\) is greater than the derived context_length \((?P<most>\d+)\)",
        CONFIGURATION,
        "context {asked} is more than the {most} tokens that the model can do",
        "Set `context` to at most that.",
        id="F20",
    ),
    failure(
        r"served_model_name cannot contain a colon",
        CONFIGURATION,
        "the model's name has a ':'",
        "Rename the model: SGLang separates LoRA adapters so.",
    ),
    failure(
        r"Unsupported architectures?:? (?P<what>\S+)|Model architectures \[(?P<names>[^\]]*)\] (?:are not supported|failed)",
        CONFIGURATION,
        "this version does not know the model's architecture",
        "Use a newer SGLang installation.",
    ),
    failure(
        r"Watchdog TimeoutError|(?:watchdog|Watchdog) timeout",
        RETRY,
        "a forward pass hung and its watchdog ended it",
        "Look for a GPU error (Xid) in the kernel log of its nodes; very long prefills want a higher `watchdog-timeout`.",
        id="F5",
    ),
    *ANY_TORCH,
)

GUESSES: tuple[Failure, ...] = (
    raised("AssertionError"),
    raised("ValueError"),
    RANK_LOST,
    failure(
        r"Health check failed\. Server couldn't get a response from detokenizer for last (?P<time>\d+) seconds",
        RETRY,
        "it gave no output for {time} s and called itself unhealthy",
        "Raise SGLANG_HEALTH_CHECK_TIMEOUT in `environment` if it was busy with long prompts.",
        id="F40",
    ),
    failure(
        r"SIGQUIT received.*|Received sigquit from a child process.*",
        UNKNOWN,
        "one of its processes died and it killed itself",
        "Read its output for the first traceback: `llmgw logs SHARD`.",
        id="F36",
    ),
)
