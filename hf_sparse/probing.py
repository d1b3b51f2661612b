"""Looking at what the blocks of a model compute while text passes through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from hf_sparse.modeling import BlockId, HybridBlock, Place, skipping

from .model import SparseMixin

COLLECTED_BYTES = 1_000_000_000  # of what blocks compute, held in memory at once

# (block, place, values [tokens, entries]) -> what the block goes on with.
Look = Callable[[HybridBlock, Place, Tensor], Tensor]
Block = TypeVar("Block", bound=HybridBlock)


@contextmanager
def probed(blocks: Iterable[HybridBlock], look: Look) -> Iterator[None]:
    """Within it `look` is the probe of `blocks`, each whole on one tier."""
    blocks = list(blocks)
    for block in blocks:
        block.probe = lambda place, values, block=block: look(block, place, values)
    try:
        yield
    finally:
        for block in blocks:
            block.probe = None


def pass_densely(model: SparseMixin, blocks: Iterable[HybridBlock], rows: Tensor, look: Look) -> None:
    """Shows `look` what `blocks` compute on `rows`, int64 [rows, tokens], with all rules off."""
    with probed(blocks, look), torch.no_grad(), skipping("never"):
        for row in rows:
            model.base_model(row[None], use_cache=False)


def groups_that_fit(
    blocks: Mapping[BlockId, Block], bytes_of: Callable[[Block], int]
) -> Iterator[dict[BlockId, Block]]:
    """`blocks` in groups whose `bytes_of` are COLLECTED_BYTES together, or of one block that is more."""
    group: dict[BlockId, Block] = {}
    size = 0
    for id, block in blocks.items():
        if group and size + bytes_of(block) > COLLECTED_BYTES:
            yield group
            group, size = {}, 0
        group[id] = block
        size += bytes_of(block)
    if group:
        yield group
