"""Keys and values of earlier steps, so that generating a token costs one query instead of all."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


class AttentionCache:
    """Keys and values (B, Hk, L, D) of one attention layer.  Room doubles when it runs out, so appending is cheap."""

    def __init__(self) -> None:
        self.length = 0
        self.positions: Tensor | None = None
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new positions; returns all there are."""
        self._key = self._grown(self._key, key, "key")
        self._value = self._grown(self._value, value, "value")
        end = self.length + key.shape[2]
        self._key[:, :, self.length : end] = key
        self._value[:, :, self.length : end] = value
        self.length = end
        return self._key[:, :, :end], self._value[:, :, :end]

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
        batch = max(before.shape[0], added.shape[0])
        self.positions = torch.cat([before.expand(batch, -1), added.expand(batch, -1)], 1)
        return self.positions

    def contents(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values so far, or None."""
        if self._key is None or self._value is None:
            return None
        return self._key[:, :, : self.length], self._value[:, :, : self.length]

    def reorder(self, index: Tensor) -> None:
        """Let row i continue what row index[i] was: beams that survive, or a batch that shrinks."""
        if self._key is not None and self._value is not None:
            self._key, self._value = self._key.index_select(0, index), self._value.index_select(0, index)
        if self.positions is not None and self.positions.shape[0] > 1:
            self.positions = self.positions.index_select(0, index)

    def _grown(self, store: Tensor | None, new: Tensor, name: str) -> Tensor:
        if store is not None:
            expected = (*store.shape[:2], new.shape[2], store.shape[3])
            if new.shape != expected or new.dtype != store.dtype or new.device != store.device:
                raise ValueError(
                    f"this cache holds {name}s of shape (B, Hk, L, D) = ({store.shape[0]}, {store.shape[1]}, *, "
                    f"{store.shape[3]}), {store.dtype}; got {tuple(new.shape)}, {new.dtype}: is it another model's?"
                )
            if self.length + new.shape[2] <= store.shape[2]:
                return store
        room = max(16, 2 * (self.length + new.shape[2]))
        grown = new.new_zeros(new.shape[0], new.shape[1], room, new.shape[3])
        if store is not None:
            grown[:, :, : self.length] = store[:, :, : self.length]
        return grown


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
        """The caches of a model's layers; an error if the model has more or fewer."""
        if len(self.layers) != num_layers:
            raise ValueError(f"this cache has {len(self.layers)} layers and the model {num_layers}: another model's?")
        return self.layers

    @property
    def length(self) -> int:
        return self.layers[0].self_attention.length if self.layers else 0

    def extend_mask(self, mask: Tensor | None, batch: int, new: int, device: torch.device) -> Tensor | None:
        """Note which of the new positions are real; returns the mask over all, None while all are."""
        if mask is None and self.mask is None:
            return None
        before = self.mask if self.mask is not None else torch.ones(batch, self.length, dtype=torch.bool, device=device)
        added = mask if mask is not None else torch.ones(batch, new, dtype=torch.bool, device=device)
        self.mask = torch.cat([before, added], 1)
        return self.mask

    def reorder(self, index: Tensor) -> None:
        for layer in self.layers:
            layer.reorder(index)
        if self.mask is not None:
            self.mask = self.mask.index_select(0, index)
