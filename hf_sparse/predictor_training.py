"""Trains a predictor beside each MLP whose neurons are truly sparse, and keeps those that pay.

Recipe of DejaVu (ICML'23) and PowerInfer (SOSP'24, section 5.1): a low-rank network on the block's input, cross-entropy
weighted for the rare positives, AdamW, early stop; its width starts from the layer's sparsity and then goes where fewer
bytes are read. Here it also starts from what the layer computes: the principal directions of its gates, each with both
signs since a ReLU lets one pass. One shift of the decision buys any recall, so a layer has a choice of recalls, each
with the bytes read for a token and the output lost on held-out text; perplexity there decides which is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hf_sparse.modeling import BlockId, HybridMLP, Predictor, SkipRule, hybrid_blocks, skipping

from .evaluation import perplexity
from .log import logger
from .model import SparseMixin
from .plan import PlannedPredictor

WEIGHT_SHARE = 0.08  # of the bytes of all blocks that predictors may take together; one may take twice its layer's share
PREDICTOR_INCREASE = 0.001  # of perplexity that predictors may cost, whatever else is allowed
RECALLS = (0.95, 0.97, 0.98, 0.99, 0.995, 0.999)  # to choose from; where a predictor is given up, nothing is missed
COMPARED_RECALL = 0.98  # at which widths are compared
WEIGHT_DTYPES = ("nf4", "int8")
GROUP = 32  # widths are multiples of it: rows are stored in groups of so many
ACTIVE_PER_UNIT = 4
COLLECTED_BYTES = 400_000_000  # held in memory at once; more layers than fit are collected in several passes
EPOCHS, PATIENCE, BATCH, LEARNING_RATE = 8, 2, 128, 3e-3
DIRECTION_TOKENS = 2048  # that principal directions are taken from
SEARCH_STEPS = 7

Fit = tuple[Tensor, Tensor]  # inputs [tokens, d_model] in the model's dtype, labels bool [tokens, neurons]
Test = tuple[Tensor, Tensor, Tensor]  # and the size of each neuron's output, bfloat16 [tokens, neurons]


@dataclass(frozen=True)
class Choice:
    """What one layer may do: a predictor, or None for the exact rule. `read`: bytes for a token, `lost`: share of the
    squared output that is missed, neuron by neuron; both on held-out text.
    """

    read: float
    lost: float
    predictor: PlannedPredictor | None = None


def train_predictors(
    model: SparseMixin, mlps: dict[BlockId, HybridMLP], training: Tensor, held_out: Tensor, limit: float, seed: int
) -> tuple[dict[BlockId, PlannedPredictor], dict[BlockId, SkipRule]]:
    """Predictors and rules of those `mlps` (exact zeros, whole on the CPU) in which one pays; leaves both on the blocks.

    `training`, `held_out`: int64 [rows, tokens]. On held-out text every predictor has a recall of 95% at least, all
    together take WEIGHT_SHARE of the blocks' bytes at most, and perplexity stays within `limit`, and within
    PREDICTOR_INCREASE of what the exact rule gives. Where the cheapest predictors of all layers cost more, one price of
    lost output, the same for all layers, is raised by bisection: each layer takes what is cheapest at that price, so
    those that lose most are the first to take a higher recall or to go back to the exact rule.
    """
    _use(mlps, {})
    limit = min(limit, perplexity(model, held_out, "always") * (1 + PREDICTOR_INCREASE))
    budget = WEIGHT_SHARE * sum(block.bytes_per_neuron() * block.neurons for block in hybrid_blocks(model))
    choices: dict[BlockId, list[Choice]] = {}
    for group in _groups(mlps, training.numel() + held_out.numel()):
        fits, tests = _collect(model, group, training, False), _collect(model, group, held_out, True)
        for id, block in group.items():
            choices[id] = _choices(block, fits.pop(id)[:2], tests.pop(id), 2 * budget / len(mlps), seed)
    chosen = _choose(model, mlps, choices, held_out, limit, budget)
    logger.info("Predictors pay in %d of %d layers that have exact zeros.", len(chosen), len(mlps))
    return chosen, {id: SkipRule("predicted") for id in chosen}


def _use(mlps: dict[BlockId, HybridMLP], predictors: dict[BlockId, PlannedPredictor]) -> None:
    for id, block in mlps.items():
        planned = predictors.get(id)
        block.rule = SkipRule("exact" if planned is None else "predicted")
        block.predictor = None if planned is None else planned.build(torch.device("cpu"))


# What a layer sees


def _groups(mlps: dict[BlockId, HybridMLP], tokens: int) -> Iterator[dict[BlockId, HybridMLP]]:
    group: dict[BlockId, HybridMLP] = {}
    size = 0
    for id, block in mlps.items():
        bytes_of_block = tokens * (4 * block.projections[block.names.up].columns + 3 * block.neurons)
        if group and size + bytes_of_block > COLLECTED_BYTES:
            yield group
            group, size = {}, 0
        group[id] = block
        size += bytes_of_block
    if group:
        yield group


def _collect(
    model: SparseMixin, mlps: dict[BlockId, HybridMLP], rows: Tensor, outputs: bool
) -> dict[BlockId, tuple[Tensor, ...]]:
    """A Fit of each block, or with `outputs` a Test."""
    seen: dict[BlockId, list[tuple[Tensor, ...]]] = {id: [] for id in mlps}

    def observe(id: BlockId, norms: Tensor | None, x: Tensor, gate: Tensor, hidden: Tensor) -> None:
        more = () if norms is None else ((hidden.float() * norms).abs().bfloat16(),)
        seen[id].append((x.clone(), gate != 0, *more))

    for id, block in mlps.items():
        norms = _weight(block, block.names.down).norm(dim=0) if outputs else None
        block.observer = lambda *values, id=id, norms=norms: observe(id, norms, *values)
    try:
        with torch.no_grad(), skipping("never"):
            for row in rows:
                model.base_model(row[None], use_cache=False)
    finally:
        for block in mlps.values():
            block.observer = None
    return {id: tuple(torch.cat(part) for part in zip(*parts, strict=True)) for id, parts in seen.items()}


def _weight(block: HybridMLP, name: str) -> Tensor:
    """float32, as in the checkpoint: [out, in]."""
    return block.dequantize()[f"{block.prefix}{name}.weight"]


# One layer


def _choices(block: HybridMLP, fit: Fit, test: Test, largest: float, seed: int) -> list[Choice]:
    """The exact rule, and the cheapest predictor of each recall that reads fewer bytes. Widths are tried from one unit
    for every ACTIVE_PER_UNIT active neurons of a token: half as wide as long as that reads less, else twice as wide.
    """
    x, labels = fit
    found = [Choice(_read_exactly(block, test[1]), 0.0)]
    active = float(labels.float().mean())
    if active in (0.0, 1.0) or not bool(test[1].any()):
        return found
    directions = _directions(block, x)
    tried: dict[int, float] = {}
    best: dict[float, Choice] = {}

    def read_at(width: int) -> float:
        """Bytes read at COMPARED_RECALL with the cheaper storage; infinite where none is small enough."""
        if width not in tried:
            tried[width] = math.inf
            fitting = [t for t in WEIGHT_DTYPES if width >= GROUP and _predictor_bytes(block, width, t) <= largest]
            tensors = _train(block, fit, directions, width, seed) if fitting else {}
            for weight_dtype in fitting:
                for recall, choice in _judge(block, tensors, weight_dtype, test):
                    if recall not in best or choice.read < best[recall].read:
                        best[recall] = choice
                    if recall == COMPARED_RECALL:
                        tried[width] = min(tried[width], choice.read)
        return tried[width]

    width = max(GROUP, round(active * block.neurons / ACTIVE_PER_UNIT / GROUP) * GROUP)
    while width > GROUP and read_at(width) == math.inf:
        width = width // 2 // GROUP * GROUP or GROUP
    start = width
    while read_at(narrower := width // 2 // GROUP * GROUP) < read_at(width):
        width = narrower
    while width >= start and read_at(2 * width) < read_at(width):
        width *= 2
    return found + [choice for choice in best.values() if choice.read < found[0].read]


def _gate(block: HybridMLP) -> tuple[Tensor, Tensor]:
    """Weight [neurons, d_model] and bias [neurons] of what the activation is applied to, float32."""
    name = block.names.gate or block.names.up
    (shard,) = block.shards
    bias = shard.biases.get(name)
    zeros = torch.zeros(block.neurons)
    return _weight(block, name)[: block.neurons], zeros if bias is None else bias[: block.neurons].float()


def _directions(block: HybridMLP, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Principal directions of the layer's gates, each gate scaled to a deviation of 1: what they read, [directions,
    d_model], how they add up to the gates, [neurons, directions], and the gates without them, [neurons].
    """
    weight, bias = _gate(block)
    gates = x[:: max(1, len(x) // DIRECTION_TOKENS)].float() @ weight.T + bias
    mean, deviation = gates.mean(0), gates.std(0).clamp_min(1e-6)
    gates.sub_(mean).div_(deviation)
    count = min(*gates.shape, x.shape[1], 256)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # svd_lowrank draws
        _, _, basis = torch.svd_lowrank(gates, q=count, niter=1)
    return (basis / deviation[:, None]).T @ weight, basis, torch.stack((mean, bias)) / deviation


def _train(
    block: HybridMLP, fit: Fit, directions: tuple[Tensor, Tensor, Tensor], width: int, seed: int
) -> dict[str, Tensor]:
    """`fc1`, `fc2` in bfloat16 and `bias` in float32 of a predictor."""
    x, labels = fit
    reads, adds, (mean, bias) = directions
    count = min(width // 2, len(reads))
    reads, adds = reads[:count], adds[:, :count]
    generator = torch.Generator().manual_seed(seed + block.id.layer)
    rest = torch.randn(width - 2 * count, x.shape[1], generator=generator) * reads.std()
    fc1 = torch.cat((reads, -reads, rest))
    fc2 = torch.cat((adds, -adds, torch.zeros(block.neurons, len(rest))), dim=1)
    scale = float((x[:512].float() @ fc1.T).std()) or 1.0  # so that one learning rate does for all layers
    parameters = [fc1 / scale, fc2 * scale, mean - adds @ (adds.T @ (mean - bias))]
    parameters = [p.clone().requires_grad_() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=1e-2)
    positives = float(labels.float().mean())
    weight = torch.tensor(min(20.0, (1 - positives) / positives))
    training = len(x) - max(1, len(x) // 10)

    def loss_on(rows: Tensor | slice) -> Tensor:
        scores = (x[rows].float() @ parameters[0].T).relu() @ parameters[1].T + parameters[2]
        return binary_cross_entropy_with_logits(scores, labels[rows].float(), pos_weight=weight)

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
    fc1, fc2, bias = (p.detach() for p in best_state)
    return {"fc1": fc1.bfloat16(), "fc2": fc2.bfloat16(), "bias": bias}


def _judge(
    block: HybridMLP, tensors: dict[str, Tensor], weight_dtype: str, test: Test
) -> Iterator[tuple[float, Choice]]:
    """For each of RECALLS the predictor that is shifted so far, and what it does on held-out text."""
    x, labels, outputs = test
    built = Predictor.from_tensors(tensors, torch.device("cpu"), weight_dtype)
    scores = torch.cat([built.scores(part.float()) for part in x.split(1024)])
    found = scores[labels].sort().values
    margin = 1e-4 * float(scores.std())  # a score is never asked to be above itself
    total = float(outputs.float().square().sum()) or 1.0
    exactly = _read_exactly(block, labels)
    for recall in RECALLS:
        least = float(found[int((1 - recall) * len(found))]) - margin
        chosen = scores > least
        hits = int((chosen & labels).sum())
        missed = outputs.masked_fill(chosen, 0.0).float().square().sum()
        kept = float(chosen.float().mean())
        read = built.nbytes + _read(block, kept, hits / labels.numel())
        planned = PlannedPredictor(
            {**tensors, "bias": tensors["bias"] - least},
            weight_dtype,
            nbytes=built.nbytes,
            recall=hits / len(found),
            precision=hits / max(1, int(chosen.sum())),
            kept=kept,
            bytes_saved=round(exactly - read),
        )
        yield recall, Choice(read, float(missed) / total, planned)


def _read(block: HybridMLP, gates: float, active: float) -> float:
    """Bytes of the block that a token reads: rows of the share `gates` of its gates, all else of the share `active` of
    its neurons.
    """
    matrices = 3 if block.names.gate or block.names.fused else 2
    return (gates + (matrices - 1) * active) / matrices * block.bytes_per_neuron() * block.neurons


def _read_exactly(block: HybridMLP, labels: Tensor) -> float:
    return _read(block, 1.0, float(labels.float().mean()))


def _predictor_bytes(block: HybridMLP, width: int, weight_dtype: str) -> float:
    """Of a predictor, within a few percent."""
    padded = -(-block.projections[block.names.up].columns // GROUP) * GROUP
    return (0.5625 if weight_dtype == "nf4" else 1.0625) * width * (padded + block.neurons) + 4 * block.neurons


# All layers


def _choose(
    model: SparseMixin,
    mlps: dict[BlockId, HybridMLP],
    choices: dict[BlockId, list[Choice]],
    held_out: Tensor,
    limit: float,
    budget: float,
) -> dict[BlockId, PlannedPredictor]:
    def at(price: float) -> dict[BlockId, PlannedPredictor]:
        """What is cheapest where all of a layer's output is worth `price` times the bytes that the exact rule reads."""
        best = {id: min(of, key=lambda choice: choice.read + price * choice.lost * of[0].read) for id, of in choices.items()}
        chosen = {id: choice.predictor for id, choice in best.items() if choice.predictor is not None}
        total = sum(planned.nbytes for planned in chosen.values())
        for id in sorted(chosen, key=lambda id: (chosen[id].bytes_saved or 0) / chosen[id].nbytes):
            if total <= budget:
                break
            total -= chosen.pop(id).nbytes
        return chosen

    def holds(chosen: dict[BlockId, PlannedPredictor]) -> bool:
        _use(mlps, chosen)
        return not chosen or perplexity(model, held_out, "always") <= limit

    low, high, kept = -3.0, 6.0, at(0.0)
    if not holds(kept):
        kept = {}
        for _ in range(SEARCH_STEPS):
            middle = (low + high) / 2
            chosen = at(10**middle)
            if holds(chosen):
                kept, high = chosen, middle
            else:
                low = middle
    _use(mlps, kept)
    return kept
