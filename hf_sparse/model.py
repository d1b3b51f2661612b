"""What a loaded model can do beyond transformers' own: its class is the family's own class with this mixin in front."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from hf_sparse.modeling import (
    BlockId,
    HybridBlock,
    HybridMLP,
    Placement,
    Predictor,
    SkipRule,
    hybrid_blocks,
    note_forward,
)

from .checkpoint import open_checkpoint
from .log import warn_once
from .plan import PlacementPlan
from .report import PlacementSummary, summarize_placement

PLAN_FOLDER = "hf_sparse_plan"
HUB_ARGUMENTS = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


class SparseMixin(PreTrainedModel, GenerationMixin):
    """Added to the class of a model that `SparseAutoModelForCausalLM` loads."""

    plan: PlacementPlan
    placement: Placement
    plan_directory: Path  # where the plan is kept, or would be if that could be written

    def use_plan(self, plan: PlacementPlan, device: torch.device) -> None:
        """Gives every MLP its rule and its predictor, which lies on `device`. `plan` must have passed `check_model`."""
        for block in hybrid_blocks(self):
            if isinstance(block, HybridMLP):
                tensors = plan.predictors.get(block.id)
                block.rule = SkipRule.from_dict(plan.rules[block.id])
                block.predictor = None if tensors is None else Predictor.from_tensors(tensors, device)
                block.reset_counters()
        self.plan = plan

    def place(self, placement: Placement) -> None:
        """Moves every neuron to its tier, and what is not a neuron to the primary one."""
        PreTrainedModel.to(self, placement.tiers[0].device)
        for block in hybrid_blocks(self):
            block.place(placement.tiers, placement.assignment[block.id])
        self.placement = placement

    def resident_bytes(self) -> int:
        """Bytes that lie on the primary tier whatever the placement: embeddings, norms, lm_head, output biases,
        predictors. A tensor that is tied counts once.
        """
        tensors: dict[int, Tensor] = {}
        predictors = 0
        for module in self.modules():
            own = [*module._parameters.values(), *module._buffers.values()]
            if isinstance(module, HybridBlock):
                own.append(module.output_bias)
            if isinstance(module, HybridMLP) and module.predictor is not None:
                predictors += module.predictor.nbytes
            tensors.update({id(t): t for t in own if t is not None})
        return predictors + sum(t.numel() * t.element_size() for t in tensors.values())

    def placement_summary(self) -> PlacementSummary:
        """Neurons and bytes on each tier; prints as a table."""
        return summarize_placement(list(hybrid_blocks(self)), self.placement, self.resident_bytes())

    def active_fraction(self) -> float | None:
        """Share of MLP neurons that were computed for the tokens to which rules applied, since the last
        `reset_active_fraction()`; None where no rule has applied yet."""
        counted = [b for b in hybrid_blocks(self) if isinstance(b, HybridMLP) and b.active_fraction is not None]
        return sum(b.active_fraction or 0.0 for b in counted) / len(counted) if counted else None

    def reset_active_fraction(self) -> None:
        for block in hybrid_blocks(self):
            if isinstance(block, HybridMLP):
                block.reset_counters()

    def dequantized_state_dict(self) -> dict[str, Tensor]:
        """The state dict that the family's plain transformers class needs to compute with the weights this model
        has.
        """
        state = {
            name: tensor
            for name, tensor in self.state_dict().items()
            if name.rpartition(".")[2] not in ("codes", "scales")
        }
        for path, block in self.named_modules():
            if isinstance(block, HybridBlock):
                layer = path.removesuffix(block.path)
                state.update({layer + name: weight.to(self.dtype) for name, weight in block.dequantize().items()})
        return state

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' own `generate`; first looks at the prompt's length.

        Raises ValueError for an empty prompt, and where prompt and `max_new_tokens` are more than the positions of a
        model that has learned positions; with rotary or ALiBi positions a prompt beyond them is a warning, since the
        model computes on, at a loss of quality.
        """
        prompt = inputs if inputs is not None else kwargs.get("input_ids")
        if isinstance(prompt, Tensor) and kwargs.get("inputs_embeds") is None:
            self._check_prompt(prompt, kwargs.get("max_new_tokens") or 0)
        return super().generate(inputs, *args, **kwargs)

    def _check_prompt(self, prompt: Tensor, new_tokens: int) -> None:
        if prompt.dim() != 2 or prompt.shape[0] == 0 or prompt.shape[1] == 0:
            raise ValueError(
                f"inputs: expected token ids [batch, tokens] with at least one token, got shape {list(prompt.shape)}"
            )
        positions = getattr(self.config, "max_position_embeddings", None)
        if positions is None:
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
        hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=target) as aside:
            super().save_pretrained(aside, **kwargs)
            written = sorted(Path(aside).iterdir(), key=lambda path: path.suffix == ".json")
            stale = set(target.glob("model*.safetensors*")) - {target / path.name for path in written}
            for path in written:
                os.replace(path, target / path.name)
            for path in stale:
                path.unlink()
        fingerprint = open_checkpoint(target, model=self).fingerprint()  # the saved files are a checkpoint of their own
        plan = dataclasses.replace(self.plan, key=dataclasses.replace(self.plan.key, checkpoint=fingerprint))
        plan.save_pretrained(target / PLAN_FOLDER)
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", target.name), **hub)

    def to(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Raises ValueError for another device than the primary tier's: neurons are where the plan put them."""
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        if device is not None and device != self.device:
            raise ValueError(
                f"device: the model is placed on {self.device} by its plan, got {device}; "
                "load it with another gpu_budget"
            )
        return super().to(*args, **kwargs)


def note_forward_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the base model: rules apply to tokens that are decoded one by one."""
    tokens = next(
        (t for t in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if isinstance(t, Tensor)), None
    )
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    note_forward(0 if tokens is None else tokens.shape[1], 0 if cache is None else int(cache.get_seq_length()))


def as_sparse(model: PreTrainedModel) -> SparseMixin:
    """Puts the mixin in front of the model's own class; name and module stay, pipelines and `architectures` go by
    them.
    """
    cls = type(model)
    model.__class__ = type(
        cls.__name__, (SparseMixin, cls), {"__module__": cls.__module__, "_can_compile_fullgraph": False}
    )
    model.base_model.register_forward_pre_hook(note_forward_pass, with_kwargs=True)
    return model  # type: ignore[return-value]


def block_neurons(model: nn.Module) -> dict[BlockId, int]:
    return {block.id: block.neurons for block in hybrid_blocks(model)}
