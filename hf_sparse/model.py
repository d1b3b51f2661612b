"""What a loaded model can do beyond transformers' own: its class is the family's own class with this mixin in front."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_sparse.modeling import (
    BlockId,
    Engine,
    HybridBlock,
    HybridMLP,
    NotUsual,
    PackedHead,
    PagedCacheLayer,
    SkipRule,
    engine_of,
    family_of,
    hybrid_blocks,
    note_forward,
    skipping_mode,
    turn_exactly,
    use_pages,
    watch_passes,
)

from .card import draw_plots, plan_card
from .card import measure_speed as measure_decode_speed
from .checkpoint import Checkpoint, open_checkpoint
from .generation import decode_alone, decodes_alone, is_watched
from .hub import publish
from .log import logger, warn_once
from .placed import PlacedMixin
from .plan import PlacementPlan
from .streaming import StreamingMixin, resolve_options

PLAN_FOLDER = "hf_sparse_plan"
# Arguments of forward() with which a decode step may be computed natively: any value, and those listed.
STEP_ARGUMENTS = {"input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "return_dict"}
STEP_OPTIONS: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, True),
    "logits_to_keep": (None, 0, 1),
    "inputs_embeds": (None,),
    "labels": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
PUSH_ARGUMENTS = (
    "repo_id",
    "commit_message",
    "commit_description",
    "private",
    "token",
    "revision",
    "create_pr",
    "tags",
)


class SparseMixin(PlacedMixin, StreamingMixin):
    """Added to the class of a model that `SparseAutoModelForCausalLM` loads."""

    plan: PlacementPlan
    _engine: Engine | None = None
    plan_directory: Path | None  # where the plan is kept; None where it could not be written

    def use_plan(self, plan: PlacementPlan) -> None:
        """Gives every block its rule and its predictor. `plan` must have passed `check_model`."""
        predictors = {id: planned.build(torch.device("cpu")) for id, planned in plan.predictors.items()}
        for block in hybrid_blocks(self):
            block.rule = plan.rules.get(block.id, SkipRule())
            block.reset_counters()
            block.predictor = predictors.get(block.id)
        self.plan = plan
        self._engine_tried = False

    # Decoding natively

    def engine(self, thoroughly: bool = True) -> Engine | None:
        """What decodes one token in one native call; None where the model is left to transformers' own modules.
        `thoroughly`: see Engine.fits.
        """
        if self._engine_tried and self._engine is not None and not self._engine.fits(thoroughly):
            self._engine_tried = False
        if not self._engine_tried:
            self._engine, self._engine_tried = None, True
            try:
                self._engine = engine_of(self)
            except NotUsual as reason:
                logger.info("Decoding goes through transformers' modules: %s", reason)
        return self._engine

    def native_logits(self, token: Tensor, cache: Cache, thoroughly: bool = False) -> Tensor | None:
        """Logits float32 [1, vocabulary], rounded to the model's dtype, that follow `token`, int64 [1, 1], after what
        `cache` holds, which gets its keys and values. None, and nothing is changed, where native code does not decode
        this: no engine, a hook on a part of the model, an empty cache or one of another kind.
        """
        engine = self.engine(thoroughly)
        if engine is None or engine.observed() or self.training or cache.get_seq_length() == 0:
            return None
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            return None
        if not isinstance(cache.layers[0], PagedCacheLayer) and not use_pages(
            cache, self.config.num_hidden_layers, self.cache_dtype
        ):
            return None
        return engine.logits(token, cache, rules=skipping_mode() != "never")

    def _native_step(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast | None:
        """The output of `forward` for a decode step; None where the family's own `forward` is to compute it."""
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if args or cache is None:
            return None
        options = ((kwargs.get(name), allowed) for name, allowed in STEP_OPTIONS.items())
        if any(isinstance(value, Tensor) or value not in allowed for value, allowed in options):
            return None
        if kwargs.keys() - STEP_ARGUMENTS - STEP_OPTIONS.keys() or self.config.output_hidden_states:
            return None
        if self.config.output_attentions or kwargs.get("return_dict", self.config.return_dict) is False:
            return None
        token, mask, positions = (kwargs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        if token is None or token.shape != (1, 1) or not isinstance(cache, Cache):
            return None
        if not isinstance(mask, Tensor | None):  # one for each kind of layer, as static caches have them
            return None
        seen = cache.get_seq_length()
        if mask is not None and not (mask.dim() == 2 and mask.shape[1] == seen + 1 and bool(mask.all())):
            return None
        if positions is not None and not (positions.shape == (1, 1) and int(positions) == seen):
            return None
        logits = self.native_logits(token, cache, thoroughly=True)
        return None if logits is None else CausalLMOutputWithPast(logits=logits[None].to(self.dtype), cache=cache)

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        alone = not is_watched(self) and decodes_alone(input_ids, generation_config, synced_gpus, model_kwargs)
        if alone and self.engine() is not None:
            return decode_alone(self, *arguments, streamer, model_kwargs)
        theirs: Any = super()._sample  # type: ignore[misc]
        return theirs(*arguments, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        made_here = model_kwargs.get("cache") is None
        theirs: Any = super()._prepare_cache_for_generation
        result = theirs(generation_config, model_kwargs, *args)
        cache = model_kwargs.get("cache")
        if made_here and isinstance(cache, Cache) and (self.cache_dtype is not None or self.engine() is not None):
            paged = use_pages(cache, self.config.num_hidden_layers, self.cache_dtype)
            if not paged and self.cache_dtype is not None:
                warn_once(f"cache_dtype {self.cache_dtype} is not used: a cache of this kind keeps the model's dtype")
        return result

    def active_fraction(self) -> float | None:
        """Share of MLP neurons that were computed for the tokens to which rules applied, since the last
        `reset_active_fraction()`; None where no rule has applied yet."""
        counted = [b for b in hybrid_blocks(self) if isinstance(b, HybridMLP) and b.active_fraction is not None]
        return sum(b.active_fraction or 0.0 for b in counted) / len(counted) if counted else None

    def read_share(self) -> float | None:
        """Share of the bytes of the blocks' weights, predictors added to what is read, that a token to which rules
        applied read since the last `reset_active_fraction()`; None where no rule has applied yet. Embeddings and head
        are not in it.
        """
        blocks = list(hybrid_blocks(self))
        if not any(bool(block.counters[:, 1].any()) for block in blocks):
            return None
        return sum(block.read_bytes() for block in blocks) / sum(block.weight_bytes for block in blocks)

    def reset_active_fraction(self) -> None:
        for block in hybrid_blocks(self):
            block.reset_counters()

    def dequantized_state_dict(self) -> dict[str, Tensor]:
        """The state dict that the family's plain transformers class needs to compute with the weights this model
        has. A packed head has weights of its own: where the embeddings are tied, the plain class needs
        `tie_word_embeddings=False`.
        """
        state = {
            name: tensor
            for name, tensor in self.state_dict().items()
            if name.rpartition(".")[2] not in ("codes", "scales", "offsets")
        }
        for path, block in self.named_modules():
            if isinstance(block, HybridBlock):
                layer = path.removesuffix(block.path)
                state.update({layer + name: weight.to(self.dtype) for name, weight in block.dequantize().items()})
            if isinstance(block, PackedHead):
                state[f"{path}.weight"] = block.matrix.dequantize().to(self.dtype)
        return state

    @classmethod
    def can_generate(cls) -> bool:
        """True: what is loaded is a causal language model. transformers would look for it in the class's bases."""
        return True

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' own `generate`, which also takes the options of StreamingLLM (Xiao et al. 2024).

        When the cache holds `ctx_size` tokens, the first `n_keep` (4) stay and the oldest `n_discard` (-1: half) of the
        others go, without anything being computed again. They may also be fields of a GenerationConfig, or of
        `self.generation_config`. The cache is a StreamingCache, which `past_key_values` takes to go on with a text.

        Without them looks at the prompt's length first: raises ValueError for an empty prompt, and where prompt and
        `max_new_tokens` are more than the positions of a model that has learned positions; with rotary or ALiBi
        positions a prompt beyond them is a warning, since the model computes on, at a loss of quality.
        """
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        if isinstance(prompt, Tensor) and kwargs.get("inputs_embeds") is None:
            configs = {"generation_config": args[0]} if args else {}
            self._check_prompt(prompt, kwargs.get("max_new_tokens") or 0, self.streams(configs | kwargs))
        return super().generate(inputs, *args, **kwargs)

    def _check_prompt(self, prompt: Tensor, new_tokens: int, streams: bool) -> None:
        if prompt.dim() != 2 or prompt.shape[0] == 0 or prompt.shape[1] == 0:
            raise ValueError(
                f"inputs: expected token ids [batch, tokens] with at least one token, got shape {list(prompt.shape)}"
            )
        positions = getattr(self.config, "max_position_embeddings", None)
        if positions is None or streams:
            return
        message = f"inputs: the prompt has {prompt.shape[1]} tokens, the model {positions} positions"
        learned = any(isinstance(m, nn.Embedding) and "position" in name for name, m in self.named_modules())
        if learned and prompt.shape[1] + new_tokens > positions:
            raise ValueError(f"{message}, max_new_tokens is {new_tokens}; shorten the prompt or ask for fewer tokens")
        if prompt.shape[1] > positions:
            warn_once(f"{message}; what it computes beyond them is not what it was trained for.")

    def save_pretrained(  # type: ignore[override]  # what is not named here goes on to transformers
        self, save_directory: str | os.PathLike[str], *, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Writes what `from_pretrained(save_directory)` loads again at once: packed weights, config, and the plan.

        Without quantization the files are those of transformers itself. Everything is written to a folder aside and
        then renamed. Further arguments are those of transformers' `save_pretrained` and, with `push_to_hub`, of its
        `push_to_hub`.
        """
        target = Path(save_directory)
        if target.is_file():
            raise NotADirectoryError(f"save_directory: expected a directory, {target} is a file")
        hub = {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs}
        target.mkdir(parents=True, exist_ok=True)
        if self.generation_config is not None and resolve_options(self.generation_config) is not None:
            self.generation_config._from_model_config = False  # or transformers forgets them when it loads
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=target) as aside:
            super().save_pretrained(aside, **kwargs)
            written = sorted(Path(aside).iterdir(), key=lambda path: path.suffix == ".json")
            for path in written:
                os.replace(path, target / path.name)
        variant = kwargs.get("variant")
        infix = "" if variant is None else f".{re.escape(variant)}"
        weights = re.compile(rf"model{infix}(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index{infix}\.json")
        names = {path.name for path in written}
        if not any(weights.fullmatch(name) for name in names):
            return  # another process writes the weights (is_main_process=False)
        for path in target.iterdir():
            if weights.fullmatch(path.name) and path.name not in names:
                path.unlink()  # shards of an earlier save, as in transformers
        fingerprint = model_fingerprint(open_checkpoint(target, model=self, variant=variant), self.config)
        plan = dataclasses.replace(self.plan, key=dataclasses.replace(self.plan.key, checkpoint=fingerprint))
        plan.save_pretrained(target / PLAN_FOLDER)
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", target.name), **hub)

    def push_plan_to_hub(
        self,
        repo_id: str,
        *,
        base_model: str | None = None,
        license: str | None = None,
        measure_speed: bool = True,
        commit_message: str = "Upload plan",
        **kwargs: Any,
    ) -> CommitInfo:
        """Publishes the plan in the model repository `repo_id` with a card, in one commit: `from_pretrained(name,
        plan=repo_id)` then needs no calibration. No weights go with it.

        Args:
            base_model: Hub id of the model, where the plan does not know it.
            license: for the card, such as "apache-2.0".
            measure_speed: decode some tokens, for the card.
            private, token, revision, create_pr: as in `hf_sparse.hub.publish`, whose errors these are.
        """
        with tempfile.TemporaryDirectory(prefix="hf_sparse-") as aside:
            folder = Path(aside, "plan")
            self.save_plan_with_card(
                folder, repo_id, base_model=base_model, license=license, measure_speed=measure_speed
            )
            return publish(folder, repo_id, commit_message=commit_message, **kwargs)

    def save_plan_with_card(
        self,
        folder: str | os.PathLike[str],
        repo_id: str,
        *,
        base_model: str | None = None,
        license: str | None = None,
        measure_speed: bool = True,
    ) -> None:
        """Writes to `folder` what `push_plan_to_hub` publishes: plan, card and plots."""
        # which file of another repository a GGUF is, nobody knows here
        loaded_by = (base_model or self.plan.base_model) if self.plan.gguf_file is None else self.plan.base_model
        plan = self.plan if base_model is None else dataclasses.replace(self.plan, base_model=base_model)
        folder = Path(folder)
        plan.save_pretrained(folder)
        card = plan_card(
            plan,
            folder,
            repo_id,
            loaded_by=loaded_by,
            model_bytes=self.get_memory_footprint(),
            license=license,
            speed=measure_decode_speed(self) if measure_speed else None,
            plots=draw_plots(self, folder),
        )
        card.save(folder / "README.md")

    def to(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Raises ValueError for another device than the primary tier's: neurons are where the plan put them."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None and (device.type, device.index or 0) != (self.device.type, self.device.index or 0):
            raise ValueError(
                f"device: the model is placed on {self.device} by its plan, got {device}; "
                "load it with another gpu_budget"
            )
        return super().to(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError: packed and placed weights come from a checkpoint."""
        raise ValueError("load_state_dict: a placed model takes no other weights; load them with from_pretrained")

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As in transformers; packed weights count as the numbers they stand for."""
        neurons = sum(
            sum(p.rows) * block.neurons * p.columns for block in hybrid_blocks(self) for p in block.projections.values()
        )
        head = self.get_output_embeddings()
        if isinstance(head, PackedHead) and not head.tied:
            neurons += head.out_features * head.in_features
        for block in hybrid_blocks(self):
            neurons += sum(bias.numel() for shard in block.shards for bias in shard.biases.values())
            neurons += 0 if block.output_bias is None else block.output_bias.numel()
        return super().num_parameters(only_trainable, exclude_embeddings) + (0 if only_trainable else neurons)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; raises ValueError where the head is packed."""
        if isinstance(self.get_output_embeddings(), PackedHead):
            raise ValueError("resize_token_embeddings: the head is packed; load the model with head_dtype=None")
        return super().resize_token_embeddings(*args, **kwargs)

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the model on all tiers."""
        return sum(tier.nbytes for tier in self.placement_summary().tiers)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {**self.__dict__, "_engine": None, "_engine_tried": False}  # addresses mean nothing elsewhere
        state.pop("_moving", None)  # nor do locks
        return _bare_model, (type(self).__bases__[1],), state


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """What holds the decoder layers, through which every forward pass goes; OPT's goes past the base model."""
    return model.get_submodule(family_of(model.config.model_type).layers.rpartition(".")[0])


def note_forward_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the decoder: rules apply to tokens that are decoded one by one."""
    tokens = next(
        (t for t in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if isinstance(t, Tensor)), None
    )
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    note_forward(0 if tokens is None else tokens.shape[1], 0 if cache is None else int(cache.get_seq_length()))


note_forward_pass.of_hf_sparse = True  # type: ignore[attr-defined]  # see Engine.observed


@functools.cache
def sparse_class(cls: type[PreTrainedModel]) -> type[SparseMixin]:
    """`cls` with the mixin in front; name and module stay, pipelines and `architectures` go by them."""
    return type(
        cls.__name__,
        (SparseMixin, cls),
        {
            "__module__": cls.__module__,
            "_can_compile_fullgraph": False,
            "forward": torch.compiler.disable(_with_native_steps(cls.forward)),
        },
    )


def _with_native_steps(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)  # generate() and others read its signature
    def with_native_steps(self: SparseMixin, *args: Any, **kwargs: Any) -> Any:
        step = self._native_step(*args, **kwargs)
        return self.forward_with_room(forward, *args, **kwargs) if step is None else step

    return with_native_steps


def _bare_model(cls: type[PreTrainedModel]) -> SparseMixin:
    """For copying and unpickling, which fill it afterwards."""
    made = sparse_class(cls)  # type: ignore[arg-type]  # classes are hashable
    return made.__new__(made)


def as_sparse(model: PreTrainedModel) -> SparseMixin:
    """`model`, whose blocks are hybrid, as an instance of `sparse_class`."""
    model.__class__ = sparse_class(type(model))  # type: ignore[arg-type]
    decoder_of(model).register_forward_pre_hook(note_forward_pass, with_kwargs=True)
    turn_exactly(model)
    watch_passes(decoder_of(model))
    return model  # type: ignore[return-value]


# What of a config says nothing of what the model computes.
_NOT_COMPUTED = ("_name_or_path", "architectures", "dtype", "quantization_config", "transformers_version", "use_cache")


def model_fingerprint(checkpoint: Checkpoint, config: Any) -> str:
    """sha256 of the weights and of the config in use, which arguments of from_pretrained may have changed."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_COMPUTED}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(f"{checkpoint.fingerprint()} {text}".encode()).hexdigest()


def block_neurons(model: nn.Module) -> dict[BlockId, int]:
    return {block.id: block.neurons for block in hybrid_blocks(model)}
