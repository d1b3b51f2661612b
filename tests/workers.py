"""What tests run in other processes: a spawned one can import this module, but not a test's."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_sparse.quantization import NeuronMatrix


def put_sum(queue: Any, matrix: NeuronMatrix) -> None:
    queue.put(float(matrix.dequantize().double().sum()))


def generate_in_a_worker(
    model: Any, ids: Tensor, options: dict[str, Any], product: Callable[[], Tensor], connection: Any
) -> None:
    """Sends what is generated and multiplied, and what was said meanwhile."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("hf_sparse").addHandler(Lines())
    try:
        connection.send(product().tolist())
        torch.set_num_threads(1)  # PyTorch's own operators hang on threads that a fork has not brought along
        for _ in range(2):
            connection.send(model.generate(ids, **options).tolist())
        connection.send(lines)
    except BaseException:
        connection.send(traceback.format_exc())
        raise
