import math

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from hf_sparse.modeling import SkipRule, gives_exact_zeros, magnitude, note_forward, rules_apply, skipping

PLACES = ("input", "gate", "hidden", "output")


@pytest.mark.parametrize(
    ("name", "exact"), [("relu", True), ("relu2", True), ("silu", False), ("gelu", False), ("gelu_pytorch_tanh", False)]
)
def test_exact_zeros_are_read_off_the_activation_itself(name, exact):
    assert gives_exact_zeros(ACT2FN[name]) is exact
    assert not gives_exact_zeros(nn.Identity())


@pytest.mark.parametrize("kind", ["exact", "predicted", "magnitude"])
def test_without_thresholds_gates_that_are_not_zero_stay(kind):
    gate = torch.tensor([[0.0, -0.0, 1e-30, -2.0, math.nan]])
    rule = SkipRule(kind)
    assert rule.keeps("gate", gate).tolist() == [[False, False, True, True, True]]
    assert all(rule.keeps(place, gate) is None for place in PLACES if place != "gate")


@pytest.mark.parametrize("place", PLACES)
def test_what_reaches_its_threshold_stays_and_nan(place):
    values = torch.tensor([[0.1, -0.2, 0.3, math.nan], [-0.3, 0.1, math.inf, -0.0]])
    assert magnitude(**{place: 0.2}).keeps(place, values).tolist() == [[0, 1, 1, 1], [1, 0, 1, 0]]
    of_each = magnitude(**{place: torch.tensor([0.0, 0.25, 1e30, 1e30])})
    assert of_each.keeps(place, values).tolist() == [[1, 0, 0, 1], [1, 0, 1, 0]]
    for dtype in (torch.bfloat16, torch.float16):  # whatever the model's dtype is
        kept = of_each.keeps(place, values.to(dtype))
        assert kept.dtype == torch.bool and kept.tolist() == of_each.keeps(place, values).tolist()
    assert magnitude(**{place: 0.0}).keeps(place, values).all()


def test_columns_have_the_thresholds_of_their_positions():
    thresholds = torch.tensor([0.4, 9.0, 0.1, 9.0, 0.2])
    values = torch.tensor([[0.3, 0.3, 0.1], [0.5, 0.05, -0.2]])
    index = torch.tensor([0, 2, 4])
    expected = values.abs() >= thresholds[index]
    for place in PLACES:
        assert torch.equal(magnitude(**{place: thresholds}).keeps(place, values, index), expected)
        assert magnitude(**{place: 0.2}).keeps(place, values, index).tolist() == [[1, 1, 0], [1, 0, 1]]


def test_magnitude_takes_numbers_and_tensors():
    below = torch.tensor([0.5, 0.25])
    rule = magnitude(gate=0.02, output=below)
    assert rule.kind == "magnitude" and list(rule.below) == ["gate", "output"]
    assert rule.below["gate"].dtype == torch.float32 and rule.below["gate"].tolist() == [pytest.approx(0.02)]
    assert rule.below["output"] is below


def test_rules_with_the_same_numbers_are_equal():
    assert SkipRule() == SkipRule() != SkipRule("exact")
    assert magnitude(gate=0.5, input=torch.ones(3)) == magnitude(input=torch.ones(3), gate=0.5)
    for other in (
        magnitude(gate=0.5),
        magnitude(gate=0.25, input=torch.ones(3)),
        magnitude(gate=0.5, input=torch.ones(4)),
        magnitude(gate=0.5, hidden=torch.ones(3)),
        SkipRule("exact", {"input": torch.ones(3)}),
        "magnitude",
    ):
        assert magnitude(gate=0.5, input=torch.ones(3)) != other


@pytest.mark.parametrize(
    ("kind", "below", "named"),
    [
        ("sometimes", {}, "kind: expected one of none, exact"),
        ("magnitude", {"gate": torch.tensor([-1.0])}, r"below\['gate'\]: expected float32 \[n\] with numbers >= 0"),
        ("magnitude", {"hidden": torch.tensor([0.1, math.nan])}, r"below\['hidden'\]"),
        ("magnitude", {"input": torch.tensor(0.1)}, r"below\['input'\]"),
        ("magnitude", {"input": torch.tensor([[0.1]])}, r"below\['input'\]"),
        ("magnitude", {"output": torch.tensor([0.1], dtype=torch.float64)}, r"below\['output'\]"),
        ("magnitude", {"down": torch.tensor([0.1])}, "expected places of input, gate, hidden, output, got 'down'"),
        ("none", {"hidden": torch.tensor([0.1])}, r"below\['hidden'\]: a rule of kind 'none' takes no such"),
        ("exact", {"gate": torch.tensor([0.1])}, r"below\['gate'\]: a rule of kind 'exact' takes no such"),
        ("predicted", {"gate": torch.tensor([0.1])}, r"below\['gate'\]: a rule of kind 'predicted' takes no such"),
    ],
)
def test_a_bad_rule_names_what_is_wrong(kind, below, named):
    with pytest.raises(ValueError, match=named):
        SkipRule(kind, below)


def test_rules_apply_to_decoded_tokens_only():
    note_forward(new_tokens=5, cached_tokens=0)
    assert not rules_apply()
    note_forward(new_tokens=1, cached_tokens=0)  # a prompt of one token is a prompt
    assert not rules_apply()
    note_forward(new_tokens=1, cached_tokens=5)
    assert rules_apply()
    with skipping("never"):
        assert not rules_apply()
        with skipping("always"):
            assert rules_apply()
        assert not rules_apply()
    note_forward(new_tokens=7, cached_tokens=5)
    assert not rules_apply()
