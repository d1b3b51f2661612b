"""Predictor: a small network beside a block that foretells which of its neurons will be active, or which of its query
heads will count.

fc1 (d_model -> r), ReLU, fc2 (r -> neurons), fed with the block's own input (DejaVu, ICML'23, section 4; PowerInfer,
SOSP'24). The bias shifts each neuron's decision so that recall, not accuracy, is what training aims at.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from hf_sparse.quantization import NeuronMatrix, active_neurons, gathered_row_product


class Predictor:
    """`fc1`: [r, d_model], `fc2`: [neurons, r], `bias`: [neurons]; a score above zero means active. `weight_dtype` is
    what the two matrices are kept in.
    """

    def __init__(self, fc1: Tensor, fc2: Tensor, bias: Tensor, weight_dtype: str = "int8") -> None:
        if not (fc1.dim() == fc2.dim() == 2 and fc2.shape[1] == fc1.shape[0] and bias.shape == (fc2.shape[0],)):
            raise ValueError(
                f"predictor: expected fc1 [r, d_model], fc2 [neurons, r], bias [neurons], got {list(fc1.shape)}, "
                f"{list(fc2.shape)}, {list(bias.shape)}"
            )
        self.fc1 = NeuronMatrix.quantize(fc1, weight_dtype, 32)
        self.fc2 = NeuronMatrix.quantize(fc2, weight_dtype, 32)
        self.bias = bias.float()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device, weight_dtype: str = "int8") -> Predictor:
        """From a plan's `fc1`, `fc2` and `bias`."""
        return cls(tensors["fc1"], tensors["fc2"], tensors["bias"], weight_dtype).of(None, device)

    def of(self, neurons: Tensor | None, device: torch.device) -> Predictor:
        """On `device`, of `neurons` (int64 [n]; None: all) alone; itself where that is what it is."""
        if neurons is None and device == self.bias.device:
            return self
        part = copy.copy(self)
        part.fc1 = self.fc1.to(device)
        part.fc2 = (self.fc2 if neurons is None else self.fc2.select(neurons)).to(device)
        part.bias = (self.bias if neurons is None else self.bias[neurons.to(self.bias.device)]).to(device)
        return part

    def scores(self, x: Tensor, compute_dtype: str = "fp32") -> Tensor:
        """float32 [tokens, neurons] for the block's input `x` [tokens, d_model]."""
        hidden = gathered_row_product(self.fc1, x, compute_dtype=compute_dtype).relu_()
        return gathered_row_product(self.fc2, hidden, compute_dtype=compute_dtype).add_(self.bias)

    def active(self, x: Tensor, compute_dtype: str = "fp32") -> Tensor:
        """bool [tokens, neurons] for the block's input `x` [tokens, d_model]. NaN counts as active."""
        return ~(self.scores(x, compute_dtype) <= 0)

    def active_index(self, x: Tensor, compute_dtype: str = "fp32") -> Tensor:
        """int64, ascending: the neurons that are active for the one token of `x` [1, d_model]."""
        return active_neurons(self.fc1, self.fc2, self.bias, x, compute_dtype)

    @property
    def bytes_per_score(self) -> int:
        """Of what belongs to one neuron or head."""
        return self.fc2.nbytes // self.fc2.rows + self.bias.element_size()

    @property
    def nbytes(self) -> int:
        return self.fc1.nbytes + self.fc2.nbytes + self.bias.numel() * self.bias.element_size()
