"""What each layer of a model keeps of a request: keys and values, latents, a window of them, or a state of fixed size.

Read from config.json or a GGUF header; a model whose figures are missing has no layers known, which is None, and never few.
Where a model's own code decides by its type (Gemma 2's alternation, Gemma 3's five to one), the type decides here, too; the
names and defaults are those of Transformers' configuration classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import evolve, frozen

from llmgw.engines.memory import config_shape, number

FULL, WINDOW, CHUNK, STATE, NONE = "full", "window", "chunk", "state", "none"
_KINDS = {
    **dict.fromkeys(("sliding_attention", "local", "local_attention"), WINDOW),
    **dict.fromkeys(("chunked_attention",), CHUNK),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "recurrent", "conv"), STATE),
    **dict.fromkeys(("mlp", "moe"), NONE),
}
# Encoders answer in one step and keep nothing.
ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert", "mpnet", "distilbert", "new", "deberta-v2"})
GGUF_ENCODERS = frozenset({"bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "modern-bert", "neo-bert"})
# One indexed key of DeepSeek's sparse attention: 128 numbers of fp8 and a scale of 4 bytes (vLLM's indexer cache).
_INDEX_SCALE = 4


@frozen
class LayerCache:
    """What one layer keeps.

    @ivar key: numbers per token and head; C{value} the same of the values.
    @ivar heads: divided over tensor ranks, and repeated where there are more ranks; None: all of it on every rank.
    @ivar window: the most tokens it looks back on, None all.
    @ivar chunked: the window is cut at multiples of its size instead of moving along.
    @ivar state: numbers per request however long, over all tensor ranks.
    @ivar extra: bytes per token on every rank beside, whatever the cache's number format.
    """

    key: int = 0
    value: int = 0
    heads: int | None = None
    window: int | None = None
    chunked: bool = False
    state: int = 0
    extra: int = 0


@frozen
class Pages:
    """How an engine lays the cache out.

    @ivar key: bytes of one number of the keys; C{value} of the values, C{state} of a recurrent state: the most that engines
        take. vLLM keeps a convolution's inputs, and many models' states, in the model's own format, which is half of it
        (C{MambaStateDtypeCalculator}); beside a long context's keys and values neither weighs much.
    @ivar tensor: over how many ranks heads are divided.
    @ivar held: how many tokens it holds for a layer with that window (None: all), of a request of so many tokens.
    """

    held: Callable[[LayerCache, int], int]
    key: float = 2.0
    value: float = 2.0
    state: float = 4.0
    tensor: int = 1


def bytes_of(layers: Iterable[LayerCache], tokens: int, pages: Pages) -> int:
    """Bytes that one request of C{tokens} takes on one tensor rank of these layers."""
    return sum(count * _one(layer, tokens, pages) for layer, count in Counter(layers).items())


def _one(layer: LayerCache, tokens: int, pages: Pages) -> int:
    heads = 1 if layer.heads is None else max(1, layer.heads // pages.tensor)
    each = heads * (layer.key * pages.key + layer.value * pages.value) + layer.extra
    state = -(-layer.state // pages.tensor) * pages.state
    return int(each * (pages.held(layer, tokens) if each else 0) + state)


def config_layers(config: Mapping[str, object]) -> tuple[LayerCache, ...] | None:
    """The layers by config.json's (language part's) figures; None where one of them is missing."""
    count = number(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count is None:
        return None
    if str(config.get("model_type")) in ENCODERS:
        return (LayerCache(),) * count
    kinds = _shared(config, _kinds(config, count))
    attention, state = _attention(config), _state(config)
    needs = {kind for kind in kinds if kind != NONE}
    if (needs - {STATE} and attention is None) or (STATE in needs and state is None):
        return None
    window, chunk = number(config, "sliding_window"), number(config, "attention_chunk_size")
    made = {
        NONE: LayerCache(),
        FULL: attention,
        WINDOW: evolve(attention, window=window) if attention else None,
        CHUNK: evolve(attention, window=chunk, chunked=True) if attention else None,
        STATE: LayerCache(state=state or 0),
    }
    layers = [made[kind] or LayerCache() for kind in kinds]
    return tuple(_headed(config, layers))


def _headed(config: Mapping[str, object], layers: list[LayerCache]) -> Iterable[LayerCache]:
    """Models that were pruned have other heads in each layer (C{block_configs} of Nemotron NAS)."""
    blocks, heads = config.get("block_configs"), number(config, "num_attention_heads")
    if not isinstance(blocks, list) or heads is None:
        return layers
    pairs = zip(layers, blocks, strict=False)
    return (evolve(layer, heads=heads // (_block(block).get("n_heads_in_group") or 1)) for layer, block in pairs)


def _block(block: object) -> Mapping[str, int]:
    found = block.get("attention") if isinstance(block, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _shared(config: Mapping[str, object], kinds: list[str]) -> list[str]:
    """The last layers of Gemma 3n use the cache of earlier ones."""
    shared = number(config, "num_kv_shared_layers") or 0
    return [*kinds[: len(kinds) - shared], *(NONE for _ in kinds[len(kinds) - shared :])]


def _kinds(config: Mapping[str, object], count: int) -> list[str]:
    """The kind of each layer, by whatever way the model's file has of telling."""
    named = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(named, list) and len(named) >= count:
        return [_KINDS.get(str(name), FULL) for name in named[:count]]
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and len(pattern) >= count:
        return [{"M": STATE, "*": FULL}.get(letter, NONE) for letter in pattern[:count]]
    blocks = config.get("block_configs")
    if isinstance(blocks, list) and len(blocks) >= count:
        return [FULL if _block(block).get("n_heads_in_group") else NONE for block in blocks[:count]]
    return _mixed(config, count) or _windowed(config, count)


def _mixed(config: Mapping[str, object], count: int) -> list[str]:
    """Attention in some layers only, recurrent states in the others; empty for a model that has no such thing."""
    kinds = config.get("attn_type_list")
    if isinstance(kinds, list) and len(kinds) >= count:
        return [FULL if kind == 1 else STATE for kind in kinds[:count]]
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(full := linear.get("full_attn_layers"), list):
        return [FULL if index + 1 in full else STATE for index in range(count)]
    period, offset = number(config, "attn_layer_period"), number(config, "attn_layer_offset") or 0
    if period:
        return [FULL if index % period == offset else STATE for index in range(count)]
    every = number(config, "full_attention_interval")
    return [STATE if (index + 1) % every else FULL for index in range(count)] if every else []


def _windowed(config: Mapping[str, object], count: int) -> list[str]:
    kind = str(config.get("model_type"))
    if number(config, "attention_chunk_size"):
        return [CHUNK if (index + 1) % 4 else FULL for index in range(count)]
    if not number(config, "sliding_window") or config.get("use_sliding_window") is False:
        return [FULL] * count
    if kind == "gemma2":
        return [FULL if index % 2 else WINDOW for index in range(count)]
    every = number(config, "sliding_window_pattern", "_sliding_window_pattern") or (6 if kind.startswith("gemma3") else None)
    if every:
        return [WINDOW if (index + 1) % every else FULL for index in range(count)]
    first = number(config, "max_window_layers") if config.get("use_sliding_window") else 0
    return [WINDOW if index >= (first or 0) else FULL for index in range(count)]


def _attention(config: Mapping[str, object]) -> LayerCache | None:
    """A layer with attention over everything; None where the figures are missing."""
    rank, rope = number(config, "kv_lora_rank"), number(config, "qk_rope_head_dim")
    if rank is not None and rope is not None:
        indexed = number(config, "index_head_dim")
        return LayerCache(key=rank + rope, extra=indexed + _INDEX_SCALE if indexed else 0)
    found = config_shape(config)
    if found.kv_heads is None or found.head_size is None:
        return None
    return LayerCache(found.head_size, number(config, "v_head_dim") or found.head_size, found.kv_heads)


def _state(config: Mapping[str, object]) -> int | None:
    """Numbers that a recurrent layer keeps of a request: the state and the inputs of its short convolution."""
    return next(
        (found for found in (_delta(config), _kda(config), _mamba2(config), _mamba(config), _short(config)) if found), None
    )


def _product(*numbers: int | None) -> int | None:
    total = 1
    for each in numbers:
        if each is None:
            return None
        total *= each
    return total


def _delta(config: Mapping[str, object]) -> int | None:
    """Gated delta nets (Qwen3-Next): value heads x key size x value size, and the convolution over keys, queries, values."""
    keys, values = (number(config, f"linear_num_{name}_heads") for name in ("key", "value"))
    key, value = (number(config, f"linear_{name}_head_dim") for name in ("key", "value"))
    kernel = number(config, "linear_conv_kernel_dim")
    if keys is None or values is None or key is None or value is None or kernel is None:
        return None
    return values * key * value + (2 * keys * key + values * value) * (kernel - 1)


def _kda(config: Mapping[str, object]) -> int | None:
    """Kimi's delta attention, and MiniMax' lightning attention, which has no convolution."""
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping):
        heads, size, kernel = (number(linear, name) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
        return heads * size * (size + 3 * (kernel - 1)) if heads and size and kernel else None
    if "attn_type_list" in config:
        size = number(config, "head_dim")
        return _product(number(config, "num_attention_heads"), size, size)
    return None


def _mamba2(config: Mapping[str, object]) -> int | None:
    heads, size = number(config, "mamba_num_heads", "mamba_n_heads"), number(config, "mamba_head_dim", "mamba_d_head")
    state, groups = number(config, "ssm_state_size", "mamba_d_state"), number(config, "n_groups", "mamba_n_groups")
    kernel = number(config, "conv_kernel", "mamba_d_conv")
    if heads is None or size is None or state is None or groups is None or kernel is None:
        return None
    return heads * size * state + (heads * size + 2 * groups * state) * (kernel - 1)


def _mamba(config: Mapping[str, object]) -> int | None:
    inner = _product(number(config, "mamba_expand"), number(config, "hidden_size"))
    state, kernel = number(config, "mamba_d_state"), number(config, "mamba_d_conv")
    return inner * (state + kernel - 1) if inner and state and kernel else None


def _short(config: Mapping[str, object]) -> int | None:
    return _product(number(config, "conv_L_cache"), number(config, "hidden_size"))


def gguf_layers(header: Mapping[str, object]) -> tuple[LayerCache, ...] | None:
    """The layers by a GGUF header's figures; None where one is missing, or where a layer keeps what nobody here can count.

    Which layers have a window stands in the header only for some models; for the others llama.cpp's own code has the pattern.
    """
    kind = str(header.get("general.architecture", ""))
    count = number(header, f"{kind}.block_count")
    if count is None or f"{kind}.ssm.state_size" in header:
        return None
    if kind in GGUF_ENCODERS:
        return (LayerCache(),) * count
    latent = number(header, f"{kind}.attention.key_length")
    if latent and f"{kind}.attention.kv_lora_rank" in header:
        return (LayerCache(key=latent),) * count
    heads = _each(header.get(f"{kind}.attention.head_count_kv", header.get(f"{kind}.attention.head_count")), count)
    key, value = _gguf_sizes(header, kind)
    if heads is None or key is None or value is None:
        return None
    windows = _gguf_windows(header, kind, count)
    return tuple(LayerCache(key, value, own, window) for own, window in zip(heads, windows, strict=True))


def _each(value: object, count: int) -> Sequence[int] | None:
    if isinstance(value, int):
        return [value] * count
    if isinstance(value, list) and len(value) == count and all(isinstance(one, int) for one in value):
        return value
    return None


def _gguf_sizes(header: Mapping[str, object], kind: str) -> tuple[int | None, int | None]:
    heads, width = number(header, f"{kind}.attention.head_count"), number(header, f"{kind}.embedding_length")
    plain = width // heads if heads and width else None
    key, value = (number(header, f"{kind}.attention.{name}_length") for name in ("key", "value"))
    return key or plain, value or plain


def _gguf_windows(header: Mapping[str, object], kind: str, count: int) -> list[int | None]:
    window = number(header, f"{kind}.attention.sliding_window")
    if not window:
        return [None] * count
    said = header.get(f"{kind}.attention.sliding_window_pattern")
    if isinstance(said, list) and len(said) == count:
        return [window if own else None for own in said]
    every = said if isinstance(said, int) and said > 0 else {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4}.get(kind)
    # Without a pattern that is known here all layers count as whole: never too little.
    return [window if every and (index + 1) % every else None for index in range(count)]
