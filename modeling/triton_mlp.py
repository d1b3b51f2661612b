"""The neurons of an MLP on one GPU tier, for one token: the GPU's counterpart of NativeMLP. Kernels of
quantization/triton_ops.py one after the other, recorded once in a CUDA graph and replayed for every token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_sparse.quantization import NeuronMatrix, triton_ops

from .block import Shard
from .native_mlp import NotUsual, activation_code
from .rules import Place

if TYPE_CHECKING:
    from .mlp import HybridMLP

WARM_UPS = 3  # runs before the recording: kernels are compiled, memory is taken


class TritonMLP:
    """What `HybridMLP` asks of a shard on a GPU. Nothing in it waits for the device; what is left out is counted
    there.
    """

    def __init__(self, block: HybridMLP, shard: Shard) -> None:
        """Raises NotUsual where the kernels do not compute the like."""
        activation = activation_code(block.activation)
        if activation is None:
            raise NotUsual(f"activation {type(block.activation).__name__}")
        self._activation, self._rule, self._predictor = activation, block.rule, shard.predictor
        names, count = block.names, len(shard.neurons)
        up, up_bias = shard.by_neuron(names.up), _bias(shard, names.up)
        self._gate, self._gate_bias = up, up_bias
        self._up: NeuronMatrix | None = None
        self._up_bias: Tensor | None = None
        if names.fused:
            self._gate, self._gate_bias = up.narrow(0, count), None if up_bias is None else up_bias[:count]
            self._up, self._up_bias = up.narrow(count, count), None if up_bias is None else up_bias[count:]
        elif names.gate is not None:
            self._gate, self._gate_bias = shard.by_neuron(names.gate), _bias(shard, names.gate)
            self._up, self._up_bias = up, up_bias
        forms = {(m.weight_dtype, m.dtype, m.group_size) for m in (self._gate, self._up) if m is not None}
        if len(forms) > 1:
            raise NotUsual("gate and up are stored in different ways")
        self._down = shard.by_neuron(names.down)
        self._rounds = block.weights.compute_dtype == "bf16"
        self._rounds_weights = self._rounds and self._gate.weight is None  # numbers take activations as they are
        neurons = None if count == block.neurons else shard.neurons.long()
        self._inputs_below = self._thresholds("input", shard, None)
        self._gates_below = self._thresholds("gate", shard, neurons)
        self._hidden_below = self._thresholds("hidden", shard, neurons)
        self._rows = {what: row for row, what in enumerate(block.counted)}
        self._records = records_on(shard.tier.device)
        self._replays: dict[bool, tuple[Tensor, Callable[[], Tensor], Tensor]] = {}

    def _thresholds(self, place: Place, shard: Shard, neurons: Tensor | None) -> Tensor | None:
        found = self._rule.below.get(place)
        if found is None:
            return None
        width = self._gate.cols if place == "input" else len(shard.neurons)
        found = found.to(shard.tier.device)
        return (found.expand(width) if len(found) == 1 else found if neurons is None else found[neurons]).contiguous()

    def run(self, x: Tensor, rules: bool, counters: Tensor) -> Tensor:
        """What its neurons add to the output for `x` [1, d_model], on the tier's device: float32 [1, d_model]. With
        `rules`, the counts of the block are added to its `counters`, int64 [counted, 2] on that device.
        """
        x = x.to(torch.float32)
        if not self._records:
            return self._step(x, rules, counters)
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            return self._replayed(x, rules, counters)

    def _replayed(self, x: Tensor, rules: bool, counters: Tensor) -> Tensor:
        recorded = self._replays.get(rules)
        if recorded is None or recorded[2] is not counters:
            given, before = x.clone(), counters.clone()
            recorded = self._replays[rules] = (
                given,
                record(lambda: self._step(given, rules, counters), x.device),
                counters,
            )
            counters.copy_(before)  # the runs of the recording are no tokens
        given, replay, _ = recorded
        given.copy_(x)
        return replay().clone()  # the next replay writes to the same memory

    def _step(self, x: Tensor, rules: bool, counters: Tensor) -> Tensor:
        form: dict[str, Any] = {"gate_bias": self._gate_bias, "up_bias": self._up_bias}
        seen = self._rounded(x)
        if not rules:
            hidden, _ = triton_ops.gate_up(self._gate, self._up, seen, self._activation, **form)
            return triton_ops.accumulate(self._down, self._rounded(hidden)[None])
        x_gate = seen
        if self._inputs_below is not None:
            kept_inputs = ~(x.abs() < self._inputs_below)
            x_gate = torch.where(kept_inputs, seen, 0.0)
            self._count("input", kept_inputs, counters)
        index = count = None
        if self._predictor is not None:
            predictor = self._predictor
            index, count = triton_ops.predict(predictor.fc1, predictor.fc2, predictor.bias, x, self._rounds)
        hidden, kept = triton_ops.gate_up(
            self._gate,
            self._up,
            seen,
            self._activation,
            x_gate=x_gate,
            index=index,
            count=count,
            skips=True,
            gates_below=self._gates_below,
            hidden_below=self._hidden_below,
            **form,
        )
        self._count("gate", kept > 0, counters)
        self._count("hidden", kept > 1, counters)
        hidden = self._rounded(hidden)[None]
        if index is not None:  # and the few of them that turn out inactive have a factor of zero
            return triton_ops.accumulate(self._down, hidden, index, count)
        stays, count = triton_ops.compact((kept > 1).float())
        return triton_ops.accumulate(self._down, hidden, stays, count, by_row=True)

    def _rounded(self, hidden: Tensor) -> Tensor:
        return hidden.to(torch.bfloat16).float() if self._rounds_weights else hidden

    def _count(self, what: str, kept: Tensor, counters: Tensor) -> None:
        row = counters[self._rows[what]]
        row[0] += kept.sum()
        row[1] += kept.numel()


def _bias(shard: Shard, name: str) -> Tensor | None:
    bias = shard.biases.get(name)
    return None if bias is None else bias.detach().to(torch.float32).contiguous()


def records_on(device: torch.device) -> bool:
    return device.type == "cuda"


@functools.cache
def _memory(device: torch.device) -> Any:
    """What all graphs of a device share: they are replayed one after the other, and outputs are copied at once."""
    return torch.cuda.graph_pool_handle()


def record(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """`step`, whose tensors keep their places, as a CUDA graph: what comes back replays it and returns its output,
    always the same tensor.
    """
    with torch.cuda.device(device):
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # of this thread alone: another one may use the device meanwhile
        with torch.cuda.graph(graph, pool=_memory(device), capture_error_mode="thread_local"):
            output = step()

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
