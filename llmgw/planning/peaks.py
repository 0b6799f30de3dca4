"""The most device memory that engines were seen to use while they served: it corrects what was reckoned before they ran.

A peak is kept in the shard's record, and in the husk that remembers a model's last number, so that it outlives the replica. It
is written only when it grows by a hundredth: every report shows other figures, and each writing is a commit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from attrs import evolve

from llmgw.fleet.model import Model
from llmgw.fleet.records import ShardRecord
from llmgw.fleet.shard import ShardState
from llmgw.planning.world import Draft

GROWS = 1.01


def follow_peaks(draft: Draft) -> None:
    """Note for each shard that serves the most its engine uses on one device, by the nodes' inventories."""
    used: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for node in draft.nodes.values():
        for device in node.facts.inventory.devices if node.facts else ():
            for process in device.processes:
                if process.shard is not None and process.memory:
                    used[process.shard][device.uuid] += process.memory
    for shard, devices in used.items():
        record, most = draft.shards.get(shard), max(devices.values())
        if record is not None and record.state is ShardState.READY and most > (record.peak or 0) * GROWS:
            draft.put(evolve(record, peak=most))


def peak_of(shards: Iterable[ShardRecord], model: Model) -> int | None:
    """The most that a shard of this very profile was seen to use of one device; None if none was seen."""
    seen = [shard.peak for shard in shards if shard.model == model.name and shard.generation == model.generation]
    return max((peak for peak in seen if peak is not None), default=None)
