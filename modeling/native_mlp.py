"""What native code (quantization/cpu/decode.h) is told of an MLP: HybridMLP computes one token on one tier with it,
Engine makes it part of a decoder layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_sparse.quantization import InputMatrix, NeuronMatrix, native

from .block import HybridBlock, Shard
from .predictor import Predictor
from .rules import Place

if TYPE_CHECKING:
    from .mlp import HybridMLP

# What native code knows, in its order; a module is recognized by what it computes.
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.silu,
    F.gelu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.relu,
    lambda x: F.relu(x).square(),
)


class NotUsual(Exception):  # noqa: N818  # nothing went wrong
    """Why a model, or a part or a step of it, is left to PyTorch modules."""


class NativeWeights:
    """Weights as native code takes them, by address. What was built with them must not outlive this."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def address(self, tensor: Tensor | None, plus: float = 0.0) -> int:
        """Of a float32 copy, `plus` added; 0 for None. Raises NotUsual for a tensor that is not on the CPU."""
        if tensor is None:
            return 0
        if tensor.device.type != "cpu":
            raise NotUsual("a weight is not on the CPU")
        copy = tensor.detach().to(torch.float32, copy=True).contiguous() + plus
        self._kept.append(copy)
        return copy.data_ptr()

    def matrix(self, matrix: NeuronMatrix | InputMatrix) -> Any:
        """Raises NotUsual for one that the kernels do not take."""
        found = matrix.native()
        if found is None:
            raise NotUsual(f"weights are {getattr(matrix, 'dtype', 'packed')} on {matrix.device}")
        self._kept.append(matrix)
        return found.handle

    def linear(self, matrix: NeuronMatrix | InputMatrix, bias: Tensor | None) -> Any:
        return native.kernels().Linear(self.matrix(matrix), self.address(bias))

    def predictor(self, predictor: Predictor) -> Any:
        fc1, fc2 = self.matrix(predictor.fc1), self.matrix(predictor.fc2)
        return native.kernels().Predictor(fc1, fc2, self.address(predictor.bias))

    def thresholds(self, block: HybridBlock, place: Place, width: int, index: Tensor | None = None) -> int:
        """Address of the rule's thresholds for `width` entries, those at `index`; 0 where it has none at this place."""
        found = block.rule.below.get(place)
        if found is None:
            return 0
        if len(found) not in (1, whole := block.width_of(place)):
            raise ValueError(f"{block.id} rule: below[{place!r}]: expected 1 or {whole}, got {len(found)}")
        return self.address(found.expand(width) if len(found) == 1 else found if index is None else found[index])

    def mlp(self, block: HybridMLP, shard: Shard, output_bias: Tensor | None) -> Any:
        """The structure for the neurons of one tier, without a predictor. `output_bias`: what it adds to its output.
        Raises NotUsual where native code does not compute the like.
        """
        names, count = block.names, len(shard.neurons)
        activation = activation_code(block.activation)
        if activation is None:
            raise NotUsual(f"activation {type(block.activation).__name__}")
        up, up_bias = shard.matrices[names.up], shard.biases.get(names.up)
        gate: tuple[NeuronMatrix | InputMatrix, Tensor | None] | None = None
        if names.fused and isinstance(up, NeuronMatrix):
            gate = up.narrow(0, count), None if up_bias is None else up_bias[:count]
            up, up_bias = up.narrow(count, count), None if up_bias is None else up_bias[count:]
        elif names.gate is not None:
            gate = shard.matrices[names.gate], shard.biases.get(names.gate)
        down = self.linear(shard.matrices[names.down], output_bias)
        compute = native.COMPUTE_CODES[block.weights.compute_dtype]
        made = native.kernels().Mlp(self.linear(up, up_bias), down, activation, compute)
        if gate is not None:
            made.gate = self.linear(*gate)
        made.rule = block.rule.kind != "none"
        read = (gate or (up, None))[0]
        if isinstance(read, InputMatrix) and block.predictor is not None:
            raise NotUsual("a predictor chooses rows of weights that lie by input")
        neurons = None if count == block.neurons else shard.neurons.long()
        inputs = self.thresholds(block, "input", read.cols)
        made.set_thresholds(inputs, *(self.thresholds(block, p, count, neurons) for p in ("gate", "hidden")))
        return made


def activation_code(activation: nn.Module) -> int | None:
    """Its number in native code; None where it is none of those."""
    # far values too: some are clipped where others of the same shape are not (ReLU6)
    far = torch.tensor([8.0, 12.0, 30.0, 100.0, 1000.0], dtype=torch.float32, device="cpu")
    probe = torch.cat((torch.linspace(-6, 6, 97, dtype=torch.float32, device="cpu"), far, -far))
    with torch.no_grad():
        values = activation(probe.clone())
    codes = (
        code for code, known in enumerate(ACTIVATIONS) if torch.allclose(values, known(probe), rtol=1e-6, atol=1e-6)
    )
    return next(codes, None)


class NativeMLP:
    """The neurons of an MLP on one CPU tier: one native call for one token. Holds addresses: is not to be copied."""

    def __init__(self, block: HybridMLP, shard: Shard, level: int) -> None:
        """Raises NotUsual where native code does not compute the like."""
        if shard.tier.device.type != "cpu":
            raise NotUsual(f"neurons on {shard.tier.device}")
        self._weights = NativeWeights()
        structure = self._weights.mlp(block, shard, None)  # the block adds its bias once, after the merge of its tiers
        if shard.predictor is not None and structure.rule:
            structure.predictor = self._weights.predictor(shard.predictor)
        layer = native.kernels().Layer()
        layer.mlp = structure
        self._decoder = _decoder(level, shard.matrices[block.names.up].cols, shard.tier.name)
        self._index = self._decoder.add(layer)

    def run(self, x: Tensor, rules: bool, counters: Tensor) -> Tensor:
        """What its neurons add to the output for `x` [1, d_model], on the CPU: float32 [1, d_model]. With `rules`, the
        counts of the block are added to its `counters`.
        """
        x = x.to(torch.float32).contiguous()
        out = torch.empty_like(x)
        self._decoder.run(self._index, x, out, rules, counters)
        return out


class _Decoder:
    """The kernels' decoder, for MLPs of one width: they work in the same memory, one after the other."""

    def __init__(self, level: int, hidden: int) -> None:
        self._decoder = native.kernels().Decoder(level, hidden)
        self._count = 0
        self._lock = native.Lock()  # `add` may move what a `run` in another thread reads

    def add(self, layer: Any) -> int:
        with self._lock:
            self._decoder.add(layer)
            self._count += 1
            return self._count - 1

    def run(self, index: int, x: Tensor, out: Tensor, rules: bool, counters: Tensor) -> None:
        addresses = x.data_ptr(), out.data_ptr(), 0, 0, 0, 0, 0  # no logits, tokens, ring, rotations or caches
        with self._lock:
            self._decoder.run(index, 1, False, *addresses, rules, counters.data_ptr(), native.threads())


# Those in use: a decoder goes when the last MLP that was added to it goes.
_decoders: weakref.WeakValueDictionary[tuple[int, int, str], _Decoder] = weakref.WeakValueDictionary()


def _decoder(level: int, hidden: int, tier: str) -> _Decoder:
    """One for each tier: they work at the same time."""
    found = _decoders.get((level, hidden, tier))
    if found is None:
        found = _decoders[level, hidden, tier] = _Decoder(level, hidden)
    return found
