"""Ways to quantize better than by rounding, by the libraries that maintain them.

HQQ (Badri & Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models") needs no data: it moves the
offset of every group until the errors are sparse, few large ones and many small. It works on a weight as it is stored
here, so projections that write to the hidden states gain too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_sparse.modeling import WeightFormat
from hf_sparse.quantization import NeuronMatrix, reference
from hf_sparse.quantization.codebooks import codebook
from hf_sparse.quantization.neuron_matrix import row_chunks

HQQ_FORM = "int4_asym"
NARROWEST = 1e-3  # a range of weights below which hqq replaces or clamps its scale
TUNED = ("AutoRound", "GPTQ")  # on text, see tuning.py
_EXTRAS = {"HQQ": "algorithms", "AutoRound": "algorithms", "GPTQ": "gptq"}
_MODULES = {"HQQ": ("hqq",), "AutoRound": ("auto_round", "hqq"), "GPTQ": ("gptqmodel", "hqq")}


def require(algorithm: str) -> None:
    """Raises ImportError, with what to install, where a package that `algorithm` needs is missing. Imports none."""
    if missing := [module for module in _MODULES.get(algorithm, ()) if importlib.util.find_spec(module) is None]:
        raise ImportError(
            f'algorithm: {algorithm!r} needs {" and ".join(missing)}: pip install "hf_sparse[{_EXTRAS[algorithm]}]"'
        )


def packed_by(algorithm: str, form: WeightFormat) -> Callable[[Tensor], NeuronMatrix] | None:
    """How a weight [rows, cols], as it is stored, becomes `form`; None where it is rounded."""
    if algorithm == "RTN" or form.weight_dtype != HQQ_FORM:
        return None
    return lambda weight: quantize_hqq(weight, form.group_size)


def quantize_hqq(weight: Tensor, group_size: int) -> NeuronMatrix:
    """Packs `weight` [rows, cols], float32, bfloat16 or float16, on the CPU, as int4_asym with the scales and offsets
    that hqq finds, rounded to bfloat16 before codes are chosen. Groups too narrow for it are rounded.

    Raises ImportError without hqq, and ValueError as NeuronMatrix.quantize does.
    """
    require("HQQ")
    from hqq.core.quantize import Quantizer

    matrix, book = NeuronMatrix.quantize(weight, HQQ_FORM, group_size), codebook(HQQ_FORM)
    assert matrix.codes is not None and matrix.scales is not None and matrix.offsets is not None
    for start, stop in row_chunks(*weight.shape):
        part = slice(start, stop)
        chunk = F.pad(weight[part].detach().to(torch.float32), (0, -weight.shape[1] % group_size))
        groups = chunk.unflatten(1, (-1, group_size))
        _, found = Quantizer.quantize(
            chunk, nbits=4, group_size=group_size, axis=1, bitpack=False, compute_dtype=torch.float32, device="cpu"
        )
        scales, zeros = (found[name].view(groups.shape[:2]) for name in ("scale", "zero"))
        offsets = -zeros * scales
        usable = (groups.amax(2) - groups.amin(2) > NARROWEST) & (offsets.abs() <= book.weight_limit)
        matrix.scales[part] = torch.where(usable, scales.to(torch.bfloat16), matrix.scales[part])
        matrix.offsets[part] = torch.where(usable, offsets.to(torch.bfloat16), matrix.offsets[part])
        scales, offsets = (of[part].to(torch.float32)[..., None] for of in (matrix.scales, matrix.offsets))
        ratio = torch.where(scales == 0, 0.0, (groups - offsets) / scales)
        matrix.codes[part] = reference.pack(ratio.round().clamp(0, 15).to(torch.uint8).flatten(1))
    return matrix
