"""Predictors of query heads: which of them count for a token is foretold from what its attention block reads.

DejaVu (ICML'23, sections 3 and 4) foretells heads as it does neurons; here the price is that of every other entry that
is left out (`activation_profile.thresholds`): a head costs the sum of the squares of its entries times their
sensitivities, and spares its rows of q and what is still read of its rows of o. The logarithm of that cost is taken as
a linear function of the block's input, found by ridge regression; from which foretold cost on a head is computed is
chosen for each head, so that on held-out text what is spared outweighs what is lost the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_sparse.modeling import BlockId, HybridAttention, HybridBlock, Place, Predictor, hybrid_blocks

from .activation_profile import ActivationProfile, row_bytes, thresholds
from .model import SparseMixin
from .plan import PlannedPredictor
from .probing import groups_that_fit, pass_densely

WEIGHT_DTYPE = "int8"
GROUP = 32  # widths are multiples of it: rows are stored in groups of so many
RIDGE = 1e-2  # of the mean square of the inputs
BEYOND = 5.0  # how far, in logarithms of cost, a decision that is the same for all tokens reaches beyond those seen


@dataclass
class Foretold:
    """Of one block on held-out text, [tokens, heads]: `scores`, logarithms of costs as its predictor foretells them,
    and the `costs`. `spared`: bytes that a head spares; `instead`: net bytes a token that q spares by leaving out
    inputs, which it cannot do where heads are left out.
    """

    tensors: dict[str, Tensor]
    nbytes: int
    scores: Tensor
    costs: Tensor
    spared: float
    instead: float

    def at(self, level: float) -> PlannedPredictor | None:
        """The predictor, deciding for a level of `activation_profile.thresholds`; None where it does not pay."""
        scores, order = self.scores.sort(dim=0)
        gains = (self.spared - self.costs.gather(0, order) / level**2).cumsum(0)
        gains[:-1][scores[:-1] == scores[1:]] = -math.inf  # no cut parts equal scores
        best, count = torch.cat((torch.zeros_like(gains[:1]), gains)).max(dim=0)
        if float(best.sum()) / len(scores) - self.nbytes <= self.instead:
            return None
        ends = torch.cat((scores[:1] - 2 * BEYOND, scores, scores[-1:] + 2 * BEYOND))
        cut = (ends.gather(0, count[None]) + ends.gather(0, count[None] + 1))[0] / 2
        computed, counting = self.scores > cut, self.costs > level**2 * self.spared
        both = int((computed & counting).sum())
        return PlannedPredictor(
            {**self.tensors, "bias": self.tensors["bias"] - cut},
            WEIGHT_DTYPE,
            nbytes=self.nbytes,
            recall=both / int(counting.sum()) if counting.any() else 1.0,
            precision=both / int(computed.sum()) if computed.any() else 1.0,
            kept=float(computed.float().mean()),
            bytes_saved=round(float((~computed).float().sum(1).mean()) * self.spared - self.nbytes),
        )


def foretell_heads(
    model: SparseMixin, profile: ActivationProfile, training: Tensor, held_out: Tensor, level: float
) -> dict[BlockId, Foretold]:
    """Of those attention blocks of `model`, whole on the CPU, in which leaving out heads would pay at `level` for one
    who knew their costs. `training`, `held_out`: int64 [rows, tokens].
    """
    candidates = _candidates(model, profile, held_out, level)
    found: dict[BlockId, Foretold] = {}
    tokens = training.numel() + held_out.numel()
    collected = lambda block: 4 * tokens * (block.width_of("input") + block.predicts)  # noqa: E731
    for group in groups_that_fit({id: block for id, (block, _, _) in candidates.items()}, collected):
        fits, tests = _collect(model, profile, group, training), _collect(model, profile, group, held_out)
        for id in group:
            tensors = fit_costs(*fits.pop(id))
            x, costs = tests.pop(id)
            built = Predictor.from_tensors(tensors, torch.device("cpu"), WEIGHT_DTYPE)
            scores = torch.cat([built.scores(part.float()) for part in x.split(1024)])
            _, spared, instead = candidates[id]
            found[id] = Foretold(tensors, built.nbytes, scores, costs, spared, instead)
    return found


def _candidates(
    model: SparseMixin, profile: ActivationProfile, rows: Tensor, level: float
) -> dict[BlockId, tuple[HybridAttention, float, float]]:
    """Block, bytes that a head spares, and net bytes that leaving out inputs of q spares; where the best choice of
    heads, known beforehand, spares more.
    """
    below = thresholds(profile, level)
    found: dict[BlockId, tuple[HybridAttention, float, float]] = {}
    blocks = {b.id: b for b in hybrid_blocks(model) if isinstance(b, HybridAttention) and b.predicts and b.id in below}
    kept = dict.fromkeys(blocks, 0)
    instead = dict.fromkeys(blocks, 0.0)
    costs: dict[BlockId, list[Tensor]] = {id: [] for id in blocks}
    cost = _cost_function(profile, blocks)

    def look(block: HybridBlock, place: Place, values: Tensor) -> Tensor:
        id, of_entries = block.id, cost(block.id, place, values)
        if place == "output":
            kept[id] += int((values.abs() >= below[id][place]).sum())
            costs[id].append(of_entries.view(len(values), block.predicts, -1).sum(2))
        elif place in below[id]:
            left_out = values.abs() < below[id][place]
            instead[id] += float(((row_bytes(block, place) - of_entries / level**2) * left_out).sum())
        return values

    pass_densely(model, blocks.values(), rows, look)
    for id, block in blocks.items():
        width = block.width_of("output")
        share = kept[id] / (rows.numel() * width)
        matrix = block.shards[0].matrices["q_proj"]
        spared = (matrix.nbytes + share * width * row_bytes(block, "output")) / block.predicts
        best = (spared - torch.cat(costs[id]) / level**2).clamp_min(0).sum(1).mean()
        net_of_inputs = instead[id] / rows.numel()
        if float(best) - _nbytes(block) > net_of_inputs:
            found[id] = block, spared, net_of_inputs
    return found


def _nbytes(block: HybridAttention) -> float:
    """Of a predictor, about."""
    heads = block.predicts
    return 1.0625 * _width(heads) * (block.width_of("input") + heads) + 4 * heads


def _width(heads: int) -> int:
    return math.ceil(2 * heads / GROUP) * GROUP


def _cost_function(profile: ActivationProfile, blocks: Iterable[BlockId]) -> Callable[[BlockId, Place, Tensor], Tensor]:
    """(block, place, values [tokens, entries]) -> what each would cost, of the same shape."""
    places: tuple[Place, ...] = ("input", "output")
    sensitivities = {(id, place): profile.at(id, place).sensitivity for id in blocks for place in places}
    return lambda id, place, values: (values.float() * sensitivities[id, place]).square()


def _collect(
    model: SparseMixin, profile: ActivationProfile, blocks: dict[BlockId, HybridAttention], rows: Tensor
) -> dict[BlockId, tuple[Tensor, Tensor]]:
    """What each block reads, [tokens, d_model] in the model's dtype, and what its heads cost, [tokens, heads]."""
    inputs: dict[BlockId, list[Tensor]] = {id: [] for id in blocks}
    costs: dict[BlockId, list[Tensor]] = {id: [] for id in blocks}
    cost = _cost_function(profile, blocks)

    def look(block: HybridBlock, place: Place, values: Tensor) -> Tensor:
        if place == "input":
            inputs[block.id].append(values.clone())
        else:
            of_heads = cost(block.id, place, values).view(len(values), block.predicts, -1)
            costs[block.id].append(of_heads.sum(2))
        return values

    pass_densely(model, blocks.values(), rows, look)
    return {id: (torch.cat(inputs[id]), torch.cat(costs[id])) for id in blocks}


def fit_costs(x: Tensor, costs: Tensor) -> dict[str, Tensor]:
    """`fc1`, `fc2` and `bias` whose scores are the logarithms of `costs` [tokens, heads] as a linear function of `x`
    [tokens, d_model]: the two signs of each weight, since a ReLU is between.
    """
    x, y = x.float(), costs.clamp_min(1e-30).log()
    # Tokens whose inputs are huge would else count alone.
    weight = 1 / x.square().mean(1, keepdim=True).clamp_min(1e-12)
    weight /= weight.mean()
    x_mean, y_mean = (weight * x).mean(0), (weight * y).mean(0)
    root = weight.sqrt()
    x, y = root * (x - x_mean), root * (y - y_mean)
    ridge = max(RIDGE * float(x.square().sum()) / min(x.shape), 1e-12)
    if len(x) < x.shape[1]:
        w = x.T @ torch.linalg.solve(x @ x.T + ridge * torch.eye(len(x)), y)
    else:
        w = torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1]), x.T @ y)
    heads = costs.shape[1]
    fc1, fc2 = torch.zeros(_width(heads), x.shape[1]), torch.zeros(heads, _width(heads))
    fc1[:heads], fc1[heads : 2 * heads] = w.T, -w.T
    fc2[:, :heads], fc2[:, heads : 2 * heads] = torch.eye(heads), -torch.eye(heads)
    return {"fc1": fc1.bfloat16(), "fc2": fc2.bfloat16(), "bias": y_mean - x_mean @ w}
