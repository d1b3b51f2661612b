"""Fixtures of models and of native decode steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers.cache_utils import Cache

from engine_steps import Save
from hf_sparse.modeling import Engine, note_forward
from hf_sparse.modeling.native_mlp import NativeMLP
from tiny_models import save_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """`save_checkpoint` with room for 400 positions, once for what it is called with."""
    made: dict[str, Path] = {}

    def save(case: str, **overrides: Any) -> Path:
        key = case + json.dumps(overrides, sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp(case)
            save_checkpoint(case, made[key], **({"max_position_embeddings": 400} | overrides))
        return made[key]

    return save


@pytest.fixture(autouse=True)
def no_token_is_decoded() -> None:
    """Blocks that are called by themselves must not take up what another test's model decoded last."""
    note_forward(new_tokens=0, cached_tokens=0)


@pytest.fixture
def native_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of the tokens that were decoded natively."""
    steps: list[int] = []
    logits = Engine.logits

    def counted(self: Engine, token: Tensor, cache: Cache, *args: Any, **kwargs: Any) -> Tensor | None:
        position = cache.get_seq_length()
        result = logits(self, token, cache, *args, **kwargs)
        if result is not None:
            steps.append(position)
        return result

    monkeypatch.setattr(Engine, "logits", counted)
    return steps


@pytest.fixture
def native_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many native calls of an MLP there were, in a list of one number."""
    counted, run = [0], NativeMLP.run

    def counting(self: NativeMLP, *args: Any) -> Tensor:
        counted[0] += 1
        return run(self, *args)

    monkeypatch.setattr(NativeMLP, "run", counting)
    return counted


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A plain model with room for 700 positions."""
    return save_checkpoint("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=700)
