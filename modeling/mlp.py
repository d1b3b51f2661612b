"""HybridMLP: an MLP that computes the neurons that matter, each on the tier where it lives."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparse.quantization import gathered_accumulate, gathered_row_product, native

from .block import BlockSpec, HybridBlock, Shard
from .native_mlp import NativeMLP, NotUsual
from .predictor import Predictor
from .rules import SkipRule, rules_apply
from .tiers import merge, run_side_by_side


@dataclass(frozen=True)
class MLPNames:
    """What a family calls the parts of its MLP, relative to `prefix`. `gate` is None where the MLP has none; where
    `fused`, `up` is one matrix with the rows of gate first and those of up after them.
    """

    up: str
    down: str
    activation: str
    gate: str | None = None
    fused: bool = False


# Up to this many rows the union of their active neurons is gathered; beyond it nearly every neuron is active for some
# row, and what a row leaves out is only set to zero.
FEW_ROWS = 32

# (input [tokens, d_model], activated gate [tokens, neurons], hidden [tokens, neurons]): what a calibration looks at.
Observer = Callable[[Tensor, Tensor, Tensor], None]


class HybridMLP(HybridBlock):
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` where the family has no gate.

    While rules apply (`rules_apply()`: one token per row after others), a token's inactive neurons are left out: with a
    predictor their rows of gate, up and down are not read, with the other rules those of up and down. Several rows (a
    batch, beams) read the union of their active neurons (`FEW_ROWS`), and each row still adds its own only, so that a
    row equals its solo run.

    One token on a CPU tier is one native call where native code knows the block (`NativeMLP`); the operators of
    hf_sparse.quantization, one by one, are what it is compared with, and what runs everywhere else.
    """

    def __init__(self, spec: BlockSpec, names: MLPNames, activation: nn.Module) -> None:
        super().__init__(spec)
        self.names = names
        self.activation = activation
        self.rule = SkipRule()
        self.predictor: Predictor | None = None
        self.observer: Observer | None = None
        # what was built for the shards, by place, and from what: [level, shards, rule, predictor, activation]
        self._native: tuple[list[Any], list[NativeMLP | None]] | None = None
        self.reset_counters()

    def reset_counters(self) -> None:
        """Starts `active_fraction` anew."""
        if not hasattr(self, "counters"):
            self.counters = torch.zeros(2, dtype=torch.int64, device="cpu")  # computed, offered; native code adds to it
        self.counters.zero_()

    @property
    def active_fraction(self) -> float | None:
        """Share of neurons that were computed since the last reset, over the tokens to which rules applied; None before
        any.
        """
        computed, offered = self.counters.tolist()
        return computed / offered if offered else None

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor:
        """hidden_states [..., d_model] -> [..., d_model]; `residual` is added for families whose MLP does so itself
        (Bloom).
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        rule = self.rule if rules_apply() and self.rule.kind != "none" else None
        natives = self._native_shards(x, rule)
        predicted = None
        if rule is not None and self.predictor is not None and None in natives:
            alone = x.shape[0] == 1 and self.observer is None
            predict = self.predictor.active_index if alone else self.predictor.active
            predicted = predict(x, self.weights.compute_dtype)
        parts = run_side_by_side(
            list(zip(self.shards, natives, strict=True)),
            lambda item: self._partial(*item, x, rule, predicted),
            lambda item: item[0].tier.device,
        )
        out = merge(parts, x.device)
        if self.output_bias is not None:
            out = out + self.output_bias
        out = out.to(hidden_states.dtype).view(hidden_states.shape)
        return out if residual is None else out + residual

    def _native_shards(self, x: Tensor, rule: SkipRule | None) -> Sequence[NativeMLP | None]:
        """What computes `x` [tokens, d_model] natively, by place in `shards`; None where operators do."""
        none, level, activation = [None] * len(self.shards), native.level(), self.activation
        if level is None or x.shape[0] != 1 or (x.requires_grad and torch.is_grad_enabled()):
            return none
        if self.observer is not None or activation._forward_hooks or activation._forward_pre_hooks:
            return none  # someone wants to see what is in between
        state = [level, self.shards, self.rule, self.predictor, activation]
        if self._native is None or not all(map(operator.is_, state, self._native[0])):
            self._native = state, [self._native_shard(shard, level) for shard in self.shards]
        natives = self._native[1]
        if rule is not None and self.predictor is not None and not all(made and made.predicts for made in natives):
            return none
        return natives

    def _native_shard(self, shard: Shard, level: int) -> NativeMLP | None:
        try:
            return NativeMLP(self, shard, level)
        except NotUsual:
            return None

    def _placed(self) -> None:
        self._native = None  # would keep the weights of shards that are gone

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_native": None}  # addresses mean nothing in a copy

    def _partial(
        self, shard: Shard, made: NativeMLP | None, x: Tensor, rule: SkipRule | None, predicted: Tensor | None
    ) -> Tensor:
        """What the neurons of one tier add to the output: fp32 [tokens, d_model]. `predicted`: of all tiers, which are
        active, bool [tokens, neurons], or, for one token, int64 and ascending, the active ones.
        """
        device, names = shard.tier.device, self.names
        x = x.to(device)
        if made is not None:
            return made.run(x, rule is not None, self.counters)
        gather = rule is not None and x.shape[0] <= FEW_ROWS and self.observer is None
        active = index = None
        if predicted is not None and predicted.dtype == torch.bool:
            active = predicted.to(device)[:, shard.neurons]
            index = _union(active) if gather else None
        elif predicted is not None:
            index = _positions(predicted.to(device), shard.neurons, self.neurons)
        gate = self._activated(shard, x, index)
        if rule is not None:
            kept = rule.active(gate)
            if active is not None:
                kept &= active if index is None else active[:, index]
            if gather:
                local = _union(kept)
                index = local if index is None else index[local]
                gate, kept = gate[:, local], kept[:, local]
            self.counters += torch.tensor([int(kept.sum()), len(x) * len(shard.neurons)], device="cpu")
        hidden = gate if names.gate is None and not names.fused else gate * self._up(shard, x, index)
        if rule is not None:
            hidden = torch.where(kept, hidden, 0.0)
        if self.observer is not None:
            self.observer(x, gate, hidden)
        return gathered_accumulate(shard.matrices[names.down], hidden, index, compute_dtype=self.weights.compute_dtype)

    def _activated(self, shard: Shard, x: Tensor, index: Tensor | None) -> Tensor:
        """The activated gate (without a gate: the activated up) of the listed neurons: fp32 [tokens, listed]."""
        return self.activation(self._rows(shard, self.names.gate or self.names.up, 0, x, index))

    def _up(self, shard: Shard, x: Tensor, index: Tensor | None) -> Tensor:
        return self._rows(shard, self.names.up, len(shard.neurons) if self.names.fused else 0, x, index)

    def _rows(self, shard: Shard, name: str, start: int, x: Tensor, index: Tensor | None) -> Tensor:
        matrix, bias = shard.matrices[name], shard.biases.get(name)
        if self.names.fused:
            matrix = matrix.narrow(start, len(shard.neurons))
            bias = None if bias is None else bias[start : start + len(shard.neurons)]
        product = gathered_row_product(matrix, x, index, compute_dtype=self.weights.compute_dtype)
        if bias is not None:
            product = product + (bias if index is None else bias[index])
        return product


def _union(mask: Tensor) -> Tensor:
    """int64, ascending: the columns of `mask` [tokens, neurons] in which some row is set."""
    return (mask if mask.shape[0] == 1 else mask.any(0, keepdim=True))[0].nonzero().flatten()


def _positions(index: Tensor, neurons: Tensor, total: int) -> Tensor:
    """int64, ascending: where in `neurons` (int32, ascending, of `total`) those of `index` (int64, ascending) are that
    are in it.
    """
    if len(neurons) == total:
        return index
    places = torch.searchsorted(neurons, index.to(neurons.dtype)).clamp_(max=len(neurons) - 1)
    return places[neurons[places] == index]
