"""Evaluation beside a direct computation in plain torch, on a tiny llama with a tiny tokenizer."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from hf_sparse import SparseAutoModelForCausalLM, WeightOnlyQuantConfig
from hf_sparse.cli import app
from hf_sparse.evaluation import Evaluation, bytes_per_token, evaluate, full_precision
from hf_sparse.modeling import HybridMLP, SkipRule, hybrid_blocks, magnitude, skipping
from hf_sparse.texts import read_texts
from tiny_models import VOCABULARY, plain_twin, prompt_ids, save_checkpoint, save_tokenizer

TEXT = topics["while"] + topics["with"]
WINDOW = 23


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation") / "tiny"
    save_checkpoint("llama", folder)
    save_tokenizer(folder)
    return folder


def load(directory: Path, **options: Any) -> Any:
    form = WeightOnlyQuantConfig(compute_dtype="fp32")
    return SparseAutoModelForCausalLM.from_pretrained(
        directory, **({"quantization_config": form, "calibration_tokens": 256} | options)
    )


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def original(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory)


@pytest.fixture
def model(directory: Path) -> Any:
    """With rules that skip: every layer another share."""
    made = load(directory)
    for number, block in enumerate(mlps(made)):
        block.rule = magnitude(gate=0.02 + 0.03 * number)
    return made


def mlps(model: Any) -> list[HybridMLP]:
    return [block for block in hybrid_blocks(model) if isinstance(block, HybridMLP)]


class GivenTokens:
    """A tokenizer that makes the same tokens of every text."""

    bos_token_id = None

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __call__(self, text: str, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=self.ids)


def render(found: Evaluation, width: int = 80) -> str:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(found)
    return capture.get()


@torch.no_grad()
def test_figures_equal_a_direct_computation(model: Any, original: Any, tokenizer: Any) -> None:
    found = evaluate(model, tokenizer, [TEXT], tokens=100, window=WINDOW, reference=original)
    ids = torch.tensor(tokenizer(TEXT).input_ids)[: 100 // WINDOW * WINDOW].view(-1, WINDOW)
    assert (found.tokens, found.window, found.texts) == (len(ids) * (WINDOW - 1), WINDOW, "1 texts")
    logits = {"full_precision": original(ids).logits, "dense": plain_twin(model)(ids).logits}
    model.reset_active_fraction()
    with skipping("always"):
        logits["sparse"] = torch.cat([model(row[None], use_cache=False).logits for row in ids])
    probabilities = {name: value[:, :-1].double().softmax(-1) for name, value in logits.items()}
    for name, p in probabilities.items():
        likelihood = p.gather(-1, ids[:, 1:, None]).log().mean()
        assert found.perplexity[name] == pytest.approx(float((-likelihood).exp()), rel=1e-4), name
    seen = {(d.model, d.reference): d for d in found.differences}
    assert list(seen) == [("sparse", "dense"), ("sparse", "full_precision"), ("dense", "full_precision")]
    for (q_name, p_name), difference in seen.items():
        p, q = probabilities[p_name], probabilities[q_name]
        assert difference.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-3, abs=1e-7)
        assert difference.kl > 1e-5
        same = (p.argmax(-1) == q.argmax(-1)).double().mean()
        assert difference.same_top1 == pytest.approx(float(same), abs=1.5 / found.tokens)  # a near tie may fall
    fractions = [block.active_fraction for block in mlps(model)]
    assert list(found.active_fraction) == list(found.read_share) == [0, 1, 2]
    weights = [sum(b.weight_bytes for b in hybrid_blocks(model) if b.id.layer == layer) for layer in range(3)]
    read = sum(share * of for share, of in zip(found.read_share.values(), weights, strict=True))
    head = found.bytes_per_token["dense"] - sum(weights)
    assert found.bytes_per_token["sparse"] == pytest.approx(read + head, abs=1)
    assert read < sum(weights)
    assert list(found.active_fraction.values()) == pytest.approx(fractions, abs=1e-3)
    assert fractions == sorted(fractions, reverse=True) and fractions[2] < fractions[0] < 1


def test_without_rules_sparse_is_dense(directory: Path, tokenizer: Any) -> None:
    model = load(directory, max_perplexity_increase=0)
    found = evaluate(model, tokenizer, [TEXT], tokens=90, window=WINDOW)
    assert found.perplexity["sparse"] == found.perplexity["dense"]
    assert "full_precision" not in found.perplexity
    (difference,) = found.differences
    assert (difference.same_top1, difference.kl) == (1.0, 0.0)
    assert set(found.active_fraction.values()) == {1.0}
    assert found.bytes_per_token["sparse"] == found.bytes_per_token["dense"]


def test_unpacked_weights_without_rules_are_full_precision(directory: Path, original: Any, tokenizer: Any) -> None:
    model = load(directory, quantization_config=None, max_perplexity_increase=0)
    found = evaluate(model, tokenizer, [TEXT], tokens=90, window=WINDOW, reference=original)
    assert found.weights == "as they came"
    assert found.perplexity["dense"] == pytest.approx(found.perplexity["full_precision"], rel=1e-5)
    assert max(difference.kl for difference in found.differences) < 1e-6


def test_counts_of_generation_are_left_as_they_were(model: Any, tokenizer: Any) -> None:
    model.generate(prompt_ids(1, 5), max_new_tokens=4, do_sample=False)
    before = [block.counters.tolist() for block in mlps(model)]
    assert all(offered for counts in before for _, offered in counts[1:])  # of gates and hidden states
    evaluate(model, tokenizer, [TEXT], tokens=50, window=WINDOW)
    assert [block.counters.tolist() for block in mlps(model)] == before


# What of each matrix is read, in words of the places whose kept entries read it: "" is all of it.
READ_BY_GATES = {
    "llama": {"up_proj": "gate", "down_proj": "hidden"},
    "phi3": {"gate_up_proj": "half gate", "down_proj": "hidden"},  # gates are read whole: they say which are active
    "opt": {"fc2": "hidden"},
    "gpt_neox": {"dense_4h_to_h": "hidden"},
}
READ_BY_INPUTS = {
    "llama": {"gate_proj": "input", "q_proj": "input", "o_proj": "output"},
    "phi3": {"o_proj": "output"},
    "opt": {"fc1": "input", "q_proj": "input", "out_proj": "output"},
    "gpt_neox": {"dense_h_to_4h": "input", "dense": "output"},
}


@pytest.mark.parametrize("case", READ_BY_GATES)
@pytest.mark.parametrize("everywhere", [False, True])
def test_bytes_per_token_count_what_is_read(case: str, everywhere: bool, tmp_path: Path) -> None:
    save_checkpoint(case, tmp_path)
    model = load(tmp_path, max_perplexity_increase=0)
    head = model.get_output_embeddings()
    of_head = head.matrix.nbytes if hasattr(head, "matrix") else head.weight.nbytes

    def every() -> int:
        return sum(m.nbytes for b in hybrid_blocks(model) for s in b.shards for m in s.matrices.values())

    assert bytes_per_token(model) == bytes_per_token(model, rules=False) == of_head + every()
    assert model.read_share() is None
    read_by = READ_BY_GATES[case] | (READ_BY_INPUTS[case] if everywhere else {})
    expected = 0.0
    for number, block in enumerate(hybrid_blocks(model)):
        if isinstance(block, HybridMLP):
            below = {"gate": 0.1} | ({"input": 0.1, "hidden": 0.1} if everywhere else {})
        else:
            below = dict.fromkeys(block.takes("magnitude"), 0.1) if everywhere else {}
        block.rule = magnitude(**below) if below else SkipRule()
        kept = {place: 20 + 17 * i + number for i, place in enumerate(block.places)}
        if not below:
            kept = {}
        for i, place in enumerate(block.places):
            if place in kept:
                block.counters[i] = torch.tensor([kept[place], 100])
        for name, matrix in block.shards[0].matrices.items():
            half, _, place = read_by.get(name, "").rpartition(" ")
            share = kept[place] / 100 if place else 1.0
            expected += matrix.nbytes * ((1 + share) / 2 if half else share)
    assert bytes_per_token(model) == pytest.approx(of_head + expected, abs=1)
    assert bytes_per_token(model, rules=False) == of_head + every()
    assert model.read_share() == pytest.approx(expected / every())


def test_windows_begin_as_the_tokenizer_begins_texts(model: Any, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    beginning = save_tokenizer(tmp_path)
    plain = beginning(TEXT).input_ids
    beginning.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    seen: list[torch.Tensor] = []
    handle = model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(_ids(args, kwargs)), with_kwargs=True
    )
    found = evaluate(model, beginning, [TEXT], tokens=60, window=11)
    handle.remove()
    rows = torch.cat(seen[0::2])
    assert torch.equal(rows[:, 1:].flatten(), torch.tensor(plain[:60]))
    assert rows[:, 0].tolist() == [1] * 6 and found.tokens == 60


def _ids(args: Any, kwargs: Any) -> torch.Tensor:
    return args[0] if args else kwargs["input_ids"]


def test_texts_are_read_alike_from_a_list_a_text_file_and_lines(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    txt, jsonl = tmp_path / "a.txt", tmp_path / "a.jsonl"
    txt.write_text(TEXT, encoding="utf-8")
    jsonl.write_text(json.dumps({"text": TEXT}) + "\n\n", encoding="utf-8")
    found = [evaluate(model, tokenizer, source, tokens=50, window=WINDOW) for source in ([TEXT], txt, str(jsonl))]
    assert len({one.perplexity["sparse"] for one in found}) == 1
    assert found[1].texts == str(txt)
    default = evaluate(model, tokenizer, tokens=50, window=WINDOW)
    assert default.perplexity != found[0].perplexity and "documentation" in default.texts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"texts": []}, "texts: expected at least 23 tokens, a window, got 0"),
        ({"texts": ["for a in b"]}, "texts: expected at least 23 tokens, a window, got "),
        ({"texts": [TEXT, " \n"]}, r"texts\[1\]: got ' \\n', allowed are texts that are not blank"),
        ({"texts": "no, a text is not a path"}, "texts: got 'no, a text is not a path', allowed are a list"),
        ({"tokens": 22}, "tokens: got 22, expected at least a window of 23"),
        ({"tokens": 50.0}, "tokens: got 50.0"),
        ({"window": 1}, "window: got 1, allowed are integers from 2 to the model's 160"),
        ({"window": 161}, "window: got 161"),
        ({"window": True}, "window: got True"),
        ({"tokenizer": None}, "texts: there is no tokenizer"),
    ],
)
def test_bad_arguments_are_named(model: Any, tokenizer: Any, options: dict[str, Any], message: str) -> None:
    arguments = {"tokenizer": tokenizer, "texts": [TEXT], "tokens": 60, "window": WINDOW} | options
    with pytest.raises(ValueError, match=message):
        evaluate(model, **arguments)


def test_tokens_and_references_that_do_not_fit_are_named(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"texts: the tokenizer gives token {VOCABULARY}, the model has {VOCABULARY}"):
        evaluate(model, GivenTokens([*range(60), VOCABULARY]), [TEXT], tokens=60, window=WINDOW)
    other = save_checkpoint("llama", tmp_path, vocab_size=VOCABULARY + 6)
    with pytest.raises(ValueError, match=f"reference: has {VOCABULARY + 6} tokens, expected the model's {VOCABULARY}"):
        evaluate(model, tokenizer, [TEXT], tokens=60, window=WINDOW, reference=other)


def test_bad_files_are_named(tmp_path: Path) -> None:
    def read(name: str, content: bytes | None) -> list[str]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        return read_texts(tmp_path / name, name="texts", tokens=10)

    with pytest.raises(OSError, match=r"texts: .*absent\.txt: No such file"):
        read("absent.txt", None)
    with pytest.raises(ValueError, match=r"texts: got .*a\.md', allowed are .*\.txt or \.jsonl"):
        read("a.md", b"words")
    with pytest.raises(ValueError, match=r"texts: .*latin\.txt: 'utf-8' codec"):
        read("latin.txt", b"caf\xe9")
    with pytest.raises(ValueError, match=r"texts: .*half\.jsonl: "):
        read("half.jsonl", b'{"text": "a"}\n{"text"\n')
    with pytest.raises(ValueError, match=r'texts: .*other\.jsonl: expected a "text" in every line'):
        read("other.jsonl", b'{"text": "a"}\n{"words": "a"}\n')
    assert read("fine.jsonl", '{"text": "é"}\n\n{"text": ""}\n'.encode()) == ["é", ""]


def test_a_broken_model_is_reported_as_it_is(model: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    model.get_input_embeddings().weight.data[5] = math.nan
    text = tokenizer.decode([5] * 60)
    with caplog.at_level(logging.WARNING, logger="hf_sparse"):
        found = evaluate(model, tokenizer, [text + TEXT], tokens=60, window=WINDOW)
    assert math.isnan(found.perplexity["sparse"]) and math.isnan(found.perplexity["dense"])
    assert math.isnan(found.differences[0].kl) and math.isnan(found.differences[0].same_top1)
    assert "worse than guessing" in caplog.text
    written = json.dumps(found.to_dict(), allow_nan=False)
    assert math.isnan(float(json.loads(written)["perplexity"]["dense"]))
    assert "nan" in render(found)


def test_a_model_worse_than_guessing_is_warned_of(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    norm = model.base_model.norm.weight.data
    norm.mul_(3)
    with skipping("never"):
        own = model.generate(prompt_ids(1, 1), max_new_tokens=39, do_sample=False, eos_token_id=None)[0].tolist()

    def warnings() -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="hf_sparse"):
            evaluate(model, GivenTokens(own), ["its own text"], tokens=40, window=40)
        return sum("worse than guessing" in record.message for record in caplog.records)

    assert warnings() == 0
    norm.mul_(-1)
    assert warnings() == 1


def test_the_table_says_what_was_found(model: Any, original: Any, tokenizer: Any) -> None:
    found = evaluate(model, tokenizer, [TEXT], tokens=60, window=WINDOW, reference=original)
    shown = render(found)
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    for name in ("sparse", "dense", "full_precision"):
        assert f"{found.perplexity[name]:.3f}" in shown
    for difference in found.differences:
        assert f"{difference.kl:.4f}" in shown and f"{difference.same_top1:.1%}" in shown
    change = found.perplexity["sparse"] / found.perplexity["dense"] - 1
    assert f"{change:+.2%}" in shown
    layers = [line.split()[3:] for line in shown.splitlines() if line.split()[:3] == ["0", "to", "2"]]
    for cells, shares in zip(layers, (found.active_fraction, found.read_share), strict=True):
        assert cells == [f"{100 * share:.1f}" for share in shares.values()]


def test_full_precision_is_the_checkpoint_or_nothing(
    directory: Path, original: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = full_precision(str(directory), dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), original.parameters(), strict=True))
    assert full_precision(str(directory), dtype=torch.bfloat16).dtype == torch.bfloat16
    load(directory).save_pretrained(tmp_path / "packed")
    with caplog.at_level(logging.WARNING, logger="hf_sparse"):
        assert full_precision(str(tmp_path / "packed")) is None
        assert full_precision(str(tmp_path / "packed")) is None
    assert caplog.text.count("full precision is left out") == 1


# What lm-eval needs of a model


@torch.no_grad()
def test_rows_padded_on_the_right_without_a_mask_equal_their_solo_runs(model: Any) -> None:
    """lm-eval's batches are made so."""
    rows = [prompt_ids(1, length, seed=length)[0] for length in (19, 7, 12)]
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    assert model.eval() is model
    model.tie_weights()
    for mode in ("always", "never"):
        with skipping(mode):
            logits = model(batch.to(model.device)).logits
            for row, found in zip(rows, logits, strict=True):
                torch.testing.assert_close(found[: len(row)], model(row[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_lm_eval_runs_offline_on_the_model_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    directory = tmp_path / "model"
    save_checkpoint("llama", directory, max_position_embeddings=400)  # a token is about a character here
    save_tokenizer(directory)
    script = Path(__file__).parents[1] / "scripts" / "lm_eval_offline.py"
    report = tmp_path / "report.json"
    command = [sys.executable, script, directory, "--pages", 2, "--questions", 3, "--json", report]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(report.read_text())
    for name in ("sparse", "dense"):
        assert found[name]["documentation_perplexity"]["byte_perplexity,none"] > 1
        assert 0 <= found[name]["documentation_next"]["acc,none"] <= 1
    assert found["sparse"]["documentation_perplexity"] != found["dense"]["documentation_perplexity"]
    assert 0 < found["active_fraction"] < 1


# The command line


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_eval_prints_the_table_and_writes_all_of_it(directory: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ("--tokens", 64, "--window", 16, "--weight-dtype", "int4_asym", "--head-dtype", "none", "--json", report)
    result = invoke("eval", directory, *options)
    assert result.exit_code == 0, result.output
    written = json.loads(report.read_text())
    assert written["model"] == str(directory) and list(tmp_path.iterdir()) == [report]
    assert (written["tokens"], written["window"], written["weights"]) == (60, 16, "int4_asym in groups of 64")
    assert set(written["perplexity"]) == {"sparse", "dense", "full_precision"}
    for value in written["perplexity"].values():
        assert f"{value:.3f}" in result.stdout
    alone = invoke("eval", directory, *options, "--no-full-precision")
    assert alone.exit_code == 0 and "full precision" not in alone.stdout
    assert set(json.loads(report.read_text())["perplexity"]) == {"sparse", "dense"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--texts", "absent.txt"], "texts: absent.txt: No such file"),
        (["--json", "absent/report.json"], "json: got absent/report.json, but there is no directory absent"),
        (["--tokens", "5"], "tokens: got 5"),
        (["--window", "1000"], "window: got 1000"),
        (["--head-dtype", "int3"], "head_dtype: got 'int3'"),
    ],
)
def test_bad_options_of_eval_are_one_line(directory: Path, options: list[str], named: str) -> None:
    result = invoke("eval", directory, *options)
    assert result.exit_code == 1 and result.stdout == ""
    assert named in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr


def test_a_packed_folder_is_evaluated_without_the_original(directory: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    load(directory, quantization_config=None, load_in_4bit=True).save_pretrained(packed)
    save_tokenizer(packed)
    result = invoke("eval", packed, "--tokens", 64, "--window", 16)
    assert result.exit_code == 0, result.output
    assert "dense" in result.stdout and "full precision" not in result.stdout
