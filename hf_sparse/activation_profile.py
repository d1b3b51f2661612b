"""ActivationProfile: what one pass over calibration text shows of every place where entries may be left out.

How much an entry matters is its magnitude times the root mean square of the loss's gradient there: half the square of
that product, summed over what is left out, is the loss that it costs (the diagonal of the empirical Fisher information;
Theis et al. 2018, section 2, prune by it). It weighs an entry by what its column does to the output, as column norms
do (WINA, 2025), and compares tensors and layers with each other.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from hf_sparse.modeling import BlockId, HybridBlock, HybridMLP, Place, hybrid_blocks, skipping
from hf_sparse.quantization import NeuronMatrix

from .log import logger
from .model import SparseMixin
from .plan_store import keep_aside
from .probing import Look, probed

SAMPLED = 1 << 13  # values of a place, for quantiles
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
SAVE_SECONDS = 20.0
KINDS = ("prompt", "generated")  # of tokens


@dataclass(frozen=True)
class PlaceProfile:
    """Of one place of a block; tensors are float32 [entries], means over tokens. `active`: how often the entry is not
    zero. `mean`, `spread`: of its magnitude (mean and standard deviation). `sensitivity`: root mean square of the
    loss's gradient, nats. `quantiles`: of the magnitudes of all entries, at QUANTILES. `by_kind`: `mean` of "prompt"
    and of "generated" tokens, for those kinds that there were.
    """

    active: Tensor
    mean: Tensor
    spread: Tensor
    sensitivity: Tensor
    quantiles: tuple[float, ...]
    by_kind: dict[str, Tensor]


class ActivationProfile:
    """Measures `model`, whose blocks lie whole on the CPU, batch by batch: sums are kept, never activations."""

    def __init__(self, model: SparseMixin) -> None:
        self.model = model
        self.rows = 0  # that were measured
        # [KINDS, (active, magnitude, its square, gradient's), entries]
        self.sums: dict[tuple[BlockId, Place], Tensor] = {}
        self.samples: dict[tuple[BlockId, Place], Tensor] = {}
        self.tokens = torch.zeros(len(KINDS), dtype=torch.float64, device="cpu")

    def measure(self, rows: Tensor, generated: Tensor, aside: Path | None = None, of: str = "") -> None:
        """Adds what `rows`, int64 [rows, tokens], show. `generated`: bool, the same shape: tokens that a model wrote.
        `aside`: a file that is written now and then, so that the same call goes on from there after a kill, and that is
        there no more at the end; `of` says whose activations are in it.

        Raises ValueError where the model computes NaN or infinity.
        """
        key = _key(rows, generated, of)
        if aside is not None:
            self._resume(aside, key)
        saved = time.monotonic()
        for start in range(self.rows, len(rows)):
            self._measure_row(rows[start : start + 1], generated[start])
            self.rows = start + 1
            if aside is not None and time.monotonic() - saved > SAVE_SECONDS:
                self._save(aside, key)
                saved = time.monotonic()
        if aside is not None:
            with suppress(OSError):  # where it could not be written it is not there
                aside.unlink()

    def _measure_row(self, row: Tensor, generated: Tensor) -> None:
        kinds = torch.stack((~generated, generated)).to(torch.float32)
        self.tokens += kinds.sum(1).to(torch.float64)
        look: Look = lambda block, place, values: self._look(block, place, values, kinds)  # noqa: E731
        dense = skipping("never")
        with probed(hybrid_blocks(self.model), look), dense, _without_weight_gradients(self.model), torch.enable_grad():
            logits = self.model(row, use_cache=False).logits[0, :-1].float()
            torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum").backward()

    def _look(self, block: HybridBlock, place: Place, values: Tensor, kinds: Tensor) -> Tensor:
        seen = values.detach().to(torch.float32)
        magnitude = seen.abs()
        if not bool(magnitude.isfinite().all()):
            part = "attention" if block.id.kind == "attention" else "MLP"
            raise ValueError(
                f"layer {block.id.layer}: the {part} computes NaN or infinite activations on the calibration text"
            )
        sums = self.sums.setdefault((block.id, place), torch.zeros(len(KINDS), 4, seen.shape[1], device="cpu"))
        for i, values_of in enumerate(((seen != 0).float(), magnitude, magnitude.square())):
            sums[:, i] += kinds @ values_of
        self._sample(block.id, place, magnitude)
        out = values.view_as(values) if values.requires_grad else values.detach().requires_grad_()

        def note(gradient: Tensor) -> None:
            sums[:, 3] += kinds @ gradient.detach().float().square()

        out.register_hook(note)
        return out

    def _sample(self, id: BlockId, place: Place, magnitude: Tensor) -> None:
        """Every value so far has the same chance to be among those kept."""
        generator = torch.Generator().manual_seed(self.rows)  # so that a resumed run draws the same
        drawn = torch.randint(magnitude.numel(), (SAMPLED,), generator=generator)
        found = self.samples.get((id, place))
        values = magnitude.flatten()[drawn]
        if found is not None:
            values = torch.where(torch.rand(SAMPLED, generator=generator) * (self.rows + 1) < 1, values, found)
        self.samples[id, place] = values

    # What was found

    def places(self) -> Iterator[tuple[HybridBlock, Place]]:
        for block in hybrid_blocks(self.model):
            yield from ((block, place) for place in block.places if (block.id, place) in self.sums)

    def at(self, id: BlockId, place: Place) -> PlaceProfile:
        sums, tokens = self.sums[id, place], self.tokens.to(torch.float32)
        active, mean, square, gradient = (sums.sum(0) / tokens.sum()).unbind(0)
        at = torch.quantile(self.samples[id, place], torch.tensor(QUANTILES)).tolist()
        return PlaceProfile(
            active=active,
            mean=mean,
            spread=(square - mean.square()).clamp_min(0).sqrt(),
            sensitivity=gradient.sqrt(),
            quantiles=tuple(at),
            by_kind={kind: sums[i, 1] / tokens[i] for i, kind in enumerate(KINDS) if tokens[i]},
        )

    def impact(self, block: HybridBlock) -> Tensor:
        """float32 [neurons]: how much each contributes, the mean of |hidden| times the norm of its column of down, and
        for a KV group the mean magnitude of what it hands to the output projection.
        """
        if isinstance(block, HybridMLP):
            return self.at(block.id, "hidden").mean * column_norms(block)
        return self.at(block.id, "output").mean.view(block.neurons, -1).mean(1)

    def heads(self, block: HybridBlock, head_dim: int) -> Tensor:
        """float32 [query heads]: the mean magnitude of what each hands to the output projection."""
        return self.at(block.id, "output").mean.view(-1, head_dim).mean(1)

    # What is kept aside

    def _save(self, aside: Path, key: str) -> None:
        tensors = {"tokens": self.tokens}
        for (id, place), sums in self.sums.items():
            tensors |= {f"{id}.{place}.sums": sums, f"{id}.{place}.samples": self.samples[id, place]}
        keep_aside(aside, tensors, {"key": key, "rows": str(self.rows)}, "profile")

    def _resume(self, aside: Path, key: str) -> None:
        if not aside.exists():
            return
        try:
            with safe_open(aside, "pt") as file:
                metadata = file.metadata() or {}
            if metadata.get("key") != key:
                return  # of another text
            tensors = load_file(aside)
            widths = {(b.id, place): b.width_of(place) for b in hybrid_blocks(self.model) for place in b.places}
            self.sums = {at: tensors[f"{at[0]}.{at[1]}.sums"] for at in widths if f"{at[0]}.{at[1]}.sums" in tensors}
            self.samples = {at: tensors[f"{at[0]}.{at[1]}.samples"] for at in self.sums}
            self.tokens, self.rows = tensors["tokens"], int(metadata["rows"])
            shapes = [(sums, [len(KINDS), 4, widths[at]]) for at, sums in self.sums.items()]
            shapes += [(samples, [SAMPLED]) for samples in self.samples.values()]
            if any(list(t.shape) != shape for t, shape in [*shapes, (self.tokens, [len(KINDS)])]):
                raise ValueError("tensors of other shapes")
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            logger.warning("What was calibrated before in %s cannot be read (%s): it begins anew", aside, error)
            self.__init__(self.model)  # type: ignore[misc]
            return
        logger.info("Calibration goes on after %d rows", self.rows)


def column_norms(block: HybridMLP) -> Tensor:
    """float32 [neurons]: of each neuron's column of down."""
    (shard,) = block.shards
    matrix = shard.by_neuron(block.names.down)
    norms = [matrix.narrow(i, min(256, matrix.rows - i)).dequantize().norm(dim=1) for i in range(0, matrix.rows, 256)]
    return torch.cat(norms)


@contextmanager
def _without_weight_gradients(model: SparseMixin) -> Iterator[None]:
    wanted = [p for p in model.parameters() if p.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def _key(rows: Tensor, generated: Tensor, of: str) -> str:
    digest = hashlib.sha256(f"{of} {list(rows.shape)}".encode())
    digest.update(rows.contiguous().numpy().tobytes())
    digest.update(generated.contiguous().numpy().tobytes())
    return digest.hexdigest()


def thresholds(profile: ActivationProfile, level: float) -> dict[BlockId, dict[Place, Tensor]]:
    """By block and place, float32 [entries]: below them an entry costs less than `level` per root of a byte of the row
    that it saves. A rule of these is the greedy choice: entries of all layers and tensors in the order of what they
    cost by what they save.
    """
    found: dict[BlockId, dict[Place, Tensor]] = {}
    for block, place in profile.places():
        if (saved := row_bytes(block, place)) == 0:
            continue
        sensitivity = profile.at(block.id, place).sensitivity
        below = (level * math.sqrt(saved) / sensitivity.clamp_min(1e-30)).clamp_max(1e30)
        found.setdefault(block.id, {})[place] = below
    return found


def row_bytes(block: HybridBlock, place: Place) -> int:
    """Of the weights that an entry at `place` spares; 0 where the stored layout cannot spare them."""
    names: Any = getattr(block, "names", None)
    if place == "input":
        name = block.skips_inputs_of
    elif place == "gate":
        name = None if names.gate is None and not names.fused else names.up
    else:
        name = next(p.name for p in block.projections.values() if p.writes)
    if name is None or (place == "input" and block.weights.weight_dtype is None):
        return 0
    (shard,) = block.shards
    matrix = shard.matrices[name]
    if place == "input":  # as they lie by neuron, whichever form they have now
        return matrix.rows * NeuronMatrix.row_nbytes(matrix.cols, matrix.weight_dtype, matrix.group_size) // matrix.cols
    return matrix.nbytes // matrix.rows
