"""HybridMLP: an MLP that computes the neurons that matter, each on the tier where it lives."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparse.quantization import (
    InputMatrix,
    NeuronMatrix,
    gathered_accumulate,
    gathered_row_product,
    input_product,
    native,
    triton_ops,
)

from .block import FEW_ROWS, BlockSpec, HybridBlock, Shard, union
from .native_mlp import NativeMLP, NotUsual
from .rules import SkipRule
from .tiers import HandedOver, merge, streams_weights
from .triton_mlp import TritonMLP

# Of weights that are copied to an accelerator at a time: what its budget need not have room for, since a prompt's
# activations take more.
STREAMED_BYTES = 2**25


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


class HybridMLP(HybridBlock):
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` where the family has no gate.

    While rules apply (`rules_apply()`: one token per row after others), a token's inactive neurons are left out: with a
    predictor their rows of gate, up and down are not read, with the other rules those of up and down. Several rows (a
    batch, beams) read the union of their active neurons (`FEW_ROWS`), and each row still adds its own only, so that a
    row equals its solo run.

    One token on a CPU tier is one native call where native code knows the block (`NativeMLP`), and on a GPU one replay
    of a graph of Triton kernels (`TritonMLP`); the operators of
    hf_sparse.quantization, one by one, are what it is compared with, and what runs everywhere else.
    """

    def __init__(self, spec: BlockSpec, names: MLPNames, activation: nn.Module) -> None:
        super().__init__(spec)
        self.names = names
        self.activation = activation
        self.skips_inputs_of = None if names.fused else names.gate or names.up
        # what was built for the shards, by place, and from what: [level, shards, rule, predictor, activation]
        self._native: tuple[list[Any], list[NativeMLP | TritonMLP | None]] | None = None

    @property
    def active_fraction(self) -> float | None:
        """Share of neurons that were computed since the last reset, over the tokens to which rules applied; None before
        any.
        """
        offered = int(self.counters[self.counted.index("gate")][1])
        return self.kept("gate") if offered else None

    def read_share_of(self, name: str, matrix: NeuronMatrix | InputMatrix, counters: Tensor | None = None) -> float:
        """Without the gates that a predictor asked for in vain."""
        names, gates = self.names, self.kept("gate", counters)
        if name == names.down:
            return self.kept("hidden", counters)
        if self.predictor is not None:
            return gates
        if names.fused:
            return (1 + gates) / 2  # gates are read whole: they say which neurons are active
        return super().read_share_of(name, matrix, counters) if name == (names.gate or names.up) else gates

    def neuron_read_bytes(self, active: Tensor) -> Tensor:
        """Where the rule leaves neurons out, rows of up and down are read for active ones, rows of the gate for all
        unless a predictor foretells them.
        """
        if self.rule.kind == "none":
            return super().neuron_read_bytes(active)
        matrices, _, _ = self._whole()
        names = self.names
        sizes = {name: m.nbytes // m.rows * sum(self.projections[name].rows) for name, m in matrices.items()}
        gate = sizes[names.up] // 2 if names.fused else sizes[names.gate or names.up]
        weights = sum(sizes.values())
        if self.predictor is not None:
            return self.predictor.bytes_per_score + weights * active
        return gate + (weights - gate) * active

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor:
        """hidden_states [..., d_model] -> [..., d_model]; `residual` is added for families whose MLP does so itself
        (Bloom).
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        rule = self.rule_now()
        natives = self._native_shards(x)
        given = HandedOver(x, [shard.tier for shard in self.shards])
        parts = self.side_by_side(lambda i: self._partial_or_streamed(self.shards[i], natives[i], given, rule))
        out = merge(parts, x.device)
        if self.output_bias is not None:
            out = out + self.output_bias
        out = out.to(hidden_states.dtype).view(hidden_states.shape)
        return out if residual is None else out + residual

    def _native_shards(self, x: Tensor) -> Sequence[NativeMLP | TritonMLP | None]:
        """What computes `x` [tokens, d_model] natively, by place in `shards`; None where operators do."""
        none, level, activation = [None] * len(self.shards), native.level(), self.activation
        if x.shape[0] != 1 or (x.requires_grad and torch.is_grad_enabled()):
            return none
        if self.probe is not None or activation._forward_hooks or activation._forward_pre_hooks:
            return none  # someone wants to see what is in between
        state = [level, self.shards, self.rule, self.predictor, activation]
        if self._native is None or not all(map(operator.is_, state, self._native[0])):
            self._native = state, [self._native_shard(shard, level) for shard in self.shards]
        return self._native[1]

    def _native_shard(self, shard: Shard, level: int | None) -> NativeMLP | TritonMLP | None:
        try:
            if triton_ops.runs_on(shard.tier.device):
                return TritonMLP(self, shard)
            return None if level is None else NativeMLP(self, shard, level)
        except NotUsual:
            return None

    def _placed(self) -> None:
        self._native = None  # would keep the weights of shards that are gone

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_native": None}  # addresses mean nothing in a copy

    def _partial_or_streamed(
        self, shard: Shard, made: NativeMLP | TritonMLP | None, given: HandedOver, rule: SkipRule | None
    ) -> Tensor:
        """As `_partial`; the weights of a prompt's cold neurons go to the primary tier, a few at a time, where that is
        sooner than to compute with them where they are.
        """
        tokens = given.tokens
        if made is not None or rule is not None or tokens <= FEW_ROWS or self.probe is not None:
            return self._partial(shard, made, given, rule)
        nbytes = sum(matrix.nbytes for matrix in shard.matrices.values())
        numbers = len(shard.neurons) * sum(sum(p.rows) * p.columns for p in self.projections.values())
        crosses = self.primary.accelerates and not shard.tier.accelerates
        if not (crosses and streams_weights(tokens, nbytes, numbers, self.primary, shard.tier)):
            return self._partial(shard, made, given, rule)
        step = max(1, STREAMED_BYTES * len(shard.neurons) // nbytes)
        total = torch.zeros((), device=self.primary.device)
        for start in range(0, len(shard.neurons), step):
            part = self.part_of(shard, start, min(start + step, len(shard.neurons)), self.primary)
            total = total + self._partial(part, None, given, None)
        return total

    def _partial(
        self, shard: Shard, made: NativeMLP | TritonMLP | None, given: HandedOver, rule: SkipRule | None
    ) -> Tensor:
        """What the neurons of one tier add to the output: fp32 [tokens, d_model]."""
        device, names = shard.tier.device, self.names
        x = given.at(device)
        if made is not None:
            return made.run(x, rule is not None, self.counters_of(shard))
        gather = rule is not None and x.shape[0] <= FEW_ROWS and self.probe is None
        active = index = None
        if rule is not None and shard.predictor is not None:
            if x.shape[0] == 1 and self.probe is None:
                index = shard.predictor.active_index(x, self.weights.compute_dtype)
            else:
                active = shard.predictor.active(x, self.weights.compute_dtype)
                index = union(active) if gather else None
        seen, inputs = self.seen("input", x, rule, shard=shard)
        gate = self._activated(shard, seen, index, inputs if gather else None)
        if self.probe is not None:
            gate = self.probe("gate", gate)
        kept = None if rule is None else rule.keeps("gate", gate, self._positions(shard, index))
        if kept is not None:
            if active is not None:
                kept &= active if index is None else active[:, index]
            if gather:
                local = union(kept)
                index = local if index is None else index[local]
                gate, kept = gate[:, local], kept[:, local]
            self.count("gate", kept, len(x) * len(shard.neurons), shard)
        hidden = gate if names.gate is None and not names.fused else gate * self._up(shard, x, index)
        if kept is not None:
            hidden = torch.where(kept, hidden, 0.0)
        if self.probe is not None:
            hidden = self.probe("hidden", hidden)
        if rule is not None and kept is not None:
            stays = rule.keeps("hidden", hidden, self._positions(shard, index))
            if stays is not None:
                kept &= stays
                hidden = torch.where(kept, hidden, 0.0)
                if gather:
                    local = union(kept)
                    index, hidden = (local if index is None else index[local]), hidden[:, local]
            self.count("hidden", kept, len(x) * len(shard.neurons), shard)
        down = shard.by_neuron(names.down)
        return gathered_accumulate(down, hidden, index, compute_dtype=self.weights.compute_dtype)

    def _positions(self, shard: Shard, index: Tensor | None) -> Tensor | None:
        """Where in the block the neurons `index` of a shard (None: all of them) are; None where these are all."""
        if len(shard.neurons) == self.neurons:
            return index
        return shard.neurons.long() if index is None else shard.neurons.long()[index]

    def _activated(self, shard: Shard, x: Tensor, index: Tensor | None, inputs: Tensor | None) -> Tensor:
        """The activated gate (without a gate: the activated up) of the listed neurons: fp32 [tokens, listed]. `inputs`:
        of each token, the entries of `x` that are not zero, where those are to be gathered.
        """
        name = self.names.gate or self.names.up
        matrix, bias = shard.matrices[name], shard.biases.get(name)
        if not isinstance(matrix, InputMatrix):
            return self.activation(self._rows(shard, name, 0, x, index))
        listed = None if inputs is None else union(inputs)
        product = input_product(matrix, x, listed, compute_dtype=self.weights.compute_dtype)
        if bias is not None:
            product = product + bias
        return self.activation(product if index is None else product[:, index])

    def _up(self, shard: Shard, x: Tensor, index: Tensor | None) -> Tensor:
        return self._rows(shard, self.names.up, len(shard.neurons) if self.names.fused else 0, x, index)

    def _rows(self, shard: Shard, name: str, start: int, x: Tensor, index: Tensor | None) -> Tensor:
        matrix, bias = shard.by_neuron(name), shard.biases.get(name)
        if self.names.fused:
            matrix = matrix.narrow(start, len(shard.neurons))
            bias = None if bias is None else bias[start : start + len(shard.neurons)]
        product = gathered_row_product(matrix, x, index, compute_dtype=self.weights.compute_dtype)
        if bias is not None:
            product = product + (bias if index is None else bias[index])
        return product
