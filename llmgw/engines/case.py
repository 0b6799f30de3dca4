"""What is known when a profile is looked at before a start, and the figures that all engines' checks read from it.

A check that lacks a figure says nothing: what nobody knows is no reason to refuse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from attrs import frozen

from llmgw.engines.launch import whole
from llmgw.engines.memory import Shape, shape
from llmgw.fleet.model import Profile
from llmgw.fleet.node import Device, Installation, NodeFacts
from llmgw.fleet.shard import WeightFiles
from llmgw.interfaces import Flags


@frozen
class Case:
    """What is known when a profile is looked at; on the server for a whole catalog no more than the profile.

    @ivar engine: how sentences call the engine.
    """

    profile: Profile
    files: WeightFiles | None
    node: NodeFacts | None
    installation: Installation | None
    flags: Flags
    engine: str = "vLLM"

    @property
    def shape(self) -> Shape:
        """The figures of the weights."""
        return shape(self.files)

    @property
    def named(self) -> str:
        """The installation and its version, e.g. C{vllm 0.33.0}."""
        if self.installation is None:
            return self.engine.lower()
        return f"{self.installation.name} {self.installation.version or ''}".strip()

    @property
    def version(self) -> tuple[int, int] | None:
        """The first two numbers of the installed version, None where it is not known."""
        return version_of(self.installation.version if self.installation else None)

    @property
    def for_processors(self) -> bool:
        """Whether the installation is a build that can use no device, by its version's own word (C{0.32.0+cpu})."""
        return self.installation is not None and (self.installation.version or "").endswith("+cpu")

    def argument(self, name: str) -> int | None:
        """A whole-numbered argument, None where it is not given or not a number."""
        return whole(self.profile.arguments.get(name))

    @property
    def quantization(self) -> str | None:
        """How the weights are quantized by their own word."""
        config = self.files.config.get("quantization_config") if self.files else None
        method = config.get("quant_method") if isinstance(config, Mapping) else None
        return method if isinstance(method, str) else None

    @property
    def architecture(self) -> str | None:
        """The first architecture that config.json names."""
        named = self.files.config.get("architectures") if self.files else None
        return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None

    @property
    def devices(self) -> list[Device]:
        """The node's healthy devices; none where the node is not known or the profile takes none."""
        if self.node is None or self.profile.resources.devices == 0:
            return []
        return [device for device in self.node.inventory.devices if not device.problem]


def version_of(text: str | None) -> tuple[int, int] | None:
    """C{(0, 33)} of C{0.33.0rc1+cu130}; None if it does not begin with two numbers."""
    found = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None


def divisors(value: int, most: int = 64) -> str:
    """C{1, 2, 4, 7, 14}."""
    return ", ".join(str(n) for n in range(1, min(value, most) + 1) if value % n == 0)
