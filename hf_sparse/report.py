"""Tables that people look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from hf_sparse.modeling import HybridBlock, Placement


@dataclass(frozen=True)
class TierSummary:
    """What lies on one tier. `nbytes` is exact: packed weights, scales, biases, indices, and on the primary tier what
    must be there.
    """

    name: str
    mlp_neurons: int
    kv_groups: int
    nbytes: int
    budget: int | None


@dataclass(frozen=True)
class PlacementSummary:
    """Neurons and bytes on each tier. `str()` is a table; rich prints it too."""

    tiers: tuple[TierSummary, ...]
    mlp_neurons: int
    kv_groups: int
    resident_bytes: int

    def __rich__(self) -> Table:
        table = Table(
            title="Placement", caption=f"{self.resident_bytes:,} bytes on the first tier are embeddings, norms, head"
        )
        for heading in ("tier", "MLP neurons", "KV groups", "bytes", "budget"):
            table.add_column(heading, justify="left" if heading == "tier" else "right")
        for tier in self.tiers:
            table.add_row(
                tier.name,
                f"{tier.mlp_neurons:,} ({tier.mlp_neurons / self.mlp_neurons:.0%})",
                f"{tier.kv_groups:,} ({tier.kv_groups / self.kv_groups:.0%})",
                f"{tier.nbytes:,}",
                "none" if tier.budget is None else f"{tier.budget:,}",
            )
        return table

    def __str__(self) -> str:
        console = Console(width=100, force_terminal=False, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    __repr__ = __str__


def summarize_placement(blocks: Sequence[HybridBlock], placement: Placement, resident_bytes: int) -> PlacementSummary:
    tiers = []
    for position, tier in enumerate(placement.tiers):
        shards = [(block, shard) for block in blocks for shard in block.shards if shard.tier == tier]
        tiers.append(
            TierSummary(
                name=tier.name,
                mlp_neurons=sum(len(shard.neurons) for block, shard in shards if block.id.kind == "mlp"),
                kv_groups=sum(len(shard.neurons) for block, shard in shards if block.id.kind == "attention"),
                nbytes=sum(shard.nbytes for _, shard in shards) + (resident_bytes if position == 0 else 0),
                budget=tier.budget,
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
