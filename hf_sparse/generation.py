"""The loop that decodes a single sequence token by token, where a token is one native call.

It is transformers' `_sample` without what a batch of one on the CPU does not need: building inputs anew, growing the
mask, tracking which rows are finished. Logits processors, stopping criteria, streamers, scores and caches are called
and kept as there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_sparse.modeling import PagedCacheLayer, StreamingCache


def decodes_alone(input_ids: Tensor, config: GenerationConfig, synced_gpus: bool, inputs: dict[str, Any]) -> bool:
    """Whether `decode_alone` does what transformers' loop would, for these arguments of `_sample`."""
    cache, mask, positions = inputs.get("cache"), inputs.get("attention_mask"), inputs.get("position_ids")
    if input_ids.shape[0] != 1 or synced_gpus or config.is_assistant or not inputs.get("use_cache"):
        return False
    if config.output_attentions or config.output_hidden_states or not isinstance(cache, Cache):
        return False
    if not all(isinstance(layer, PagedCacheLayer) for layer in cache.layers):
        return False
    if any(value is not None for name, value in inputs.items() if name not in KNOWN_INPUTS):
        return False
    if isinstance(cache, StreamingCache):  # which goes by what it holds; of the mask the new columns count
        return not cache.stale and (mask is None or bool(mask[:, cache.columns :].all()))
    if mask is not None and not (mask.dim() == 2 and bool(mask.all())):
        return False
    return positions is None or bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all())


def is_watched(model: Any) -> bool:
    """Whether someone wants to see every call of the model itself, or of what prepares its inputs."""
    replaced = vars(model).keys() & {"forward", "prepare_inputs_for_generation"}
    return bool(model._forward_hooks or model._forward_pre_hooks or replaced)


# Those that forward() gets, and the tokenizer that stop_strings needs.
KNOWN_INPUTS = ("cache", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "tokenizer")


def decode_alone(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    config: GenerationConfig,
    streamer: Any,
    inputs: dict[str, Any],
) -> GenerateDecoderOnlyOutput | Tensor:
    """`_sample` for `input_ids` [1, tokens] where `decodes_alone`."""
    keeps = config.return_dict_in_generate
    all_scores: tuple[Tensor, ...] | None = () if keeps and config.output_scores else None
    all_logits: tuple[Tensor, ...] | None = () if keeps and config.output_logits else None
    text = _Text(input_ids)
    outputs = model._prefill(input_ids, config, inputs)
    pending = 0  # tokens that `inputs` does not know of yet
    logits = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
    inputs = model._update_model_kwargs_for_generation(outputs, inputs)
    del outputs
    while True:
        scores: Tensor = logits_processor(input_ids, logits)  # type: ignore[arg-type]
        if all_scores is not None:
            all_scores += (scores,)
        if all_logits is not None:
            all_logits += (logits,)
        if config.do_sample:
            token = torch.multinomial(scores.softmax(dim=-1), num_samples=1)
        else:
            best = int(scores[0].float().numpy().argmax())  # many times faster than torch's
            token = torch.tensor([[best]], dtype=torch.int64, device="cpu")
        input_ids = text.append(token)
        finished = bool(stopping_criteria(input_ids, all_scores).all())
        if streamer is not None:
            streamer.put(token[0])
        if finished:
            break
        following = None if is_watched(model) else model.native_logits(token, inputs["cache"])
        if following is None:  # someone hooked on to the model, or changed it, meanwhile
            inputs = _caught_up(inputs, pending)
            outputs = model(**model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **inputs))
            inputs, pending = model._update_model_kwargs_for_generation(outputs, inputs), 0
            following = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        else:
            pending += 1
        logits = following
    if streamer is not None:
        streamer.end()
    input_ids = input_ids.clone()
    if not keeps:
        return input_ids
    kept: dict[str, Any] = {"sequences": input_ids, "scores": all_scores, "logits": all_logits}
    return GenerateDecoderOnlyOutput(**kept, cache=inputs["cache"])


class _Text:
    """Token ids int64 [1, tokens] that grow without being copied for every token."""

    def __init__(self, ids: Tensor) -> None:
        self._count = ids.shape[1]
        self._ids = torch.cat((ids, ids.new_empty(1, max(256, self._count))), dim=1)

    def append(self, token: Tensor) -> Tensor:
        """All of them, with `token` [1, 1]; what was given out before stays as it is."""
        if self._count == self._ids.shape[1]:
            self._ids = torch.cat((self._ids, torch.empty_like(self._ids)), dim=1)
        self._ids[:, self._count] = token[0]
        self._count += 1
        return self._ids[:, : self._count]


def _caught_up(inputs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """`inputs` with mask and positions of `tokens` more tokens."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None:
        inputs["attention_mask"] = torch.cat((mask, mask.new_ones(1, tokens)), dim=-1)
    if positions is not None:
        more = positions[..., -1:] + 1 + torch.arange(tokens, device=positions.device)
        inputs["position_ids"] = torch.cat((positions, more), dim=-1)
    return inputs
