"""Trains a predictor beside each MLP whose neurons are truly sparse, and keeps those that pay.

Recipe of DejaVu (ICML'23) and PowerInfer (SOSP'24, section 5.1): a low-rank network on the block's input, cross-entropy
weighted for the rare positives, AdamW, early stop; its width starts from the layer's sparsity and then goes where fewer
bytes are read. Here it also starts from what the layer computes: the principal directions of its gates, each with both
signs since a ReLU lets one pass. One shift of the decision buys any recall, so a layer has a choice of recalls, each
with the bytes read for a token and the output lost on held-out text; perplexity there decides which is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hf_sparse.modeling import BlockId, HybridBlock, HybridMLP, Place, Predictor, SkipRule, hybrid_blocks, skipping

from .activation_profile import column_norms
from .evaluation import perplexity, vocabulary_size
from .log import logger
from .model import SparseMixin
from .plan import PlannedPredictor
from .probing import groups_that_fit, pass_densely

WEIGHT_SHARE = 0.08  # of the bytes of all blocks, for all predictors; one may take twice its layer's share
PREDICTOR_INCREASE = 0.001  # of perplexity that predictors may cost, whatever else is allowed
RECALLS = (0.95, 0.97, 0.98, 0.99, 0.995, 0.999)  # to choose from; where a predictor is given up, nothing is missed
COMPARED_RECALL = 0.98  # at which widths are compared
WEIGHT_DTYPES = ("nf4", "int8")
GROUP = 32  # widths are multiples of it: rows are stored in groups of so many
ACTIVE_PER_UNIT = 4
EPOCHS, PATIENCE, BATCH, LEARNING_RATE = 6, 2, 128, 1e-2
DIRECTION_TOKENS = 2048  # that principal directions are taken from
SEARCH_STEPS = 6
LOSS_LOGITS = 1 << 25  # that a layer's loss is measured on, a row at least


@dataclass
class Seen:
    """What a layer computes: inputs [tokens, d_model], in the model's dtype; `active`, bool, and the size of what each
    neuron adds to the output, bfloat16, [tokens, neurons]. Sizes are relative to their token's, or the few tokens whose
    outputs are huge would count alone.
    """

    x: Tensor
    active: Tensor
    outputs: Tensor


@dataclass(frozen=True)
class Choice:
    """What one layer may do: a predictor, or None for the exact rule. `read`: bytes for a token, `lost`: share of the
    squared output that is missed, neuron by neuron, mean over tokens; both on held-out text.
    """

    read: float
    lost: float
    predictor: PlannedPredictor | None = None


def train_predictors(
    model: SparseMixin,
    mlps: dict[BlockId, HybridMLP],
    training: Tensor,
    held_out: Tensor,
    limit: float,
    seed: int,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[dict[BlockId, PlannedPredictor], dict[BlockId, SkipRule]]:
    """Predictors and rules of those `mlps` (exact zeros, all on the CPU) in which one pays; leaves both on the blocks.

    `training`, `held_out`: int64 [rows, tokens]. `tell` is told which layer is trained. On held-out text every
    predictor has a recall of 95% at least, all together take WEIGHT_SHARE of the blocks' bytes at most, and perplexity
    stays within `limit`, and within PREDICTOR_INCREASE of what the exact rule gives. Where the cheapest predictors of
    all layers cost more, each layer's loss is measured alone, and one price of loss, the same for all layers, found by
    bisection: each layer takes what is cheapest at that price, so those whose loss is largest for what they save are
    the first to take a higher recall, at which they lose in proportion less, or to go back to the exact rule.
    """
    _use(mlps, {})
    limit = min(limit, perplexity(model, held_out, "always") * (1 + PREDICTOR_INCREASE))
    budget = WEIGHT_SHARE * sum(block.bytes_per_neuron() * block.neurons for block in hybrid_blocks(model))
    choices: dict[BlockId, list[Choice]] = {}
    tokens = training.numel() + held_out.numel()
    collected = lambda block: tokens * (4 * block.width_of("input") + 3 * block.neurons)  # noqa: E731
    for group in groups_that_fit(mlps, collected):
        fits, tests = _collect(model, group, training), _collect(model, group, held_out)
        for id, block in group.items():
            tell(f"predictor {len(choices) + 1} of {len(mlps)}")
            choices[id] = _choices(block, fits.pop(id), tests.pop(id), 2 * budget / len(mlps), seed)
    chosen = _choose(model, mlps, choices, held_out, limit, budget)
    logger.info("Predictors pay in %d of %d layers that have exact zeros.", len(chosen), len(mlps))
    return chosen, {id: SkipRule("predicted") for id in chosen}


def _use(mlps: dict[BlockId, HybridMLP], predictors: dict[BlockId, PlannedPredictor]) -> None:
    for id, block in mlps.items():
        planned = predictors.get(id)
        block.rule = SkipRule("exact" if planned is None else "predicted")
        block.predictor = None if planned is None else planned.build(torch.device("cpu"))


# What a layer sees


def _collect(model: SparseMixin, mlps: dict[BlockId, HybridMLP], rows: Tensor) -> dict[BlockId, Seen]:
    seen: dict[BlockId, dict[Place, list[Tensor]]] = {id: {"input": [], "gate": [], "hidden": []} for id in mlps}
    norms = {id: column_norms(block) for id, block in mlps.items()}

    def look(block: HybridBlock, place: Place, values: Tensor) -> Tensor:
        if place == "input":
            kept = values.clone()
        elif place == "gate":
            kept = values != 0
        else:
            sizes = (values.float() * norms[block.id]).abs()
            kept = (sizes / sizes.norm(dim=1, keepdim=True).clamp_min(1e-30)).bfloat16()
        seen[block.id][place].append(kept)
        return values

    pass_densely(model, mlps.values(), rows, look)
    return {id: Seen(*map(torch.cat, parts.values())) for id, parts in seen.items()}


def _weight(block: HybridMLP, name: str) -> Tensor:
    """float32 [rows, in], of a projection that does not write."""
    (shard,) = block.shards
    return shard.by_neuron(name).dequantize()


# One layer


def _choices(block: HybridMLP, fit: Seen, test: Seen, largest: float, seed: int) -> list[Choice]:
    """The exact rule, and the cheapest predictor of each recall that reads fewer bytes. The width starts from one unit
    for every ACTIVE_PER_UNIT active neurons of a token and is halved as long as that reads less, else doubled; what it
    is to start from tells that, so that one width is trained.
    """
    exact = Choice(_read_exactly(block, test), 0.0)
    active = float(fit.active.float().mean())
    if active in (0.0, 1.0) or not bool(test.active.any()):
        return [exact]
    start = max(GROUP, round(active * block.neurons / ACTIVE_PER_UNIT / GROUP) * GROUP)
    while start > GROUP and not _fitting(block, start, largest):
        start = _half(start)
    if not _fitting(block, start, largest):
        return [exact]
    directions = _directions(block, fit.x, start)

    @functools.cache
    def read_at(width: int) -> float:
        """Bytes read at COMPARED_RECALL by an untrained predictor; infinite where none is small enough."""
        if not (fitting := _fitting(block, width, largest)):
            return math.inf
        tensors = _packed(*_start(block, fit, directions, width, seed))
        ((_, choice),) = _judge(block, tensors, fitting[0], test, (COMPARED_RECALL,))
        return choice.read

    width = start
    while read_at(_half(width)) < read_at(width):
        width = _half(width)
    while width >= start and read_at(2 * width) < read_at(width):
        width *= 2
    tensors = _train(block, fit, _start(block, fit, directions, width, seed), seed)
    best: dict[float, Choice] = {}
    for weight_dtype in _fitting(block, width, largest):
        for recall, choice in _judge(block, tensors, weight_dtype, test):
            if recall not in best or choice.read < best[recall].read:
                best[recall] = choice
    return [exact, *(choice for choice in best.values() if choice.read < exact.read)]


def _half(width: int) -> int:
    return width // 2 // GROUP * GROUP


def _fitting(block: HybridMLP, width: int, largest: float) -> list[str]:
    """In which WEIGHT_DTYPES a predictor takes `largest` bytes at most, within a few percent."""
    padded = -(-block.projections[block.names.up].columns // GROUP) * GROUP
    weights, bias = width * (padded + block.neurons), 4 * block.neurons
    size = {"nf4": 0.5625 * weights + bias, "int8": 1.0625 * weights + bias}
    return [weight_dtype for weight_dtype in WEIGHT_DTYPES if width and size[weight_dtype] <= largest]


def _gate(block: HybridMLP) -> tuple[Tensor, Tensor]:
    """Weight [neurons, d_model] and bias [neurons] of what the activation is applied to, float32."""
    name = block.names.gate or block.names.up
    (shard,) = block.shards
    bias = shard.biases.get(name)
    zeros = torch.zeros(block.neurons)
    return _weight(block, name)[: block.neurons], zeros if bias is None else bias[: block.neurons].float()


def _directions(block: HybridMLP, x: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """At most `count` principal directions of the layer's gates, each gate scaled to a deviation of 1: what they read,
    [directions, d_model], how they add up to the gates, [neurons, directions], and the gates' mean and bias, [2,
    neurons].
    """
    weight, bias = _gate(block)
    gates = x[:: max(1, len(x) // DIRECTION_TOKENS)].float() @ weight.T + bias
    mean, deviation = gates.mean(0), gates.std(0).clamp_min(1e-6)
    gates.sub_(mean).div_(deviation)
    count = min(*gates.shape, x.shape[1], count)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # svd_lowrank draws
        _, _, basis = torch.svd_lowrank(gates, q=count, niter=1)
    return (basis / deviation[:, None]).T @ weight, basis, torch.stack((mean, bias)) / deviation


def _start(
    block: HybridMLP, fit: Seen, directions: tuple[Tensor, Tensor, Tensor], width: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """fc1, fc2 and bias that follow the principal directions, float32."""
    reads, adds, (mean, bias) = directions
    count = min(width // 2, len(reads))
    reads, adds = reads[:count], adds[:, :count]
    generator = torch.Generator().manual_seed(seed + block.id.layer)
    rest = torch.randn(width - 2 * count, reads.shape[1], generator=generator) * reads.std()
    fc1 = torch.cat((reads, -reads, rest))
    fc2 = torch.cat((adds, -adds, torch.zeros(block.neurons, len(rest))), dim=1)
    scale = float((fit.x[:512].float() @ fc1.T).std()) or 1.0  # so that one learning rate does for all layers
    return fc1 / scale, fc2 * scale, mean - adds @ (adds.T @ (mean - bias))


def _packed(fc1: Tensor, fc2: Tensor, bias: Tensor) -> dict[str, Tensor]:
    return {"fc1": fc1.bfloat16(), "fc2": fc2.bfloat16(), "bias": bias}


def _train(block: HybridMLP, fit: Seen, start: tuple[Tensor, Tensor, Tensor], seed: int) -> dict[str, Tensor]:
    """`fc1`, `fc2` in bfloat16 and `bias` in float32 of a predictor. Active neurons weigh by what they add."""
    x, labels = fit.x, fit.active
    generator = torch.Generator().manual_seed(seed + block.id.layer)
    parameters = [p.clone().requires_grad_() for p in start]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=1e-2)
    positives = float(labels.float().mean())
    weight = min(20.0, (1 - positives) / positives)
    mean_output = float(fit.outputs.float().sum()) / float(labels.sum()) or 1.0
    training = len(x) - max(1, len(x) // 10)

    def loss_on(rows: Tensor | slice) -> Tensor:
        scores = (x[rows].float() @ parameters[0].T).relu() @ parameters[1].T + parameters[2]
        found, outputs = labels[rows].float(), fit.outputs[rows].float()
        weights = 1 + found * (weight * (0.25 + 0.75 * (outputs / mean_output).clamp_max(4.0)) - 1)
        return binary_cross_entropy_with_logits(scores, found, weights)

    best, best_state, since = math.inf, parameters, 0
    for epoch in range(EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - epoch / EPOCHS)
        for batch in torch.randperm(training, generator=generator).split(BATCH):
            with torch.enable_grad():
                loss = loss_on(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            current = float(loss_on(slice(training, None)))
        if current < 0.998 * best:
            best, best_state, since = current, [p.detach().clone() for p in parameters], 0
        elif (since := since + 1) == PATIENCE:
            break
    return _packed(*(p.detach() for p in best_state))


def _judge(
    block: HybridMLP, tensors: dict[str, Tensor], weight_dtype: str, test: Seen, recalls: tuple[float, ...] = RECALLS
) -> Iterator[tuple[float, Choice]]:
    """For each of `recalls` the predictor that is shifted so far, and what it does on held-out text."""
    built = Predictor.from_tensors(tensors, torch.device("cpu"), weight_dtype)
    scores = torch.cat([built.scores(part.float()) for part in test.x.split(1024)])
    found, order = scores[test.active].sort()
    sizes = test.outputs[test.active][order].double().square().cumsum(0)
    margin = 1e-4 * float(scores.std())  # a score is never asked to be above itself
    exactly = _read_exactly(block, test)
    for recall in recalls:
        least = float(found[int((1 - recall) * len(found))]) - margin
        missed = int(torch.searchsorted(found, least, right=True))
        lost = float(sizes[missed - 1] / sizes[-1].clamp_min(1e-30)) if missed else 0.0
        hits, named = len(found) - missed, int(torch.count_nonzero(scores > least))
        read = built.nbytes + _read(block, named / scores.numel(), hits / scores.numel())
        planned = PlannedPredictor(
            {**tensors, "bias": tensors["bias"] - least},
            weight_dtype,
            nbytes=built.nbytes,
            recall=hits / len(found),
            precision=hits / named,
            kept=named / scores.numel(),
            bytes_saved=round(exactly - read),
        )
        yield recall, Choice(read, lost, planned)


def _read(block: HybridMLP, gates: float, active: float) -> float:
    """Bytes of the block that a token reads: rows of the share `gates` of its gates, all else of the share `active` of
    its neurons.
    """
    matrices = 3 if block.names.gate or block.names.fused else 2
    return (gates + (matrices - 1) * active) / matrices * block.bytes_per_neuron() * block.neurons


def _read_exactly(block: HybridMLP, test: Seen) -> float:
    return _read(block, 1.0, float(test.active.float().mean()))


# All layers


def _choose(
    model: SparseMixin,
    mlps: dict[BlockId, HybridMLP],
    choices: dict[BlockId, list[Choice]],
    held_out: Tensor,
    limit: float,
    budget: float,
) -> dict[BlockId, PlannedPredictor]:
    cheapest = {id: min(of, key=lambda choice: choice.read) for id, of in choices.items()}
    whole = sum(of[0].read for of in choices.values())

    def at(price: float, losses: dict[BlockId, float]) -> dict[BlockId, PlannedPredictor]:
        """What is cheapest where a nat is worth `price` times the bytes that the exact rule reads in all layers."""
        chosen: dict[BlockId, PlannedPredictor] = {}
        for id, of in choices.items():
            of_lost = price * whole * losses.get(id, 0.0) / (cheapest[id].lost or 1.0)
            best = min(of, key=lambda choice: choice.read + of_lost * choice.lost)
            if best.predictor is not None:
                chosen[id] = best.predictor
        total = sum(planned.nbytes for planned in chosen.values())
        for id in sorted(chosen, key=lambda id: (chosen[id].bytes_saved or 0) / chosen[id].nbytes):
            if total <= budget:
                break
            total -= chosen.pop(id).nbytes
        return chosen

    def holds(chosen: dict[BlockId, PlannedPredictor]) -> bool:
        _use(mlps, chosen)
        return not chosen or perplexity(model, held_out, "always") <= limit

    kept = at(0.0, {})
    if not holds(kept):
        losses = _losses(model, mlps, {id: choice.predictor for id, choice in cheapest.items()}, held_out)
        low, high, kept = -2.0, 5.0, {}  # prices, as powers of 10
        for _ in range(SEARCH_STEPS):
            middle = (low + high) / 2
            chosen = at(10**middle, losses)
            if holds(chosen):
                kept, high = chosen, middle
            else:
                low = middle
    _use(mlps, kept)
    return kept


def _losses(
    model: SparseMixin,
    mlps: dict[BlockId, HybridMLP],
    predictors: dict[BlockId, PlannedPredictor | None],
    held_out: Tensor,
) -> dict[BlockId, float]:
    """What each predictor costs alone: KL divergence of the next tokens' distributions from the exact rule's, nats."""

    def log_probs() -> Tensor:
        with skipping("always"):
            return torch.cat([model(row[None], use_cache=False).logits[0].float().log_softmax(-1) for row in rows])

    rows = held_out[: max(1, LOSS_LOGITS // (held_out.shape[1] * vocabulary_size(model)))]
    losses: dict[BlockId, float] = {}
    with torch.no_grad():
        _use(mlps, {})
        exact = log_probs()
        for id, planned in predictors.items():
            if planned is not None:
                _use({id: mlps[id]}, {id: planned})
                losses[id] = float((exact.exp() * (exact - log_probs())).sum(-1).mean().clamp_min(0.0))
                _use({id: mlps[id]}, {})
    return losses
