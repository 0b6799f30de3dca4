"""What weights say about themselves: layers, heads, context, and the bytes of KV cache that a token takes.

Reads what an agent's inspection found: config.json of a Transformers folder, or a GGUF header. Whatever is not there is
None, never 0: a missing number must not look like a small one. Vision models keep the language part's figures under
C{text_config}.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from llmgw.fleet.shard import WeightFiles

# What Transformers' classes take where config.json is silent, for types whose published files are.
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072},
}


@frozen
class Shape:
    """The figures of a model that decide how it can be cut up and what it takes. None is unknown."""

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    context: int | None = None
    experts: int | None = None
    latent: int | None = None

    def kv_per_token(self, tensor: int = 1, pipeline: int = 1, width: int = 2) -> int | None:
        """Bytes of KV cache for a token on one device; None if the figures do not tell.

        C{2 x layers / pipeline x max(1, kv_heads // tensor) x head_size x width}; with latents C{layers / pipeline x latent x
        width}. Compressed attention (MLA) keeps the same latent on every tensor rank; heads are otherwise divided, and repeated
        where there are more ranks than heads. Windows and layers of other kinds are counted as if they kept everything: never
        too little; L{llmgw.engines.cache} counts layer by layer.

        @param width: bytes of one number in the cache.
        """
        if self.layers is None:
            return None
        layers = -(-self.layers // pipeline)
        if self.latent is not None:
            return layers * self.latent * width
        if self.kv_heads is None or self.head_size is None:
            return None
        return 2 * layers * max(1, self.kv_heads // tensor) * self.head_size * width


def shape(files: WeightFiles | None) -> Shape:
    """The shape of these weights; all unknown where nobody has looked."""
    if files is None:
        return Shape()
    return _of_gguf(files.gguf) if files.gguf else config_shape(text_config(files))


def text_config(files: WeightFiles | None) -> Mapping[str, object]:
    """config.json, or its language part where the model has several."""
    config = files.config if files is not None else {}
    inner = config.get("text_config") or config.get("llm_config") or config.get("language_config")
    found = {**config, **inner} if isinstance(inner, Mapping) else config
    return {**DEFAULTS.get(str(found.get("model_type")), {}), **found}


def number(config: Mapping[str, object], *names: str) -> int | None:
    """The first of these entries that is a whole number; of a list per layer, its greatest."""
    for name in names:
        value = config.get(name)
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def config_shape(config: Mapping[str, object]) -> Shape:
    """The shape by the figures of config.json, or of its language part."""
    heads = number(config, "num_attention_heads", "n_head", "n_heads")
    hidden = number(config, "hidden_size", "n_embd", "d_model")
    # Nemotron-H's first files say attention_head_dim, and 32 heads of 128 in a width of 3072.
    head_size = number(config, "head_dim", "attention_head_dim", "kv_channels")
    if head_size is None and heads and hidden:
        head_size = hidden // heads
    rank, rope = number(config, "kv_lora_rank"), number(config, "qk_rope_head_dim")
    return Shape(
        layers=number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_size=head_size,
        context=_context(config),
        experts=number(config, "num_experts", "n_routed_experts", "num_local_experts"),
        latent=rank + rope if rank is not None and rope is not None else None,
    )


def _kv_heads(config: Mapping[str, object], heads: int | None) -> int | None:
    """Older families have names of their own; C{multi_query} alone means one head (vLLM's get_total_num_kv_heads)."""
    inner = config.get("attn_config")
    inner = inner if isinstance(inner, Mapping) else {}
    named = number({**inner, **config}, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads")
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return number(config, "multi_query_group_num") or 1
    return heads if named is None else named


def _context(config: Mapping[str, object]) -> int | None:
    """What vLLM derives: the positions, times the factor of a rope scaling that stretches them.

    Gemma 3 tells positions that are stretched already (vLLM's C{_get_and_verify_max_len}).
    """
    positions = number(config, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if positions is None or not isinstance(scaling, Mapping) or "gemma3" in str(config.get("model_type")):
        return positions
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor")
    if kind in (None, "default", "llama3", "longrope", "su", "mrope") or not isinstance(factor, int | float):
        return positions
    original = number(scaling, "original_max_position_embeddings") if kind == "yarn" else None
    return int((original or positions) * factor)


def _of_gguf(header: Mapping[str, object]) -> Shape:
    kind = header.get("general.architecture", "")
    heads = number(header, f"{kind}.attention.head_count")
    width = number(header, f"{kind}.embedding_length")
    head_size = number(header, f"{kind}.attention.key_length")
    if head_size is None and heads and width:
        head_size = width // heads
    kv_heads = number(header, f"{kind}.attention.head_count_kv")
    return Shape(
        layers=number(header, f"{kind}.block_count"),
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_size=head_size,
        context=number(header, f"{kind}.context_length"),
        experts=number(header, f"{kind}.expert_count"),
    )
