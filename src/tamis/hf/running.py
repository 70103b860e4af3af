"""Calling a Hugging Face model as `tamis.analysis` wants it."""

from __future__ import annotations

from typing import Any

from torch import nn

from tamis.analysis import Sentences


def run_model(model: nn.Module, batch: Sentences) -> Any:
    """Call a Hugging Face model on a batch, as the `run` of `tamis.analysis.analyze`.

    Args:
        model: a sparsified model.
        batch: pairs for an encoder-decoder, else targets.

    Returns:
        what the model returns.
    """
    target = {"ids": batch.target.ids, "mask": batch.target.real.long()}
    if batch.source is None:
        return model(input_ids=target["ids"], attention_mask=target["mask"])
    return model(
        input_ids=batch.source.ids,
        attention_mask=batch.source.real.long(),
        decoder_input_ids=target["ids"],
        decoder_attention_mask=target["mask"],
    )
