"""Keys and values of earlier steps, so that generating a token costs one query instead of all."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tamis.mechanisms.reach import PAGE


class AttentionCache:
    """Keys and values (B, Hk, L, D) of one attention layer.

    Room doubles when it runs out, so appending is cheap, as decoding wants it.  Where gradients are recorded nothing is
    written in place: a graph may hold what is already there, whether or not the keys themselves have a gradient.

    On the CPU keys lie in memory as (B, Hk, D, L): the product of a few queries with them, which is what decoding
    does, is then several times faster.  It does not show in shapes.
    """

    def __init__(self) -> None:
        self.length = 0
        self.positions: Tensor | None = None
        self.slots: Tensor | None = None
        """(B, n), where the next n positions are written; see :meth:`ModelCache.overwrite`."""
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._norms: Tensor | None = None  # of whole pages, as far as somebody asked

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new positions, or write them over those at `slots`; returns all there are."""
        self.check(key, value)
        if self.slots is not None and self._key is not None and self._value is not None:
            place, self.slots = (torch.arange(key.shape[0], device=key.device)[:, None], self.slots), None
            self._key.transpose(1, 2)[place] = key.transpose(1, 2)  # faster than to scatter with an index for all heads
            self._value.transpose(1, 2)[place] = value.transpose(1, 2)
            self._norms = None
            return self._key[:, :, : self.length], self._value[:, :, : self.length]
        if torch.is_grad_enabled():
            self._key, self._value = self._joined(self._key, key), self._joined(self._value, value)
        else:
            self._key, self._value = self._written(self._key, key, _across(key)), self._written(self._value, value)
        self.length += key.shape[2]
        return self._key[:, :, : self.length], self._value[:, :, : self.length]

    def check(self, key: Tensor, value: Tensor) -> None:
        """Raise unless keys and values like these, of any length, continue what is held."""
        for name, held, new in (("key", self._key, key), ("value", self._value, value)):
            if held is None:
                continue
            expected = (*held.shape[:2], new.shape[2], held.shape[3])
            if new.shape != expected or new.dtype != held.dtype or new.device != held.device:
                raise ValueError(
                    f"this cache holds {name}s of shape (B, Hk, L, D) = ({held.shape[0]}, {held.shape[1]}, *, "
                    f"{held.shape[3]}), {held.dtype} on {held.device}; got {tuple(new.shape)}, {new.dtype} on "
                    f"{new.device}: is it another model's?"
                )

    def note_positions(self, positions: Tensor | None, new: int, device: torch.device) -> Tensor | None:
        """Remember the positions (B or 1, new) of keys about to be appended; returns those of all keys.

        None as long as nobody has given any: keys then sit at 0, 1, 2, ...
        """
        if positions is None and self.positions is None:
            return None
        before = torch.arange(self.length, device=device)[None] if self.positions is None else self.positions
        added = positions
        if added is None:
            added = before[:, -1:] + torch.arange(1, new + 1, device=device)[None]
        if self.slots is not None:
            before = before.expand(self.slots.shape[0], -1)
            self.positions = before.scatter(1, self.slots, added.expand(self.slots.shape))
            return self.positions
        batch = max(before.shape[0], added.shape[0])
        self.positions = torch.cat([before.expand(batch, -1), added.expand(batch, -1)], 1)
        return self.positions

    def shorten(self, length: int) -> None:
        """Forget the positions from `length` on."""
        self.length = length
        if self.positions is not None:
            self.positions = self.positions[:, :length]
        if self._norms is not None:
            self._norms = self._norms[:, :, : length // PAGE]

    def contents(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values so far, or None."""
        if self._key is None or self._value is None:
            return None
        return self._key[:, :, : self.length], self._value[:, :, : self.length]

    def page_norms(self) -> Tensor:
        """Return the largest norm of the keys in each page of PAGE, (B, Hk, pages); those of whole pages are computed
        once."""
        assert self._key is not None
        known = 0 if self._norms is None else self._norms.shape[2]
        new = self._key[:, :, known * PAGE : self.length]
        norms = torch.linalg.vector_norm(new, dim=-1, dtype=torch.promote_types(new.dtype, torch.float32))
        filled = F.pad(norms, (0, -norms.shape[2] % PAGE))
        pages = filled.unflatten(2, (filled.shape[2] // PAGE, PAGE)).amax(-1)
        pages = pages if self._norms is None else torch.cat([self._norms, pages], 2)
        self._norms = pages[:, :, : self.length // PAGE]
        return pages

    def reorder(self, index: Tensor) -> None:
        """Let row i continue what row index[i] was: beams that survive, or a batch that shrinks."""
        if self._key is not None and self._value is not None:
            key = self._key.mT.index_select(0, index).mT if _across(self._key) else self._key.index_select(0, index)
            self._key, self._value = key, self._value.index_select(0, index)
        if self._norms is not None:
            self._norms = self._norms.index_select(0, index)
        if self.positions is not None and self.positions.shape[0] > 1:
            self.positions = self.positions.index_select(0, index)

    def _joined(self, held: Tensor | None, new: Tensor) -> Tensor:
        return new if held is None else torch.cat([held[:, :, : self.length], new], 2)

    def _written(self, held: Tensor | None, new: Tensor, across: bool = False) -> Tensor:
        end = self.length + new.shape[2]
        if held is None or end > held.shape[2]:
            batch, heads, _, width = new.shape
            room = max(16, end if held is None else 2 * end)  # what is filled once needs no more
            grown = new.new_empty(batch, heads, width, room).mT if across else new.new_empty(batch, heads, room, width)
            if held is not None:
                grown[:, :, : self.length] = held[:, :, : self.length]
            held = grown
        held[:, :, self.length : end] = new
        return held


def _across(key: Tensor) -> bool:
    """Whether keys lie in memory with their positions last."""
    return key.device.type == "cpu"


@dataclass
class LayerCache:
    """One Transformer layer: growing self-attention and, in a decoder, cross-attention computed once."""

    self_attention: AttentionCache = field(default_factory=AttentionCache)
    cross_attention: AttentionCache = field(default_factory=AttentionCache)

    def reorder(self, index: Tensor) -> None:
        self.self_attention.reorder(index)
        self.cross_attention.reorder(index)


class ModelCache:
    """The caches of all layers, with which of the cached positions are real: (B, L), False for left padding."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [LayerCache() for _ in range(num_layers)]
        self.mask: Tensor | None = None

    def of_depth(self, num_layers: int) -> list[LayerCache]:
        """Collect the caches of a model's layers; an error if the model has more or fewer."""
        if len(self.layers) != num_layers:
            raise ValueError(
                f"this cache has {len(self.layers)} layers and the model {num_layers}: is it another model's?"
            )
        return self.layers

    @property
    def length(self) -> int:
        return self.layers[0].self_attention.length if self.layers else 0

    def extended_mask(self, mask: Tensor | None, batch: int, new: int, device: torch.device) -> Tensor | None:
        """Which of all positions are real once the new ones are there, (B, L); None while all are.

        It changes nothing: who fills the cache sets `mask` to it when no layer has refused.
        """
        if mask is None and self.mask is None:
            return None
        before = self.mask if self.mask is not None else torch.ones(batch, self.length, dtype=torch.bool, device=device)
        if before.shape[0] != batch:
            raise ValueError(f"this cache holds a batch of {before.shape[0]}, got {batch}: is it another model's?")
        added = mask if mask is not None else torch.ones(batch, new, dtype=torch.bool, device=device)
        if added.shape != (batch, new) or added.dtype != torch.bool:
            raise ValueError(
                f"mask must be boolean and cover the new tokens, ({batch}, {new}), "
                f"got {added.dtype} {tuple(added.shape)}"
            )
        return torch.cat([before, added], 1)

    def shorten(self, length: int) -> None:
        """Go back to where so many tokens were read, to go on differently."""
        if not 0 <= length <= self.length:
            raise ValueError(f"this cache holds {self.length} tokens, and cannot be shortened to {length}")
        for layer in self.layers:
            layer.self_attention.shorten(length)
        if self.mask is not None:
            self.mask = self.mask[:, :length]

    def reorder(self, index: Tensor) -> None:
        for layer in self.layers:
            layer.reorder(index)
        if self.mask is not None:
            self.mask = self.mask.index_select(0, index)

    def overwrite(self, slots: Tensor) -> None:
        """Let the next tokens take the places slots (B, n) of earlier ones in self-attention, instead of being added.

        For tokens that nobody looks back at any longer.  Not where gradients are recorded: a graph may hold them.
        """
        if torch.is_grad_enabled():
            raise RuntimeError("tokens of a cache can only be overwritten where no gradients are recorded")
        for layer in self.layers:
            layer.self_attention.slots = slots
