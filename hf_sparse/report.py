"""Tables that people look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from hf_sparse.modeling import BlockId, HybridBlock, Placement


@dataclass(frozen=True)
class TierSummary:
    """What lies on one tier. `nbytes` is exact: packed weights, scales, biases, indices, predictors, embeddings and
    head, and on the primary tier what must be there. `cache_bytes`: room that keys and values may take besides; both
    together keep within `budget`. `whole`: "embedding", "head", where they lie here.
    """

    name: str
    mlp_neurons: int
    kv_groups: int
    nbytes: int
    cache_bytes: int
    budget: int | None
    whole: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlacementSummary:
    """Neurons and bytes on each tier. `str()` is a table; rich prints it too."""

    tiers: tuple[TierSummary, ...]
    mlp_neurons: int
    kv_groups: int
    resident_bytes: int
    solution: str = ""  # how it was solved

    def __rich__(self) -> Table:
        caption = f"{self.resident_bytes:,} bytes on the first tier are norms, biases and the like"
        table = Table(title="Placement", caption=f"{caption}\n{self.solution}" if self.solution else caption)
        for heading in ("tier", "MLP neurons", "KV groups", "with", "bytes", "room for the cache", "budget"):
            table.add_column(heading, justify="left" if heading in ("tier", "with") else "right")
        for tier in self.tiers:
            table.add_row(
                tier.name,
                f"{tier.mlp_neurons:,} ({tier.mlp_neurons / self.mlp_neurons:.0%})",
                f"{tier.kv_groups:,} ({tier.kv_groups / self.kv_groups:.0%})",
                ", ".join(tier.whole),
                f"{tier.nbytes:,}",
                f"{tier.cache_bytes:,}",
                "none" if tier.budget is None else f"{tier.budget:,}",
            )
        return table

    def __str__(self) -> str:
        console = Console(width=100, force_terminal=False, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    __repr__ = __str__


def summarize_placement(
    blocks: Sequence[HybridBlock],
    placement: Placement,
    resident_bytes: int,
    part_bytes: Mapping[BlockId, tuple[int, int]],
    cache_room: Mapping[BlockId, int],
) -> PlacementSummary:
    """`part_bytes`: of embeddings and head; `cache_room`: bytes by block for a neuron's keys and values."""
    tiers = []
    for position, tier in enumerate(placement.tiers):
        shards = [(block, shard) for block in blocks for shard in block.shards if shard.tier == tier]
        parts = [id for id in part_bytes if int(placement.assignment.get(id, torch.zeros(1))) == position]
        nbytes = sum(shard.nbytes for _, shard in shards) + sum(part_bytes[id][0] for id in parts)
        tiers.append(
            TierSummary(
                name=tier.name,
                mlp_neurons=sum(len(shard.neurons) for block, shard in shards if block.id.kind == "mlp"),
                kv_groups=sum(len(shard.neurons) for block, shard in shards if block.id.kind == "attention"),
                nbytes=nbytes + (resident_bytes if position == 0 else 0),
                cache_bytes=sum(len(shard.neurons) * cache_room.get(block.id, 0) for block, shard in shards),
                budget=tier.budget,
                whole=tuple(id.kind for id in parts),
            )
        )
    return PlacementSummary(
        tuple(tiers),
        sum(block.neurons for block in blocks if block.id.kind == "mlp"),
        sum(block.neurons for block in blocks if block.id.kind == "attention"),
        resident_bytes,
    )


def format_bytes(count: float) -> str:
    """1234567 -> "1.2 MB" (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
