"""What the stand-ins of vLLM and SGLang share of taking LoRA adapters while they run: a list, and how its folders are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Seconds until an adapter is loaded: longer than it takes to say that the order for it was heard.
TAKES = 1.0


class BadAdapter(Exception):
    """It cannot be loaded; C{absent}: there is none at this path."""

    def __init__(self, text: str, absent: bool = False) -> None:
        super().__init__(text)
        self.absent = absent


def read_adapter(path: str) -> dict[str, Any]:
    """Its adapter_config.json.

    @raise BadAdapter: there is none, or its weights are not there.
    """
    folder = Path(path)
    try:
        config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_bytes())
    except (OSError, ValueError):
        raise BadAdapter(f"No adapter found for {path}", absent=True) from None
    if not (folder / "adapter_model.safetensors").exists():
        raise BadAdapter(f"{path} doesn't contain tensors")
    return config


def cards(base: list[str], root: str, adapters: dict[str, str]) -> str:
    """The answer of C{/v1/models}: each name of the base model, then each adapter with its parent and its path."""
    found = [{"id": name, "object": "model", "owned_by": "fake", "root": root, "parent": None} for name in base]
    found += [
        {"id": name, "object": "model", "owned_by": "fake", "root": path, "parent": base[0]} for name, path in adapters.items()
    ]
    return json.dumps({"object": "list", "data": found})
