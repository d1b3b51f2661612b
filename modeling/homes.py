"""Where hidden states are: at home on the primary tier for layers that have neurons on a fast tier, and on the last
tier for those that have none, so that such a layer crosses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .block import HybridBlock
from .neurons import Placement, Tier
from .tiers import SimulatedTier, all_to_device


class _Hook:
    """A hook that the native engine need not mind: it only moves what goes in or comes out. See Engine.observed."""

    of_hf_sparse = True

    def __init__(self, device: torch.device, wait_for: Tier | None = None, seconds: float = 0.0) -> None:
        self.device, self.wait_for, self.seconds = device, wait_for, seconds

    def wait(self) -> None:
        if isinstance(self.wait_for, SimulatedTier):
            self.wait_for.wait(self.seconds)


class _Before(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.wait()
        return all_to_device(args, self.device), all_to_device(kwargs, self.device)


class _After(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self.wait()
        return all_to_device(output, self.device)


def move(module: nn.Module, device: torch.device) -> None:
    """The module's own parameters and buffers, without those of its children."""
    module._apply(lambda tensor: tensor.to(device), recurse=False)


def _homes(layers: Sequence[nn.Module], placement: Placement) -> list[int]:
    """Positions in `placement.tiers`."""
    last = len(placement.tiers) - 1
    homes = []
    for layer in layers:
        blocks = [block for block in layer.modules() if isinstance(block, HybridBlock)]
        alone = all(bool((placement.assignment[block.id] == last).all()) for block in blocks)
        homes.append(last if alone else 0)
    return homes


def settle_layers(layers: Sequence[nn.Module], placement: Placement) -> list[RemovableHandle]:
    """Brings norms and hidden states of every layer to its home. Returns the hooks that do."""
    tiers, homes = placement.tiers, _homes(layers, placement)
    handles: list[RemovableHandle] = []
    for layer, home in zip(layers, homes, strict=True):
        for module in layer.modules():
            move(module, tiers[home].device)
            if isinstance(module, HybridBlock):
                module.settle(tiers[home])
    if any(homes):
        before = 0
        for layer, home in zip(layers, homes, strict=True):
            waits = tiers[0].sync_seconds / 2 if home != before else 0.0
            hook = _Before(tiers[home].device, tiers[0], waits)
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            before = home
        waits = tiers[0].sync_seconds / 2 if before else 0.0
        handles.append(layers[-1].register_forward_hook(_After(tiers[0].device, tiers[0], waits)))
    return handles


def settle_part(module: nn.Module, tier: Tier, primary: Tier, read_bytes: int) -> list[RemovableHandle]:
    """Brings embeddings or head to `tier`; what it gives comes to `primary`."""
    move(module, tier.device)
    if tier == primary and not isinstance(primary, SimulatedTier):
        return []
    crossing = primary.sync_seconds / 2 if tier != primary else 0.0
    reading = tier.launch_seconds + read_bytes / tier.bandwidth if isinstance(tier, SimulatedTier) else 0.0
    waits_for = tier if isinstance(tier, SimulatedTier) else primary
    return [
        module.register_forward_pre_hook(_Before(tier.device), with_kwargs=True),
        module.register_forward_hook(_After(primary.device, waits_for, crossing + reading)),
    ]
