"""What a node finds of a model's weights, and how it says what is wrong with them."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from llmgw.agent.gguf import read_header
from llmgw.agent.weights import WeightFinder
from llmgw.fleet.tensors import TensorBytes
from llmgw.testing.tiny_gguf import write_tiny_gguf


def gguf_file(path):
    writer = GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_head_count_kv(1)
    writer.add_token_list([f"t{i}" for i in range(1000)])
    writer.add_tensor("x", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def safetensors_file(path, size: int) -> None:
    header = json.dumps({"x": {"dtype": "F16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def test_gguf_under_the_first_root_that_has_it(tmp_path):
    """Key-values without the vocabulary; the first hit wins and all looked-at paths are told."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    gguf_file(b / "m.gguf")
    found = WeightFinder([a, b]).inspect("m.gguf")
    assert (found.found, found.format, found.path) == (True, "gguf", str(b / "m.gguf"))
    assert found.gguf["llama.block_count"] == 2
    assert "tokenizer.ggml.tokens" not in found.gguf
    assert found.looked == (str(a / "m.gguf"), str(b / "m.gguf"))
    assert found.bytes == (b / "m.gguf").stat().st_size


def test_missing_weights_name_the_paths_looked_at(tmp_path):
    """Not found is a value."""
    found = WeightFinder([tmp_path]).inspect("none/model")
    assert (found.found, found.looked) == (False, (str(tmp_path / "none/model"),))


def test_a_folder_of_tensors(tmp_path):
    """config.json as parsed, the tensors' bytes without headers."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"num_attention_heads": 32}')
    safetensors_file(tmp_path / "m" / "model-00001.safetensors", 1000)
    safetensors_file(tmp_path / "m" / "model-00002.safetensors", 500)
    found = WeightFinder([tmp_path]).inspect("m")
    assert (found.format, found.bytes, found.config) == ("safetensors", 1500, {"num_attention_heads": 32})
    assert found.problem == ""


def test_an_index_whose_file_is_missing(tmp_path):
    """Half a download is named."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    safetensors_file(tmp_path / "m" / "a.safetensors", 10)
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "b.safetensors" in WeightFinder([tmp_path]).inspect("m").problem


@pytest.mark.parametrize(
    ("name", "data", "word"),
    [
        ("m.gguf", b"hello world", "b'hell'"),
        ("m.gguf", b"GGUF\x03", "ends inside"),
        ("m.gguf", b"GGUF" + struct.pack("<IQQ", 3, 1, 2**60), "length"),
        ("m.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("m.safetensors", struct.pack("<Q", 2**50) + b"x", "cut short"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, data, word):
    """Each fault that an engine would find after minutes."""
    (tmp_path / name).write_bytes(data)
    found = WeightFinder([tmp_path]).inspect(name)
    assert found.found and word in found.problem


def test_a_link_out_of_the_root_is_refused(tmp_path):
    """A model root is a boundary."""
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "root" / "m").symlink_to(tmp_path / "secret")
    for name in ("m", "../secret"):
        found = WeightFinder([tmp_path / "root"]).inspect(name)
        assert not found.found and "leads out" in found.problem


def test_the_hugging_face_cache(tmp_path):
    """hf:ORG/NAME@REVISION through refs, or a commit by itself; files are links to blobs inside the cache."""
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")
    (repo / "blobs").mkdir()
    (repo / "blobs" / "f").write_text('{"a": 1}')
    (snapshot / "config.json").symlink_to(repo / "blobs" / "f")
    finder = WeightFinder([], {"HF_HUB_CACHE": str(tmp_path)})
    for name in ("hf:org/name", "hf:org/name@main", "hf:org/name@abc123"):
        found = finder.inspect(name)
        assert (found.config, found.revision) == ({"a": 1}, "abc123")
    other = finder.inspect("hf:org/name@other")
    assert not other.found and other.problem.endswith("has no whole revision other; it has: main, abc123")
    assert finder.inspect("hf:org/absent").problem == ""


def test_a_changed_file_is_read_again(tmp_path):
    """The cache goes by size and time."""
    finder = WeightFinder([tmp_path])
    safetensors_file(tmp_path / "m.safetensors", 100)
    assert finder.inspect("m.safetensors").bytes == 100
    safetensors_file(tmp_path / "m.safetensors", 200)
    assert finder.inspect("m.safetensors").bytes == 200


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_sentence(tmp_path_factory, data):
    """Never another error, never for ever."""
    path = tmp_path_factory.mktemp("g") / "x"
    path.write_bytes(b"GGUF" + data)
    with open(path, "rb") as file:
        try:
            read_header(file)
        except ValueError as error:
            assert str(error)


def tensors_file(path, **sizes) -> None:
    """A safetensors file whose tensors have these sizes; C{__} stands for a dot."""
    rows, at = {}, 0
    for name, size in sizes.items():
        rows[name.replace("__", ".")] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(rows | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(at))


def test_where_the_bytes_of_a_folder_stand(tmp_path):
    """Layers with their experts, embedding, head and the rest, over all files; a vision tower's layers are no layers."""
    folder = tmp_path / "m"
    folder.mkdir()
    tensors_file(
        folder / "a.safetensors",
        model__embed_tokens__weight=40,
        model__layers__0__self_attn__q_proj__weight=10,
        model__layers__0__mlp__gate__weight=1,
        vision_tower__encoder__layers__9__fc1__weight=7,
    )
    tensors_file(
        folder / "b.safetensors",
        model__layers__1__mlp__experts__0__up_proj__weight=20,
        model__layers__1__mlp__shared_experts__up_proj__weight=3,
        model__norm__weight=2,
        lm_head__weight=30,
    )
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    found = WeightFinder([tmp_path]).inspect("m")
    assert found.tensors == TensorBytes((11, 23), (0, 20), embedding=40, output=30, other=9, largest=40)
    assert (found.bytes, found.generation) == (113, {"temperature": 0.6})


def test_where_the_bytes_of_a_gguf_file_stand(tmp_path):
    """As its offsets say: a real file with two layers, an output of its own and no experts."""
    found = WeightFinder([tmp_path]).inspect(write_tiny_gguf(tmp_path / "m.gguf").name)
    parts = found.tensors
    assert len(parts.layers) == 2 and parts.layers[0] == parts.layers[1] > 0
    assert parts.embedding == parts.output > 0 and parts.experts == ()
    assert 0 < parts.other < parts.embedding
    total = sum(parts.layers) + parts.embedding + parts.output + parts.other
    assert 0 < found.bytes - total < 2**20, "what is left is the header"


def test_a_file_of_another_size_than_its_header_says(tmp_path):
    """A download that stopped: refused with both sizes before an engine reads it for minutes."""
    tensors_file(tmp_path / "m.safetensors", x=1000)
    whole = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(whole[:-10])
    found = WeightFinder([tmp_path]).inspect("m.safetensors")
    assert f"has {len(whole) - 10} bytes and should have {len(whole)}" in found.problem


def test_a_copy_in_mistrals_layout_counts_once(tmp_path):
    """Without an index consolidated.safetensors beside the rest is the same again; alone it is the model."""
    folder = tmp_path / "m"
    folder.mkdir()
    tensors_file(folder / "consolidated.safetensors", x=100)
    assert WeightFinder([tmp_path]).inspect("m").bytes == 100
    tensors_file(folder / "model-00001-of-00001.safetensors", x=100)
    assert WeightFinder([tmp_path]).inspect("m").bytes == 100


def test_only_what_the_index_names_is_loaded(tmp_path):
    """Files that the index does not name count for nothing."""
    folder = tmp_path / "m"
    folder.mkdir()
    tensors_file(folder / "a.safetensors", x=100)
    tensors_file(folder / "old.safetensors", x=77)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert WeightFinder([tmp_path]).inspect("m").bytes == 100


def test_a_split_gguf_model_is_all_its_parts(tmp_path):
    """Named by its first file or its folder; a missing part is a problem with its name."""
    folder = tmp_path / "m"
    folder.mkdir()
    for part in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        write_tiny_gguf(folder / part)
    (folder / "mmproj-m.gguf").write_bytes(b"GGUF")
    each = (folder / "m-00001-of-00002.gguf").stat().st_size
    for name in ("m", "m/m-00001-of-00002.gguf"):
        found = WeightFinder([tmp_path]).inspect(name)
        assert (found.bytes, found.path) == (2 * each, str(folder / "m-00001-of-00002.gguf")), found.problem
    finder = WeightFinder([tmp_path])
    assert not finder.inspect("m/m-00001-of-00002.gguf").problem
    (folder / "m-00002-of-00002.gguf").unlink()
    for name in ("m", "m/m-00001-of-00002.gguf"):
        assert "1 of 2 parts are missing, the first is m-00002-of-00002.gguf" in finder.inspect(name).problem


def test_a_folder_of_several_gguf_models_wants_one_named(tmp_path):
    """Quantizations of one model side by side are several models."""
    (tmp_path / "m").mkdir()
    write_tiny_gguf(tmp_path / "m" / "m-Q4.gguf")
    write_tiny_gguf(tmp_path / "m" / "m-Q8.gguf")
    assert "2 GGUF models; name the file of one: m-Q4.gguf, m-Q8.gguf" in WeightFinder([tmp_path]).inspect("m").problem


def test_pickled_weights_have_a_size_and_no_parts(tmp_path):
    """Reading a pickle runs it, so nobody does."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(bytes(500))
    (tmp_path / "m" / "config.json").write_text("{}")
    found = WeightFinder([tmp_path]).inspect("m")
    assert (found.format, found.bytes, found.tensors) == ("pytorch", 500, None)


def test_what_is_known_is_not_read_again(tmp_path, monkeypatch):
    """As long as path, size and time stay; and no more than some hundred are kept."""
    write_tiny_gguf(tmp_path / "m.gguf")
    finder = WeightFinder([tmp_path])
    first = finder.inspect("m.gguf")
    monkeypatch.setattr("llmgw.agent.weights.read_file", lambda path: pytest.fail("read again"))
    assert finder.inspect("m.gguf") == first
    monkeypatch.setattr("llmgw.agent.weights.KEEP", 3)
    monkeypatch.setattr("llmgw.agent.weights.read_file", lambda path: first)
    for number in range(10):
        (tmp_path / f"{number}.gguf").touch()
        finder.inspect(f"{number}.gguf")
    assert len(finder._known) == 3


def test_a_configuration_is_told_without_what_no_decision_needs(tmp_path):
    """Thousands of names of modules would not go through a line of the link; what tells of layers stays."""
    config = {"layer_types": ["full_attention"] * 126, "quantization_config": {"quant_method": "fp8", "ignore": ["x"] * 5000}}
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"chat_template": "y" * 100_000}))
    found = WeightFinder([tmp_path]).inspect("m").config
    assert found == {"layer_types": config["layer_types"], "quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "qwen.tiktoken", "spiece.model"]
)
def test_whether_a_tokenizer_stands_beside_the_tensors(tmp_path, name):
    """By the names that models use; without tensors nobody has looked."""
    (tmp_path / "m").mkdir()
    finder = WeightFinder([tmp_path])
    assert finder.inspect("m").tokenizer is None
    safetensors_file(tmp_path / "m" / "a.safetensors", 10)
    assert finder.inspect("m").tokenizer is False
    (tmp_path / "m" / name).write_text("{}")
    assert finder.inspect("m").tokenizer is True


def test_an_adapter_is_told_by_its_own_configuration(tmp_path):
    """A LoRA's folder has adapter_config.json in place of a model's."""
    (tmp_path / "lora").mkdir()
    safetensors_file(tmp_path / "lora" / "adapter_model.safetensors", 10)
    (tmp_path / "lora" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16}')
    assert WeightFinder([tmp_path]).inspect("lora").config == {"peft_type": "LORA", "r": 16}
