"""How good a model is: perplexity, under the rules that apply or without them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_sparse.modeling import Skipping, skipping


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the input embeddings, which may be more than the tokenizer has tokens."""
    weight: Any = model.get_input_embeddings().weight
    return weight.shape[0]


def batches(rows: Tensor, model: PreTrainedModel) -> Iterator[Tensor]:
    """`rows` in batches whose logits take about 32 MB, at least a row."""
    vocabulary = vocabulary_size(model)
    yield from rows.split(max(1, (1 << 23) // (vocabulary * rows.shape[1])))


def perplexity(model: PreTrainedModel, rows: Tensor, mode: Skipping) -> float:
    """exp of the mean negative log likelihood of tokens 1.. of each row; `mode` as in `modeling.skipping`."""
    total, count = 0.0, 0
    with torch.no_grad(), skipping(mode):
        for batch in batches(rows, model):
            logits = model(batch, use_cache=False).logits[:, :-1]
            for row, targets in zip(logits, batch[:, 1:], strict=True):
                total += float(torch.nn.functional.cross_entropy(row.float(), targets, reduction="sum"))
                count += targets.numel()
    return math.exp(min(total / count, 700.0)) if not math.isnan(total) else math.nan
