import pytest
import torch

from hf_sparse.modeling import Predictor


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
