"""Adapters for engines that run: how an engine is started for them, what it takes later, and what it refuses; no process here."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.engines import lora
from llmgw.engines.llamacpp import llamacpp
from llmgw.engines.sglang import sglang
from llmgw.engines.vllm import vllm
from llmgw.fleet.model import Lora, Parallel, Profile
from llmgw.fleet.node import Installation
from llmgw.fleet.shard import Allocation, ShardExit, WeightFiles
from llmgw.interfaces import Flags
from llmgw.testing import standin_sglang, standin_vllm

ENGINES = {"vllm": vllm, "sglang": sglang}
TUNED = Lora("tuned", "loras/tuned")
FILES = WeightFiles("llama", True, "/models/llama", format="safetensors", bytes=10**9)


def adapter(rank=8, weights="loras/tuned", **config):
    return WeightFiles(weights, True, f"/models/{weights}", config={"peft_type": "LORA", "r": rank, **config})


def launched(engine, profile, *adapters):
    files = evolve(FILES, loras=adapters)
    return ENGINES[engine].launch(
        profile, Allocation("n1", ports=tuple(range(20000, 20020))), Installation(engine, engine), files, ("llama",), "key"
    )


def taken(engine, launch):
    """The options as the engine's own parser reads them."""
    if engine == "vllm":
        return standin_vllm.parser().parse_args(launch.argv[1:])
    words = list(launch.argv[2:])
    at = words.index("--config")
    return standin_sglang.asked(words[:at] + words[at + 2 :])


@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_started_for_adapters_and_without_any(engine):
    """A bad one never keeps it from starting; the rank holds the largest, with room for more than there are."""
    launch = launched(engine, Profile(engine, "llama", loras=(TUNED,)), adapter(40, target_modules=["q_proj", "lm_head"]))
    options, door = taken(engine, launch), launch.loras
    assert options.enable_lora and not (options.lora_modules if engine == "vllm" else options.lora_paths)
    assert door.fixed == "" and door.load.endswith("/load_lora_adapter") and door.unload.endswith("/unload_lora_adapter")
    assert options.max_lora_rank == door.rank == (64 if engine == "vllm" else 40)
    if engine == "vllm":
        assert (options.max_loras, door.most, door.served) == (4, 4, "{name}")
        assert launch.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    else:
        assert options.lora_target_modules[-2:] == ["down_proj", "lm_head"] and door.served == "llama:{name}"


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_can_be_prepared_for_adapters_to_come(engine):
    """By the argument that llmgw sets itself else; no other value of it is taken."""
    prepared = Profile(engine, "llama", arguments={"enable-lora": True})
    launch = launched(engine, prepared)
    assert launch.argv.count("--enable-lora") == 1 and launch.loras.load and taken(engine, launch).enable_lora
    codes = [one.code for one in ENGINES[engine].problems(prepared, FILES, None, None, Flags())]
    assert "reserved_argument" not in codes
    no = evolve(prepared, arguments={"enable-lora": False})
    assert "reserved_argument" in [one.code for one in ENGINES[engine].problems(no, FILES, None, None, Flags())]


@pytest.mark.parametrize(
    ("engine", "changes", "why"),
    [
        ("vllm", {"loras": ()}, "enable-lora: true"),
        ("sglang", {"loras": ()}, "enable-lora: true"),
        ("vllm", {"parallel": Parallel(data=2)}, "only at its start"),
        ("vllm", {"arguments": {"api-server-count": 2}}, "only at its start"),
        ("vllm", {"environment": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ("sglang", {"parallel": Parallel(tensor=2, nodes=2)}, "only at its start"),
        ("sglang", {"arguments": {"tokenizer-worker-num": 2}}, "only at its start"),
    ],
)
def test_who_takes_none_while_it_runs_says_why(engine, changes, why):
    launch = launched(engine, evolve(Profile(engine, "llama", loras=(TUNED,)), **changes), adapter())
    assert (launch.loras.load, launch.loras.unload) == ("", "") and why in launch.loras.fixed
    assert launch.environment.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0") == "0"
    assert ("tuned=/models/loras/tuned" in launch.argv) is (changes != {"loras": ()})


def test_other_engines_take_none():
    made = llamacpp.launch(
        Profile("llamacpp", "m"), Allocation("n1", ports=(20000,)), Installation("llamacpp", "llamacpp"), None, ("m",), "key"
    )
    assert made.loras.load == "" and "only at its start" in made.loras.fixed


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_running_engine_cannot_take(engine):
    """Each with the reason, and whether an engine that is started anew would: never for what no start could change."""
    profile = Profile(engine, "llama", loras=(TUNED,))
    door = launched(engine, profile, adapter()).loras

    def refused(there, count=0, door=door, **arguments):
        return lora.refused(TUNED, there, door, evolve(profile, arguments=arguments), count)

    assert refused(adapter(16)) == ("", False)
    text, anew = refused(WeightFiles("loras/tuned", False, looked=("/models/loras/tuned",)))
    assert "loras/tuned is not on the node (looked at /models/loras/tuned)" in text and not anew
    assert "adapter_config.json" in refused(WeightFiles("loras/tuned", True, "/x"))[0]
    assert refused(evolve(adapter(), problem="/x: cut off")) == ("adapter tuned: /x: cut off", False)
    assert refused(adapter(64)) == ("adapter tuned has rank 64, its engine was started for at most 16", True)
    text, anew = refused(adapter(64), **{"max-lora-rank": 16})
    assert "raise arguments.max-lora-rank" in text and not anew
    text, anew = refused(adapter(1024))
    assert "takes at most 512" in text and not anew
    text, anew = refused(adapter(), count=4, door=evolve(door, most=4))
    assert text == "adapter tuned is one too many: its engine was started for 4" and anew
    assert launched(engine, profile, adapter(1024)).loras.rank == 16, "what it can never take raises nothing"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bad_adapter_is_no_reason_to_refuse_a_start(engine):
    """Where it is loaded later; the base model serves without it."""
    for there in (WeightFiles("loras/tuned", False), adapter(4096), WeightFiles("loras/tuned", True, "/x")):
        found = ENGINES[engine].problems(
            Profile(engine, "llama", loras=(TUNED,)), evolve(FILES, loras=(there,)), None, None, Flags()
        )
        assert [one.code for one in found if one.code.startswith("lora")] == []


def test_more_slots_than_vllm_is_told_to_keep_are_not_asked_for():
    """Its own check would refuse to start."""
    launch = launched("vllm", Profile("vllm", "llama", loras=(TUNED,), arguments={"max-cpu-loras": 2}), adapter())
    assert taken("vllm", launch).max_loras == launch.loras.most == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_that_failed_is_no_cause_of_a_later_end(engine):
    """Its error stands in the output of an engine that lived on."""
    error = ["RuntimeError: CUDA error: out of memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"]
    answer = 'INFO:     127.0.0.1:5 - "POST /v1/load_lora_adapter HTTP/1.1" 500 Internal Server Error'
    killed = ShardExit(signal=9)
    assert ENGINES[engine].diagnose(killed, [*error, answer, "fine"]) == ENGINES[engine].diagnose(killed, ["fine"])
    assert ENGINES[engine].diagnose(killed, [answer, *error]) != ENGINES[engine].diagnose(killed, ["fine"])
