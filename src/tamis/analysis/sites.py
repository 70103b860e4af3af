"""Where attention is in a model, and what its places are called."""

from __future__ import annotations

import torch
from torch import nn

from tamis.mechanisms import Mechanism
from tamis.nn import Attention, MultiheadAttention


class NamedSite(nn.Module):
    """Attention inside a model that is not made of ours, such as one of `tamis.hf`; it knows what it is called.

    Its forward takes queries, keys and values as a mechanism does, and returns what is projected, (B, Lq, H * Dv).
    """

    site: str
    mechanism: Mechanism
    num_heads: int
    head_dim: int


AttentionSite = Attention | MultiheadAttention | NamedSite
OF_TORCH = {"self_attn": "self", "multihead_attn": "cross"}
"""What the layers of `torch.nn.Transformer` call their attention, and what we call it."""


def site_name(path: str) -> str:
    """The name of a site from the path of its module: wrappers and "_attention" are left out."""
    *outer, last = path.removeprefix("module.").split(".")
    return ".".join([*outer, OF_TORCH.get(last, last)]).removesuffix("_attention") or "attention"


def kind_of(site: str) -> str:
    """Return the kind of a site: cross, encoder, or decoder, which is also what a decoder-only model has.

    Args:
        site: such as "decoder.0.cross".

    Returns:
        "cross", "encoder" or "decoder".
    """
    if site.endswith("cross"):
        return "cross"
    return "encoder" if site.startswith("encoder") or "encoder" in site.split(".") else "decoder"


def attention_sites(model: nn.Module) -> dict[str, AttentionSite]:
    """Find every attention of ours in a model by its site, in the order of the modules.

    Args:
        model: it is a ValueError if there is none.

    Returns:
        attention by site.
    """
    found = {
        module.site if isinstance(module, NamedSite) else site_name(path): module
        for path, module in model.named_modules()
        if isinstance(module, AttentionSite)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention to see: looked for tamis.nn.Attention, "
            "tamis.nn.MultiheadAttention and what tamis.hf.sparsify puts into a Hugging Face model"
        )
    return found


def device_of(model: nn.Module) -> torch.device:
    """Where a model is."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def refuse_compiled(model: nn.Module) -> None:
    """Raise if a part of a model is compiled: hooks would be passed over in silence."""
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError("hooks do not reach into a compiled model: run the model before torch.compile")
