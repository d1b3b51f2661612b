"""Compiles every Triton kernel for the compute capability that is given, down to machine code; needs no GPU. Prints
each with the shared memory that it uses, in bytes.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_sparse.quantization import triton_kernels, triton_ops, triton_prompt_kernels

POINTERS = {
    **dict.fromkeys(("codes", "gate_codes", "up_codes"), "*u8"),
    **dict.fromkeys(("index", "count", "counts"), "*i32"),
    "kept_gates": "*i8",
}
INTEGERS = ("maximum", "cols", "n", "length", "tiles", "x_stride", "a_stride", "code_stride", "scale_stride")
FLAGS = ("HAS_INDEX", "HAS_COUNT", "HAS_GATE_BIAS", "HAS_UP", "HAS_UP_BIAS", "HAS_BIAS", "BY_ROW", "SKIPS")
CONSTANTS = {
    **dict.fromkeys((*FLAGS, "HAS_GATES_BELOW", "HAS_HIDDEN_BELOW"), True),
    "GROUP": 64,
    "FORMAT": 0,
    "HAS_OFFSET": False,
    "ACTIVATION": 0,
    "FULL": False,
    "INTERPRETED": False,
    "SPLITS": triton_ops.MOST_SPLITS,
    "TILE": triton_ops.TILE,
    "TILES": 32,
    "ROWS": triton_ops.ROWS,
    "WIDTH": triton_ops.WIDTH,
}
DOT = triton_ops.DOT
KERNELS = {
    "row_product": {},
    "accumulate": {"ROWS": triton_ops.SUM_ROWS},
    "gate_up": {},
    "count_set": {},
    "place_set": {},
    "many_row_product": DOT,
    "many_accumulate": DOT,
}
VARIANTS = [{}, {"FORMAT": 1}, {"FORMAT": 2}, {"HAS_OFFSET": True}]


def pointer(name: str, form: int) -> str:
    if name in POINTERS and not (form and name.endswith("codes")):
        return POINTERS[name]
    if name.endswith("codes"):
        return "*i8" if form == 1 else "*bf16"
    return "*bf16" if name.endswith(("scales", "offsets")) or (name == "table" and form == 2) else "*fp32"


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for name, sizes in KERNELS.items():
        kernel = getattr(triton_prompt_kernels if name.startswith("many") else triton_kernels, name)
        variants = [*VARIANTS, {"FULL": True}] if name.startswith("many") else VARIANTS
        for variant in variants if "FORMAT" in kernel.arg_names else [{}]:
            constants = {
                key: value for key, value in {**CONSTANTS, **sizes, **variant}.items() if key in kernel.arg_names
            }
            signature = {
                argument: "constexpr"
                if argument in constants
                else "i32"
                if argument in INTEGERS
                else pointer(argument, int(variant.get("FORMAT", 0)))
                for argument in kernel.arg_names
            }
            made = triton.compile(ASTSource(kernel, signature, constants), target=target)
            print(name, *(f"{key}={value}" for key, value in variant.items()), made.metadata.shared)  # noqa: T201


if __name__ == "__main__":
    main()
