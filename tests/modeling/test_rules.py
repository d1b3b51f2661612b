import math

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from hf_sparse.modeling import SkipRule, gives_exact_zeros, magnitude, note_forward, rules_apply, skipping


@pytest.mark.parametrize(
    ("name", "exact"), [("relu", True), ("relu2", True), ("silu", False), ("gelu", False), ("gelu_pytorch_tanh", False)]
)
def test_exact_zeros_are_read_off_the_activation_itself(name, exact):
    assert gives_exact_zeros(ACT2FN[name]) is exact
    assert not gives_exact_zeros(nn.Identity())


def test_exact_rule_keeps_what_is_not_zero():
    gate = torch.tensor([[0.0, -0.0, 1e-30, -2.0, math.nan]])
    assert SkipRule("exact").active(gate).tolist() == [[False, False, True, True, True]]


def test_magnitude_rule_keeps_what_reaches_the_threshold_and_nan():
    gate = torch.tensor([[0.1, -0.2, 0.3, math.nan]])
    assert magnitude(gate=0.2).active(gate).tolist() == [[False, True, True, True]]


@pytest.mark.parametrize("rule", [SkipRule(), SkipRule("exact"), magnitude(gate=0.25), SkipRule("predicted")])
def test_a_rule_survives_json(rule):
    assert SkipRule.from_dict(rule.to_dict()) == rule


@pytest.mark.parametrize(
    ("kind", "threshold"), [("sometimes", 0.0), ("magnitude", -1.0), ("magnitude", math.inf), ("magnitude", math.nan)]
)
def test_a_bad_rule_names_what_is_wrong(kind, threshold):
    with pytest.raises(ValueError, match="kind" if kind == "sometimes" else "threshold"):
        SkipRule(kind, threshold)


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
