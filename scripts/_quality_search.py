"""The searches of bench_quality.py: TEAL's for its shares, and the oracle's over the choices of our rule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from _quality import LINEARS, OURS, SORTED, Calibration, Dropper, Measured, Rule, Setting
from torch import Tensor
from torch.nn import functional as F

HALVINGS = 11  # of a level whose loss is measured
SIZES = (0.5, 0.25)  # steps of the search for better exponents of 2
EVERY = 4  # of the positions that a move of the search is judged at


# TEAL's search


@torch.no_grad()
def greedy_path(
    dropper: Dropper, calibration: Calibration, row: Tensor, layer: int, step: float, until: float
) -> list[str]:
    """Names of the projections of `layer` in the order in which TEAL's search (algorithm 1) leaves a share `step` of
    the layer's weights out of one: each time where the layer's output, squared error on `row` int64 [1, tokens],
    suffers least; up to a share `until`.
    """
    ordered = {name: calibration.samples[layer, name].abs().flatten() for name in LINEARS}
    ordered = {name: values[:: -(-len(values) // SORTED)].sort().values for name, values in ordered.items()}
    total = sum(dropper.weights[layer, name] for name in LINEARS)
    block: Any = dropper.model.base_model.layers[layer]  # type: ignore[index]
    inputs: list[tuple[Any, Any]] = []
    handle = block.register_forward_pre_hook(
        lambda module, args, options: inputs.append((args, options)), with_kwargs=True
    )
    dropper.model.base_model(row, use_cache=False)
    handle.remove()
    ((args, options),) = inputs

    def output(steps: dict[str, int]) -> Tensor:
        setting = {}
        for name, count in steps.items():
            share = count * step * total / dropper.weights[layer, name]
            if share > 0:
                setting[layer, name] = ordered[name][min(int(share * len(ordered[name])), len(ordered[name]) - 1)]
        with dropper.applied(setting):
            found = block(*args, **options)
        return (found if isinstance(found, Tensor) else found[0]).float()

    steps = dict.fromkeys(LINEARS, 0)
    exact = output(steps)
    path: list[str] = []
    while len(path) * step < until:
        errors = {}
        for name in LINEARS:
            if (steps[name] + 1) * step * total <= dropper.weights[layer, name]:
                errors[name] = float((output(steps | {name: steps[name] + 1}) - exact).square().sum())
        best = min(errors, key=errors.__getitem__)
        steps[best] += 1
        path.append(best)
    return path


# The oracle


@dataclass
class Search:
    """A search over our rule's choices, exponents of 2 that lambda is multiplied by at each site ("layer place"), and
    how far it came. It looks at the text that it is judged on, so that it may save more than could be known beforehand:
    that is the oracle. All are JSON values.
    """

    dense: float = 0.0  # perplexity
    ours: dict[str, float] = field(default_factory=dict)  # level, and what `Measured` has
    found: dict[str, float] = field(default_factory=dict)  # of the search at the same divergence; empty: not ended
    price: float = 0.0  # share of the weights that a nat of divergence buys
    exponents: dict[str, float] = field(default_factory=dict)
    tried: int = 0  # moves
    accepted: int = 0


def search(dropper: Dropper, rule: Rule, rows: Tensor, budget: float, state: Search, seconds: float) -> bool:
    """Goes on with `state` for about `seconds`, a move at least; returns whether it has ended. `rule`: ours.

    Ours is where one lambda takes the perplexity on `rows` up by `budget`. From there moves are tried one by one, of a
    place in all layers, a layer's places together, then each place of each layer, by SIZES up and down. A move stays if
    what it reads more is less than what its divergence from the dense model, at every EVERYth position, buys elsewhere:
    at the price at which lambda trades one for the other. In the end lambda takes the divergence back to that of ours.
    """
    stop = time.monotonic() + seconds

    def setting(level: float, exponents: dict[str, float]) -> Setting:
        thresholds = rule.setting(level).items()
        return {site: t * 2.0 ** exponents.get(f"{site[0]} {site[1]}", 0.0) for site, t in thresholds}

    def last(allowed: Callable[[Measured], bool], exponents: dict[str, float]) -> dict[str, float]:
        """Of the highest level that is allowed."""
        reference = dropper.last_hidden_states(rows)
        low, high, best = 0.0, 1.0, dropper.measure(rows, {}, reference)
        for _ in range(HALVINGS):
            middle = dropper.measure(rows, setting((low + high) / 2, exponents), reference)
            if allowed(middle):
                low, best = (low + high) / 2, middle
            else:
                high = (low + high) / 2
        return {"level": low, **asdict(best)}

    passes = Passes(dropper, rows)
    if not state.ours:
        state.dense = dropper.measure(rows, {}).perplexity
        state.ours = last(lambda m: m.perplexity <= state.dense * (1 + budget), {})
        here, there = (passes.run(setting(state.ours["level"] * by, {})) for by in (1.0, 1.1))
        state.price = (here.read - there.read) / max(there.divergence - here.divergence, 1e-9)
    now = passes.run(setting(state.ours["level"], state.exponents))
    moves = list(_moves(dropper))
    while state.tried < len(moves):
        sites, size = moves[state.tried]
        for step in (size, -size):
            exponents = state.exponents | {site: state.exponents.get(site, 0.0) + step for site in sites}
            first = min(int(site.split()[0]) for site in sites)
            found = passes.run(setting(state.ours["level"], exponents), first, now)
            if found.cost(state.price) < now.cost(state.price):
                state.exponents, now = exponents, found
                state.accepted += 1
                break
        state.tried += 1
        if time.monotonic() > stop:
            return False
    if not state.found:
        state.found = last(lambda m: m.kl <= state.ours["kl"], state.exponents)
    return True


@dataclass(frozen=True)
class Pass:
    """Of one pass: what enters each layer, the share of all block weights that each layer leaves out, and the
    divergence from the dense model in nats.
    """

    inputs: list[Tensor]
    spared: list[float]
    divergence: float

    @property
    def read(self) -> float:
        return 1 - sum(self.spared)

    def cost(self, price: float) -> float:
        return self.read + price * self.divergence


class Passes:
    """Passes of `rows`, int64 [rows, tokens], through a model, from any layer on."""

    def __init__(self, dropper: Dropper, rows: Tensor) -> None:
        self.dropper, self.rows = dropper, rows
        base: Any = dropper.model.base_model
        self.layers, self.norm = base.layers, base.norm
        calls: list[tuple[Any, dict[str, Any]]] = []
        see = lambda module, args, options: calls.append((args[0], options))  # noqa: E731
        handles = [layer.register_forward_pre_hook(see, with_kwargs=True) for layer in self.layers]
        with torch.no_grad():
            base(rows, use_cache=False)
        for handle in handles:
            handle.remove()
        self.start, self.options = calls[0][0], [options for _, options in calls]
        self.log_p = self._log_probs(self._through({}, 0, [], [self.start]))

    def run(self, setting: Setting, first: int = 0, before: Pass | None = None) -> Pass:
        """`before`: of a setting that is the same in the layers before `first`."""
        spared, inputs = ([], [self.start]) if before is None else (before.spared[:first], before.inputs[: first + 1])
        log_q = self._log_probs(self._through(setting, first, spared, inputs))
        divergence = F.kl_div(log_q, self.log_p, log_target=True, reduction="batchmean")
        return Pass(inputs, spared, float(divergence))

    @torch.no_grad()
    def _through(self, setting: Setting, first: int, spared: list[float], inputs: list[Tensor]) -> Tensor:
        """The output of the last layer; adds what enters the layers after `first`, and what each from it on spares."""
        self.dropper.take_spared(1)
        with self.dropper.applied(setting):
            for layer in range(first, len(self.layers)):
                output = self.layers[layer](inputs[-1], **self.options[layer])
                inputs.append(output if isinstance(output, Tensor) else output[0])
                spared.append(self.dropper.take_spared(self.rows.numel()))
        return inputs.pop()

    @torch.no_grad()
    def _log_probs(self, hidden: Tensor) -> Tensor:
        """[positions, vocabulary]"""
        head: Any = self.dropper.model.get_output_embeddings()
        return head(self.norm(hidden)[:, ::EVERY]).flatten(0, 1).float().log_softmax(dim=-1)


def _moves(dropper: Dropper) -> Iterator[tuple[list[str], float]]:
    """Sites, and the exponent by which they move together."""
    layers = range(dropper.layers)
    for size in SIZES:
        yield from (([f"{layer} {place}" for layer in layers], size) for place in OURS.values())
        yield from (([f"{layer} {place}" for place in OURS], size) for layer in layers)
        yield from (([f"{layer} {place}"], size) for layer in layers for place in OURS.values())
