"""HybridMLP: an MLP that computes the neurons that matter, each on the tier where it lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_sparse.quantization import gathered_accumulate, gathered_row_product

from .block import BlockSpec, HybridBlock, Shard
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
    """

    def __init__(self, spec: BlockSpec, names: MLPNames, activation: nn.Module) -> None:
        super().__init__(spec)
        self.names = names
        self.activation = activation
        self.rule = SkipRule()
        self.predictor: Predictor | None = None
        self.observer: Observer | None = None
        self.reset_counters()

    def reset_counters(self) -> None:
        """Starts `active_fraction` anew."""
        if not hasattr(self, "counters"):
            self.counters = torch.zeros(2, dtype=torch.int64)  # computed, offered; native code adds to it
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
        predicted = self.predictor.active(x) if rule is not None and self.predictor is not None else None
        parts = run_side_by_side(
            self.shards, lambda shard: self._partial(shard, x, rule, predicted), lambda shard: shard.tier.device
        )
        out = merge(parts, x.device)
        if self.output_bias is not None:
            out = out + self.output_bias
        out = out.to(hidden_states.dtype).view(hidden_states.shape)
        return out if residual is None else out + residual

    def _partial(self, shard: Shard, x: Tensor, rule: SkipRule | None, predicted: Tensor | None) -> Tensor:
        """What the neurons of one tier add to the output: fp32 [tokens, d_model]."""
        device, names = shard.tier.device, self.names
        x = x.to(device)
        gather = rule is not None and x.shape[0] <= FEW_ROWS and self.observer is None
        active = None if predicted is None else predicted.to(device)[:, shard.neurons]
        index = _union(active) if gather and active is not None else None
        gate = self._activated(shard, x, index)
        if rule is not None:
            kept = rule.active(gate)
            if active is not None:
                kept &= active if index is None else active[:, index]
            if gather:
                local = _union(kept)
                index = local if index is None else index[local]
                gate, kept = gate[:, local], kept[:, local]
            self.counters += torch.tensor([int(kept.sum()), len(x) * len(shard.neurons)])
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
