"""lm-eval (the language model evaluation harness) on a model of hf_sparse as it is, without a network: two tasks made
from Python's own documentation, once with the skip rules on every token ("sparse") and once without them ("dense").

    pip install -c constraints.txt ".[eval]"
    python scripts/lm_eval_offline.py MODEL [--gguf-file FILE] [--pages N] [--questions N] [--json FILE]

  documentation_perplexity  how well pages are foretold, by byte and by word (loglikelihood_rolling)
  documentation_next        which of four passages, all of a length, goes on where a paragraph was cut; the others are
                            of other pages
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from _bench import at_least_one, say

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # unless told otherwise: lm-eval asks the hub what it knows of a model

try:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    sys.exit(f'{error}; in a clone of the project: pip install -c constraints.txt ".[eval]"')
from transformers import AutoTokenizer

from hf_sparse import SparseAutoModelForCausalLM
from hf_sparse.modeling import skipping

PERPLEXITY, NEXT = "documentation_perplexity", "documentation_next"
PAGE_CHARACTERS, SHOWN_CHARACTERS, CHOICE_CHARACTERS, CHOICES = 3000, 150, 80, 4
TASKS: dict[str, dict[str, Any]] = {
    PERPLEXITY: {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
    NEXT: {
        "output_type": "multiple_choice",
        "doc_to_text": "{{shown}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm")],
    },
}


def pages(count: int) -> list[dict[str, Any]]:
    """The beginnings of `count` pages, evenly chosen among the long ones."""
    long = sorted(name for name, text in topics.items() if len(text) > PAGE_CHARACTERS)
    return [{"page": topics[name][:PAGE_CHARACTERS]} for name in long[:: max(1, len(long) // count)][:count]]


def questions(count: int, seed: int = 0) -> list[dict[str, Any]]:
    passages = []
    for page, text in sorted(topics.items()):
        for paragraph in (" ".join(part.split()) for part in text.split("\n\n")):
            if len(paragraph) > SHOWN_CHARACTERS + CHOICE_CHARACTERS:
                cut = paragraph.rindex(" ", 0, SHOWN_CHARACTERS)
                passages.append((page, paragraph[:cut], paragraph[cut + 1 :][:CHOICE_CHARACTERS]))
    numbers, made = random.Random(seed), []
    for page, shown, following in numbers.sample(passages, min(count, len(passages))):
        others = [other for other_page, _, other in passages if other_page != page]
        choices, answer = numbers.sample(others, CHOICES - 1), numbers.randrange(CHOICES)
        choices.insert(answer, following)
        made.append({"shown": shown, "choices": choices, "answer": answer})
    return made


def write_task(folder: Path, name: str, documents: Sequence[dict[str, Any]]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    files = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **TASKS[name]}
    (folder / f"{name}.yaml").write_text(json.dumps(task, indent=1), encoding="utf-8")  # JSON is YAML


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a directory or a hub id")
    parser.add_argument("--gguf-file", help="name of a GGUF file in it")
    parser.add_argument("--pages", type=at_least_one, default=6, help=f"of {PERPLEXITY} (default 6)")
    parser.add_argument("--questions", type=at_least_one, default=40, help=f"of {NEXT} (default 40)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    arguments = parser.parse_args()
    source = {"pretrained_model_name_or_path": arguments.model, "gguf_file": arguments.gguf_file}
    model = SparseAutoModelForCausalLM.from_pretrained(**source, load_in_4bit=True)
    harness = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(**source), batch_size=1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hf_sparse-") as folder:
        write_task(Path(folder), PERPLEXITY, pages(arguments.pages))
        write_task(Path(folder), NEXT, questions(arguments.questions))
        manager = TaskManager(include_path=folder, include_defaults=False)
        for name, mode in (("sparse", "always"), ("dense", "never")):
            with skipping(mode):
                results = simple_evaluate(model=harness, tasks=[PERPLEXITY, NEXT], task_manager=manager)
            found[name] = {
                task: {metric: value for metric, value in figures.items() if isinstance(value, (int, float))}
                for task, figures in results["results"].items()
            }
    say(f"{'':42}{'sparse':>12}{'dense':>12}")
    for task, figures in found["dense"].items():
        for metric, dense in figures.items():
            if not metric.startswith("sample_"):
                name = metric.removesuffix(",none")
                say(f"{task} {name:{41 - len(task)}}{found['sparse'][task][metric]:12.4f}{dense:12.4f}")
    active = model.active_fraction()
    say(f"{1.0 if active is None else active:.1%} of the MLP neurons were computed by the rules")
    if arguments.json:
        arguments.json.write_text(json.dumps({**found, "active_fraction": active}, indent=1) + "\n")


if __name__ == "__main__":
    main()
