"""Writes a llama model with random weights that never ends by itself, and a LoRA adapter for it: `python tiny_llama.py FOLDER`.

Run by the Python of vLLM's own installation, which has all it needs; 1.6 MB in FOLDER/tiny-llama and FOLDER/tuned.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

LAYERS, WIDTH, HEADS, CONTEXT, RANK = 2, 128, 4, 4096, 8


def write_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bytewise = Tokenizer(models.BPE())
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bytewise.train_from_iterator([], trainers.BpeTrainer(special_tokens=["<s>"], initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, bos_token="<s>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, bos_token_id=0,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=CONTEXT, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def write_adapter(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for layer in range(LAYERS):
        for name in ("q_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            tensors |= {f"{stem}A.weight": torch.randn(RANK, WIDTH), f"{stem}B.weight": torch.randn(WIDTH, RANK)}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told | {"base_model_name_or_path": "tiny-llama"}))


if __name__ == "__main__":
    write_model(Path(sys.argv[1]) / "tiny-llama")
    write_adapter(Path(sys.argv[1]) / "tuned")
