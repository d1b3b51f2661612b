"""SparseAutoModelForCausalLM: the one road from checkpoint to model, told step by step."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file, extract_commit_hash

from hf_sparse.modeling import Placement, Tier, WeightFormat, family_of, hybrid_blocks, swap_blocks

from .adapters import CONFIG as ADAPTER_CONFIG
from .adapters import WEIGHTS as ADAPTER_WEIGHTS
from .adapters import AdapterMerger, MergedCheckpoint, is_adapter, show_projections
from .algorithms import TUNED
from .calibration import calibrate
from .checkpoint import Checkpoint, open_checkpoint
from .config import CACHE_DTYPES, STORED, SparseConfig, WeightOnlyQuantConfig
from .gguf_header import read_gguf_header
from .hub import PLAN_FILES, fetch_plan, is_repo_id
from .log import logger, show_progress_messages
from .model import PLAN_FOLDER, SparseMixin, as_sparse, block_neurons, model_fingerprint
from .plan import PlacementPlan, PlanError, PlanKey
from .plan_store import plan_directory, plan_lock, save_or_warn
from .prequantized import Method, PrequantizedCheckpoint, method_of
from .stored_formats import FOUR_BITS, settle_formats
from .tuning import tuned
from .weights import load_weights, skeleton, take_dtype_of

HUB_ARGUMENTS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "variant",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
CACHE_TOKENS = 2048
ALWAYS_SO = ("low_cpu_mem_usage", "weights_only")
CALIBRATION_ARGUMENTS = (
    "max_perplexity_increase",
    "target_sparsity",
    "calibration_texts",
    "calibration_tokens",
    "calibration_seed",
)


class SparseAutoModelForCausalLM:
    """Drop-in for `transformers.AutoModelForCausalLM`: the same `from_pretrained`, another model underneath."""

    def __init__(self) -> None:
        raise OSError(f"{type(self).__name__} is made by {type(self).__name__}.from_pretrained(name_or_path)")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        load_in_4bit: bool = False,
        quantization_config: Any = None,
        gpu_budget: int | str | Mapping[str, int | str] | None = None,
        plan: str | os.PathLike[str] | None = None,
        plan_revision: str | None = None,
        tiers: Sequence[Tier] | None = None,
        gguf_file: str | None = None,
        dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool | None = None,
        device_map: Any = None,
        output_loading_info: bool = False,
        cache_dtype: str | None = None,
        cache_tokens: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Loads a checkpoint, quantizes it tensor by tensor, calibrates on first load, and places every neuron.

        Args:
            pretrained_model_name_or_path: a local directory or a hub id, of a model or of a LoRA adapter, which is
                merged into its base model.
            load_in_4bit: 4-bit weights (nf4, groups of 64); short for `quantization_config=WeightOnlyQuantConfig()`.
            quantization_config: a `WeightOnlyQuantConfig`, or transformers' `BitsAndBytesConfig`.
            gpu_budget: bytes of neurons and other weights that may lie on the GPU: "11GB", "10GiB", "80%", bytes, or a
                mapping from device to budget. Without a GPU it is accepted, and a warning says that all neurons stay on
                the CPU.
            plan: a folder or a Hub id with a `PlacementPlan` to use instead of looking for one.
            plan_revision: branch, tag or commit of a plan on the Hub; `revision` is the model's.
            tiers: explicit `Tier`s instead of the devices found, the CPU last; a second CPU tier rehearses a GPU.
            gguf_file: name of a GGUF file in the directory or repository.
            cache_dtype: "int8", "bf16" or "fp32": what keys and values are cached in; None: the model's dtype.
            cache_tokens: of how many tokens a budget leaves room for keys and values; None: 2,048, or the model's
                positions where those are fewer.
            device_map: "auto", "cpu" or None are understood; placement is the plan's.
            max_perplexity_increase, calibration_texts, calibration_tokens, calibration_seed: see `SparseConfig`.
            low_cpu_mem_usage, weights_only: accepted, for they are always so: weights are streamed, never unpickled.
            dtype, attn_implementation, trust_remote_code, output_loading_info, config, cache_dir, force_download,
                local_files_only, proxies, revision, subfolder, token, use_safetensors, variant: as in transformers.
                What is left must be fields of the model's config.

        Returns:
            The model, an instance of its family's own class and of `SparseMixin`; with `output_loading_info` a tuple of
            it and transformers' loading info.

        Raises:
            TypeError: an argument that neither hf_sparse nor the model's config knows.
            OSError: files that are missing or cannot be read.
            ValueError: an architecture without hybrid blocks, contradictory options, a budget too small, weights that
                are not finite.
        """
        show_progress_messages()
        name = os.fspath(pretrained_model_name_or_path)
        given = {key: kwargs.pop(key) for key in CALIBRATION_ARGUMENTS if key in kwargs}
        tiers = tuple(tiers) if isinstance(tiers, Sequence) else tiers
        options = SparseConfig(gpu_budget=gpu_budget, tiers=tiers, cache_tokens=cache_tokens, **given)
        hub = {key: kwargs.pop(key) for key in HUB_ARGUMENTS if key in kwargs}
        variant = hub.pop("variant", None)  # of the weights alone
        dtype = kwargs.pop("torch_dtype", None) if dtype is None else dtype
        for always_so in ALWAYS_SO:
            kwargs.pop(always_so, None)
        check_device_map(device_map)
        if cache_dtype not in (None, *CACHE_DTYPES):
            raise ValueError(
                f"cache_dtype: got {cache_dtype!r}, allowed are None, {', '.join(map(repr, CACHE_DTYPES))}"
            )
        if kwargs.pop("use_safetensors", True) is False:
            raise ValueError(
                "use_safetensors: False asks for pickled weights, which hf_sparse never reads; "
                "allowed are True and None"
            )

        adapter = None if gguf_file is not None else _adapter(name, hub)
        if adapter is not None:
            name, hub = _base_of(adapter), hub | {"revision": adapter.base_revision, "subfolder": ""}
        config = _config(name, gguf_file, trust_remote_code, hub, kwargs)
        family_of(config.model_type)
        quantization, method = _quantization(config, quantization_config, load_in_4bit)
        dtype_of_config = config.dtype
        model = skeleton(config, dtype, attn_implementation, trust_remote_code)
        checkpoint = open_checkpoint(name, model=model, gguf_file=gguf_file, variant=variant, **hub)
        if method is not None:
            checkpoint = PrequantizedCheckpoint(checkpoint, method)
        if adapter is not None:
            checkpoint = MergedCheckpoint(checkpoint, adapter, model)
        if dtype in (None, "auto") and dtype_of_config is None:
            take_dtype_of(checkpoint, model)
        swap_blocks(model, weight_format(quantization))
        any_four_bits = gguf_file is not None and load_in_4bit and quantization_config is None
        quantization = settle_formats(quantization, model, checkpoint, any_four_bits)
        for block in hybrid_blocks(model):
            block.weights = weight_format(quantization)

        def tokenizer() -> Any:
            own = None if adapter is None else adapter.directory
            source = str(own) if own is not None and _has_tokenizer(own) else name
            return _tokenizer(source, gguf_file, trust_remote_code, hub, checkpoint.directory)

        algorithm = "RTN" if quantization is None else quantization.algorithm
        if quantization is not None and algorithm in TUNED:
            make = functools.partial(
                skeleton, copy.deepcopy(config), model.dtype, attn_implementation, trust_remote_code
            )
            checkpoint = tuned(model, checkpoint, quantization, options, tokenizer, make)
        info = load_weights(model, checkpoint, head_format(quantization), algorithm)
        _load_generation_config(model, name, gguf_file, hub)

        sparse = complete(
            model,
            checkpoint,
            quantization,
            options,
            asked=None if plan is None else _plan_folder(plan, plan_revision, hub),
            any_settings=not given,
            hub=hub,
            tokenizer=tokenizer,
        )
        sparse.cache_dtype = None if cache_dtype is None else CACHE_DTYPES[cache_dtype]
        return (sparse, info) if output_loading_info else sparse


def complete(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    quantization: WeightOnlyQuantConfig | None,
    options: SparseConfig,
    *,
    hub: dict[str, Any],
    tokenizer: Callable[[], Any],
    asked: Path | None = None,
    any_settings: bool = True,
) -> SparseMixin:
    """`model`, whose hybrid blocks are loaded from `checkpoint`, with a plan and on its tiers: the last steps of
    from_pretrained. `asked`: a folder with the plan that the user names; `any_settings`: whatever settings of the
    calibration a plan was made with will do; `tokenizer` is called where it must be calibrated.
    """
    if quantization is not None:
        model.config.quantization_config = quantization
    sparse = as_sparse(model)
    show_projections(sparse)
    sparse.eval()
    sparse.cache_dtype = None
    sparse.place(_everything_on_the_cpu(sparse))
    key = PlanKey(
        model_fingerprint(checkpoint, model.config),
        {} if quantization is None else quantization.to_dict(),
        options.calibration_settings(),
    )
    directory = plan_directory(
        checkpoint.directory,
        local=checkpoint.repo_id is None,
        key=key,
        repo_id=checkpoint.repo_id,
        revision_hash=checkpoint.revision_hash,
    )
    beside = checkpoint.directory / PLAN_FOLDER
    found = None if asked is None else _find_plan(asked, sparse, key, any_settings)
    found = found or _find_plan(beside, sparse, key, any_settings)
    if found is None:
        with plan_lock(directory):
            found = _find_plan(directory, sparse, key)
            if found is None and _fetch_plan_of_model(checkpoint, hub):
                found = _find_plan(beside, sparse, key, any_settings)
            if found is None:
                found = replace(
                    calibrate(sparse, tokenizer(), options, key, directory),
                    base_model=checkpoint.repo_id,
                    base_model_revision=checkpoint.revision_hash,
                    gguf_file=next((file.name for file in checkpoint.files if file.suffix == ".gguf"), None),
                )
                sparse.plan_directory = directory if save_or_warn(found, directory) else None
    sparse.use_plan(found)
    sparse.given_tiers, sparse.placements_directory = options.tiers, directory
    sparse.cache_tokens = _cache_tokens(options, sparse.config)
    sparse.solve(options.tiers or sparse.found_tiers(options.gpu_budget))
    return sparse


# Config and options


def check_device_map(device_map: Any) -> None:
    plain = device_map.get("") if isinstance(device_map, dict) and set(device_map) == {""} else device_map
    if plain is not None and str(plain) not in ("auto", "cpu"):
        raise ValueError(
            f"device_map: expected None, 'auto' or 'cpu', got {device_map!r}; "
            f"where neurons live is the plan's choice, within gpu_budget"
        )


def _config(name: str, gguf_file: str | None, trust_remote_code: bool | None, hub: dict, kwargs: dict) -> Any:
    config = kwargs.pop("config", None)
    if config is None or isinstance(config, (str, os.PathLike)):
        source = name if config is None else os.fspath(config)
        if os.path.isfile(source):
            raise OSError(
                f"pretrained_model_name_or_path: {source} is a file; give its folder, and a GGUF as gguf_file"
            )
        if gguf_file is None and os.path.isdir(source) and not (Path(source) / "config.json").exists():
            files = sorted(path.name for path in Path(source).glob("*.gguf"))
            if files:
                raise OSError(f"{source} has no config.json but a GGUF: pass gguf_file={files[0]!r}")
        if not os.path.exists(source) and (os.path.isabs(source) or source.startswith(".") or source.count("/") > 1):
            raise OSError(f"pretrained_model_name_or_path: {source} is neither an existing directory nor a hub id")
        gguf = {} if gguf_file is None else {"gguf_file": gguf_file}
        if gguf_file is not None and (path := Path(source) / gguf_file).is_file():
            read_gguf_header(path)  # names the file where it is damaged; transformers' reader does not
        config, unused = AutoConfig.from_pretrained(
            source, return_unused_kwargs=True, trust_remote_code=trust_remote_code, **gguf, **hub, **kwargs
        )
        unused = unused.keys() & kwargs.keys()  # transformers may hand its own back too
    else:
        config, unused = copy.deepcopy(config), kwargs.keys()
    if unused:
        ours = [p for p in inspect.signature(SparseAutoModelForCausalLM.from_pretrained).parameters if p != "kwargs"]
        raise TypeError(
            f"from_pretrained() got unknown arguments: {', '.join(sorted(unused))}. Known are {', '.join(ours[1:])}, "
            f"{', '.join((*CALIBRATION_ARGUMENTS, *HUB_ARGUMENTS))}, config, use_safetensors, "
            f"and the fields of {type(config).__name__}."
        )
    return config


def _quantization(
    config: Any, quantization_config: Any, load_in_4bit: bool
) -> tuple[WeightOnlyQuantConfig | None, Method | None]:
    """How weights are to be stored, and how the checkpoint stores them where another library quantized it."""
    asked = WeightOnlyQuantConfig.resolve(quantization_config, load_in_4bit)
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return asked, None
    fields = stored if isinstance(stored, dict) else stored.to_dict()
    if fields.get("quant_method") != WeightOnlyQuantConfig.quant_method:
        method = method_of(fields)
        del config.quantization_config
        keeps_codes = quantization_config is None and (method.bits <= FOUR_BITS or not load_in_4bit)
        return WeightOnlyQuantConfig(weight_dtype=STORED) if keeps_codes else asked, method
    del config.quantization_config
    saved = WeightOnlyQuantConfig.from_dict(fields)
    if (quantization_config is not None and asked != saved) or (load_in_4bit and saved.weight_dtype == "int8"):
        raise ValueError(
            f"quantization_config: the checkpoint is stored as {saved}, got {asked}; leave the argument out"
        )
    return saved, None


def weight_format(quantization: WeightOnlyQuantConfig | None) -> WeightFormat:
    if quantization is None:
        return WeightFormat()
    form = (quantization.weight_dtype, quantization.group_size, quantization.compute_dtype)
    return WeightFormat(*form, quantization.exceptions())


def head_format(quantization: WeightOnlyQuantConfig | None) -> WeightFormat | None:
    if quantization is None or quantization.head_dtype is None:
        return None
    return WeightFormat(quantization.head_dtype, quantization.group_size, quantization.compute_dtype)


def _load_generation_config(model: PreTrainedModel, name: str, gguf_file: str | None, hub: dict[str, Any]) -> None:
    if gguf_file is None:
        try:
            model.generation_config = GenerationConfig.from_pretrained(name, **hub)
        except OSError:
            pass  # made from the model's config, as transformers does


def _tokenizer(
    name: str, gguf_file: str | None, trust_remote_code: bool | None, hub: dict[str, Any], directory: Path
) -> Any:
    gguf = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **gguf, **hub)
    except OSError:
        return None  # there is none, which the calibration says
    except (ValueError, KeyError, TypeError) as error:
        if _has_tokenizer(directory):
            logger.warning("The tokenizer of %s cannot be read: %s", name, str(error).partition("\n")[0])
        return None


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / file).exists() for file in TOKENIZER_FILES)


def _adapter(name: str, hub: dict[str, Any]) -> AdapterMerger | None:
    """The adapter that `name` is, a folder or a repository, where it is not a model."""
    if os.path.isdir(name):
        return AdapterMerger(name) if is_adapter(name) else None
    if not is_repo_id(name):
        return None

    def found(file: str) -> str | None:
        return cached_file(
            name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
            **hub,
        )

    try:
        if found(CONFIG_NAME) is not None or found(ADAPTER_CONFIG) is None:
            return None
        weights = found(ADAPTER_WEIGHTS)
    except OSError:
        return None  # why nothing can be had of this repository is said when its config is asked for
    if weights is None:
        raise OSError(f"{name}: an adapter without {ADAPTER_WEIGHTS}; pickled ones are never read")
    return AdapterMerger(Path(weights).parent, repo_id=name, revision_hash=extract_commit_hash(weights, None))


def _base_of(adapter: AdapterMerger) -> str:
    if adapter.base_model is None:
        raise ValueError(
            f"adapter {adapter.directory}: base_model_name_or_path: got none, expected the model it belongs to"
        )
    return adapter.base_model


# The plan, and every neuron to its tier


def _cache_tokens(options: SparseConfig, config: Any) -> int:
    if options.cache_tokens is not None:
        return options.cache_tokens
    positions = getattr(config, "max_position_embeddings", None)
    return min(CACHE_TOKENS, positions) if isinstance(positions, int) else CACHE_TOKENS


def _everything_on_the_cpu(model: SparseMixin) -> Placement:
    zeros = {id: torch.zeros(count, dtype=torch.int64) for id, count in block_neurons(model).items()}
    return Placement((Tier("cpu"),), zeros)


def _plan_folder(asked: str | os.PathLike[str], revision: str | None, hub: dict[str, Any]) -> Path:
    """Where the plan lies that the user names."""
    if (Path(asked) / "plan.json").is_file():
        return Path(asked)
    if os.path.exists(asked) or not is_repo_id(asked):
        raise OSError(
            f"plan: no plan.json in {os.fspath(asked)!r}; expected a folder that PlacementPlan.save_pretrained wrote, "
            "or the id of a repository with a plan, 'user/name'"
        )
    options = ("token", "cache_dir", "force_download", "local_files_only")
    return fetch_plan(os.fspath(asked), revision=revision, **{name: hub[name] for name in options if name in hub})


def _fetch_plan_of_model(checkpoint: Checkpoint, hub: dict[str, Any]) -> bool:
    """Whether the model's repository on the Hub comes with a plan, which then lies beside its weights."""
    if checkpoint.repo_id is None:
        return False
    options = hub | {"revision": checkpoint.revision_hash or hub.get("revision")}
    folder = Path(options.pop("subfolder", "") or "") / PLAN_FOLDER
    return all(
        cached_file(
            checkpoint.repo_id,
            (folder / file).as_posix(),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **options,
        )
        for file in PLAN_FILES
    )


def _find_plan(source: Path, model: SparseMixin, key: PlanKey, any_settings: bool = False) -> PlacementPlan | None:
    """The plan in `source` if there is one that fits; one that does not is reported by field. `any_settings`: see
    `complete`.
    """
    if not (source / "plan.json").is_file():
        return None
    try:
        plan = PlacementPlan.from_pretrained(source)
        plan.check_model(
            model_type=model.config.model_type,
            shapes={block.id: block.shape for block in hybrid_blocks(model)},
            key=replace(key, calibration=plan.key.calibration) if any_settings else key,
        )
    except PlanError as error:
        logger.warning("The plan in %s is not used: %s", source, error)
        return None
    logger.info("Using the plan in %s", source)
    model.plan_directory = source
    return plan
