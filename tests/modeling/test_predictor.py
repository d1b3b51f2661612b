import pytest
import torch

from hf_sparse.modeling import Predictor
from hf_sparse.quantization import (
    COMPUTE_DTYPES,
    NeuronMatrix,
    active_neurons,
    gathered_row_product,
    instruction_sets,
    reference,
)

WEIGHTS = [("nf4", 32), ("int4_asym", 32), ("int8", 64), (None, 32)]


def test_a_predictor_names_the_neurons_whose_score_is_positive():
    generator = torch.Generator().manual_seed(0)
    fc1, fc2 = torch.randn(32, 40, generator=generator), torch.randn(70, 32, generator=generator)
    bias = torch.randn(70, generator=generator)
    x = torch.randn(5, 40, generator=generator)
    predictor = Predictor(fc1, fc2, bias)
    scores = (x @ fc1.T).relu() @ fc2.T + bias
    clear = scores.abs() > 0.05 * scores.abs().max()  # 8-bit weights may decide otherwise next to zero
    assert clear.float().mean() > 0.8
    assert torch.equal(predictor.active(x)[clear], (scores > 0)[clear])
    assert predictor.nbytes < 0.4 * (fc1.nbytes + fc2.nbytes)


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"fc1 \[r, d_model\], fc2 \[neurons, r\]"):
        Predictor(torch.zeros(8, 40), torch.zeros(70, 9), torch.zeros(70))


def test_one_token_gets_an_index():
    generator = torch.Generator().manual_seed(0)
    fc1, fc2 = torch.randn(32, 40, generator=generator), torch.randn(70, 32, generator=generator)
    predictor = Predictor(fc1, fc2, torch.randn(70, generator=generator))
    x = torch.randn(5, 40, generator=generator)
    for row, mask in zip(x, predictor.active(x), strict=True):
        assert torch.equal(predictor.active_index(row[None]), mask.nonzero().flatten())


def matrices(neurons, width, cols, weight_dtype, group_size, generator, dtype=torch.float32):
    fc1, fc2 = torch.randn(width, cols, generator=generator), torch.randn(neurons, width, generator=generator)
    return tuple(NeuronMatrix.quantize(weight.to(dtype), weight_dtype, group_size) for weight in (fc1, fc2))


def reference_scores(fc1, fc2, bias, x, compute_dtype):
    seen = reference.round_activations(x, compute_dtype, fc1.group_size).double()
    hidden = (seen @ fc1.dequantize().double().T).relu().float()
    seen = reference.round_activations(hidden, compute_dtype, fc2.group_size).double()
    return (seen @ fc2.dequantize().double().T)[0] + bias


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize(("weight_dtype", "group_size"), WEIGHTS)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_active_neurons_are_those_of_the_reference(
    isa, weight_dtype, group_size, compute_dtype, dtype, use_instruction_set, generator
):
    use_instruction_set(isa)
    for neurons, width, cols in [(1, 1, 1), (7, 3, 31), (70, 33, 40), (257, 32, 130), (1000, 64, 576)]:
        fc1, fc2 = matrices(neurons, width, cols, weight_dtype, group_size, generator, dtype)
        bias = torch.randn(neurons, generator=generator)
        x = torch.randn(1, cols, generator=generator)
        index = active_neurons(fc1, fc2, bias, x, compute_dtype)
        assert index.dtype == torch.int64 and bool((index[1:] > index[:-1]).all())
        scores = reference_scores(fc1, fc2, bias, x, "fp32" if weight_dtype is None else compute_dtype)
        # The order of a sum decides next to zero, and so does the rounding of a bfloat16 product.
        unit = 2e-2 if torch.bfloat16 in (fc1.dtype, fc2.dtype) or compute_dtype == "bf16" else 1e-4
        clear = scores.abs() > unit * (scores.abs().max() + 1)
        found = torch.zeros(neurons, dtype=torch.bool)
        found[index] = True
        assert torch.equal(found[clear], (scores > 0)[clear])
        assert clear.float().mean() > 0.8 or neurons == 1


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_none_some_and_all_neurons_are_active(isa, compute_dtype, use_instruction_set, generator):
    use_instruction_set(isa)
    fc1, fc2 = matrices(77, 12, 45, "int8", 32, generator)
    x = torch.randn(1, 45, generator=generator)
    wanted = torch.rand(77, generator=generator) < 0.3
    for bias, expected in [
        (torch.full((77,), -1e4), []),
        (torch.full((77,), 1e4), list(range(77))),
        (torch.where(wanted, 1e4, -1e4), wanted.nonzero().flatten().tolist()),
        (torch.where(wanted, 1e4, -1e4).to(torch.float64), wanted.nonzero().flatten().tolist()),
    ]:
        assert active_neurons(fc1, fc2, bias, x, compute_dtype).tolist() == expected
    # nothing is above zero where all is zero
    assert active_neurons(fc1, fc2, torch.zeros(77), torch.zeros(1, 45), compute_dtype).tolist() == []
    x[0, 7] = torch.nan
    assert active_neurons(fc1, fc2, torch.zeros(77), x, compute_dtype).tolist() == list(range(77))
    assert Predictor(fc1.dequantize(), fc2.dequantize(), torch.zeros(77)).active(x, compute_dtype).all()


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("isa", instruction_sets())
def test_threads_find_the_same_neurons(isa, threads, use_instruction_set, generator):
    use_instruction_set(isa)
    fc1, fc2 = matrices(1001, 65, 577, "int8", 32, generator)
    bias, x = torch.randn(1001, generator=generator), torch.randn(1, 577, generator=generator)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = active_neurons(fc1, fc2, bias, x)
        torch.set_num_threads(threads)
        for _ in range(5):
            assert torch.equal(active_neurons(fc1, fc2, bias, x), expected)
    finally:
        torch.set_num_threads(before)


def test_active_neurons_takes_any_floating_dtype_and_no_gradient(generator):
    fc1, fc2 = matrices(50, 12, 45, "int8", 32, generator)
    x = torch.randn(45, 1, generator=generator).bfloat16().T.requires_grad_()
    bias = torch.randn(50, 2, generator=generator).bfloat16()[:, 0].requires_grad_()
    index = active_neurons(fc1, fc2, bias, x)
    assert torch.equal(index, active_neurons(fc1, fc2, bias.detach().float(), x.detach().float()))
    scores = gathered_row_product(fc2, gathered_row_product(fc1, x.detach()).relu()) + bias.detach()
    assert torch.equal(index, (scores[0] > 0).nonzero().flatten())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 40)}, r"x: expected one token, floating \[1, 40\], got \[2, 40\]"),
        ({"x": torch.zeros(1, 41)}, r"x: expected floating \[n, 40\]"),
        ({"x": torch.zeros(1, 40, dtype=torch.int64)}, "x: expected floating"),
        ({"x": torch.zeros(1, 40, device="meta")}, "x: on meta, but the matrix is on cpu"),
        ({"fc2": NeuronMatrix.quantize(torch.zeros(70, 9), "int8", 32)}, r"fc2: expected \[neurons, 8\]"),
        ({"fc2": NeuronMatrix.quantize(torch.zeros(70, 8), "int8", 32).to("meta")}, "fc2: on meta, but fc1 is on cpu"),
        ({"bias": torch.zeros(69)}, r"bias: expected floating \[70\], got torch.float32 \[69\]"),
        ({"bias": torch.zeros(70, dtype=torch.int64)}, "bias: expected floating"),
        ({"bias": torch.zeros(70, device="meta")}, "bias: on meta, but fc1 is on cpu"),
        ({"compute_dtype": "fp16"}, "compute_dtype 'fp16'"),
    ],
)
def test_active_neurons_refuses_what_does_not_fit(change, message):
    fitting = {
        "fc1": NeuronMatrix.quantize(torch.zeros(8, 40), "int8", 32),
        "fc2": NeuronMatrix.quantize(torch.zeros(70, 8), "int8", 32),
        "bias": torch.zeros(70),
        "x": torch.zeros(1, 40),
    }
    with pytest.raises(ValueError, match=message):
        active_neurons(**{**fitting, **change})
