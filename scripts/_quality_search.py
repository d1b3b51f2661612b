"""The searches of bench_quality.py: TEAL's for its shares, and the oracle's over the choices of our rule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from _quality import LINEARS, OURS, SORTED, Calibration, Dropper, Rule
from torch import Tensor

HALVINGS = 11  # of a level whose loss is measured
SIZES = (0.5, 0.25)  # steps of the search for better exponents of 2


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
    block: Any = dropper.model.base_model.layers[layer]  # type: ignore[union-attr,index]
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
    now: dict[str, float] = field(default_factory=dict)
    tried: int = 0  # moves
    accepted: int = 0


def search(dropper: Dropper, rule: Rule, rows: Tensor, budget: float, state: Search, seconds: float) -> bool:
    """Goes on with `state` for about `seconds`, a move at least; returns whether it has ended. `rule`: ours.

    Ours is where one lambda takes the perplexity on `rows` up by `budget`. From there moves are tried one by one, of a
    place in all layers, a layer's places together, then each place of each layer, by SIZES up and down. A move stays if
    what it reads more is less than what its divergence from the dense model buys elsewhere, at the price at which
    lambda trades one for the other. In the end lambda takes the divergence back to that of ours.
    """
    stop = time.monotonic() + seconds
    reference = dropper.last_hidden_states(rows)

    def measure(level: float, exponents: dict[str, float]) -> dict[str, float]:
        setting = {
            (layer, place): threshold * 2.0 ** exponents.get(f"{layer} {place}", 0.0)
            for (layer, place), threshold in rule.setting(level).items()
        }
        return {"level": level, **asdict(dropper.measure(rows, setting, reference))}

    def last(allowed: Callable[[dict[str, float]], bool], exponents: dict[str, float]) -> dict[str, float]:
        """Of the highest level that is allowed."""
        low, high, best = 0.0, 1.0, measure(0.0, exponents)
        for _ in range(HALVINGS):
            middle = measure((low + high) / 2, exponents)
            if allowed(middle):
                low, best = middle["level"], middle
            else:
                high = middle["level"]
        return best

    if not state.ours:
        state.dense = dropper.measure(rows, {}).perplexity
        state.ours = last(lambda m: m["perplexity"] <= state.dense * (1 + budget), {})
        more = measure(min(state.ours["level"] * 1.1, 1.0), {})
        state.price = (state.ours["read"] - more["read"]) / max(more["kl"] - state.ours["kl"], 1e-9)
        state.now = state.ours
    moves = list(_moves(dropper))
    while state.tried < len(moves):
        sites, size = moves[state.tried]
        for step in (size, -size):
            exponents = state.exponents | {site: state.exponents.get(site, 0.0) + step for site in sites}
            found = measure(state.ours["level"], exponents)
            if _cost(found, state.price) < _cost(state.now, state.price):
                state.exponents, state.now = exponents, found
                state.accepted += 1
                break
        state.tried += 1
        if time.monotonic() > stop:
            return False
    if not state.found:
        state.found = last(lambda m: m["kl"] <= state.ours["kl"], state.exponents)
    return True


def _cost(measured: dict[str, float], price: float) -> float:
    return measured["read"] + price * measured["kl"]


def _moves(dropper: Dropper) -> Iterator[tuple[list[str], float]]:
    """Sites, and the exponent by which they move together."""
    layers = range(dropper.layers)
    for size in SIZES:
        yield from (([f"{layer} {place}" for layer in layers], size) for place in OURS)
        yield from (([f"{layer} {place}" for place in OURS], size) for layer in layers)
        yield from (([f"{layer} {place}"], size) for layer in layers for place in OURS)
