"""Thresholds for every place of a model, and what they do in plain PyTorch: transformers' own modules, whose inputs and
activations hooks set to zero and count.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparse.modeling import (
    BlockId,
    HybridAttention,
    HybridBlock,
    HybridMLP,
    Placement,
    SkipRule,
    Tier,
    hybrid_blocks,
    skipping,
)
from hf_sparse.modeling.rules import RuleKind
from tiny_models import plain_twin, prompt_ids

EVERYWHERE = ("input", "gate", "hidden", "output")


def magnitudes(model: Any, ids: Tensor | None = None) -> dict[tuple[BlockId, str], Tensor]:
    """float32 [tokens, entries] that pass each place of the dense model, on a prompt of its own or `ids`."""
    seen: dict[tuple[BlockId, str], Tensor] = {}

    def look(block: HybridBlock, place: str, values: Tensor) -> Tensor:
        seen[block.id, place] = values.detach().float().abs()
        return values

    for block in hybrid_blocks(model):
        block.probe = lambda place, values, block=block: look(block, place, values)
    try:
        with torch.no_grad(), skipping("never"):
            model(prompt_ids(1, 30, seed=99) if ids is None else ids)
    finally:
        for block in hybrid_blocks(model):
            block.probe = None
    return seen


def give_thresholds(
    model: Any,
    places: Collection[str] = EVERYWHERE,
    kind: RuleKind = "magnitude",
    alike: bool = False,
    certain: bool = False,
) -> None:
    """Every block gets a rule with thresholds at those of `places` that it has, about half of the entries below them;
    `alike`: one for all entries of a place. `certain`: some entries are never left out, the others always, so that
    what rounding does to them decides nothing.
    """
    generator = torch.Generator().manual_seed(0)
    typical = {at: float(values[values > 0].median()) for at, values in magnitudes(model).items()}
    for block in hybrid_blocks(model):
        below = {}
        for place in (place for place in block.takes("magnitude") if place in places):
            width = 1 if alike else block.width_of(place)
            spread = torch.ones(1) if alike else 2 * torch.rand(width, generator=generator)
            below[place] = (spread > 1).float() * 1e9 if certain else spread * typical[block.id, place]
        if below or isinstance(block, HybridMLP):
            block.rule = SkipRule(kind, below)


def counts_of(model: Any) -> dict[tuple[Any, str], list[int]]:
    """As MaskedTwin counts: only where something was offered."""
    return {
        (block.id, what): counts
        for block in hybrid_blocks(model)
        for what, counts in zip(block.counted, block.counters.tolist(), strict=True)
        if counts[1]
    }


def split(model: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    assignment = {b.id: torch.randint(0, 2, (b.neurons,), generator=generator) for b in hybrid_blocks(model)}
    model.place(Placement((Tier("fast"), Tier("cpu")), assignment))


@torch.no_grad()
def always(model: Any, ids: Tensor) -> Tensor:
    """Logits with rules for every token; counts are those of this call."""
    model.reset_active_fraction()
    with skipping("always"):
        return model(ids, use_cache=False).logits


class MaskedTwin:
    """transformers' own model with the dequantized weights of `model`, its rules, which apply to every token, and its
    predictors of query heads (no others). `counts`: entries kept and offered by block and place in the last call.
    """

    def __init__(self, model: Any) -> None:
        self.model = plain_twin(model)
        self.counts: dict[tuple[BlockId, str], list[int]] = {}
        for path, module in model.named_modules():
            if isinstance(module, HybridBlock) and module.rule.kind != "none":
                self._mask(path.removesuffix(module.path) + module.prefix, module)

    def __call__(self, ids: Tensor) -> Tensor:
        self.counts = {}
        with torch.no_grad():
            return self.model(ids).logits

    def _mask(self, prefix: str, block: HybridBlock) -> None:
        writes = next(name for name, p in block.projections.items() if p.writes)
        if isinstance(block, HybridMLP):
            names = block.names
            self._hook(prefix + (names.gate or names.up), block, "input", fused=block.neurons if names.fused else 0)
            activation = self.model.get_submodule(prefix + names.activation)
            activation.register_forward_hook(lambda _, args, out: self._masked(block, "gate", out))
            self._hook(prefix + writes, block, "hidden")
        else:
            if isinstance(block, HybridAttention) and block.predictor_in_use is not None:
                q = self.model.get_submodule(prefix + "q_proj")
                q.register_forward_pre_hook(lambda _, args: self._predict(block, args[0]))
            if block.skips_inputs_of is not None:
                self._hook(prefix + block.skips_inputs_of, block, "input")
            self._hook(prefix + writes, block, "output")

    def _predict(self, block: HybridBlock, x: Tensor) -> None:
        assert block.predictor is not None
        self._heads = block.predictor.active(x.flatten(0, 1)).view(*x.shape[:-1], -1)
        self._count(block, "heads", self._heads)

    def _count(self, block: HybridBlock, what: str, kept: Tensor) -> None:
        counts = self.counts.setdefault((block.id, what), [0, 0])
        counts[0] += int(kept.sum())
        counts[1] += kept.numel()

    def _hook(self, path: str, block: HybridBlock, place: str, fused: int = 0) -> None:
        linear = self.model.get_submodule(path)
        if not fused:
            linear.register_forward_pre_hook(lambda _, args: (self._masked(block, place, args[0]),))
            return

        def replace(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            """Gates come first, and only they see the mask."""
            weight = module.weight[:fused]
            return torch.cat((self._masked(block, place, args[0]) @ weight.T, out[..., fused:]), dim=-1)

        linear.register_forward_hook(replace)

    def _masked(self, block: HybridBlock, place: str, values: Tensor) -> Tensor:
        below = block.rule.below.get(place)
        heads = isinstance(block, HybridAttention) and block.predictor_in_use is not None and place == "output"
        if below is None and place in ("input", "output") and not heads:
            return values
        kept = values != 0 if below is None else values.abs() >= below
        if heads:
            of_heads = self._heads.repeat_interleave(values.shape[-1] // self._heads.shape[-1], dim=-1)
            kept = of_heads if below is None else of_heads & kept
        if place == "gate":
            self._gates = kept
        elif place == "hidden":
            kept = self._gates if below is None else self._gates & kept
        self._count(block, place, kept)
        return torch.where(kept, values, 0.0)
