"""HybridBlock: what HybridMLP and HybridAttention share. Weights in NeuronMatrix form, split between tiers by neuron.

A projection is one linear layer of the checkpoint. Its stored rows belong to neurons, segment by segment: `q_proj` has
one segment in which KV group g owns a run of rows; a fused `gate_up_proj` has two segments in which neuron n owns one
row each. Projections that write to the hidden states (down, o) are stored transposed, so that there too a neuron owns
whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_sparse.quantization import InputMatrix, NeuronMatrix

from .neurons import BlockId, Tier, WeightFormat
from .predictor import Predictor
from .rules import PLACES, Place, RuleKind, SkipRule, rules_apply
from .tiers import run_side_by_side, to_device

T = TypeVar("T")
INDEX_BYTES = 4  # a shard keeps the model position of each of its neurons as int32


@dataclass(frozen=True)
class Projection:
    """A linear layer of a block. `rows`: how many stored rows one neuron owns in each consecutive segment; `writes`: it
    writes to the hidden states, so its weight [out, in] is stored transposed; `columns`: width of a stored row.
    """

    name: str
    rows: tuple[int, ...]
    columns: int
    writes: bool = False
    bias: bool = False

    def stored_rows(self, neurons: Tensor, total: int) -> Tensor:
        """int64: the stored rows that `neurons` (int, ascending) own, in the layout of the whole projection with only
        them in it.
        """
        start, parts = 0, []
        for count in self.rows:
            parts.append((start + neurons.long()[:, None] * count + torch.arange(count)).flatten())
            start += count * total
        return torch.cat(parts)


@dataclass(frozen=True)
class BlockSpec:
    """What a family's table row and the meta model say of a block. `path` is its place in its decoder layer ("mlp");
    `prefix` is what a projection's name in the checkpoint has in front of it, relative to the layer ("mlp.", or ""
    where the projections are the layer's own, as in OPT).
    """

    id: BlockId
    path: str
    prefix: str
    neurons: int
    projections: tuple[Projection, ...]
    weights: WeightFormat


@dataclass(frozen=True)
class BlockShape:
    """What a plan must fit. `widths`: entries of each place where a rule may have thresholds; `reads`: d_model, what
    its predictor reads; `predicts`: what that scores, neurons or query heads, 0 where there may be none.
    """

    neurons: int
    widths: Mapping[Place, int]
    reads: int
    predicts: int


@dataclass
class Shard:
    """The part of a block that lives on one tier. `neurons`: int32 [n], their positions in the model, ascending.
    `predictor`: of these neurons, on the tier. `counters`: what this part counted and the block does not yet know, on
    the tier's device; None where it counts for the block.
    """

    tier: Tier
    neurons: Tensor
    matrices: dict[str, NeuronMatrix | InputMatrix]
    biases: dict[str, Tensor]
    predictor: Predictor | None = None
    counters: Tensor | None = None

    def by_neuron(self, name: str) -> NeuronMatrix:
        matrix = self.matrices[name]
        return matrix.by_neuron() if isinstance(matrix, InputMatrix) else matrix

    @property
    def nbytes(self) -> int:
        tensors = (self.neurons, *self.biases.values())
        predictor = 0 if self.predictor is None else self.predictor.nbytes
        weights = sum(m.nbytes for m in self.matrices.values())
        return weights + predictor + sum(t.numel() * t.element_size() for t in tensors)


# (place, values [tokens, entries]) -> what the block goes on with: the values, or others of that shape. For
# calibration, on one tier.
Probe = Callable[[Place, Tensor], Tensor]

# Up to this many rows the union of what their tokens keep is gathered; beyond it nearly everything is kept by some row,
# and what a row leaves out is only set to zero.
FEW_ROWS = 32


class HybridBlock(nn.Module):
    """Base of the hybrid blocks: loads a block's tensors one by one, splits its neurons between tiers, saves them in
    model order, and leaves out what its rule says.

    `predicts`: how many neurons or query heads its predictor scores; 0 where it takes none. `counters`: int64
    [counted, 2], what was kept and offered of each of `counted`, over the tokens to which rules applied.
    """

    skips_inputs_of: str | None = None  # the projection that place "input" is the input of

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.id, self.path, self.prefix = spec.id, spec.path, spec.prefix
        self.neurons, self.weights = spec.neurons, spec.weights
        self.projections = {projection.name: projection for projection in spec.projections}
        self.shards: list[Shard] = []
        self.home = self.primary = Tier("cpu")  # where hidden states are here, and where they are at first
        self.output_bias: Tensor | None = None  # of the projection that writes: added once, after the merge
        # loaded and not placed yet: matrices and biases by projection, half-loaded packed tensors by name
        self._matrices: dict[str, NeuronMatrix] = {}
        self._biases: dict[str, Tensor] = {}
        self._packed: dict[str, Tensor] = {}
        self._rule = SkipRule()
        self.probe: Probe | None = None
        self.predicts = spec.neurons
        self._predictor: Predictor | None = None
        self.places = PLACES[spec.id.kind]
        self.counted: tuple[str, ...] = self.places if spec.id.kind == "mlp" else (*self.places, "heads")
        self._counters = torch.zeros(len(self.counted), 2, dtype=torch.int64, device="cpu")  # native code adds to it

    # Leaving out

    @property
    def rule(self) -> SkipRule:
        return self._rule

    @rule.setter
    def rule(self, rule: SkipRule) -> None:
        """Raises ValueError for thresholds at a place that the block does not have, and for another number of them than
        it has entries there, or one.
        """
        takes = self.takes(rule.kind)
        if alien := sorted(set(rule.below) - set(takes)):
            raise ValueError(
                f"{self.id} rule: expected thresholds at {', '.join(takes)} of kind {rule.kind!r}, got "
                f"{', '.join(alien)}"
            )
        for place, thresholds in rule.below.items():
            if len(thresholds) not in (1, width := self.width_of(place)):
                raise ValueError(f"{self.id} rule: below[{place!r}]: expected 1 or {width}, got {len(thresholds)}")
        self._rule = rule
        if self._store():
            self._placed()

    @property
    def predictor(self) -> Predictor | None:
        """Is not to be changed in place, nor is the rule: native code has copies. Give the block another."""
        return self._predictor

    @predictor.setter
    def predictor(self, predictor: Predictor | None) -> None:
        """Raises ValueError for one that reads or scores something else than this block has."""
        if predictor is not None:
            got, expected = (predictor.fc1.cols, predictor.fc2.rows), (self.width_of("input"), self.predicts)
            if got != expected:
                raise ValueError(f"{self.id} predictor: expected [inputs, scores] of {expected}, got {got}")
        if predictor is not None and self.id.kind == "attention":
            predictor = predictor.of(None, self.home.device)
        self._predictor = predictor
        # every tier of an MLP gets the predictor of its own neurons, so that no list of neurons crosses
        for shard in self.shards if self.id.kind == "mlp" else ():
            rows = None if len(shard.neurons) == self.neurons else shard.neurons.cpu().long()
            shard.predictor = None if predictor is None else predictor.of(rows, shard.tier.device)

    @property
    def predictor_in_use(self) -> Predictor | None:
        """The one that decides wherever the rule applies."""
        return None if self._rule.kind == "none" else self._predictor

    def takes(self, kind: RuleKind) -> tuple[Place, ...]:
        """Where a rule of this kind may have thresholds."""
        return self.places

    @property
    def shape(self) -> BlockShape:
        widths = {place: self.width_of(place) for place in self.takes("magnitude")}
        return BlockShape(self.neurons, widths, self.width_of("input"), self.predicts)

    def width_of(self, place: Place) -> int:
        """Entries at `place` of the whole block: columns of what reads, rows of what writes."""
        if place == "input":
            return next(p.columns for p in self.projections.values() if not p.writes)
        return next(sum(p.rows) * self.neurons for p in self.projections.values() if p.writes)

    def rule_now(self) -> SkipRule | None:
        """The rule, where it applies to the tokens that are computed now."""
        return self._rule if rules_apply() and self._rule.kind != "none" else None

    def seen(
        self,
        place: Place,
        values: Tensor,
        rule: SkipRule | None,
        index: Tensor | None = None,
        within: Tensor | None = None,
        shard: Shard | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """What is computed on with of `values` [tokens, entries], and which of them stay (bool; None: all). `index`:
        the positions of the columns in the whole block, where they are not all. `within`: bool, no others stay.
        `shard`: whose part of the block it is.
        """
        if self.probe is not None:
            values = self.probe(place, values)
        kept = None if rule is None else rule.keeps(place, values, index)
        if within is not None:
            kept = within if kept is None else kept & within
        if kept is None:
            return values, None
        self.count(place, kept, kept.numel(), shard)
        return torch.where(kept, values, 0.0), kept

    @property
    def counters(self) -> Tensor:
        """int64 [counted, 2], on the CPU; what is written to it stays."""
        for shard in self.shards:
            if shard.counters is not None:
                self._counters += shard.counters.cpu()
                shard.counters.zero_()
        return self._counters

    @counters.setter
    def counters(self, counters: Tensor) -> None:
        self._counters = counters

    def counters_of(self, shard: Shard | None) -> Tensor:
        """Where what `shard` leaves out is counted."""
        return self._counters if shard is None or shard.counters is None else shard.counters

    def count(self, what: str, kept: Tensor, offered: int, shard: Shard | None = None) -> None:
        row = self.counters_of(shard)[self.counted.index(what)]
        row[0] += kept.sum()
        row[1] += offered

    def reset_counters(self) -> None:
        self.counters.zero_()

    def kept(self, what: str, counters: Tensor | None = None) -> float:
        """Share of the entries at a place, or of the heads, that were kept since the last reset, or in `counters`; 1
        where none was left out.
        """
        kept, offered = (self.counters if counters is None else counters)[self.counted.index(what)].tolist()
        return kept / offered if offered else 1.0

    @property
    def weight_bytes(self) -> int:
        """Of its projections' weights, on all tiers."""
        return sum(matrix.nbytes for shard in self.shards for matrix in shard.matrices.values())

    def read_bytes(self) -> float:
        """Of weights, per token to which rules applied since the last reset, the predictor's too; all where there was
        none.
        """
        counters = self.counters
        return sum(self.read_bytes_of(shard, counters) for shard in self.shards)

    def read_bytes_of(self, shard: Shard, counters: Tensor) -> float:
        """As `read_bytes`, of one part, by what `counters` say."""
        weights = sum(self.read_share_of(name, m, counters) * m.nbytes for name, m in shard.matrices.items())
        predictor = self.predictor_in_use if shard.predictor is None else shard.predictor
        return weights + (0 if self.predictor_in_use is None or predictor is None else predictor.nbytes)

    def read_share_of(self, name: str, matrix: NeuronMatrix | InputMatrix, counters: Tensor | None = None) -> float:
        if isinstance(matrix, InputMatrix):
            return self.kept("input", counters)
        return self.kept("output", counters) if self.projections[name].writes else 1.0

    def side_by_side(self, compute: Callable[[int], T]) -> list[T]:
        """`compute(position)` of every shard, the tiers beside each other."""
        return run_side_by_side([shard.tier for shard in self.shards], compute, self._watch_reading)

    def _watch_reading(self, position: int) -> Callable[[], float]:
        """What says how many bytes of weights a shard read between now and the call."""
        shard = self.shards[position]
        before = self.counters_of(shard).clone()
        return lambda: self.read_bytes_of(shard, self.counters_of(shard) - before)

    def _store(self) -> bool:
        """Brings weights whose inputs the rule leaves out into the form that skips them. Whether it changed any."""
        name, changed = self.skips_inputs_of, False
        if name is None:
            return False
        for shard in self.shards:
            matrix = shard.matrices[name]
            wanted = "input" in self._rule.below and self._rule.kind == "magnitude" and matrix.device.type == "cpu"
            if isinstance(matrix, InputMatrix) and not wanted:
                shard.matrices[name], changed = matrix.by_neuron(), True
            elif isinstance(matrix, NeuronMatrix) and wanted and matrix.weight_dtype is not None:
                shard.matrices[name], changed = InputMatrix.by_input(matrix), True
        return changed

    # Loading: names are relative to the block, "gate_proj.weight", or "gate_proj.codes" and ".scales" of a saved model.

    def expected_tensors(self, quantized: bool) -> list[str]:
        names = []
        for name, projection in self.projections.items():
            leaves = self.form_of(name).packed_leaves if quantized else ("weight",)
            names += [f"{name}.{leaf}" for leaf in (*leaves, *(("bias",) if projection.bias else ()))]
        return names

    def form_of(self, projection: str) -> WeightFormat:
        return self.weights.of(self.id.layer, f"{self.prefix}{projection}")

    def load(self, name: str, tensor: Tensor | NeuronMatrix) -> None:
        """Takes a tensor of the checkpoint and packs it, or a packed weight. Raises ValueError where that is amiss."""
        owner, _, leaf = name.rpartition(".")
        projection, form = self.projections[owner], self.form_of(owner)
        stored = (sum(projection.rows) * self.neurons, projection.columns)
        if isinstance(tensor, NeuronMatrix):
            if (wanted := (*stored, form.weight_dtype)) != (got := (tensor.rows, tensor.cols, tensor.weight_dtype)):
                raise ValueError(f"{self.id} {name}: expected [rows, columns, weight_dtype] {wanted}, got {got}")
            self._matrices[owner] = tensor
        elif leaf == "weight":
            weight = tensor.T if projection.writes else tensor
            if tuple(weight.shape) != stored:
                expected = stored[::-1] if projection.writes else stored
                raise ValueError(f"{self.id} {name}: expected shape {list(expected)}, got {list(tensor.shape)}")
            self._matrices[owner] = NeuronMatrix.quantize(weight, form.weight_dtype, form.group_size)
        elif leaf == "bias":
            width = projection.columns if projection.writes else stored[0]
            if tuple(tensor.shape) != (width,):
                raise ValueError(f"{self.id} {name}: expected shape [{width}], got {list(tensor.shape)}")
            self._biases[owner] = tensor.clone()
        else:
            self._packed[name] = tensor
            names = {leaf: f"{owner}.{leaf}" for leaf in form.packed_leaves}
            if all(part in self._packed for part in names.values()):
                parts = {leaf: self._packed.pop(part) for leaf, part in names.items()}
                sizes = (form.weight_dtype, form.group_size, *stored)
                self._matrices[owner] = NeuronMatrix.from_tensors(parts, *sizes)

    # Placing

    def bytes_per_neuron(self) -> int:
        """What one neuron takes on the tier where it lives, exactly: its rows of every projection, their biases, its
        index. `foretelling_bytes` come on top.
        """
        matrices, biases, _ = self._whole()
        rows = {name: sum(p.rows) for name, p in self.projections.items()}
        weights = sum(rows[name] * matrix.nbytes // matrix.rows for name, matrix in matrices.items())
        return weights + sum(rows[name] * bias.element_size() for name, bias in biases.items()) + INDEX_BYTES

    def foretelling_bytes(self) -> tuple[int, int]:
        """Of a predictor that is split like its block, what a neuron takes on its tier, and what every tier takes that
        has any.
        """
        if self.id.kind != "mlp" or self._predictor is None:
            return 0, 0
        return self._predictor.bytes_per_score, self._predictor.fc1.nbytes

    def neuron_read_bytes(self, active: Tensor) -> Tensor:
        """float64 [neurons]: what an average token reads of each, those that are computed a share `active` of the
        time, float64 [neurons].
        """
        return torch.full_like(active, self.bytes_per_neuron() - INDEX_BYTES)

    def place(self, tiers: Sequence[Tier], tier_of: Tensor) -> None:
        """Moves each neuron to `tiers[tier_of[neuron]]`; `tier_of` is int64 [neurons]. Hidden states are at home on
        `tiers[0]` until `settle` says otherwise. Memory that runs out changes nothing; what stays needs none.
        """
        wanted = [(tiers[i], (tier_of == i).nonzero().flatten().tolist()) for i in tier_of.unique().tolist()]
        there = [(shard.tier.name, shard.tier.device, shard.neurons.tolist()) for shard in self.shards]
        if there == [(tier.name, tier.device, neurons) for tier, neurons in wanted]:
            for shard, (tier, _) in zip(self.shards, wanted, strict=True):
                shard.tier = tier
            self.primary = tiers[0]
            self.settle(tiers[0])
            return
        matrices, biases, output_bias = self._whole()
        counters = self.counters  # those of the tiers that there were are in it now
        shards = []
        for position, tier in enumerate(tiers):
            neurons = (tier_of == position).nonzero().flatten()
            if not len(neurons):
                continue
            whole = len(neurons) == self.neurons
            shard = Shard(tier, neurons.to(tier.device, torch.int32), {}, {})
            for name, matrix in matrices.items():
                rows = None if whole else self.projections[name].stored_rows(neurons, self.neurons)
                chosen = matrix if rows is None else matrix.select(rows.to(matrix.device))
                shard.matrices[name] = chosen.to(tier.device)
                if name in biases:
                    bias = biases[name]
                    shard.biases[name] = (bias if rows is None else bias[rows.to(bias.device)]).to(tier.device)
            if not whole or tier.device.type != "cpu":
                shard.counters = torch.zeros_like(counters, device=tier.device)
            if self._predictor is not None and self.id.kind == "mlp":
                shard.predictor = self._predictor.of(None if whole else neurons, tier.device)
            shards.append(shard)
        self._matrices, self._biases, self.output_bias = {}, {}, output_bias
        self.shards, self.primary = shards, tiers[0]
        self._store()
        self._placed()
        self.settle(tiers[0])

    def settle(self, home: Tier) -> None:
        """Brings to `home`, where hidden states are, what is computed there."""
        self.home = home
        if self.output_bias is not None:
            self.output_bias = self.output_bias.to(home.device)
        if self._predictor is not None and self.id.kind == "attention":  # scores all heads
            self._predictor = self._predictor.of(None, home.device)

    def _placed(self) -> None:
        """For subclasses: the shards have changed."""

    def part_of(self, shard: Shard, start: int, stop: int, tier: Tier) -> Shard:
        """A copy of the neurons start .. stop - 1 of `shard` on `tier`, without its predictor."""
        chosen = torch.arange(start, stop)
        part = Shard(tier, shard.neurons[start:stop].to(tier.device), {}, {}, counters=shard.counters)
        for name in shard.matrices:
            rows = self.projections[name].stored_rows(chosen, len(shard.neurons))
            matrix = shard.by_neuron(name).select(rows)
            part.matrices[name] = matrix.to(tier.device)
            if name in shard.biases:
                part.biases[name] = to_device(shard.biases[name][rows], tier.device)
        return part

    def _whole(self) -> tuple[dict[str, NeuronMatrix], dict[str, Tensor], Tensor | None]:
        """Matrices and input biases in model order, and the output bias, from the shards or, before `place`, as
        loaded.
        """
        if not self.shards:
            inputs = {name: bias for name, bias in self._biases.items() if not self.projections[name].writes}
            output_bias = next((bias for name, bias in self._biases.items() if name not in inputs), None)
            return self._matrices, inputs, output_bias
        if len(self.shards) == 1:
            (shard,) = self.shards
            return {name: shard.by_neuron(name) for name in shard.matrices}, shard.biases, self.output_bias
        matrices: dict[str, NeuronMatrix] = {}
        biases: dict[str, Tensor] = {}
        for name, projection in self.projections.items():
            rows = [projection.stored_rows(shard.neurons.cpu(), self.neurons) for shard in self.shards]
            matrices[name] = NeuronMatrix.scatter(
                [(r, s.by_neuron(name)) for r, s in zip(rows, self.shards, strict=True)]
            )
            if name in self.shards[0].biases:
                pieces = [shard.biases[name].cpu() for shard in self.shards]
                biases[name] = torch.empty(sum(map(len, pieces)), dtype=pieces[0].dtype)
                for r, piece in zip(rows, pieces, strict=True):
                    biases[name][r] = piece
        return matrices, biases, self.output_bias

    # Saving: in model order under the checkpoint's own names, whatever the placement.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        layer = prefix.removesuffix(f"{self.path}.")
        matrices, biases, output_bias = self._whole()
        for name, matrix in matrices.items():
            projection = self.projections[name]
            for leaf, tensor in matrix.tensors().items():
                if leaf == "weight" and projection.writes:
                    tensor = tensor.T.contiguous()
                destination[f"{layer}{self.prefix}{name}.{leaf}"] = tensor
            bias = output_bias if projection.writes else biases.get(name)
            if bias is not None:
                destination[f"{layer}{self.prefix}{name}.bias"] = bias

    def dequantize(self) -> dict[str, Tensor]:
        """{"q_proj.weight": fp32 [out, in], ...} in the checkpoint's orientation: what transformers would need to
        compute the same.
        """
        matrices, _, _ = self._whole()
        weights: Mapping[str, Tensor] = {name: matrix.dequantize() for name, matrix in matrices.items()}
        return {
            f"{self.prefix}{name}.weight": weight.T.contiguous() if self.projections[name].writes else weight
            for name, weight in weights.items()
        }

    def extra_repr(self) -> str:
        where = ", ".join(f"{len(shard.neurons)} on {shard.tier.name}" for shard in self.shards) or "not placed"
        return f"neurons={self.neurons} ({where}), weights={self.weights.weight_dtype or 'unquantized'}"


def union(mask: Tensor) -> Tensor:
    """int64, ascending: the columns of `mask` [tokens, entries] in which some row is set."""
    return (mask if mask.shape[0] == 1 else mask.any(0, keepdim=True))[0].nonzero().flatten()
