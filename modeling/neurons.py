"""Where neurons are: addresses, tiers and placements. Frozen data that the solver writes and the blocks read.

A neuron is one hidden unit of an MLP (a row of gate and up, a column of down) or, in attention, one KV group: a KV head
with the query heads that share it (PowerInfer, SOSP'24, places MLP neurons and attention heads alike).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

BlockKind = Literal["attention", "mlp", "embedding", "head"]


@dataclass(frozen=True, order=True)
class BlockId:
    """Address of a hybrid block: decoder layer (from 0) and kind. Sorts by layer number, then attention before mlp.
    Embeddings (layer 0) and head (the last layer) are blocks of one neuron to a placement.
    """

    layer: int
    kind: BlockKind

    def __str__(self) -> str:
        return f"{self.layer}.{self.kind}"

    @classmethod
    def parse(cls, text: str) -> BlockId:
        """The inverse of `str`. Raises ValueError where `text` is not `<layer>.<attention|mlp>`."""
        layer, _, kind = text.partition(".")
        if not layer.isdecimal() or kind not in get_args(BlockKind):
            kinds = ", ".join(get_args(BlockKind))
            raise ValueError(f"block id {text!r}: expected '<layer>.<kind>', kinds are {kinds}")
        return cls(int(layer), kind)  # type: ignore[arg-type]


@dataclass(frozen=True)
class WeightFormat:
    """How a block stores and multiplies its weights.

    `weight_dtype`: "nf4", "fp4", "int4", "int4_asym", "iq4_nl", "int8", or None for weights kept as they came.
    `group_size`: columns that share a scale. `compute_dtype`: "int8", "bf16" or "fp32", see
    `hf_sparse.quantization.gathered_row_product`. `exceptions`: projections that are stored otherwise, by name within
    their layer ("mlp.down_proj", or "3.mlp.down_proj" for one layer's): weight_dtype and group_size.
    """

    weight_dtype: str | None = None
    group_size: int = 64
    compute_dtype: str = "fp32"
    exceptions: Mapping[str, tuple[str, int]] = field(default_factory=dict, hash=False)

    def of(self, layer: int, projection: str) -> WeightFormat:
        """That of one projection."""
        found = self.exceptions.get(f"{layer}.{projection}", self.exceptions.get(projection))
        return self if found is None else WeightFormat(*found, self.compute_dtype)

    @property
    def packed_leaves(self) -> tuple[str, ...]:
        """What a saved packed weight consists of."""
        return ("codes", "scales", "offsets") if self.weight_dtype == "int4_asym" else ("codes", "scales")


@dataclass(frozen=True)
class Tier:
    """A place where neurons live and are computed.

    `budget` is in bytes, None for no limit. The rest feeds the cost model only: `bandwidth`, at which weights are read,
    in bytes per second; `sync_seconds`, what it costs once per block to hand activations over and merge the result;
    `launch_seconds`, what a block's part costs however little it reads; `flops`, multiplications and additions per
    second in products with many activation rows; `copy_bandwidth`, at which weights come from the host's memory.
    """

    name: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    budget: int | None = None
    bandwidth: float = 10e9
    sync_seconds: float = 0.0
    launch_seconds: float = 0.0
    flops: float = 1e11
    copy_bandwidth: float = 1e10

    @property
    def accelerates(self) -> bool:
        """Whether weights have to be copied to it from the host's memory."""
        return self.device.type != "cpu"

    def __post_init__(self) -> None:
        if self.device.type == "meta":
            raise ValueError(f"tier {self.name!r}: device must be one that holds data, got meta")
        if self.budget is not None and self.budget < 0:
            raise ValueError(f"tier {self.name!r}: budget must be >= 0 bytes or None, got {self.budget}")
        for name in ("bandwidth", "flops", "copy_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"tier {self.name!r}: {name} must be > 0 per second, got {getattr(self, name)}")
        for name in ("sync_seconds", "launch_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"tier {self.name!r}: {name} must be >= 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Placement:
    """Which neuron lives on which tier.

    `tiers[0]` is the primary tier: hidden states, embeddings, norms and merges live on its device. `assignment[block]`
    is an int64 tensor [neurons of that block] of positions in `tiers`.
    """

    tiers: tuple[Tier, ...]
    assignment: Mapping[BlockId, Tensor]

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ValueError("tiers: a placement needs at least one tier")
        for block, tier_of in self.assignment.items():
            if tier_of.dim() != 1 or tier_of.dtype != torch.int64:
                raise ValueError(
                    f"assignment[{block}]: expected int64 [neurons], got {tier_of.dtype} {list(tier_of.shape)}"
                )
            if tier_of.numel() and not 0 <= int(tier_of.min()) <= int(tier_of.max()) < len(self.tiers):
                raise ValueError(f"assignment[{block}]: tier positions must lie in 0..{len(self.tiers) - 1}")
