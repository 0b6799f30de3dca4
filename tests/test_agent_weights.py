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
        assert finder.inspect(name).config == {"a": 1}
    assert not finder.inspect("hf:org/name@other").found


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
