"""PackedHead: the language modeling head in 8 or 4 bits. It is read whole for every token, and for a small model it is
a third of all that is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_sparse.quantization import NeuronMatrix, gathered_row_product

from .neurons import WeightFormat


class PackedHead(nn.Module):
    """Stands where `lm_head`, an nn.Linear, was. `tied`: the weights are the embeddings', so they are not saved."""

    matrix: NeuronMatrix

    def __init__(self, linear: nn.Linear, form: WeightFormat, tied: bool) -> None:
        """Without weights: `load` or `pack` brings them. The bias stays that of `linear`."""
        super().__init__()
        self.form, self.tied, self.bias = form, tied, linear.bias
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self._loaded: dict[str, Tensor] = {}

    @property
    def compute_dtype(self) -> str:
        return self.form.compute_dtype

    def pack(self, weight: Tensor) -> float:
        """Takes `weight` [vocabulary, hidden]. Returns the relative error (Frobenius norm) of what is stored."""
        self.matrix = NeuronMatrix.quantize(weight.detach(), self.form.weight_dtype, self.form.group_size)
        return relative_error(weight, self.matrix)

    def load(self, leaf: str, tensor: Tensor) -> None:
        """Takes one tensor of a saved model. Raises ValueError where it does not fit."""
        self._loaded[leaf] = tensor
        if len(self._loaded) == len(self.form.packed_leaves):
            shape = (self.out_features, self.in_features)
            self.matrix = NeuronMatrix.from_tensors(self._loaded, self.form.weight_dtype, self.form.group_size, *shape)
            self._loaded = {}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., hidden] -> logits [..., vocabulary] in the dtype of `hidden_states`."""
        flat = hidden_states.reshape(-1, self.in_features)
        logits = gathered_row_product(self.matrix, flat, compute_dtype=self.compute_dtype)
        if self.bias is not None:
            logits += self.bias
        return logits.to(hidden_states.dtype).view(*hidden_states.shape[:-1], -1)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if hasattr(self, "matrix"):
            self.matrix = self.matrix.to(fn(torch.empty(0, device=self.matrix.device)).device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.tied:
            destination.update({f"{prefix}{name}": tensor for name, tensor in self.matrix.tensors().items()})

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, weights={self.matrix.weight_dtype}"


def relative_error(weight: Tensor, matrix: NeuronMatrix) -> float:
    """|W' - W| / |W| (Frobenius) of packed weights against what they were packed from."""
    difference = total = 0.0
    step = max(1, 2**22 // matrix.cols)
    for start in range(0, matrix.rows, step):
        rows = weight[start : start + step].detach().to(torch.float32)
        difference += float((matrix.narrow(start, len(rows)).dequantize() - rows).square().sum())
        total += float(rows.square().sum())
    return (difference / total) ** 0.5 if total else 0.0
