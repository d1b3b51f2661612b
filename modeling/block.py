"""HybridBlock: what HybridMLP and HybridAttention share. Weights in NeuronMatrix form, split between tiers by neuron.

A projection is one linear layer of the checkpoint. Its stored rows belong to neurons, segment by segment: `q_proj` has
one segment in which KV group g owns a run of rows; a fused `gate_up_proj` has two segments in which neuron n owns one
row each. Projections that write to the hidden states (down, o) are stored transposed, so that there too a neuron owns
whole rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_sparse.quantization import NeuronMatrix

from .neurons import BlockId, Tier, WeightFormat

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


@dataclass
class Shard:
    """The part of a block that lives on one tier. `neurons`: int32 [n], their positions in the model, ascending."""

    tier: Tier
    neurons: Tensor
    matrices: dict[str, NeuronMatrix]
    biases: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        tensors = (self.neurons, *self.biases.values())
        return sum(m.nbytes for m in self.matrices.values()) + sum(t.numel() * t.element_size() for t in tensors)


class HybridBlock(nn.Module):
    """Base of the hybrid blocks: loads a block's tensors one by one, splits its neurons between tiers, and saves them
    in model order.
    """

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.id, self.path, self.prefix = spec.id, spec.path, spec.prefix
        self.neurons, self.weights = spec.neurons, spec.weights
        self.projections = {projection.name: projection for projection in spec.projections}
        self.shards: list[Shard] = []
        self.output_bias: Tensor | None = None  # of the projection that writes: added once, after the merge
        # loaded and not placed yet: matrices and biases by projection, half-loaded packed tensors by name
        self._matrices: dict[str, NeuronMatrix] = {}
        self._biases: dict[str, Tensor] = {}
        self._packed: dict[str, Tensor] = {}

    # Loading: names are relative to the block, "gate_proj.weight", or "gate_proj.codes" and ".scales" of a saved model.

    def expected_tensors(self, quantized: bool) -> list[str]:
        leaves = self.weights.packed_leaves if quantized else ("weight",)
        return [
            f"{p.name}.{leaf}" for p in self.projections.values() for leaf in (*leaves, *(("bias",) if p.bias else ()))
        ]

    def load(self, name: str, tensor: Tensor) -> None:
        """Takes one tensor of the checkpoint and packs it. Raises ValueError where its shape does not fit the block."""
        projection_name, _, leaf = name.rpartition(".")
        projection = self.projections[projection_name]
        stored = (sum(projection.rows) * self.neurons, projection.columns)
        if leaf == "weight":
            weight = tensor.T if projection.writes else tensor
            if tuple(weight.shape) != stored:
                expected = stored[::-1] if projection.writes else stored
                raise ValueError(f"{self.id} {name}: expected shape {list(expected)}, got {list(tensor.shape)}")
            self._matrices[projection_name] = NeuronMatrix.quantize(
                weight, self.weights.weight_dtype, self.weights.group_size
            )
        elif leaf == "bias":
            width = projection.columns if projection.writes else stored[0]
            if tuple(tensor.shape) != (width,):
                raise ValueError(f"{self.id} {name}: expected shape [{width}], got {list(tensor.shape)}")
            self._biases[projection_name] = tensor.clone()
        else:
            self._packed[name] = tensor
            names = {leaf: f"{projection_name}.{leaf}" for leaf in self.weights.packed_leaves}
            if all(part in self._packed for part in names.values()):
                parts = {leaf: self._packed.pop(part) for leaf, part in names.items()}
                form = self.weights
                self._matrices[projection_name] = NeuronMatrix.from_tensors(
                    parts, form.weight_dtype, form.group_size, *stored
                )

    # Placing

    def bytes_per_neuron(self) -> int:
        """What one neuron takes on the tier where it lives, exactly: its rows of every projection, their biases, its
        index.
        """
        matrices, biases, _ = self._whole()
        rows = {name: sum(p.rows) for name, p in self.projections.items()}
        weights = sum(rows[name] * matrix.nbytes // matrix.rows for name, matrix in matrices.items())
        return weights + sum(rows[name] * bias.element_size() for name, bias in biases.items()) + INDEX_BYTES

    def place(self, tiers: Sequence[Tier], tier_of: Tensor) -> None:
        """Moves each neuron to `tiers[tier_of[neuron]]`; `tier_of` is int64 [neurons]. `tiers[0]` is where hidden
        states live.
        """
        matrices, biases, output_bias = self._whole()
        self._matrices, self._biases = {}, {}
        shards = []
        for position, tier in enumerate(tiers):
            neurons = (tier_of == position).nonzero().flatten()
            if not len(neurons):
                continue
            whole = len(neurons) == self.neurons
            shard = Shard(tier, neurons.to(tier.device, torch.int32), {}, {})
            for name, matrix in matrices.items():
                rows = None if whole else self.projections[name].stored_rows(neurons, self.neurons)
                shard.matrices[name] = (matrix if rows is None else matrix.select(rows.to(matrix.device))).to(
                    tier.device
                )
                if name in biases:
                    bias = biases[name]
                    shard.biases[name] = (bias if rows is None else bias[rows.to(bias.device)]).to(tier.device)
            shards.append(shard)
        self.shards = shards
        self.output_bias = None if output_bias is None else output_bias.to(tiers[0].device)
        self._placed()

    def _placed(self) -> None:
        """For subclasses: the shards have changed."""

    def _whole(self) -> tuple[dict[str, NeuronMatrix], dict[str, Tensor], Tensor | None]:
        """Matrices and input biases in model order, and the output bias, from the shards or, before `place`, as
        loaded.
        """
        if not self.shards:
            inputs = {name: bias for name, bias in self._biases.items() if not self.projections[name].writes}
            output_bias = next((bias for name, bias in self._biases.items() if name not in inputs), None)
            return self._matrices, inputs, output_bias
        if len(self.shards) == 1:
            return self.shards[0].matrices, self.shards[0].biases, self.output_bias
        matrices: dict[str, NeuronMatrix] = {}
        biases: dict[str, Tensor] = {}
        for name, projection in self.projections.items():
            rows = [projection.stored_rows(shard.neurons.cpu(), self.neurons) for shard in self.shards]
            matrices[name] = NeuronMatrix.scatter(
                [(r, s.matrices[name]) for r, s in zip(rows, self.shards, strict=True)]
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
