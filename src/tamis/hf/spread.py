"""The start of the scores of Hugging Face models that are trained from scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tamis.hf.sites import parts_of
from tamis.nn.spread import Site, measure_sites, set_on_sites

_SEPARATE = (("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("q_lin", "k_lin"), ("q_attn", "c_attn"))
_JOINED = ("c_attn", "Wqkv", "qkv_proj", "query_key_value")
BATCH, LENGTH = 8, 64


def measure_spread(model: PreTrainedModel, inputs: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """Return the spread of the scores of every head of a sparsified model.

    Args:
        inputs: what the model is called with; by default random tokens.

    Returns:
        tensors (H,) by the name of the site.
    """
    return measure_sites(_sites(model), model, lambda: _run(model, inputs))


def set_spread(
    model: PreTrainedModel, inputs: Mapping[str, Any] | None = None, *, spread: float | None = None
) -> dict[str, Tensor]:
    """Rescale query and key projections of a sparsified model, in place, as :func:`tamis.nn.set_spread` does.

    It is for models trained from scratch; one that has learnt where to look would forget it.

    Args:
        model: a sparsified model.
        inputs: what the model is called with; by default random tokens.
        spread: standard deviation of the scores.

    Returns:
        the spread before, as of :func:`tamis.hf.measure_spread`.
    """
    return set_on_sites(_sites(model), model, lambda: _run(model, inputs), spread)


def _sites(model: PreTrainedModel) -> dict[str, Site]:
    return {part.site: Site(part.mechanism, partial(_projections, module)) for module, part in parts_of(model)}


def _projections(module: nn.Module) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    for names in _SEPARATE:
        queries, keys = (getattr(module, name, None) for name in names)
        if isinstance(queries, nn.Module) and isinstance(keys, nn.Module):
            joined = names[1] in _JOINED  # keys and values
            return _rows(queries), [tensor.chunk(2)[0] for tensor in _rows(keys)] if joined else _rows(keys)
    for name in _JOINED:
        if isinstance(joint := getattr(module, name, None), nn.Module):
            parts = [tensor.chunk(3) for tensor in _rows(joint)]
            if any(part[0].shape != part[1].shape for part in parts):
                break
            return [part[0] for part in parts], [part[1] for part in parts]
    known = ", ".join((*(name for pair in _SEPARATE for name in pair), *_JOINED))
    raise ValueError(f"{type(module).__name__} must make queries and keys by one of {known} to be rescaled")


def _rows(projection: nn.Module) -> list[Tensor]:
    """Weights and biases with one row for each output; GPT-2's own kind of layer has columns instead."""
    transposed = not isinstance(projection, nn.Linear)
    return [p.data.T if transposed and p.ndim == 2 else p.data for p in projection.parameters()]


def _run(model: PreTrainedModel, inputs: Mapping[str, Any] | None) -> None:
    given: dict[str, Any] = _random_inputs(model) if inputs is None else dict(inputs)
    if "use_cache" in model.config.to_dict():  # a cache would be filled for nothing
        given.setdefault("use_cache", False)
    model(**given)


def _random_inputs(model: PreTrainedModel) -> dict[str, Any]:
    longest = getattr(model.config, "max_position_embeddings", None) or LENGTH
    shape = (BATCH, min(LENGTH, longest))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(model.device)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return given | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
