"""What every adapter shares: arguments to long options, checks against an installation's flags, environments, placeholders.

An option's value that begins with a dash is joined to its option by C{=}: as a word of its own a parser would take it for
the next option.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from llmgw.errors import Problem
from llmgw.fleet.model import Argument, Profile
from llmgw.fleet.shard import Allocation, WeightFiles
from llmgw.interfaces import Flags, ShardLaunch

_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")

# What an engine may keep of its agent's own environment. Everything else (systemd's, proxies, other services' addresses,
# secrets) stays out; agent.yaml can put back what a node needs.
INHERITED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR"}
    | {"LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH", "HF_HOME", "XDG_CACHE_HOME", "VIRTUAL_ENV"}
)

# Names that decide which code runs or where it talks. They belong to the node: agent.yaml may set them, a catalog may not.
NODES_OWN = re.compile(
    r"(LD_.*|DYLD_.*|PYTHON(PATH|HOME|STARTUP|USERBASE|INSPECT|BREAKPOINT)|PATH|HOME|BASH_ENV|ENV|IFS|GCONV_PATH"
    r"|(https?|all|no|ftp)_proxy)\Z",
    re.IGNORECASE,
)
# Names that belong to the daemon or its service manager; nobody may hand them to an engine.
NEVER = re.compile(
    r"(NOTIFY_SOCKET|WATCHDOG_.*|LISTEN_(FDS|PID|FDNAMES)|INVOCATION_ID|JOURNAL_STREAM|CREDENTIALS_DIRECTORY|LLMGW_.*)\Z"
)
# What says which devices an engine sees; GPU_DEVICE_ORDINAL is OpenCL's and older HIP's.
DEVICE_VARIABLES = frozenset(
    {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}
)

# An option, and what it takes: words in capitals, [optional], {choices}, <thing>; argparse repeats that after each short form.
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


def help_flags(output: str) -> Flags:
    """The options in a help text, one a line with its short forms in front or behind.

    What stands behind two blanks is the description. An option is a switch when nothing but options stand on its line.
    """
    names: set[str] = set()
    switches: set[str] = set()
    for line in output.splitlines():
        if not re.match(r" {0,4}-", line):
            continue
        usage = re.split(r"\s{2,}", re.sub(r",\s+", ", ", line.strip()), maxsplit=1)[0]
        options = _OPTION.findall(re.sub(r"\{[^}]*\}?", "VALUE", usage))
        names.update(options)
        if not _OPTION.sub("", usage).strip(" ,"):
            switches.update(options)
    return Flags(frozenset(names), frozenset(switches))


def joined(value: Argument) -> list[str]:
    """A list as one word of JSON."""
    return [json.dumps(value, separators=(",", ":"))]


def words(value: Argument) -> list[str]:
    """A list as words of its own, for engines whose options take several values."""
    assert isinstance(value, list)
    return [_word(item) for item in value]


def commas(value: Argument) -> list[str]:
    """A list as one word, separated by commas."""
    return [",".join(words(value))]


def _word(value: Argument) -> str:
    if isinstance(value, bool | list | dict) or value is None:
        return json.dumps(value, separators=(",", ":"))
    return str(value)


def long_options(
    arguments: Mapping[str, Argument], lists: Callable[[str], Callable[[Argument], list[str]]] = lambda name: joined
) -> list[str]:
    """Arguments as long options, in their own order.

    Text and numbers follow their option, C{True} is the bare option, C{False} is C{--no-NAME}, C{None} leaves it out,
    maps are JSON.

    @param lists: for an option's name, how its engine wants a list: L{joined}, L{words} or L{commas}.
    """
    argv: list[str] = []
    for name, value in arguments.items():
        if value is False:
            argv.append(f"--no-{name}")
        elif value is True:
            argv.append(f"--{name}")
        elif value is not None:
            argv += option(f"--{name}", *(lists(name)(value) if isinstance(value, list) else [_word(value)]))
    return argv


def option(name: str, *values: str) -> list[str]:
    """One option with its values as argv words."""
    if len(values) == 1 and values[0].startswith("-"):
        return [f"{name}={values[0]}"]
    return [name, *values]


def whole(value: object) -> int | None:
    """An argument's value if it is a whole number, which C{true} is not."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def fraction(value: object) -> float | None:
    """An argument's value if it is a number above 0 and at most 1."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1 else None


def nearest(name: str, known: Iterable[str]) -> str:
    """C{", did you mean X?"} for the closest known name, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def unknown_arguments(profile: Profile, flags: Flags, whose: str, see: str) -> list[Problem]:
    """Arguments that the installed version has no option for, or gives a value to a switch. Nothing if nobody could ask.

    @param whose: the installation and its version, for the sentence, e.g. C{vllm 0.33.0}.
    @param see: the command that lists what there is.
    """
    if not flags.names:
        return []
    problems = []
    for name, value in profile.arguments.items():
        wanted = f"--no-{name}" if value is False else f"--{name}"
        where = f"arguments.{name}"
        if _known(wanted, flags):
            if wanted in flags.switches and not isinstance(value, bool | None):
                text = f"{whose}: {wanted} takes no value, found {value!r}; write true or false"
                problems.append(Problem(text, where, "argument_value"))
            elif flags.switches and value is True and wanted not in flags.switches:
                problems.append(Problem(f"{whose}: {wanted} takes a value, found true", where, "argument_value"))
        elif value is False and _known(f"--{name}", flags):
            problems.append(
                Problem(f"{whose} has --{name} but no {wanted}: leave the argument out instead of false", where, "argument_value")
            )
        else:
            options = {known[2:] for known in flags.names if known.startswith("--")}
            text = f"{whose} has no option --{name}{nearest(name, options)} ({see} lists all)"
            problems.append(Problem(text, where, "unknown_argument"))
    return problems


def _known(flag: str, flags: Flags) -> bool:
    # vLLM takes --a-b and --a_b alike, and --a.b for a key inside the JSON that --a takes.
    head = flag.partition(".")[0]
    return head in flags.names or "--" + head[2:].replace("_", "-") in flags.names


def reserved_arguments(profile: Profile, reserved: Mapping[str, str]) -> list[Problem]:
    """Options that llmgw sets itself, found in C{arguments} or C{extra_argv}, where they would override it in silence.

    @param reserved: option without dashes (short ones, too) to what to use instead, e.g. C{"port": "llmgw gives the port"}.
    """
    problems = [
        _reserved(f"--{name}", reserved[plain], f"arguments.{name}")
        for name in profile.arguments
        if (plain := name.replace("_", "-")) in reserved
    ]
    for index, word in enumerate(profile.extra_argv):
        plain = word.lstrip("-").partition("=")[0].replace("_", "-")
        if word.startswith("-") and plain in reserved:
            problems.append(_reserved(word.partition("=")[0], reserved[plain], f"extra_argv.{index}"))
    return problems


def _reserved(flag: str, instead: str, where: str) -> Problem:
    return Problem(f"{flag} is llmgw's own to set: {instead}", where, "reserved_argument")


def weights_problems(profile: Profile, files: WeightFiles | None) -> list[Problem]:
    """No C{weights} at all, or none where the agent looked."""
    if not profile.weights:
        text = f"{profile.engine} needs `weights`: a name under the model roots, an absolute path or hf:org/name@revision"
        return [Problem(text, "weights", "weights_missing")]
    if files is None or (files.found and not files.problem):
        return []
    looked = f" (looked at {', '.join(files.looked)})" if files.looked else ""
    text = files.problem or f"{files.weights} is not on the node{looked}"
    if not files.found and files.weights.startswith("hf:"):
        repository = files.weights.removeprefix("hf:").partition("@")[0]
        text += f"; `llmgw fetch` downloads it. If the hub says it is gated, accept the licence at https://huggingface.co/{repository}"
        text += " and set HF_TOKEN in agent.yaml"
    return [Problem(text, "weights", "weights_missing")]


def unchecked_arguments(profile: Profile, flags: Flags) -> list[Problem]:
    """A warning where nobody could ask the installation for its options."""
    if not profile.arguments or flags.names:
        return []
    return [Problem("arguments are not checked: the installation's options are not known", "arguments", "unchecked")]


def no_loras(profile: Profile, engine: str) -> list[Problem]:
    """Adapters that this engine would not serve under names of their own, so that requests for them got the base's answers."""
    if not profile.loras:
        return []
    return [Problem(f"{engine} serves no adapters by name: leave `loras` out, or use vllm or sglang", "loras", "loras")]


def environment_problems(profile: Profile, reserved: Collection[str] = (), nodes_own: bool = True) -> list[Problem]:
    """Names in C{environment} that a catalog may not set.

    @param reserved: what the adapter sets itself, beside what makes devices visible.
    @param nodes_own: whether names that choose the code that runs are refused (see L{NODES_OWN}).
    """
    problems = []
    for name, value in profile.environment.items():
        where = f"environment.{name}"
        if not name or "=" in name or "\0" in name + value:
            problems.append(Problem("not a name and value that a process can be given", where, "environment"))
        elif NEVER.match(name) or name in DEVICE_VARIABLES or name in reserved:
            problems.append(Problem(f"{name} is llmgw's own to set: leave it out", where, "environment"))
        elif nodes_own and NODES_OWN.match(name):
            text = f"{name} belongs to the node: set it in agent.yaml under engines.{profile.engine}.environment"
            problems.append(Problem(text, where, "environment"))
    return problems


def child_environment(
    own: Mapping[str, str], agent: Mapping[str, str], installation: Mapping[str, str], launch: ShardLaunch
) -> dict[str, str]:
    """All that an engine gets: the harmless part of our own, then what each layer sets; the last one wins.

    @param own: the agent's own environment, of which only L{INHERITED} and locale names pass.
    @param agent: C{environment} of agent.yaml; C{installation}: of one of its C{engines}.
    """
    layers = [{name: value for name, value in own.items() if name in INHERITED or name.startswith("LC_")}]
    layers += [dict(launch.defaults), dict(agent), dict(installation)]
    merged = {name: value for layer in layers for name, value in layer.items() if not NEVER.match(name)}
    return merged | dict(launch.environment)


def fill(words: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """C{{name}} replaced in each word by its value; what is not a known name stays, so JSON and C{${HOME}} pass unharmed."""

    def value(found: re.Match[str]) -> str:
        return str(values[found[1]]) if found[1] in values else found[0]

    return [_PLACEHOLDER.sub(value, word) for word in words]


def placeholder_problems(words: Sequence[str], known: Collection[str]) -> list[Problem]:
    """Placeholders that look like a mistyped known one."""
    problems = []
    for index, word in enumerate(words):
        for name in _PLACEHOLDER.findall(word):
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            if name not in known and close:
                text = f"{{{name}}} is no placeholder; did you mean {{{close[0]}}}? There are {', '.join(sorted(known))}"
                problems.append(Problem(text, f"argv.{index}", "placeholder"))
    return problems


def first_question(profile: Profile) -> str:
    """The probe (see L{ShardLaunch}) that suits an engine: an embedding where its arguments say that it makes those."""
    words = {name.replace("_", "-"): value for name, value in profile.arguments.items()}
    embeds = any(words.get(name) is True for name in ("embeddings", "embedding", "is-embedding"))
    embeds = embeds or words.get("runner") == "pooling" or "embed" in (words.get("convert"), words.get("task"))
    return "embedding" if embeds else "completion"


def visible_devices(allocation: Allocation) -> dict[str, str]:
    """The shard's devices, and no other; none where it has none.

    NVIDIA's go by UUID, and their numbers are then those of NVML. AMD's go by the numbers that the agent has just looked up: of
    ROCm's variables vLLM and SGLang read only this one, as numbers, and one more would count within what the first has left
    (https://rocm.docs.amd.com, "GPU isolation techniques"). Empty would be as if it were not set
    (https://github.com/ROCm/hip/issues/3001).
    """
    if allocation.hip:
        return {"HIP_VISIBLE_DEVICES": ",".join(map(str, allocation.hip))}
    none_of_amd = {} if allocation.hip is None else {"HIP_VISIBLE_DEVICES": "-1"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(allocation.devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **none_of_amd}


def http_url(host: str, port: int) -> str:
    """The engine's address as routers use it, without a path."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
