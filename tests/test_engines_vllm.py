"""The vLLM adapter: golden argv, checks before a start, and a stand-in that takes vLLM's own options."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.engines.vllm import memory_share, vllm
from llmgw.engines.vllm_checks import RESERVED
from llmgw.fleet.model import Lora, Parallel, Profile, Resources
from llmgw.fleet.node import Device, Installation, Inventory, NodeFacts
from llmgw.fleet.shard import Allocation, WeightFiles
from llmgw.interfaces import Flags
from llmgw.testing.standin_vllm import contradictions, option_rows, parser

GIB = 2**30


VLLM = Installation("vllm", "vllm", ("vllm",), "0.33.0")


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
}


FILES = WeightFiles("llama", True, "/models/llama", format="safetensors", bytes=16 * GIB, config=LLAMA_8B)


HELP = parser()._subparsers._group_actions[0].choices["serve"].format_help()


FLAGS = vllm.flags(HELP)


TAIL = ("--shutdown-timeout", "10", "--disable-access-log-for-endpoints", "/health,/metrics")


def launch(profile, allocation=None, files=FILES, served=("llama-8b", "default"), installation=VLLM):
    return vllm.launch(profile, allocation or Allocation("n1", ports=(20001,)), installation, files, served, "the-key")


def problems(files=FILES, node=None, flags=FLAGS, **changes):
    profile = evolve(Profile("vllm", "llama"), **changes)
    return vllm.problems(profile, files, node, VLLM, flags)


def config(**changes):
    return evolve(FILES, config={**LLAMA_8B, **changes})


def gpu(capability, driver="580.65", cuda=13000):
    device = Device("GPU-a", 0, "GPU", memory_total=80 * GIB, capability=capability)
    return NodeFacts("n1", "10.0.0.1", Inventory(cpus=8, memory_total=64 * GIB, devices=(device,), driver=driver, cuda=cuda))


def test_development_mode_is_for_sleep_only_and_told_where_others_reach_it():
    """Its paths run code for whoever asks, and no key guards them."""
    mode = {"VLLM_SERVER_DEV_MODE": "1"}
    [refused] = problems(environment=mode)
    assert (refused.where, "enable-sleep-mode" in refused.text) == ("environment.VLLM_SERVER_DEV_MODE", True)
    assert not problems(environment={"VLLM_SERVER_DEV_MODE": "0"})
    asked = {"environment": mode, "arguments": {"enable-sleep-mode": True}}
    assert not problems(**asked)
    profile, node = evolve(Profile("vllm", "llama"), **asked), gpu(90)
    for address, told in (("10.0.0.1", True), ("127.0.0.1", False)):
        said = vllm.warnings(profile, FILES, evolve(node, address=address), VLLM, FLAGS)
        assert ("no_key" in [one.code for one in said]) == told


def test_argv_of_one_node():
    """Weights by path, the names it serves, each kind of parallelism, context, arguments in the profile's order."""
    profile = Profile(
        "vllm",
        "llama",
        context=32768,
        parallel=Parallel(tensor=2, pipeline=2, data=2, expert=True),
        arguments={
            "max-num-seqs": 64,
            "enable-prefix-caching": False,
            "enable-auto-tool-choice": True,
            "speculative-config": {"method": "ngram"},
            "allowed-origins": ["*"],
            "cudagraph-capture-sizes": [1, 2],
            "seed": -1,
            "quantization": None,
        },
        extra_argv=("--enforce-eager",),
    )
    devices = tuple(f"GPU-{n}" for n in range(8))
    allocation = Allocation("n1", address="10.0.0.1", devices=devices, ports=(20001, 20002, 20003))
    made = launch(profile, allocation)
    assert made.argv == (
        "vllm", "serve", "/models/llama", "--host", "10.0.0.1", "--port", "20001", "--served-model-name", "llama-8b", "default",
        "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--data-parallel-size", "2",
        "--data-parallel-rpc-port", "20003", "--enable-expert-parallel", "--max-model-len", "32768", *TAIL,
        "--max-num-seqs", "64", "--no-enable-prefix-caching", "--enable-auto-tool-choice",
        "--speculative-config", '{"method":"ngram"}', "--allowed-origins", '["*"]', "--cudagraph-capture-sizes", "1", "2",
        "--seed=-1", "--enforce-eager",
    )  # fmt: skip
    assert made.environment["CUDA_VISIBLE_DEVICES"] == ",".join(devices)
    assert (made.url, made.limit, made.ready, made.models) == ("http://10.0.0.1:20001", 64, "/health", "/v1/models")
    parser().parse_args(made.argv[1:])


def test_weights_of_the_hub_keep_their_revision():
    """Where nothing was found on the node, the name and the revision go on apart, and the hub may be asked."""
    made = launch(Profile("vllm", "hf:org/model@abc"), files=None)
    assert made.argv[2:5] == ("org/model", "--revision", "abc")
    assert "HF_HUB_OFFLINE" not in made.defaults
    assert launch(Profile("vllm", "llama")).defaults["HF_HUB_OFFLINE"] == "1"


def test_argv_over_nodes_differs_by_rank_only():
    """Every rank gets one argv but for its address, rank and --headless; only rank 0 serves; the fabric's interface is named."""
    profile = Profile("vllm", "llama", parallel=Parallel(tensor=8, pipeline=2, nodes=2))
    first = Allocation(
        "n1", 0, 2, "10.0.0.1", ports=(20001, 20002, 20003), head="10.9.0.1", head_port=20002,
        peers=("10.9.0.1", "10.9.0.2"), interface="ib0",
    )  # fmt: skip
    head, other = launch(profile, first), launch(profile, evolve(first, node="n2", rank=1, address="10.0.0.2"))
    ranks = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "10.9.0.1", "--master-port", "20002")
    at = head.argv.index("--nnodes")
    assert head.argv[at : at + 8] == ranks
    assert other.argv[at : at + 9] == (*ranks[:3], "1", *ranks[4:], "--headless")
    assert [word for word in other.argv if word != "--headless"] == [
        {"10.0.0.1": "10.0.0.2"}.get(word, "1" if index == at + 3 else word) for index, word in enumerate(head.argv)
    ]
    assert (other.url, other.ready, other.models, other.metrics) == ("", None, None, None)
    assert (head.environment["VLLM_HOST_IP"], other.environment["VLLM_HOST_IP"]) == ("10.9.0.1", "10.9.0.2")
    assert {(other.defaults | dict(other.environment))[f"{what}_SOCKET_IFNAME"] for what in ("NCCL", "GLOO", "TP")} == {"ib0"}
    parser().parse_args(other.argv[1:])


@pytest.mark.parametrize("balance", ["internal", "hybrid"])
def test_argv_of_data_parallel_ranks_over_nodes(balance):
    """Two whole ranks on each of two nodes: the head serves for all, or each node for its own, with endpoints of their own."""
    profile = Profile("vllm", "llama", parallel=Parallel(tensor=2, data=4, nodes=2, expert=True, balance=balance))
    first = Allocation(
        "n1", 0, 2, "10.0.0.1", ports=(20001, 20002, 20003), head="10.9.0.1", head_port=20002, peers=("10.9.0.1", "10.9.0.2")
    )
    other = launch(profile, evolve(first, node="n2", rank=1, address="10.0.0.2", ports=(21001, 21002, 21003)))
    head = launch(profile, first)
    shared = (
        "--data-parallel-size", "4", "--data-parallel-size-local", "2", "--data-parallel-address", "10.9.0.1",
        "--data-parallel-rpc-port", "20003",
    )  # fmt: skip
    hybrid = ("--data-parallel-hybrid-lb",) if balance == "hybrid" else ()
    begins = {
        "internal": ((), ("--data-parallel-start-rank", "2")),
        "hybrid": (("--data-parallel-start-rank", "0"), ("--data-parallel-start-rank", "2")),
    }[balance]
    for made, begin, tail in ((head, begins[0], ()), (other, begins[1], () if hybrid else ("--headless",))):
        at = made.argv.index("--data-parallel-size")
        expected = (*shared, *hybrid, *begin, "--enable-expert-parallel", *tail)
        assert made.argv[at : at + len(expected)] == expected
        contradictions(parser().parse_args(made.argv[1:]))
    assert not {"--nnodes", "--master-addr"} & set(head.argv)
    assert (other.url, other.ready) == (("http://10.0.0.2:21001", "/health") if hybrid else ("", None))
    assert vllm.needs(profile, FILES).devices == 4


def test_loras_at_launch():
    """Where it takes none later: by the paths that were found, as many at once as there are, and a rank that holds them."""
    seen = tuple(
        WeightFiles(name, True, f"/models/{name}", config={"peft_type": "LORA", "r": rank})
        for name, rank in (("loras/a", 8), ("loras/b", 40))
    )
    profile = Profile("vllm", "llama", loras=(Lora("a", "loras/a"), Lora("b", "loras/b")), parallel=Parallel(data=2))
    made = launch(profile, files=evolve(FILES, loras=seen))
    at = made.argv.index("--enable-lora")
    expected = ("--lora-modules", "a=/models/loras/a", "b=/models/loras/b", "--max-loras", "2", "--max-lora-rank", "64")
    assert made.argv[at + 1 : at + 8] == expected
    assert parser().parse_args(made.argv[1:]).lora_modules == ["a=/models/loras/a", "b=/models/loras/b"]
    own = launch(evolve(profile, arguments={"max-loras": 1, "max-lora-rank": 128}), files=evolve(FILES, loras=seen))
    assert own.argv.count("--max-loras") == 1 and own.argv[own.argv.index("--max-lora-rank") + 1] == "128"


@pytest.mark.parametrize(
    ("resources", "given", "share"),
    [
        (Resources(), {"device_free": 79 * GIB}, None),
        (Resources(), {"device_free": 60 * GIB}, 0.74),
        (Resources(share=True), {"memory": 20 * GIB}, 0.25),
        (Resources(device_memory=40 * GIB), {"memory": 40 * GIB}, 0.5),
        (Resources(device_memory=80 * GIB), {"memory": 80 * GIB}, 0.95),
        (Resources(share=True), {"memory": 20 * GIB, "device_total": None}, None),
    ],
)
def test_memory_share(resources, given, share):
    """vLLM's own share of a free device; less beside others' memory; what is claimed where that is said; never all of it."""
    allocation = Allocation("n1", **{"devices": ("GPU-a",), "ports": (20001,), "device_total": 80 * GIB, **given})
    profile = Profile("vllm", "llama", resources=resources)
    assert memory_share(profile, allocation) == share
    argv = launch(profile, allocation).argv
    assert ("--gpu-memory-utilization" in argv) == (share is not None)
    assert share is None or f"{share:.3f}" in argv
    assert memory_share(evolve(profile, arguments={"gpu-memory-utilization": 0.3}), allocation) is None


def test_the_key_is_in_the_environment_only():
    """Every rank gets it; argv and URL, which anybody can read, do not; a profile cannot replace it."""
    made = launch(Profile("vllm", "llama", environment={"VLLM_API_KEY": "mine", "VLLM_LOGGING_LEVEL": "DEBUG"}))
    assert made.environment["VLLM_API_KEY"] == "the-key"
    assert made.environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "the-key" not in " ".join((*made.argv, made.url, *made.defaults.values()))


def test_needs():
    """A device a rank; the least memory that serves one context; a range of ports where ranks must meet."""
    needs = vllm.needs(Profile("vllm", "llama", context=8192, parallel=Parallel(tensor=4, pipeline=2, nodes=2)), FILES)
    weights, cache = 16 * GIB // 8, 2 * 16 * 2 * 128 * 2 * 8192
    assert needs.devices == 4
    assert needs.ports > 1
    assert weights + cache < needs.memory < weights + cache + 4 * GIB
    assert vllm.needs(Profile("vllm", "llama", resources=Resources(devices=0)), FILES).memory is None
    assert vllm.needs(Profile("vllm", "llama"), None).memory is None


def test_flags_are_those_of_the_help():
    """Every option of vLLM 0.33, its short forms, what takes no value, and the negations that the help hides."""
    takes = {name: kind for names, kind in option_rows() for name in names}
    assert FLAGS.names >= set(takes)
    assert {name for name in takes if name in FLAGS.switches} == {
        name for name, kind in takes.items() if kind in ("switch", "flag")
    }
    assert {"--no-enable-prefix-caching", "--disable-prefix-caching"} <= FLAGS.switches
    assert "--no-headless" not in FLAGS.names


def test_versions():
    """The last line that is a version alone."""
    assert vllm.version("WARNING 11-30 torch 2.9.1 is old\n0.33.0\n") == "0.33.0"
    assert vllm.version("0.33.0rc1+cu130") == "0.33.0rc1+cu130"
    assert vllm.version("ModuleNotFoundError: No module named 'torch'") is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"max-num-seq": 3}, "vllm 0.33.0 has no option --max-num-seq; did you mean max-num-seqs?"),
        ({"tensor_paralel_sizes": 3}, "did you mean tensor-parallel-size?"),
        ({"enforce-eager": 3}, "--enforce-eager takes no value, found 3"),
        ({"chat-template": True}, "--chat-template takes a value, found true"),
        ({"chat-template": False}, "has --chat-template but no --no-chat-template"),
    ],
)
def test_arguments_that_this_version_does_not_take(arguments, said):
    """What is wrong with it, of which version, and the nearest there is."""
    [problem] = problems(arguments=arguments)
    assert said in problem.text
    assert problem.where == f"arguments.{next(iter(arguments))}"


def test_spellings_that_vllm_takes():
    """Underscores, keys inside JSON options, negations; and without a help text nothing is refused."""
    good = {"max_num_seqs": 3, "compilation-config.level": 3, "no-such": None}
    assert [problem.code for problem in problems(arguments=good)] == ["unknown_argument"]
    assert problems(arguments={"max_num_seqs": 3, "compilation-config.level": 3}) == []
    assert problems(flags=Flags(), arguments={"whatever": 1}) == []


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_arguments(name):
    """What llmgw sets is refused in arguments and in extra_argv, with what to use instead, in both spellings."""
    for changes in (
        {"arguments": {name.replace("-", "_"): "x"}},
        {"extra_argv": (f"--{name}=x",)},
        {"extra_argv": (f"--{name}", "x")},
    ):
        found = problems(flags=Flags(), **changes)
        assert [problem.code for problem in found] == ["reserved_argument"], changes
        assert RESERVED[name] in found[0].text


MOE = {"num_experts": 60}


KV_4 = config(num_attention_heads=24, num_key_value_heads=4, head_dim=128)


AWQ = config(quantization_config={"quant_method": "awq"})


TOKENS, CHUNKED, TOOLS = "max-num-batched-tokens", "enable-chunked-prefill", "enable-auto-tool-choice"


MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128, "num_key_value_heads": 128}


@pytest.mark.parametrize(
    ("files", "changes", "where", "figures"),
    [
        (FILES, {"parallel": Parallel(tensor=3)}, "parallel.tensor", ("3", "32", "1, 2, 4, 8, 16, 32")),
        (KV_4, {"parallel": Parallel(tensor=6)}, "parallel.tensor", ("6", "4", "1, 2, 4")),
        (FILES, {"parallel": Parallel(pipeline=40)}, "parallel.pipeline", ("40", "32")),
        (FILES, {"parallel": Parallel(expert=True)}, "parallel.expert", ("no experts",)),
        (config(**MOE), {"parallel": Parallel(tensor=8, expert=True)}, "parallel.expert", ("8", "60", "1, 2, 3, 4, 5, 6, 10")),
        (FILES, {"parallel": Parallel(tensor=4, nodes=3)}, "parallel.nodes", ("4 ranks", "3 nodes")),
        (FILES, {"parallel": Parallel(tensor=4), "resources": Resources(devices=2)}, "resources.devices", ("2", "4")),
        (FILES, {"context": 200000}, "context", ("200000", "131072")),
        (FILES, {"arguments": {TOKENS: 32, "max-num-seqs": 64}}, f"arguments.{TOKENS}", ("32", "64")),
        (FILES, {"context": 4096, "arguments": {TOKENS: 2048, CHUNKED: False}}, f"arguments.{TOKENS}", ("2048", "4096")),
        (FILES, {"arguments": {TOOLS: True}}, f"arguments.{TOOLS}", ("tool-call-parser",)),
        (evolve(FILES, format="gguf"), {}, "weights", ("GGUF", "llamacpp")),
        (evolve(FILES, config={}), {}, "weights", ("/models/llama", "config.json")),
        (evolve(FILES, config={"x": 1}), {}, "weights", ("/models/llama", "no architecture")),
        (AWQ, {"arguments": {"quantization": "gptq"}}, "arguments.quantization", ("gptq", "awq")),
        (None, {"weights": None}, "weights", ("vllm needs `weights`",)),
        (WeightFiles("llama", False, looked=("/a/llama", "/b/llama")), {}, "weights", ("/a/llama, /b/llama",)),
        (FILES, {"environment": {"LD_PRELOAD": "x.so"}}, "environment.LD_PRELOAD", ("belongs to the node",)),
        (FILES, {"environment": {"CUDA_VISIBLE_DEVICES": "0"}}, "environment.CUDA_VISIBLE_DEVICES", ("llmgw's own to set",)),
    ],
)
def test_refused_before_a_start(files, changes, where, figures):
    """Each mistake at its place, with its figures and the way out, and nothing besides."""
    [problem] = problems(files=files, **changes)
    assert problem.where == where
    assert [figure for figure in figures if figure not in problem.text] == [], problem.text


@pytest.mark.parametrize(
    ("files", "changes"),
    [
        (FILES, {"parallel": Parallel(tensor=16)}),
        (config(**MLA), {"parallel": Parallel(tensor=16)}),
        (config(**MOE), {"parallel": Parallel(tensor=2, data=2, expert=True)}),
        (FILES, {"context": 200000, "environment": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}}),
        (config(rope_scaling={"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 50000}), {"context": 200000}),
        (evolve(FILES, config={"architectures": ["X"], "text_config": LLAMA_8B}), {"parallel": Parallel(tensor=8)}),
        (None, {"parallel": Parallel(tensor=7), "context": 10**6}),
    ],
)
def test_not_refused(files, changes):
    """What vLLM takes is taken, and what nobody knows is no reason to refuse."""
    assert problems(files=files, **changes) == []


@pytest.mark.parametrize(
    ("node", "files", "arguments", "figures"),
    [
        (gpu((7, 0)), FILES, {}, ("7.5", "7.0")),
        (gpu((7, 5)), FILES, {"dtype": "bfloat16"}, ("8.0", "7.5")),
        (gpu((7, 5)), config(quantization_config={"quant_method": "mxfp4"}), {}, ("8.0", "7.5")),
        (gpu((9, 0), "570.1", 12080), FILES, {}, ("570.1", "CUDA 13")),
    ],
)
def test_a_node_that_cannot_run_it(node, files, arguments, figures):
    """GPU and driver are compared with what the build and the weights want."""
    built = evolve(VLLM, version="0.33.0+cu130")
    profile = Profile("vllm", "llama", arguments=arguments)
    [problem] = vllm.problems(profile, files, node, built, FLAGS)
    assert [figure for figure in figures if figure not in problem.text] == [], problem.text
    assert vllm.problems(profile, files, gpu((10, 0)), built, FLAGS) == []


def test_warnings():
    """Key-value heads kept several times; tensor parallelism over nodes."""
    profile = Profile("vllm", "llama", parallel=Parallel(tensor=16, nodes=2))
    found = vllm.warnings(profile, FILES, None, VLLM, FLAGS)
    assert [row.where.partition(".")[0] for row in found] == ["parallel", "parallel"]
    assert all(word in found[0].text for word in ("tensor 16", "8", "2 times"))
    assert found[1].code == "tensor_over_nodes"
