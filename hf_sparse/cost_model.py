"""What a token costs under a placement: the cost model that placements are solved by and `hf-sparse estimate` asks.

A tier reads what is active of its neurons at its bandwidth, on top of a fixed cost per block; the tiers of a block run
side by side, so that the slowest counts (PowerInfer, SOSP'24, section 6.3, has the sum of bytes over bandwidth; that
they overlap is section 5.3). Hidden states are at home on the first tier while a block has neurons on a fast tier, and
on the last one where it has none. Another tier gets them handed over and its part is merged, once per block
(`Tier.sync_seconds`); a block that lies at home as a whole crosses nothing; where the home changes from one block to
the next half of that is paid.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparse.modeling import BlockId, Placement, Tier


@dataclass(frozen=True, eq=False)
class PlacementBlock:
    """What the solver knows of a block. Tensors are float64 [neurons], >= 0 and finite.

    `bytes_per_neuron` (> 0) is what a neuron takes of a budget. `impact`: what it is worth on a fast tier, by the
    paper's objective. `read_bytes`: what an average token reads of it. `shared_bytes`: what every tier that has any of
    the block's neurons holds, and reads, besides (the first layer of its predictor).

    A block with one neuron is placed whole: attention that cannot be split, the head, the embeddings. Raises ValueError
    where a field is not as said.
    """

    id: BlockId
    bytes_per_neuron: int
    impact: Tensor
    read_bytes: Tensor
    shared_bytes: int = 0

    def __post_init__(self) -> None:
        for name, smallest in (("bytes_per_neuron", 1), ("shared_bytes", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise ValueError(f"block {self.id}: {name} must be an int >= {smallest}, got {value!r}")
        for name, values in (("impact", self.impact), ("read_bytes", self.read_bytes)):
            if values.dtype != torch.float64 or values.dim() != 1 or not values.numel():
                got = f"{values.dtype} {list(values.shape)}"
                raise ValueError(
                    f"block {self.id}: {name} must be float64 [neurons] with at least one neuron, got {got}"
                )
            if not bool((torch.isfinite(values) & (values >= 0)).all()):
                raise ValueError(f"block {self.id}: {name} must be finite and >= 0 everywhere")
        if self.impact.shape != self.read_bytes.shape:
            lengths = f"{self.impact.numel()} and {self.read_bytes.numel()}"
            raise ValueError(f"block {self.id}: impact and read_bytes must have one length, got {lengths}")

    @classmethod
    def whole(cls, id: BlockId, nbytes: int, read: int) -> PlacementBlock:
        """A block of one neuron of `nbytes` of which a token reads `read`."""
        worth = torch.tensor([float(read)], dtype=torch.float64)
        return cls(id, nbytes, worth, worth)

    @property
    def neurons(self) -> int:
        """Number of neurons of the block."""
        return self.impact.numel()

    @functools.cached_property
    def order(self) -> Tensor:
        """int64 [neurons]: those read most first; of those read alike the ones of more impact."""
        by_impact = torch.argsort(self.impact, descending=True, stable=True)
        return by_impact[torch.argsort(self.read_bytes[by_impact], descending=True, stable=True)]

    @functools.cached_property
    def read_of_first(self) -> Tensor:
        """float64 [neurons + 1]: what a token reads of the first n of `order`."""
        return torch.cat((torch.zeros(1, dtype=torch.float64), self.read_bytes[self.order].cumsum(0)))


@dataclass(frozen=True)
class TokenTime:
    """Seconds of one token. `blocks`: of each block, by tier, what its part takes, handing over and merging included;
    they run side by side. `moves`: of hidden states that change their home between blocks.
    """

    blocks: dict[BlockId, tuple[float, ...]]
    moves: float

    @property
    def seconds(self) -> float:
        return sum(map(max, self.blocks.values())) + self.moves


def minimum_neurons(bytes_per_neuron: int, fast: Tier, slow: Tier) -> int | None:
    """The least number of neurons for which a block gains by using `fast` beside `slow`: C with C * t_fast + sync <= C
    * t_slow (PowerInfer, section 6.3). None where no number does: `fast` is slower, or no faster and costs a
    synchronisation.
    """
    gain = bytes_per_neuron / slow.bandwidth - bytes_per_neuron / fast.bandwidth
    if gain < 0 or (gain == 0 and fast.sync_seconds > 0):
        return None
    if fast.sync_seconds == 0:
        return 1
    least = fast.sync_seconds / gain
    # Less a rounding error, so that an exact quotient is not rounded up by one.
    return max(1, math.ceil(least * (1 - 1e-12))) if math.isfinite(least) else None


def split_seconds(block: PlacementBlock, tiers: Sequence[Tier], counts: Tensor, read: Tensor) -> Tensor:
    """float64 [splits, tiers]: what each tier's part of `block` takes, for splits with `counts` neurons (int64 [splits,
    tiers]) of which an average token reads `read` bytes (float64 [splits, tiers]).
    """
    launch, bandwidth = (
        torch.tensor([getattr(tier, name) for tier in tiers], dtype=torch.float64)
        for name in ("launch_seconds", "bandwidth")
    )
    seconds = launch + (read + block.shared_bytes) / bandwidth
    if len(tiers) > 1:
        seconds[:, 1:-1] += torch.tensor([tier.sync_seconds for tier in tiers[1:-1]], dtype=torch.float64)
        seconds[:, -1] += (counts[:, :-1].sum(1) > 0).double() * tiers[0].sync_seconds
    return torch.where(counts > 0, seconds, 0.0)


def token_time(blocks: Sequence[PlacementBlock], placement: Placement) -> TokenTime:
    """What one token costs in `blocks`, which are in the order in which it goes through them."""
    times, changes, home = {}, 0, None
    for block in blocks:
        tier_of, tiers = placement.assignment[block.id], placement.tiers
        counts = tier_of.bincount(minlength=len(tiers))
        read = torch.zeros(len(tiers), dtype=torch.float64).index_add_(0, tier_of, block.read_bytes)
        times[block.id] = tuple(split_seconds(block, tiers, counts[None], read[None])[0].tolist())
        lies_on_the_last = int(counts[-1]) == block.neurons
        changes += home is not None and home != lies_on_the_last
        home = lies_on_the_last
    return TokenTime(times, changes * placement.tiers[0].sync_seconds / 2)


def bytes_by_tier(blocks: Sequence[PlacementBlock], placement: Placement) -> list[int]:
    """What the neurons of `blocks` take on each tier, room for their cache and `shared_bytes` included."""
    used = [0] * len(placement.tiers)
    for block in blocks:
        for tier, count in enumerate(placement.assignment[block.id].bincount(minlength=len(used)).tolist()):
            used[tier] += count * block.bytes_per_neuron + (block.shared_bytes if count else 0)
    return used
