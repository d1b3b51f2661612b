"""Trains a predictor beside each MLP whose neurons are truly sparse, and keeps those that pay.

Recipe of DejaVu (ICML'23) and PowerInfer (SOSP'24): a low-rank network on the block's input, cross-entropy weighted for
the rare positives, AdamW, early stop on text that is not trained on; then one shift of the decision buys the recall
that is asked for. A layer keeps the exact rule where its predictor misses too much or costs more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hf_sparse.modeling import BlockId, HybridMLP, Predictor, SkipRule, skipping

from .evaluation import perplexity
from .model import SparseMixin

WEIGHT_SHARE = 0.08  # of the block's bytes that a predictor may take
COLLECTED_BYTES = (
    200_000_000  # inputs and labels in memory at once; more layers than fit are collected in several passes
)
TRAINING_RECALL = 0.99
LEAST_RECALL = 0.95
EPOCHS = 40
PATIENCE = 3
BATCH = 64

Examples = tuple[Tensor, Tensor]  # inputs float32 [tokens, d_model], labels bool [tokens, neurons]


def train_predictors(
    model: SparseMixin, mlps: dict[BlockId, HybridMLP], training: Tensor, held_out: Tensor, limit: float, seed: int
) -> tuple[dict[BlockId, dict[str, Tensor]], dict[BlockId, SkipRule]]:
    """Predictors and rules of the layers in which one pays, such that held-out perplexity stays within `limit`."""
    tensors: dict[BlockId, dict[str, Tensor]] = {}
    recall: dict[BlockId, float] = {}
    for group in _groups(mlps, training.numel() + held_out.numel()):
        examples = _collect(model, group, training)
        tests = _collect(model, group, held_out)
        for id, block in group.items():
            candidate = _train(block, examples[id], seed)
            if candidate is None:
                continue
            kept, recall[id] = _judge(block, candidate, tests[id])
            if kept:
                tensors[id] = candidate
    for id in tensors:
        mlps[id].predictor, mlps[id].rule = (
            Predictor.from_tensors(tensors[id], torch.device("cpu")),
            SkipRule("predicted"),
        )
    while tensors and perplexity(model, held_out, "always") > limit:
        for id in sorted(tensors, key=lambda id: recall[id])[: (len(tensors) + 1) // 2]:
            mlps[id].predictor, mlps[id].rule = None, SkipRule("exact")
            del tensors[id]
    return tensors, {id: SkipRule("predicted") for id in tensors}


def _groups(mlps: dict[BlockId, HybridMLP], tokens: int) -> Iterator[dict[BlockId, HybridMLP]]:
    group: dict[BlockId, HybridMLP] = {}
    size = 0
    for id, block in mlps.items():
        bytes_of_block = tokens * (4 * block.projections[block.names.up].columns + block.neurons)
        if group and size + bytes_of_block > COLLECTED_BYTES:
            yield group
            group, size = {}, 0
        group[id] = block
        size += bytes_of_block
    if group:
        yield group


def _collect(model: SparseMixin, mlps: dict[BlockId, HybridMLP], rows: Tensor) -> dict[BlockId, Examples]:
    seen: dict[BlockId, list[Examples]] = {id: [] for id in mlps}
    for id, block in mlps.items():
        block.observer = lambda x, gate, hidden, id=id: seen[id].append((x.float(), gate != 0))
    try:
        with skipping("never"):
            for row in rows:
                model.base_model(row[None], use_cache=False)
    finally:
        for block in mlps.values():
            block.observer = None
    return {id: (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])) for id, parts in seen.items()}


def _train(block: HybridMLP, examples: Examples, seed: int) -> dict[str, Tensor] | None:
    """fc1, fc2 and bias of a predictor, or None where no neuron is ever active or inactive, or where none is small
    enough.
    """
    x, labels = examples
    width = int(WEIGHT_SHARE * block.bytes_per_neuron() * block.neurons / (1.1 * (x.shape[1] + block.neurons)))
    width = min(width // 32 * 32 or width // 4 * 4, 256)  # rows are stored in groups of 32
    positives = float(labels.float().mean())
    if width < 4 or positives in (0.0, 1.0):
        return None
    generator = torch.Generator().manual_seed(seed + block.id.layer)
    scale = float(x.std()) or 1.0
    fc1 = torch.randn(width, x.shape[1], generator=generator) / (scale * x.shape[1] ** 0.5)
    fc2 = torch.randn(block.neurons, width, generator=generator) / width**0.5
    bias = torch.zeros(block.neurons)
    parameters = [p.requires_grad_() for p in (fc1, fc2, bias)]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=1e-2)
    weight = torch.tensor(min(20.0, (1 - positives) / positives))
    validation = max(1, len(x) // 10)

    def loss_on(rows: Tensor | slice) -> Tensor:
        scores = (x[rows] @ fc1.T).relu() @ fc2.T + bias
        return binary_cross_entropy_with_logits(scores, labels[rows].float(), pos_weight=weight)

    best, best_state, since = math.inf, [p.detach().clone() for p in parameters], 0
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x) - validation, generator=generator).split(BATCH):
            with torch.enable_grad():
                loss = loss_on(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        current = float(loss_on(slice(len(x) - validation, None)))
        if current < best - 1e-4:
            best, best_state, since = current, [p.detach().clone() for p in parameters], 0
        elif (since := since + 1) == PATIENCE:
            break
    fc1, fc2, bias = best_state
    found = ((x @ fc1.T).relu() @ fc2.T + bias)[labels]
    bias = bias - float(found.kthvalue(max(1, int((1 - TRAINING_RECALL) * len(found)))).values) + 1e-4
    return {"fc1": fc1, "fc2": fc2, "bias": bias}


def _judge(block: HybridMLP, candidate: dict[str, Tensor], test: Examples) -> tuple[bool, float]:
    """Whether the predictor pays on held-out tokens, in bytes read against the exact rule, and its recall there."""
    x, labels = test
    predictor = Predictor.from_tensors(candidate, torch.device("cpu"))
    chosen = predictor.active(x)
    recall = float(chosen[labels].float().mean()) if bool(labels.any()) else 1.0
    bytes_of_block = block.bytes_per_neuron() * block.neurons
    matrices = 3 if block.names.gate or block.names.fused else 2
    exact = (1 + (matrices - 1) * float(labels.float().mean())) / matrices * bytes_of_block
    predicted = predictor.nbytes + float(chosen.float().mean()) * bytes_of_block
    return recall >= LEAST_RECALL and predicted < exact, recall
