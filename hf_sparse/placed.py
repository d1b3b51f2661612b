"""The part of a loaded model that knows where everything is: neurons on their tiers, embeddings and head on theirs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_sparse.modeling import (
    BlockId,
    CacheStates,
    HybridAttention,
    HybridBlock,
    PackedHead,
    Placement,
    Tier,
    family_of,
    hybrid_blocks,
    move,
    settle_layers,
    settle_part,
)
from hf_sparse.quantization import native

from .config import parse_bytes
from .cost_model import bytes_by_tier
from .hardware import find_tiers
from .log import logger, warn_once
from .placement import Solution
from .placing import choose_placement, placement_blocks, without_coldest
from .plan import PlacementPlan
from .report import PlacementSummary, summarize_placement

FREED_SHARE = 0.1  # of what lies on a GPU, where it ran out of memory


class PlacedMixin(PreTrainedModel):
    """See SparseMixin, which is made of it."""

    plan: PlacementPlan
    placement: Placement
    solution: Solution | None = None  # that the placement is of; None where it was given or changed since
    cache_dtype: torch.dtype | None = None  # of keys and values in generate(); None: the model's
    cache_tokens: int = 0  # that budgets leave room for
    given_tiers: tuple[Tier, ...] | None = None  # by the user, instead of the devices found
    placements_directory: Path | None = None  # where solved placements are kept
    _engine_tried = False
    _home_hooks: tuple[RemovableHandle, ...] = ()

    @property
    def device(self) -> torch.device:
        """The primary tier's: inputs belong there, logits come from there."""
        return self.placement.tiers[0].device if "placement" in self.__dict__ else super().device

    def decoder_layers(self) -> list[nn.Module]:
        return list(self.get_submodule(family_of(self.config.model_type).layers).children())

    # What there is to place

    def _parts(self) -> Iterator[tuple[BlockId, list[nn.Module], int]]:
        """What is placed whole: address, modules, bytes that a token reads of it. Embeddings that are the head's
        weights go with it.
        """
        embeddings, head = self.get_input_embeddings(), self.get_output_embeddings()
        last, row = BlockId(len(self.decoder_layers()) - 1, "head"), 0
        if isinstance(embeddings, nn.Embedding):
            row = embeddings.embedding_dim * embeddings.weight.element_size()
            if head is not None and getattr(head, "weight", None) is embeddings.weight:
                yield last, [embeddings, head], sum(_own_bytes([head]))
                return
            yield BlockId(0, "embedding"), [embeddings], row
        if head is not None:
            yield last, [head], sum(_own_bytes([head]))

    def part_bytes(self) -> dict[BlockId, tuple[int, int]]:
        """Of embeddings and head: their bytes, and those that a token reads."""
        return {id: (sum(_own_bytes(modules)), read) for id, modules, read in self._parts()}

    def resident_bytes(self) -> int:
        """Bytes that lie on the primary tier whatever the placement: norms, output biases, what foretells query heads
        (norms of layers without a neuron on a fast tier lie with those, and are counted here all the same).
        """
        parts = {module for _, modules, _ in self._parts() for part in modules for module in part.modules()}
        rest = [module for module in self.modules() if module not in parts]
        predictors = 0
        for block in hybrid_blocks(self):
            if block.id.kind == "attention" and block.predictor is not None:
                predictors += block.predictor.nbytes
        return predictors + sum(_own_bytes(rest, recurse=False))

    def placement_summary(self) -> PlacementSummary:
        """Neurons and bytes on each tier, and how that was solved; prints as a table."""
        summary = summarize_placement(
            list(hybrid_blocks(self)), self.placement, self.resident_bytes(), self.part_bytes(), self._cache_room()
        )
        return dataclasses.replace(summary, solution="" if self.solution is None else str(self.solution))

    def _cache_room(self) -> dict[BlockId, int]:
        """By block, bytes that a neuron's keys and values may take."""
        dtype = self.cache_dtype or self.dtype
        return {
            block.id: block.cache_bytes_per_token(dtype) * self.cache_tokens
            for block in hybrid_blocks(self)
            if isinstance(block, HybridAttention)
        }

    # Placing

    def place(self, placement: Placement) -> None:
        """Moves every neuron to its tier, embeddings and head to theirs, and the rest to where hidden states are. Waits
        for a forward pass that is under way in another thread, and such a pass for it.

        Blocks that leave the primary tier go first, so that it holds at no time more than before or after, but for one
        block. Raises ValueError, and nothing is moved, for an assignment that does not fit the model. Where memory runs
        out halfway, `placement` says afterwards where every neuron is.
        """
        self._check_placement(placement)
        with self._moving_lock():
            self._move(placement)

    def _moving_lock(self) -> native.Lock:
        return self.__dict__.setdefault("_moving", native.Lock())

    def _check_placement(self, placement: Placement) -> None:
        needed = {block.id: block.neurons for block in hybrid_blocks(self)}
        optional = dict.fromkeys(self.part_bytes(), 1)  # without an entry: on the first tier
        for id, tier_of in placement.assignment.items():
            count = needed.get(id, optional.get(id))
            if count is None:
                raise ValueError(f"assignment[{id}]: the model has no such block")
            if len(tier_of) != count:
                raise ValueError(f"assignment[{id}]: expected one tier for each of {count} neurons, got {len(tier_of)}")
        if missing := [str(id) for id in needed if id not in placement.assignment]:
            raise ValueError(f"assignment: expected every block of the model, {', '.join(missing)} are missing")

    @torch.inference_mode(False)  # what is made here is used outside of it too
    @torch.no_grad()
    def _move(self, placement: Placement) -> None:
        blocks = sorted(hybrid_blocks(self), key=lambda block: self._growth(block, placement))
        try:
            for block in blocks:
                block.place(placement.tiers, placement.assignment[block.id])
        except torch.OutOfMemoryError:
            self._settle(self._where_it_is(placement))
            raise
        self._settle(placement)

    def _where_it_is(self, asked: Placement) -> Placement:
        """The placement of blocks of which some have moved and some have not; the rest as it was."""
        known = {tier.name: position for position, tier in enumerate(asked.tiers)}
        names = {shard.tier.name for block in hybrid_blocks(self) for shard in block.shards}
        tiers = asked.tiers
        if not names <= known.keys():  # tiers of another name are moved from
            tiers = (*tiers[:-1], *(t for t in self.placement.tiers if t.name not in known), tiers[-1])
            known = {tier.name: position for position, tier in enumerate(tiers)}
        assignment = {}
        for block in hybrid_blocks(self):
            tier_of = assignment[block.id] = torch.empty(block.neurons, dtype=torch.int64)
            for shard in block.shards:
                tier_of[shard.neurons.cpu().long()] = known[shard.tier.name]
        for id in self.part_bytes():
            if id in self.placement.assignment:
                name = self.placement.tiers[int(self.placement.assignment[id])].name
                assignment[id] = torch.tensor([known.get(name, 0)])
        return Placement(tiers, assignment)

    def _settle(self, placement: Placement) -> None:
        """Brings all but neurons to where `placement`, in which those are already, says."""
        for hook in self._home_hooks:
            hook.remove()
        tiers, layers = placement.tiers, self.decoder_layers()
        parts = list(self._parts())
        elsewhere = {module for _, modules, _ in parts for part in modules for module in part.modules()}
        elsewhere |= {module for layer in layers for module in layer.modules()}
        for module in self.modules():
            if module not in elsewhere:
                move(module, tiers[0].device)
        hooks = settle_layers(layers, placement)
        for id, modules, read in parts:
            tier = tiers[int(placement.assignment[id])] if id in placement.assignment else tiers[0]
            for module in modules:
                hooks += settle_part(module, tier, tiers[0], read if module is modules[-1] else 0)
        self._home_hooks = tuple(hooks)
        self.placement, self.solution = placement, None
        self._engine_tried = False

    def _growth(self, block: HybridBlock, placement: Placement) -> int:
        """Bytes that the block will take more on the primary tier."""
        before = sum(len(s.neurons) for s in block.shards if s.tier.device == placement.tiers[0].device)
        after = int((placement.assignment[block.id] == 0).sum())
        return (after - before) * block.bytes_per_neuron()

    def solve(self, tiers: tuple[Tier, ...]) -> None:
        """Places every neuron as the plan and `tiers` say. Raises ValueError where they have no room."""
        solution = choose_placement(self, tiers, self.cache_tokens, self.placements_directory)
        self.place(solution.placement)
        self.solution = solution

    def found_tiers(self, gpu_budget: int | str | Mapping[str, int | str] | None) -> tuple[Tier, ...]:
        """This machine's, with their bandwidths for weights of this format and of this size."""
        weight_dtype = next(hybrid_blocks(self)).weights.weight_dtype
        weights = {None: "bf16", "int8": "int8"}.get(weight_dtype, "4-bit")
        return find_tiers(gpu_budget, weights, max(1, self.get_memory_footprint()))

    def set_gpu_budget(self, gpu_budget: int | str | Mapping[str, int | str] | None) -> None:
        """Solves the placement anew for another budget, as in `from_pretrained`, and moves neurons: nothing is loaded
        again. Caches that are in use go on.

        Where the model was loaded with explicit `tiers` the budget is that of the first, or a mapping by name. Raises
        ValueError for a budget that is none, or too small, or larger than its device; nothing is moved then.
        """
        if self.given_tiers is None:
            self.solve(self.found_tiers(gpu_budget))
            return
        budgets = gpu_budget if isinstance(gpu_budget, Mapping) else {self.given_tiers[0].name: gpu_budget}
        names = [tier.name for tier in self.given_tiers]
        if not budgets or not set(budgets) <= set(names):
            raise ValueError(f"gpu_budget: got {budgets!r}, expected budgets of the model's tiers {', '.join(names)}")
        tiers = tuple(
            dataclasses.replace(tier, budget=_budget(budgets[tier.name], tier.name)) if tier.name in budgets else tier
            for tier in self.given_tiers
        )
        self.solve(tiers)
        self.given_tiers = tiers

    # Out of memory

    def forward_with_room(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`forward(self, ...)`; where a GPU runs out of memory, the neurons on it that are read least move to the last
        tier, what the cache got is taken back, and it begins anew.
        """
        if len(self.placement.tiers) == 1:
            return forward(self, *args, **kwargs)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        states = CacheStates(cache) if isinstance(cache, Cache) else None
        with self._moving_lock():
            while True:
                try:
                    return forward(self, *args, **kwargs)
                except torch.OutOfMemoryError as error:
                    tier = self._tier_out_of_memory(error)
                    if tier is None or (states is not None and not states.restore()):
                        raise
                # after the handler, which keeps the tensors of the failed pass alive
                self._make_room(tier)

    def _tier_out_of_memory(self, error: torch.OutOfMemoryError) -> int | None:
        """Position of the tier that neurons can leave; None where there is none."""
        tiers = self.placement.tiers
        named = re.search(r"GPU (\d+)", str(error))
        index = int(named[1]) if named else None
        for position, tier in enumerate(tiers[:-1]):
            meant = index is None or tier.device.type != "cuda" or (tier.device.index or 0) == index
            if meant and any(bool((of == position).any()) for of in self.placement.assignment.values()):
                return position
        return None

    def _make_room(self, position: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        blocks = placement_blocks(self, self.cache_tokens)
        used = bytes_by_tier(blocks, self.placement)[position]
        freed = max(1, int(used * FREED_SHARE))
        placement = without_coldest(self.placement, blocks, position, freed)
        tier = placement.tiers[position]
        left = bytes_by_tier(blocks, placement)[position]
        warn_once(
            f"{tier.name} ran out of memory: neurons that are read least move to {placement.tiers[-1].name}, from now "
            f"on as often as it is needed; model.set_gpu_budget() moves them back"
        )
        logger.info("%s: %d of %d bytes of neurons stay", tier.name, left, used)
        try:
            self._move(placement)
        except torch.OutOfMemoryError:  # to move a part of a block the GPU needs memory; to move all of it, none
            largest = max(hybrid_blocks(self), key=lambda block: self._bytes_on(block, tier.name))
            if not self._bytes_on(largest, tier.name):
                raise
            assignment = dict(self.placement.assignment)
            assignment[largest.id] = torch.full((largest.neurons,), len(self.placement.tiers) - 1)
            self._move(Placement(self.placement.tiers, assignment))

    @staticmethod
    def _bytes_on(block: HybridBlock, tier: str) -> int:
        return sum(shard.nbytes for shard in block.shards if shard.tier.name == tier)


def _budget(value: Any, name: str) -> int | None:
    return None if value is None else parse_bytes(value, name=f"gpu_budget[{name!r}]")


def _own_bytes(modules: list[nn.Module], recurse: bool = True) -> Iterator[int]:
    """Of each tensor of `modules` once, however often it is tied."""
    seen: set[int] = set()
    for module in modules:
        for part in module.modules() if recurse else [module]:
            tensors: list[Tensor | None] = [*part._parameters.values(), *part._buffers.values()]
            if isinstance(part, PackedHead):
                tensors += part.matrix.tensors().values()
            if isinstance(part, HybridBlock):
                tensors.append(part.output_bias)
            for tensor in tensors:
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield tensor.numel() * tensor.element_size()
