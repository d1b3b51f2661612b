"""Every option of `from_pretrained` that is ours, validated once, with its error; and budgets, always in bytes."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from transformers.utils.quantization_config import BitsAndBytesConfig, QuantizationConfigMixin

from hf_sparse.modeling.neurons import Tier

from .log import warn_once

WEIGHT_DTYPES = ("nf4", "fp4", "int4", "int4_asym", "iq4_nl", "int8")
STORED = "stored"
CACHE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8}
COMPUTE_DTYPES = ("int8", "bf16", "fp32")
GROUP_SIZES = (32, 64, 128)
FORMAT_VERSION = 3  # 1: without formats and algorithm; 2: without algorithm
ALGORITHMS = {  # the weight_dtypes that each can make, the usual one first
    "RTN": (*WEIGHT_DTYPES, STORED),
    "HQQ": ("int4_asym",),
    "AutoRound": ("int4_asym", "int4"),
    "GPTQ": ("int4_asym", "int4"),
}

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_TEXT_SUFFIXES = (".txt", ".jsonl")
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PROJECTION = re.compile(r"([0-9]+\.)?[A-Za-z_]\w*(\.\w+)*")
_AMOUNT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([a-z]*|%)")


def parse_bytes(value: int | str, *, total: int | None = None, name: str = "gpu_budget") -> int:
    """A memory budget in bytes.

    `value` is a number of bytes (1234, "1234"), an amount with a unit ("11GB", "10 GiB", "512mb"; GB = 10**9 bytes,
    GiB = 2**30 bytes, in any case, never bits) or a percentage of `total` bytes ("80%"). Fractions of a byte are
    dropped.

    Raises ValueError naming `name` where the value is none of these, is negative, is past 100%, or is a percentage
    and `total` is not known.
    """
    allowed = 'bytes as an integer >= 0, or a text such as "11GB", "10GiB", "512MB" or "80%"'
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    parts = _AMOUNT.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if parts is None or parts[2] not in (*_UNITS, "%"):
        raise ValueError(f"{name}: got {value!r}, allowed are {allowed}")
    amount = Decimal(parts[1])
    if parts[2] != "%":
        return int(amount * _UNITS[parts[2]])
    if amount > 100:
        raise ValueError(f"{name}: got {value!r}, allowed are percentages from 0% to 100%")
    if total is None:
        raise ValueError(
            f"{name}: got {value!r}, but a percentage needs a device whose total memory is known; allowed are {allowed}"
        )
    return int(amount * total / 100)


def _require_one_of(name: str, value: object, allowed: Sequence[object], algorithm: str = "RTN") -> None:
    # type first: True == 1 and 64.0 == 64 would pass a plain membership test
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        where = "" if algorithm == "RTN" else f" with algorithm {algorithm!r}"
        raise ValueError(f"{name}: got {value!r}, allowed{where} are {', '.join(map(repr, allowed))}")


@dataclass(kw_only=True)
class WeightOnlyQuantConfig(QuantizationConfigMixin):
    """How the weights of the hybrid blocks are stored and multiplied.

    `weight_dtype`: "nf4", "fp4", "int4", "int4_asym" (with an offset per group), "iq4_nl" or "int8"; or "stored": the
    codes of a checkpoint that bitsandbytes, GPTQ, AWQ or llama.cpp quantized, wherever they can be kept (a loaded model
    says what that came to). `compute_dtype`: what activations are rounded to for the products: "int8" (two signed bytes
    per activation while decoding, bfloat16 for prompts), "bf16" or "fp32" (not at all). `group_size`: neighbouring
    weights that share one scale, 32, 64 or 128. `head_dtype`: a weight_dtype for the language modeling head; None
    leaves it as it is. `formats`: projections that are stored otherwise, by name within their layer, with the layer's
    number in front for one layer alone: {"mlp.down_proj": "int8:64", "3.self_attn.v_proj": "int8:32"}.

    `algorithm`: how numbers become codes. "RTN" rounds to the nearest value. "HQQ" moves the offset of each group until
    errors are sparse, without data. "AutoRound" and "GPTQ" tune codes on the calibration texts, which takes long, once;
    what writes to the hidden states, and whatever they leave, is quantized by HQQ, or rounded to "int4". All but "RTN"
    make "int4_asym", the last two "int4" too; head and other `formats` are rounded. `weight_dtype` left out: "nf4" for
    "RTN", "int4_asym" for the others. Raises ValueError on any other value.

    Saved as "quantization_config" of a model's config.json.
    """

    quant_method: str = field(default="hf_sparse", init=False)  # type: ignore[assignment]  # an enum in transformers
    weight_dtype: str = ""  # settled with the algorithm
    compute_dtype: str = "int8"
    group_size: int = 64
    head_dtype: str | None = "int8"
    formats: Mapping[str, str] = field(default_factory=dict)
    algorithm: str = "RTN"

    def __post_init__(self) -> None:
        _require_one_of("algorithm", self.algorithm, tuple(ALGORITHMS))
        if self.weight_dtype == "":
            self.weight_dtype = ALGORITHMS[self.algorithm][0]
        _require_one_of("head_dtype", self.head_dtype, (None, *WEIGHT_DTYPES))
        _require_one_of("weight_dtype", self.weight_dtype, ALGORITHMS[self.algorithm], self.algorithm)
        _require_one_of("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        _require_one_of("group_size", self.group_size, GROUP_SIZES)
        formats: object = self.formats
        if not isinstance(formats, Mapping):
            raise ValueError(f"formats: got {formats!r}, allowed are mappings: {{'mlp.down_proj': 'int8:64'}}")
        self.formats = dict(formats)
        if self.formats and self.weight_dtype == STORED:
            raise ValueError(f"formats: got {self.formats!r:.100}, allowed is {{}} where weight_dtype is {STORED!r}")
        forms = [f"{weight_dtype}:{size}" for weight_dtype in WEIGHT_DTYPES for size in GROUP_SIZES]
        for name, form in self.formats.items():
            if not isinstance(name, str) or not _PROJECTION.fullmatch(name):
                raise ValueError(f"formats: got the key {name!r:.100}, allowed are names such as 'mlp.down_proj'")
            _require_one_of(f"formats[{name!r}]", form, forms)

    def exceptions(self) -> dict[str, tuple[str, int]]:
        """`formats` as a WeightFormat has them."""
        parts = {name: form.split(":") for name, form in self.formats.items()}
        return {name: (weight_dtype, int(size)) for name, (weight_dtype, size) in parts.items()}

    def to_dict(self) -> dict[str, Any]:
        """The fields, "quant_method" and "format_version": plain JSON values."""
        fields, version = asdict(self), 1
        # What has its default is left out: a version that other releases read and plans were made for.
        if self.algorithm == "RTN":
            del fields["algorithm"]
        else:
            version = 3
        if not self.formats:
            del fields["formats"]
        return fields | {"format_version": max(version, 2 if self.formats else 1)}

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The inverse of `to_dict`; keyword arguments that are fields replace what the dict says, the others come
        back when `return_unused_kwargs` is set (the contract of transformers' own configs).

        Raises ValueError on a foreign quant_method, a newer format_version, an unknown key or a value that is not
        allowed.
        """
        options = dict(config_dict)
        _require_one_of("quant_method", options.pop("quant_method", "hf_sparse"), ("hf_sparse",))
        version = options.pop("format_version", FORMAT_VERSION)
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise ValueError(
                f"format_version: got {version!r}, this hf_sparse reads 1 to {FORMAT_VERSION}; try a newer one"
            )
        fields = ("weight_dtype", "compute_dtype", "group_size", "head_dtype", "formats", "algorithm")
        if unknown := sorted(set(options) - set(fields)):
            raise ValueError(f"quantization_config: got unknown keys {unknown}, allowed are {list(fields)}")
        unused = {key: value for key, value in kwargs.items() if key not in fields}
        config = cls(**(options | {key: value for key, value in kwargs.items() if key in fields}))
        return (config, unused) if return_unused_kwargs else config

    @classmethod
    def resolve(cls, quantization_config: object, load_in_4bit: bool) -> WeightOnlyQuantConfig | None:
        """What the two arguments of `from_pretrained` ask for, None for weights that stay as they are.

        `quantization_config` is None, a WeightOnlyQuantConfig or its dict, or a transformers.BitsAndBytesConfig,
        whose 4-bit type and compute type are kept and whose remaining options are said to be ignored. Raises
        ValueError on anything else, and where the two arguments contradict each other.
        """
        _require_one_of("load_in_4bit", load_in_4bit, (False, True))
        match quantization_config:
            case None:
                return cls() if load_in_4bit else None
            case WeightOnlyQuantConfig():
                config = quantization_config
            case BitsAndBytesConfig():
                config = cls._from_bitsandbytes(quantization_config)
            case Mapping():
                config = cls.from_dict(quantization_config)
            case _:
                raise ValueError(
                    f"quantization_config: got a {type(quantization_config).__name__}, allowed are None, "
                    "hf_sparse.WeightOnlyQuantConfig (or its dict) and transformers.BitsAndBytesConfig"
                )
        if load_in_4bit and config.weight_dtype == "int8":
            raise ValueError(
                "load_in_4bit: got True, but quantization_config asks for 8 bits (weight_dtype 'int8'); give one"
            )
        return config

    @classmethod
    def _from_bitsandbytes(cls, bnb: BitsAndBytesConfig) -> WeightOnlyQuantConfig:
        if not (bnb.load_in_4bit or bnb.load_in_8bit):
            raise ValueError(
                "quantization_config: got a BitsAndBytesConfig with neither load_in_4bit nor load_in_8bit, set one"
            )
        options = ("bnb_4bit_use_double_quant", "llm_int8_skip_modules", "llm_int8_has_fp16_weight")
        for option in options:
            if getattr(bnb, option):
                warn_once(f"BitsAndBytesConfig.{option} has no counterpart in hf_sparse and is ignored")
        if bnb.load_in_8bit:
            return cls(weight_dtype="int8")
        compute = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}
        if bnb.bnb_4bit_compute_dtype not in compute:
            raise ValueError(
                f"bnb_4bit_compute_dtype: got {bnb.bnb_4bit_compute_dtype}, allowed are {', '.join(map(str, compute))}"
            )
        if bnb.bnb_4bit_compute_dtype == torch.float16:
            warn_once("bnb_4bit_compute_dtype float16: hf_sparse computes in bfloat16 instead")
        _require_one_of("bnb_4bit_quant_type", bnb.bnb_4bit_quant_type, ("nf4", "fp4"))
        return cls(weight_dtype=bnb.bnb_4bit_quant_type, compute_dtype=compute[bnb.bnb_4bit_compute_dtype])


@dataclass(frozen=True)
class SparseConfig:
    """The options of `from_pretrained` that concern sparsity, calibration and placement. Raises ValueError naming the
    option.

    `gpu_budget`: memory for the neurons on the GPU (see `parse_bytes`), or one per device: {"cuda:0": "11GB"}. None:
    what is free.
    `max_perplexity_increase`: what skipping may cost, as a fraction of the dense perplexity; 0 skips only what is
    exactly zero.
    `target_sparsity`: in place of it, the share of the bytes of the blocks' weights that a token is to leave unread,
    whatever that costs, which is said.
    `calibration_texts`: a list of texts, the path of a .txt file (one text) or of a .jsonl file ("text" of each
    line), or the name of a dataset for the `datasets` library; None for the prompts that ship with the package,
    completed by the model.
    `calibration_tokens`: tokens to calibrate on. `calibration_seed`: of every random choice in calibration.
    `tiers`: explicit tiers in place of the devices found, for a rehearsal; `gpu_budget` must then be None.
    `cache_tokens`: of how many tokens a budget leaves room for keys and values; None: what the model has positions for,
    2,048 at most.
    """

    gpu_budget: int | str | Mapping[str, int | str] | None = None
    max_perplexity_increase: float = 0.01
    target_sparsity: float | None = None
    calibration_texts: str | os.PathLike[str] | Sequence[str] | None = None
    calibration_tokens: int = 8192
    calibration_seed: int = 0
    tiers: tuple[Tier, ...] | None = None
    cache_tokens: int | None = None

    def __post_init__(self) -> None:
        self._check_budget()
        increase = self.max_perplexity_increase
        if (
            isinstance(increase, bool)
            or not isinstance(increase, int | float)
            or not (math.isfinite(increase) and increase >= 0)
        ):
            raise ValueError(
                f"max_perplexity_increase: got {increase!r}, allowed are finite numbers >= 0, such as 0.01 for 1%"
            )
        target = self.target_sparsity
        if target is not None and not (type(target) is float and 0 < target < 1):
            raise ValueError(f"target_sparsity: got {target!r}, allowed are None and numbers above 0 and below 1")
        for name, least in (("calibration_tokens", 1), ("calibration_seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**63:
                raise ValueError(f"{name}: got {value!r}, allowed are integers from {least} to 2**63 - 1")
        if self.cache_tokens is not None and (type(self.cache_tokens) is not int or self.cache_tokens < 0):
            raise ValueError(f"cache_tokens: got {self.cache_tokens!r}, allowed are None and integers >= 0")
        self._check_texts()
        if self.tiers is not None:
            self._check_tiers(self.tiers)

    def _check_budget(self) -> None:
        if self.gpu_budget is None:
            return
        if not isinstance(self.gpu_budget, Mapping):
            budgets = {"gpu_budget": self.gpu_budget}
        elif not self.gpu_budget:
            raise ValueError(
                "gpu_budget: got an empty mapping, allowed are None or budgets by device, such as {'cuda:0': '11GB'}"
            )
        else:
            for device in self.gpu_budget:
                try:
                    torch.device(device)
                except (RuntimeError, TypeError) as error:
                    raise ValueError(
                        f"gpu_budget: got the key {device!r}, allowed are device names such as 'cuda:0'"
                    ) from error
            budgets = {f"gpu_budget[{device!r}]": budget for device, budget in self.gpu_budget.items()}
        for name, budget in budgets.items():
            # the devices are not known here: any total will do to check a percentage
            parse_bytes(budget, total=0, name=name)

    def _check_texts(self) -> None:
        texts = self.calibration_texts
        if texts is None:
            return
        if isinstance(texts, str | os.PathLike):
            name = os.fspath(texts)
            is_file = os.path.isfile(name)  # Path.is_file raises where a long text was given for a path
            is_text_file = Path(name).suffix in _TEXT_SUFFIXES
            is_dataset = isinstance(texts, str) and not is_text_file and _DATASET.fullmatch(name) is not None
            if not (is_text_file if is_file else is_dataset):
                raise ValueError(
                    f"calibration_texts: got {name!r:.100}, allowed are a list of texts, the path of an existing file "
                    f"that ends in {' or '.join(_TEXT_SUFFIXES)}, or the name of a dataset"
                )
        elif not isinstance(texts, Sequence) or not texts:
            raise ValueError(
                f"calibration_texts: got {texts!r}, allowed are a list of at least one text, a path or a dataset's name"
            )
        else:
            for position, text in enumerate(texts):
                if not isinstance(text, str) or not text.strip():
                    raise ValueError(
                        f"calibration_texts[{position}]: got {text!r}, allowed are texts that are not blank"
                    )

    def _check_tiers(self, tiers: tuple[Tier, ...]) -> None:
        if not isinstance(tiers, tuple) or not tiers or not all(isinstance(tier, Tier) for tier in tiers):
            raise ValueError(
                f"tiers: got {tiers!r}, allowed are None or a tuple of at least one hf_sparse.modeling.neurons.Tier"
            )
        if len(tiers) > 1 and tiers[-1].accelerates:
            raise ValueError(f"tiers: got {tiers[-1].name!r} last, expected a tier of the host's memory there")
        names = [tier.name for tier in tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers: got the names {names}, each must be different")
        if self.gpu_budget is not None:
            raise ValueError(
                f"gpu_budget: got {self.gpu_budget!r} together with tiers, but each tier holds its own budget; give one"
            )

    def calibration_settings(self) -> dict[str, Any]:
        """What a plan is keyed on beside checkpoint and quantization: JSON values; the texts by a hash of their
        content.

        A dataset counts by its name. Raises OSError where a calibration file has gone since.
        """
        return {
            "texts": self._texts_key(),
            "tokens": self.calibration_tokens,
            "seed": self.calibration_seed,
            "max_perplexity_increase": float(self.max_perplexity_increase),
            "target_sparsity": self.target_sparsity,
        }

    def _texts_key(self) -> str:
        texts = self.calibration_texts
        if texts is None:
            return "default"
        if isinstance(texts, str | os.PathLike):
            path = Path(texts)
            if path.suffix not in _TEXT_SUFFIXES:
                return f"dataset:{texts}"
            return f"{path.suffix[1:]}:{hashlib.sha256(path.read_bytes()).hexdigest()}"
        digest = hashlib.sha256()
        for text in texts:
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)  # lengths keep ["ab"] and ["a", "b"] apart
        return f"texts:{digest.hexdigest()}"
