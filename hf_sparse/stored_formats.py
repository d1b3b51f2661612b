"""Which format every projection of a checkpoint that others quantized gets, so that its codes stay where they can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from transformers import PreTrainedModel

from hf_sparse.modeling import HybridBlock, Projection

from .checkpoint import Checkpoint
from .config import STORED, WeightOnlyQuantConfig
from .stored_matrix import StoredMatrix
from .weights import projections_in

Form = tuple[str, int]

# Of weights whose codes cannot stay. Where those are what writes to the hidden states (SmolLM2-135M, perplexity against
# the stored weights) these 8 bits add 0.3% to 0.4%, 4 bits again 5% to 13%. They take 1.4 bits more per weight of the
# model; groups of 64 would save 0.1 and double what is added.
AGAIN: Form = ("int8", 32)
FOUR_BITS = 5.0  # the most that a code may have on average to count as 4-bit weights
PLAIN_BITS = 16


def settle_formats(
    quantization: WeightOnlyQuantConfig | None, model: PreTrainedModel, checkpoint: Checkpoint, any_four_bits: bool
) -> WeightOnlyQuantConfig | None:
    """What is stored how, where `quantization` asks for codes as they are or, with `any_four_bits`, for any 4-bit
    weights and `checkpoint` has some. `model` has hybrid blocks. Raises ValueError where there are no codes.
    """
    if quantization is None or not (any_four_bits or quantization.weight_dtype == STORED):
        return quantization
    found = list(_stored(model, checkpoint))
    if any_four_bits:
        weights = sum(_size(block, projection) for block, projection, _ in found)
        bits = sum(_size(b, p) * (PLAIN_BITS if stored is None else stored.bits) for b, p, stored in found)
        if bits > FOUR_BITS * weights:
            return quantization
    elif not any(stored for _, _, stored in found):
        raise ValueError(
            f"weight_dtype: got {STORED!r}, but the weights of {checkpoint.directory} are not quantized; name a format"
        )
    return _with_formats(quantization, found)


def _stored(
    model: PreTrainedModel, checkpoint: Checkpoint
) -> Iterator[tuple[HybridBlock, Projection, StoredMatrix | None]]:
    for block, projection, name, _ in projections_in(model, checkpoint):
        yield block, projection, checkpoint.stored(name)


def _size(block: HybridBlock, projection: Projection) -> int:
    return sum(projection.rows) * block.neurons * projection.columns


def _with_formats(
    quantization: WeightOnlyQuantConfig, found: Iterable[tuple[HybridBlock, Projection, StoredMatrix | None]]
) -> WeightOnlyQuantConfig:
    """The commonest format is that of the config, the commonest of a projection stands under its name, and what differs
    from that under its name and layer.
    """
    everywhere: Counter[Form] = Counter()
    by_name: dict[str, Counter[Form]] = {}
    forms: list[tuple[int, str, Form]] = []
    for block, projection, stored in found:
        kept = None if stored is None or projection.writes else stored.form
        name, form, size = f"{block.prefix}{projection.name}", kept or AGAIN, _size(block, projection)
        everywhere[form] += size
        by_name.setdefault(name, Counter())[form] += size
        forms.append((block.id.layer, name, form))
    commonest = everywhere.most_common(1)[0][0]
    usual = {name: count.most_common(1)[0][0] for name, count in by_name.items()}
    formats = {name: form for name, form in usual.items() if form != commonest}
    formats |= {f"{layer}.{name}": form for layer, name, form in forms if form != usual[name]}
    return replace(
        quantization,
        weight_dtype=commonest[0],
        group_size=commonest[1],
        formats={name: f"{weight_dtype}:{size}" for name, (weight_dtype, size) in formats.items()},
    )
