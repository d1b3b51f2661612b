"""Fixtures that every test may use."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side: two pools that spin ruin each other

from collections.abc import Callable, Iterator

import pytest
import torch

from hf_sparse.quantization import instruction_set


@pytest.fixture(scope="session", autouse=True)
def _outside_the_source_tree(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A process started with `-c` imports from where it is: in the source tree hf_sparse/ lacks its sub-packages."""
    os.chdir(tmp_path_factory.mktemp("outside"))


@pytest.fixture
def generator() -> torch.Generator:
    """Seeded: a test sees the same random numbers in every run."""
    return torch.Generator().manual_seed(20240229)


@pytest.fixture
def use_instruction_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Call it to have HF_SPARSE_ISA read anew; the choice ends with the test."""

    def use(name: str) -> None:
        monkeypatch.setenv("HF_SPARSE_ISA", name)
        instruction_set.cache_clear()

    yield use
    instruction_set.cache_clear()
