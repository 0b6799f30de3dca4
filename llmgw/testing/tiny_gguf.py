"""Writes a llama model with random weights as GGUF: 400 KB, made and loaded in no time, and it says nothing sensible.

For tests that need a real engine to start, answer and die. Needs C{gguf} and numpy (the C{test} extra).
"""

from __future__ import annotations

from pathlib import Path

CONTEXT, WIDTH, LAYERS, HEADS, INNER = 512, 64, 2, 2, 128


def write_tiny_gguf(path: Path, seed: int = 1) -> Path:
    """Write the model to C{path} and return it."""
    import gguf
    import numpy

    random = numpy.random.default_rng(seed)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *(f"▁{c}" for c in "abcdefgh")]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256]
    kinds += [gguf.TokenType.NORMAL] * (len(pieces) - len(kinds))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.encode() for piece in pieces])
    writer.add_token_scores([-float(index) for index in range(len(pieces))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {"token_embd": (len(pieces), WIDTH), "output": (len(pieces), WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": (WIDTH, WIDTH) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"blk.{layer}.{name}": (INNER, WIDTH) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.ffn_down": (WIDTH, INNER)}
        shapes |= {f"blk.{layer}.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        values = numpy.ones(shape) if len(shape) == 1 else random.normal(0, 0.05, shape)
        writer.add_tensor(f"{name}.weight", values.astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
