"""How weights are stored and multiplied: packed 4-bit and 8-bit matrices and the operators that skip their rows."""

if __name__ != "hf_sparse.quantization":  # a second name would make a second copy of every class
    raise ImportError(
        f"this package is hf_sparse.quantization: install hf_sparse and import it so, not as {__name__!r}"
    )

from .codebooks import COMPUTE_DTYPES, GROUP_SIZES, WEIGHT_DTYPES
from .input_matrix import InputMatrix
from .native import instruction_set, instruction_sets
from .neuron_matrix import NeuronMatrix
from .ops import active_neurons, gathered_accumulate, gathered_row_product, input_product

__all__ = [
    "COMPUTE_DTYPES",
    "GROUP_SIZES",
    "WEIGHT_DTYPES",
    "InputMatrix",
    "NeuronMatrix",
    "active_neurons",
    "gathered_accumulate",
    "gathered_row_product",
    "input_product",
    "instruction_set",
    "instruction_sets",
]
