"""Fixtures that every test may use."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side: two pools that spin ruin each other
os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import importlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_sparse.quantization import instruction_set


@pytest.fixture(scope="session", autouse=True)
def _outside_the_source_tree(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A process started with `-c` imports from where it is: in the source tree hf_sparse/ lacks its sub-packages."""
    os.chdir(tmp_path_factory.mktemp("outside"))


@pytest.fixture(scope="session")
def script_module() -> Iterator[Callable[[str], Any]]:
    """A module of scripts/, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "scripts")
        yield importlib.import_module


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as Python has it: a shell ignores it for what runs in the background, tests too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


@pytest.fixture
def isa(request: pytest.FixtureRequest, use_instruction_set: Callable[[str], None]) -> str:
    """An instruction set that is in use during the test: its parameter."""
    use_instruction_set(request.param)
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
