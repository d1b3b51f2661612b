# The nanobind extension built from cpu/. Addresses are plain integers; see cpu/module.cpp and cpu/kernels.h.

page_tokens: int

class Matrix:
    def __init__(
        self,
        codes: int,
        scales: int,
        offsets: int,
        table: int,
        rows: int,
        cols: int,
        group_size: int,
        by_input: bool,
        /,
    ) -> None: ...

class Rule:
    def __init__(self, thresholds: int, divisor: float, signed_peak: bool, offset: bool, /) -> None: ...

class Linear:
    def __init__(self, matrix: Matrix, bias: int, /) -> None: ...

class Predictor:
    def __init__(self, fc1: Matrix, fc2: Matrix, bias: int, /) -> None: ...

class Mlp:
    gate: Linear
    predictor: Predictor
    rule: bool
    def __init__(self, up: Linear, down: Linear, activation: int, compute: int, /) -> None: ...
    def set_thresholds(self, inputs: int, gates: int, hidden: int, /) -> None: ...

class Attention:
    softcap: float
    window: int
    def __init__(
        self,
        q: Linear,
        k: Linear,
        v: Linear,
        o: Linear,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scaling: float,
        compute: int,
        /,
    ) -> None: ...
    def set_norms(self, q_norm: int, k_norm: int, all_heads: bool, epsilon: float, /) -> None: ...
    def set_thresholds(self, inputs: int, attended: int, /) -> None: ...
    def set_rotation(self, rotation: int, rotary_dim: int, /) -> None: ...

class Layer:
    attention: Attention
    mlp: Mlp
    def __init__(self) -> None: ...
    def set_norms(
        self, before_attention: int, after_attention: int, before_mlp: int, after_mlp: int, epsilon: float, /
    ) -> None: ...

class Head:
    def __init__(
        self, norm: int, epsilon: float, linear: Linear, softcap: float, rounds: bool, compute: int, /
    ) -> None: ...

class Decoder:
    def __init__(self, level: int, hidden: int, /) -> None: ...
    def add(self, layer: Layer, /) -> None: ...
    def set_head(self, head: Head, /) -> None: ...
    def run(
        self,
        first: int,
        count: int,
        whole_layers: bool,
        input: int,
        output: int,
        logits: int,
        position: int,
        rotations: int,
        caches: int,
        rules: bool,
        computed: int,
        threads: int,
        /,
    ) -> None: ...

def levels() -> dict[str, int]: ...
def quantize(
    level: int,
    weight: int,
    rows: int,
    cols: int,
    group_size: int,
    rule: Rule,
    codes: int,
    scales: int,
    offsets: int,
    threads: int,
    /,
) -> bool: ...
def dequantize(
    level: int, matrix: Matrix, index: int, count: int, out: int, is_bf16: bool, threads: int, /
) -> bool: ...
def turn(
    level: int,
    codes: int,
    packed: bool,
    rows: int,
    cols: int,
    row_bytes: int,
    out: int,
    out_bytes: int,
    threads: int,
    /,
) -> None: ...
def row_product(
    level: int, matrix: Matrix, index: int, count: int, x: int, n: int, compute: int, out: int, threads: int, /
) -> bool: ...
def accumulate(
    level: int, matrix: Matrix, index: int, count: int, a: int, n: int, compute: int, out: int, threads: int, /
) -> bool: ...
def input_product(
    level: int, matrix: Matrix, index: int, count: int, x: int, compute: int, out: int, threads: int, /
) -> bool: ...
def has_many(level: int, /) -> bool: ...
def many_row_product(
    level: int, matrix: Matrix, index: int, count: int, x: int, n: int, out: int, threads: int, /
) -> bool: ...
def many_accumulate(
    level: int, matrix: Matrix, index: int, count: int, a: int, n: int, out: int, threads: int, /
) -> bool: ...
def active_neurons(level: int, predictor: Predictor, x: int, compute: int, index: int, threads: int, /) -> int: ...
