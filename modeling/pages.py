"""Keys or values of a cache layer in pages of fixed size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

PAGE_TOKENS = 256
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float16: 3}  # what native code calls a page's dtype

ALL_ROWS = slice(None)

_versions = itertools.count()


def quantize_tokens(states: Tensor) -> tuple[Tensor, Tensor]:
    """`states` [batch, heads, tokens, dim] -> int8 values of -127..127 of the same shape and float32 scales [batch,
    heads, tokens]: absmax / 127, NaN where a vector holds NaN or infinity (its values are 0).
    """
    states = states.detach().to(torch.float32)
    scales = states.abs().amax(dim=-1) / 127
    scales = torch.where(scales.isfinite(), scales, torch.full_like(scales, torch.nan))
    divisors = scales[..., None]
    ratios = torch.where(divisors > 0, states / divisors, torch.zeros_like(states))
    # A tiny scale has few bits: ratios may then be beyond 127.
    return ratios.round().clamp(-127, 127).to(torch.int8), scales


class Pages:
    """Keys or values: pages [batch, heads, PAGE_TOKENS, dim] and, where they are int8, scales [batch, heads,
    PAGE_TOKENS]. Pages beyond `tokens` are room for what comes.
    """

    def __init__(
        self,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        states_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`sizes` are batch, heads and dim."""
        self.sizes, self.dtype, self.states_dtype, self.device = sizes, dtype, states_dtype, device
        self.tokens = 0
        self.pages: list[Tensor] = []
        self.scales: list[Tensor] = []
        self._changed()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._changed()
        # Copied or unpickled in inference mode, tensors could never be written outside it.
        self.pages = [_ordinary(page) for page in self.pages]
        self.scales = [_ordinary(scale) for scale in self.scales]

    def _changed(self) -> None:
        """Addresses are others now. A version is given out once, so that no two sets of pages share one."""
        self.version = next(_versions)

    def _new(self, *shape: int, dtype: torch.dtype) -> Tensor:
        # Zeros, for native code may read, and multiply by 0, what lies behind the last token. An ordinary tensor also
        # in inference mode: `generate` runs in it, and a cache that it returns must stay writable.
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype, device=self.device)

    def _add_page(self) -> None:
        batch, heads, dim = self.sizes
        self.pages.append(self._new(batch, heads, PAGE_TOKENS, dim, dtype=self.dtype))
        if self.dtype == torch.int8:
            self.scales.append(self._new(batch, heads, PAGE_TOKENS, dtype=torch.float32))
        self._changed()

    @property
    def capacity(self) -> int:
        return len(self.pages) * PAGE_TOKENS

    def reserve(self, tokens: int) -> None:
        while self.capacity < self.tokens + tokens:
            self._add_page()

    def _parts(self, slot: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """(page, first place in it, tokens, tokens before) of `count` tokens from `slot` on."""
        done = 0
        while done < count:
            page, start = divmod(slot + done, PAGE_TOKENS)
            part = min(PAGE_TOKENS - start, count - done)
            yield page, start, part, done
            done += part

    def accepts(self, states: Tensor) -> bool:
        batch, heads, _, dim = states.shape
        return ((batch, heads, dim), states.dtype, states.device) == (self.sizes, self.states_dtype, self.device)

    def as_stored(self, states: Tensor) -> Tensor:
        """`states` as they come back from pages."""
        if self.dtype == self.states_dtype:
            return states
        if self.dtype != torch.int8:
            return states.to(self.dtype).to(self.states_dtype)
        values, scales = quantize_tokens(states)
        return (values * scales[..., None]).to(self.states_dtype)

    def put(self, slot: int, states: Tensor, rows: slice = ALL_ROWS) -> None:
        """Writes `states` [rows, heads, new, dim] to the slots from `slot` on, which may be behind the last one."""
        count = states.shape[2]
        self.reserve(slot + count - self.tokens)
        scales = None
        values = states.detach()  # the cache is no part of a graph: pages are written again and again
        if self.dtype == torch.int8:
            values, scales = quantize_tokens(states)
        for page, start, part, done in self._parts(slot, count):
            self.pages[page][rows, :, start : start + part] = values[:, :, done : done + part]
            if scales is not None:
                self.scales[page][rows, :, start : start + part] = scales[:, :, done : done + part]
        self.tokens = max(self.tokens, slot + count)

    def take(self, slot: int, out: Tensor, rows: slice = ALL_ROWS) -> None:
        """-> `out` [rows, heads, tokens, dim] in the states' dtype, from the slots from `slot` on."""
        for page, start, part, done in self._parts(slot, out.shape[2]):
            to, values = out[:, :, done : done + part], self.pages[page][rows, :, start : start + part]
            if self.dtype == torch.int8:
                torch.mul(values, self.scales[page][rows, :, start : start + part, None], out=to)
            else:
                to.copy_(values)

    def empty(self, tokens: int) -> Tensor:
        """For `take`: [batch, heads, tokens, dim]."""
        batch, heads, dim = self.sizes
        device = self.pages[0].device if self.pages else self.device
        return torch.empty(batch, heads, tokens, dim, dtype=self.states_dtype, device=device)

    def write(self, states: Tensor) -> None:
        """Appends `states` [batch, heads, new, dim]."""
        self.put(self.tokens, states)

    def whole(self) -> Tensor:
        """[batch, heads, tokens, dim] in the states' dtype; always a copy, for pages are written again."""
        out = self.empty(self.tokens)
        self.take(0, out)
        return out

    def crop(self, tokens_to_remove: int) -> None:
        self.tokens = max(0, self.tokens - tokens_to_remove)  # pages stay, as room

    def select(self, rows: Callable[[Tensor], Tensor]) -> None:
        """`rows` gives the batch that comes out of a tensor's dimension 0."""
        for tensors in (self.pages, self.scales):
            for page, _, count, _ in self._parts(0, self.tokens) if tensors else ():
                chosen = rows(tensors[page][:, :, :count])
                if chosen.shape[0] != self.sizes[0]:
                    tensors[page] = self._new(chosen.shape[0], *tensors[page].shape[1:], dtype=chosen.dtype)
                tensors[page][:, :, :count] = chosen  # where the batch keeps its size, addresses stay
        used = -(-self.tokens // PAGE_TOKENS)
        if used and self.pages[0].shape[0] != self.sizes[0]:
            self.sizes = (self.pages[0].shape[0], *self.sizes[1:])
            del self.pages[used:], self.scales[used:]  # room for a batch of the old size
            self._changed()

    def of_heads(self, heads: Tensor, device: torch.device) -> Pages:
        """Those of `heads`, on `device`."""
        batch, _, dim = self.sizes
        return self._made(
            (batch, len(heads), dim),
            device,
            *([t[:, heads.to(t.device)] for t in ts] for ts in (self.pages, self.scales)),
        )

    @staticmethod
    def joined(parts: Sequence[Pages], order: Tensor, device: torch.device) -> Pages:
        """The heads of all `parts`, one part behind the other, in `order`, on `device`."""
        batch, _, dim = parts[0].sizes
        for part in parts:
            part.reserve(max(other.capacity for other in parts) - part.tokens)
        whole = (
            [
                torch.cat([t.to(device) for t in of_page], dim=1)[:, order.to(device)]
                for of_page in zip(*of_parts, strict=True)
            ]
            for of_parts in ([part.pages for part in parts], [part.scales for part in parts])
        )
        return parts[0]._made((batch, len(order), dim), device, *whole)

    def _made(
        self, sizes: tuple[int, int, int], device: torch.device, pages: list[Tensor], scales: list[Tensor]
    ) -> Pages:
        made = Pages(sizes, self.dtype, self.states_dtype, device)
        with torch.inference_mode(False):
            made.pages = [_ordinary(page).to(device).contiguous() for page in pages]
            made.scales = [_ordinary(scale).to(device).contiguous() for scale in scales]
        made.tokens = self.tokens
        return made

    def stored(self) -> tuple[Tensor, Tensor | None]:
        """[batch, heads, tokens, dim] as they lie, and scales where there are some."""
        values, scales = (
            torch.cat(tensors, dim=2)[:, :, : self.tokens].contiguous() if tensors else None
            for tensors in (self.pages, self.scales)
        )
        assert values is not None
        return values, scales

    @classmethod
    def of_stored(cls, values: Tensor, scales: Tensor | None, states_dtype: torch.dtype) -> Pages:
        batch, heads, tokens, dim = values.shape
        made = cls((batch, heads, dim), values.dtype, states_dtype, values.device)
        made.reserve(tokens)
        for page, _, part, done in made._parts(0, tokens):
            made.pages[page][:, :, :part] = values[:, :, done : done + part]
            if scales is not None:
                made.scales[page][:, :, :part] = scales[:, :, done : done + part]
        made.tokens = tokens
        return made

    def move(self, device: torch.device) -> None:
        if any(page.device != device for page in self.pages):
            with torch.inference_mode(False):
                self.pages = [page.to(device) for page in self.pages]
                self.scales = [scale.to(device) for scale in self.scales]
            self._changed()


def _ordinary(tensor: Tensor) -> Tensor:
    """`tensor`, copied if it was made in inference mode."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()
