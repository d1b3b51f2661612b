"""From a plan to a placement: what the parts of a model take and what a token reads of them, solved for the tiers and
kept beside the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_sparse.modeling import BlockId, HybridAttention, HybridBlock, Placement, Tier, hybrid_blocks

from .cost_model import PlacementBlock, bytes_by_tier
from .log import logger
from .placement import Solution, solve_placement
from .plan import BlockProfile
from .plan_store import load_placement, placement_key, save_placement

if TYPE_CHECKING:
    from .placed import PlacedMixin


def placement_blocks(model: PlacedMixin, cache_tokens: int) -> list[PlacementBlock]:
    """Embeddings, the blocks of every layer, the head: in the order in which a token goes through them.

    `cache_tokens`: what the keys and values of a KV group take room for; half of them are read by an average token.
    """
    made = [_placement_block(block, model, cache_tokens) for block in hybrid_blocks(model)]
    parts = {id: PlacementBlock.whole(id, nbytes, read) for id, (nbytes, read) in model.part_bytes().items()}
    before = [part for id, part in parts.items() if id.kind == "embedding"]
    return [*before, *made, *(part for id, part in parts.items() if id.kind == "head")]


def _placement_block(block: HybridBlock, model: PlacedMixin, cache_tokens: int) -> PlacementBlock:
    """A neuron is worth the bytes that it makes its tier read for a token; among equals, what it contributes
    decides.
    """
    profile: BlockProfile = model.plan.blocks[block.id]
    contribution = profile.impact.double() / profile.impact.max().clamp_min(1e-30)
    cached = 0
    if isinstance(block, HybridAttention):
        cached = block.cache_bytes_per_token(model.cache_dtype or model.dtype)
    read = block.neuron_read_bytes(profile.active_fraction.double()) + cached * cache_tokens / 2
    foretelling, shared = block.foretelling_bytes()
    size = block.bytes_per_neuron() + foretelling + cached * cache_tokens
    return PlacementBlock(block.id, size, read + size * 1e-3 * contribution, read, shared)


def choose_placement(model: PlacedMixin, tiers: Sequence[Tier], cache_tokens: int, directory: Path | None) -> Solution:
    """The placement kept in `directory` for these tiers, else one that is solved and kept there.

    Raises ValueError where the neurons do not fit.
    """
    blocks, resident_bytes = placement_blocks(model, cache_tokens), model.resident_bytes()
    solution = None
    key = placement_key(blocks, tiers, resident_bytes)
    if directory is not None:
        solution = load_placement(directory, key, tiers, {block.id: block.neurons for block in blocks})
    if solution is None or not _fits(solution.placement, blocks, resident_bytes):
        solution = solve_placement(blocks, tiers, resident_bytes)
        if directory is not None:
            save_placement(directory, key, solution)
    if len(tiers) > 1:
        logger.info("Placement: %s", solution)
    return solution


def _fits(placement: Placement, blocks: Sequence[PlacementBlock], resident_bytes: int) -> bool:
    """Whether a placement that was read from a file keeps the budgets, whatever the file says of itself."""
    for position, (tier, used) in enumerate(zip(placement.tiers, bytes_by_tier(blocks, placement), strict=True)):
        used += resident_bytes if position == 0 else 0
        if tier.budget is not None and used > tier.budget:
            logger.warning("The saved placement puts %d bytes on %s, over its budget; solving anew.", used, tier.name)
            return False
    return True


def without_coldest(placement: Placement, blocks: Sequence[PlacementBlock], tier: int, nbytes: int) -> Placement:
    """`placement` with the neurons of `tier` that are read least for what they take on the last tier, as many as it
    needs to free `nbytes` (all of them, where those are fewer).
    """
    last = len(placement.tiers) - 1
    worth, sizes, owners = [], [], []
    for b, block in enumerate(blocks):
        there = (placement.assignment[block.id] == tier).nonzero().flatten()
        worth.append(block.read_bytes[there] / block.bytes_per_neuron)
        sizes.append(torch.full((len(there),), block.bytes_per_neuron))
        owners.append(torch.stack((torch.full((len(there),), b), there), dim=1))
    order = torch.argsort(torch.cat(worth), stable=True)
    freed = torch.cat(sizes)[order].cumsum(0)
    count = min(int(torch.searchsorted(freed, nbytes)) + 1, len(freed))
    assignment: dict[BlockId, Tensor] = {id: of.clone() for id, of in placement.assignment.items()}
    for b, neuron in torch.cat(owners)[order[:count]].tolist():
        assignment[blocks[b].id][neuron] = last
    return Placement(placement.tiers, assignment)
