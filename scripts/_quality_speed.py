"""What predictors take and could give, for bench_quality.py."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from hf_sparse.evaluation import bytes_per_token
from hf_sparse.modeling import Predictor, hybrid_blocks


def bytes_of_perfect_predictors(model: Any) -> float:
    """Per token, where of MLPs with exact zeros only the rows of active neurons were read."""
    total = float(bytes_per_token(model))
    for block in hybrid_blocks(model):
        if block.rule.kind == "exact":
            total += block.kept("gate") * block.weight_bytes - block.read_bytes()
    return total


def predictors_seconds(model: Any) -> float:
    """For one token, a call of its own each, less what a call takes for the smallest of predictors."""
    found = [block.predictor_in_use for block in hybrid_blocks(model)]
    predictors = [predictor for predictor in found if predictor is not None]
    if not predictors:
        return 0.0
    width = predictors[0].fc1.cols
    nothing = Predictor(torch.zeros(32, width), torch.zeros(32, 32), torch.zeros(32))
    x, turns = torch.randn(1, width), []
    for _ in range(21):
        times = []
        for of_turn in (predictors, [nothing] * len(predictors)):
            began = time.perf_counter()
            for predictor in of_turn:
                predictor.active_index(x, "int8")
            times.append(time.perf_counter() - began)
        turns.append(times[0] - times[1])
    return max(0.0, statistics.median(turns))
