"""Turns a checkpoint whose MLPs are gated by SiLU or GELU into one gated by ReLU, whose neurons are mostly exactly
zero, by distillation from itself.

    python scripts/relufy.py MODEL OUTPUT [--gguf-file FILE] [--minutes M] [--target-zeros SHARE] [--json FILE]

Text: what the model itself generates, and the standard library's documentation or --texts; a part of both is held out.

1. Thresholds on the gates (negative biases) set the share of zeros, then ridge regression of what writes to the
   residual stream, block by block, undoes most of the harm.
2. All but the embeddings is trained on the divergence of the next tokens' distributions and on the error of each
   layer's residual stream, while a pressure on barely open gates holds the share of zeros.

Training the MLPs alone, each on the original's own input, was tried as a step between: it gains less in the same time.

Weights compute in bfloat16; AdamW works on float32 copies. WORK (default: OUTPUT.work) holds the text, the state, saved
every few minutes, and log.jsonl; the same command after a kill goes on from there. OUTPUT is an ordinary checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _bench import at_least_one, row, say, write_json
from _relufy import (
    Pressure,
    convert,
    divergence,
    documentation,
    fit_outputs,
    generated,
    given,
    hidden_loss,
    keep_memory,
    load,
    measure,
    rows_of,
    save_aside,
    set_thresholds,
)
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

THRESHOLD_ROWS, REGRESSION_ROWS = 8, 80
LOGIT_SHARE = 0.5  # of the positions: the head costs as much as the layers
GAIN = 1.0  # of the controller, per step
WARM_UP = 0.02  # of the time
HELD_OUT_GENERATED = 16  # of so many generated rows one
MOST_EVALUATED = 32  # rows of each held-out text


@dataclass
class Progress:
    """How far training is. `seconds`: all of the time spent, over resumed runs too."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    strength: float = 0.0  # of the pressure


@dataclass(frozen=True)
class Texts:
    """int64 [rows, tokens] each."""

    train: Tensor
    held_out: dict[str, Tensor]  # "documentation" or "texts", and "generated"


class MasterWeights:
    """AdamW on float32 copies of the bfloat16 parameters that `names` has, in its order."""

    def __init__(self, model: PreTrainedModel, lr: float) -> None:
        model.requires_grad_(False)
        embeddings = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings())}
        self.parameters = {n: p.requires_grad_() for n, p in model.named_parameters() if id(p) not in embeddings}
        self.copies = {name: p.detach().float() for name, p in self.parameters.items()}
        self.lr = lr
        self.forget()

    def forget(self) -> None:
        """Begins without moments."""
        self.optimizer = torch.optim.AdamW(
            self.copies.values(), lr=self.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )

    def collect(self) -> None:
        """Adds the gradients of a batch to those of the float32 copies."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                copy, gradient = self.copies[name], parameter.grad.float()
                copy.grad = gradient if copy.grad is None else copy.grad + gradient
                parameter.grad = None

    def step(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.hand_over()

    @torch.no_grad()
    def hand_over(self) -> None:
        torch._foreach_copy_(list(self.parameters.values()), list(self.copies.values()))

    def tensors(self) -> dict[str, Tensor]:
        moments = {
            f"{kind}.{name}": value
            for name, copy in self.copies.items()
            for kind, value in self.optimizer.state.get(copy, {}).items()
        }
        return {f"weight.{name}": copy for name, copy in self.copies.items()} | moments

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.forget()
        for name, copy in self.copies.items():
            copy.copy_(tensors[f"weight.{name}"])
            kinds = ("step", "exp_avg", "exp_avg_sq")
            if f"step.{name}" in tensors:
                self.optimizer.state[copy] = {kind: tensors[f"{kind}.{name}"] for kind in kinds}
        self.hand_over()


class Training:
    def __init__(self, teacher: PreTrainedModel, student: PreTrainedModel, texts: Texts, options: Any) -> None:
        self.teacher, self.student, self.texts, self.options = teacher.requires_grad_(False), student, texts, options
        self.progress = Progress()
        self.pressure = Pressure(student, options.target_zeros, options.pressure)
        self.weights = MasterWeights(student, options.learning_rate)
        self.state, self.log = options.work / "state.safetensors", options.work / "log.jsonl"
        self.began = time.perf_counter()

    def run(self) -> None:
        """From wherever the state is to the end."""
        options = self.options
        if self.progress.step == 0:
            rows = self.batch(0, THRESHOLD_ROWS)
            set_thresholds(self.student, self.teacher, rows, options.target_zeros)
            fit_outputs(self.student, self.teacher, self.batch(0, REGRESSION_ROWS))
            self.weights = MasterWeights(self.student, options.learning_rate)
            self.record(self.evaluate())
        saved = evaluated = self.seconds()
        with tqdm(total=round(options.minutes * 60), unit="s", desc="Distilling", disable=None) as bar:
            while (done := self.done()) < 1:
                rate = min(1.0, (done + 1e-3) / WARM_UP) * (0.05 + 0.95 * math.cos(math.pi / 2 * done))
                figures = self.step(rate * options.learning_rate)
                bar.n = min(round(self.seconds()), bar.total)
                bar.set_postfix(figures, refresh=True)
                if self.seconds() - evaluated >= options.evaluate_minutes * 60:
                    self.record(figures | self.evaluate())
                    evaluated = self.seconds()
                if self.seconds() - saved >= options.save_minutes * 60:
                    self.save()
                    saved = self.seconds()
        self.save()

    def done(self) -> float:
        """0 to 1."""
        if self.options.steps:
            return self.progress.step / self.options.steps
        return self.seconds() / (60 * self.options.minutes)

    def seconds(self) -> float:
        return self.progress.seconds + time.perf_counter() - self.began

    def step(self, rate: float) -> dict[str, float]:
        """One of the optimizer, over `accumulate` batches."""
        options, losses = self.options, []
        self.student.train()
        for part in range(options.accumulate):
            at = self.progress.step * options.accumulate + part
            batch = self.batch(at, options.batch_rows)
            losses.append(self.distill(batch, at))
            self.progress.tokens += batch.numel()
            self.weights.collect()
        loss = sum(losses) / len(losses)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} at step {self.progress.step}: lower --learning-rate; the last "
                f"state in {options.work} is whole"
            )
        self.weights.step(rate)
        zeros = self.pressure.settle(GAIN)
        self.progress.strength = self.pressure.strength
        self.progress.step += 1
        return {"loss": loss, "zeros": zeros, "strength": self.pressure.strength, "rate": rate}

    def batch(self, at: int, size: int) -> Tensor:
        """The `at`-th: int64 [rows, tokens]. Every row once, then all again in another order."""
        size = min(size, len(self.texts.train))
        turn, place = divmod(at, len(self.texts.train) // size)
        draw = torch.Generator().manual_seed(self.options.seed + 1 + turn)
        order = torch.randperm(len(self.texts.train), generator=draw)
        return self.texts.train[order[place * size : (place + 1) * size]]

    def distill(self, batch: Tensor, at: int) -> float:
        """Gradients of the whole on the `at`-th batch; returns the loss."""
        draw = torch.Generator().manual_seed(self.options.seed + at)
        chosen = torch.randperm(batch.numel(), generator=draw)[: math.ceil(batch.numel() * LOGIT_SHARE)]
        options = {"use_cache": False, "output_hidden_states": True}
        with torch.no_grad():
            theirs = self.teacher.base_model(batch, **options)
            wanted = self.head(self.teacher, theirs.last_hidden_state, chosen)
        ours = self.student.base_model(batch, **options)
        loss = divergence(self.head(self.student, ours.last_hidden_state, chosen), wanted)
        loss = loss + self.options.hidden_weight * hidden_loss(ours.hidden_states[1:-1], theirs.hidden_states[1:-1])
        (loss / self.options.accumulate).backward()
        return float(loss.detach())

    @staticmethod
    def head(model: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
        return model.get_output_embeddings()(hidden.flatten(0, 1)[chosen])

    # What is kept

    def evaluate(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for kind, rows in self.texts.held_out.items():
            perplexity, zeros = measure(self.student, rows)
            figures |= {f"perplexity {kind}": perplexity, f"zeros {kind}": sum(zeros) / len(zeros)}
        return figures

    def record(self, figures: dict[str, Any]) -> None:
        line = {**asdict(self.progress), "seconds": round(self.seconds(), 1), **figures}
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def save(self) -> None:
        """One file, so that weights, moments and counts always belong together."""
        now = self.seconds()
        self.progress.seconds, self.began = now, time.perf_counter()
        counts = {f"progress.{k}": torch.tensor(v, dtype=torch.float64) for k, v in asdict(self.progress).items()}
        save_aside(self.weights.tensors() | counts, self.state)

    def resume(self) -> None:
        """Takes up the saved state, if there is one, and forgets what was logged after it."""
        if not self.state.exists():
            self.log.unlink(missing_ok=True)
            return
        tensors = load_file(self.state)
        fields = {name: tensors[f"progress.{name}"].item() for name in asdict(self.progress)}
        self.progress = Progress(*(type(d)(fields[n]) for n, d in asdict(Progress()).items()))
        self.pressure.strength = self.progress.strength
        with torch.no_grad():
            self.weights.restore(tensors)
        lines = self.log.read_text(encoding="utf-8").splitlines(keepends=True) if self.log.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.progress.step]
        aside = self.log.with_suffix(".tmp")
        aside.write_text("".join(kept), encoding="utf-8")
        os.replace(aside, self.log)
        say(f"goes on from step {self.progress.step}, after {self.progress.seconds:.0f} s")


def read_texts(teacher: PreTrainedModel, tokenizer: Any, options: argparse.Namespace) -> Texts:
    """Raises ValueError where there are too few."""
    vocabulary, tokens = teacher.config.vocab_size, options.row_tokens
    kind = "texts" if options.texts else "documentation"
    train, held_out = (
        rows_of(tokenizer, texts, tokens, vocabulary)
        for texts in (given(options.texts) if options.texts else documentation())
    )
    if not (len(train) and len(held_out)):
        raise ValueError(
            f"--texts: expected at least {8 * tokens} tokens (rows of {tokens}, an eighth held out), got "
            f"{(len(train) + len(held_out)) * tokens}"
        )
    texts = {kind: held_out[:: math.ceil(len(held_out) / MOST_EVALUATED)]}
    rows = math.ceil(options.generated_tokens / tokens)
    if rows:
        own = generated(teacher, tokenizer, train, rows, options.seed, options.work)
        held = torch.arange(rows) % HELD_OUT_GENERATED == 0
        texts["generated"] = own[held][:MOST_EVALUATED]
        train = torch.cat([train, *[own[~held]] * options.generated_weight])
    return Texts(train, texts)


def write_model(student: PreTrainedModel, tokenizer: Any, output: Path) -> None:
    """Written aside and renamed."""
    aside = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    student.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    if output.exists():  # empty: main() saw to it
        output.rmdir()
    aside.rename(output)


def report(training: Training, options: argparse.Namespace) -> list[dict[str, Any]]:
    name = options.gguf_file or options.model
    progress = training.progress
    spent = {"tokens_trained": progress.tokens, "seconds": round(progress.seconds, 1), "steps": progress.step}
    rows = []
    for kind, held_out in training.texts.held_out.items():
        before, zeros_before = measure(training.teacher, held_out)
        after, zeros = measure(training.student, held_out)
        for system, perplexity, layers in (("original", before, zeros_before), (options.activation, after, zeros)):
            more = {"zeros": sum(layers) / len(layers), "zeros_by_layer": layers, "change": perplexity / before - 1}
            tokens = held_out.numel()
            rows.append(row(f"{kind}, held out", system, "perplexity", [perplexity], name, tokens=tokens, **more))
            say(f"{kind:14} {system:10} perplexity {perplexity:9.3f}  zeros {more['zeros']:6.1%}")
        rows[-1] |= spent
        say(f"{'':14} change {after / before - 1:+.1%}; layers {min(zeros):.1%} to {max(zeros):.1%} zeros")
    return rows


def share(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and below 1, got {text}")
    return number


def above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return number


def at_least_zero(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text}")
    return number


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory or a hub id")
    add("output", metavar="OUTPUT", type=Path, help="directory to write, new or empty")
    add("--gguf-file", help="name of a GGUF file in MODEL")
    add("--work", type=Path, metavar="DIR", help="text, state and log (default: OUTPUT.work)")
    add("--restart", action="store_true", help="forget what WORK holds")
    add("--activation", choices=("relu", "relu2"), default="relu")
    add("--target-zeros", type=share, default=0.82, help="share of MLP neurons, mean over layers (default 0.82)")
    add("--minutes", type=above_zero, default=55.0, help="all in all, resumed runs added up (default 55)")
    add("--steps", type=at_least_one, help="so many instead of --minutes")
    add("--texts", type=Path, nargs="+", metavar="FILE", help="UTF-8 (default: the standard library's documentation)")
    add("--generated-tokens", type=at_least_zero, default=98304, help="default 98304")
    add("--generated-weight", type=at_least_one, default=4, help="times that each is seen per turn (default 4)")
    add("--row-tokens", type=at_least_one, default=256, help="default 256")
    add("--batch-rows", type=at_least_one, default=4, help="default 4")
    add("--accumulate", type=at_least_one, default=1, help="batches per step (default 1)")
    add("--learning-rate", type=above_zero, default=6e-4, help="at its highest (default 6e-4)")
    add("--hidden-weight", type=at_least_zero, default=1.0, help="of the residual streams' error (default 1)")
    add("--pressure", type=above_zero, default=1e-4, help="on gates, to begin with (default 1e-4)")
    add("--save-minutes", type=at_least_zero, default=5.0, help="between states (default 5; 0: each step)")
    add("--evaluate-minutes", type=at_least_zero, default=4.0, help="between lines of the log (default 4)")
    add("--seed", type=int, default=0)
    add("--threads", type=at_least_one, help="default: as many as torch takes by itself")
    add("--json", type=Path, metavar="FILE", help="write the figures here")
    options = parser.parse_args(arguments)
    options.work = options.work or options.output.with_name(f"{options.output.name}.work")
    if options.row_tokens < 4:
        parser.error(f"--row-tokens: expected at least 4, got {options.row_tokens}")
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        parser.error(f"OUTPUT: expected a new or empty directory, got {options.output}")
    for file in options.texts or ():
        if not file.is_file():
            parser.error(f"--texts: there is no file {file}")
    return options


def claim(options: argparse.Namespace) -> None:
    """Makes WORK this run's. Raises ValueError where it holds a run with other settings."""
    if options.restart and (options.work / "settings.json").exists():
        shutil.rmtree(options.work)
    free = ("output", "work", "restart", "minutes", "save_minutes", "evaluate_minutes", "threads", "json")
    ours = {k: v for k, v in vars(options).items() if k not in free}
    ours["texts"] = options.texts and [str(file) for file in options.texts]
    file = options.work / "settings.json"
    if file.exists():
        theirs = json.loads(file.read_text(encoding="utf-8"))
        for name, value in ours.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"{name.replace('_', '-')}: the run in {options.work} has {theirs.get(name)!r}, got {value!r}; "
                    "give another --work, or --restart to forget that run"
                )
    options.work.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(ours, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    options = parse()
    began = time.perf_counter()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        claim(options)
        teacher, tokenizer = load(options.model, options.gguf_file)
        student = convert(teacher, options.activation)
        texts = read_texts(teacher, tokenizer, options)
        keep_memory()
        training = Training(teacher, student, texts, options)
        training.resume()
        training.began = began
        training.run()
    except (ValueError, OSError, FloatingPointError) as error:
        sys.exit(f"relufy: {error}")
    rows = report(training, options)
    write_model(student, tokenizer, options.output)
    write_json(options.json, rows)
    say(f"{training.progress.tokens:,} tokens in {training.seconds():.0f} s; written to {options.output}")


if __name__ == "__main__":
    main()
