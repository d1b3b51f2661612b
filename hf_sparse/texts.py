"""Texts that a model is measured on: read from where the user says, and turned into one stream of tokens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_texts(source: str | os.PathLike[str] | Sequence[str], *, name: str, tokens: int) -> list[str]:
    """The texts of `source`: a list of them, the path of a .txt file (one text) or of a .jsonl file ("text" of each
    line), or the name of a dataset, of which about as much as `tokens` tokens need is read.

    Raises ValueError, OSError or ImportError naming `name`, the argument that `source` came from.
    """
    if not isinstance(source, (str, os.PathLike)):
        texts = list(source)
        for position, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{name}[{position}]: got {text!r:.100}, allowed are texts that are not blank")
        return texts
    path = Path(source)
    if path.suffix not in (".txt", ".jsonl"):
        if os.path.isfile(source) or not _DATASET.fullmatch(os.fspath(source)):
            raise ValueError(
                f"{name}: got {os.fspath(source)!r:.100}, allowed are a list of texts, the path of a .txt or .jsonl "
                "file, or the name of a dataset"
            )
        return _dataset_texts(os.fspath(source), name, tokens)
    try:
        text = path.read_text(encoding="utf-8")
        return [text] if path.suffix == ".txt" else _texts_of_lines(text)
    except OSError as error:
        raise OSError(f"{name}: {path}: {error.strerror}") from error
    except ValueError as error:  # neither UTF-8 nor JSON is said with the file's name
        raise ValueError(f"{name}: {path}: {error}") from error


def token_stream(texts: Sequence[str], tokenizer: Any, *, vocabulary: int, name: str, special: bool = True) -> Tensor:
    """Token ids int64 [tokens] of all `texts`, one after the other; `special`: with what the tokenizer adds to a text.

    Raises ValueError naming `name`, where the texts came from, without a tokenizer or for an id past `vocabulary`.
    """
    if tokenizer is None:
        raise ValueError(f"{name}: there is no tokenizer beside the model that could read them")
    ids = [tokenizer(text, add_special_tokens=special).input_ids for text in texts]
    stream = torch.tensor([token for text in ids for token in text], dtype=torch.int64)
    if len(stream) and int(stream.max()) >= vocabulary:
        raise ValueError(f"{name}: the tokenizer gives token {int(stream.max())}, the model has {vocabulary}")
    return stream


def _texts_of_lines(jsonl: str) -> list[str]:
    lines = [json.loads(line) for line in jsonl.splitlines() if line.strip()]
    if not all(isinstance(line, dict) and isinstance(line.get("text"), str) for line in lines):
        raise ValueError('expected a "text" in every line')
    return [line["text"] for line in lines]


def _dataset_texts(dataset: str, name: str, tokens: int) -> list[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"{name}: to read the dataset {dataset!r}, pip install datasets") from error
    try:
        split = load_dataset(dataset, split="train")
    except Exception as error:
        raise ValueError(
            f"{name}: the dataset {dataset!r} cannot be loaded ({error}); offline it must be in the cache already, "
            "or give a list of texts or a .txt or .jsonl file"
        ) from error
    if "text" not in split.column_names:
        raise ValueError(f"{name}: the dataset {dataset!r} has columns {split.column_names}, expected one named 'text'")
    texts, characters = [], 0
    for text in split["text"]:
        texts.append(text)
        characters += len(text)
        if characters > 8 * tokens:  # more than enough: a token has about four characters
            break
    return texts
