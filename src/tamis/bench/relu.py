"""`tamis bench kernels --relu`: ReLU attention on long rows on a GPU, beside its peers.

The topics are those of `tamis.bench.long`, with two changes: a score needs more than what two topics have in common by
chance, so that tiles of different topics hold no weight at all, and the keys' runs are shifted by one, so that a
query's own run is no better than others and one tile in T holds weights at every length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from tamis.attention.rules import Activation, Rule
from tamis.bench.long import RUN, Case, Inputs
from tamis.bench.long import run as run_long

OFFSET = 40.0
"""What is taken off the 64 that a topic adds to a score; others add by chance, with deviation 11 at head size 64."""
CASES = [
    Case(length, dim, causal, topics)
    for length in (4096, 16384, 65536)
    for dim in (64, 128)
    for causal in (True, False)
    for topics in (1, 32)
]


OTHER_CASES = [Case(length, dim, causal) for length in (4096, 16384) for dim in (64, 128) for causal in (True, False)]


def run(output: Path | None, cases: list[Case] | None = None) -> None:
    run_long(output, cases or CASES, ReluInputs)


def run_others(output: Path | None, cases: list[Case] | None = None) -> None:
    run_long(output, cases or OTHER_CASES, OtherInputs)


class ReluInputs(Inputs):
    file = "kernels-long-relu-gpu"
    ours: tuple[str, ...] = ("relu", "squared relu")
    rule = ("relu", 0.0)

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        with torch.no_grad():
            self.key.copy_(self.key.roll(RUN, 2))
            self.query[..., -1] = (OFFSET * case.dim**0.5) ** 0.5
            self.key[..., -1] = -self.query[..., -1]

    def _rule(self, name: str) -> Rule:
        return Activation(name.replace(" ", "_"))

    @staticmethod
    def has_peers(case: Case) -> bool:
        return case.length <= 16384  # beyond, the mask of blocks is made by way of one with an entry a score

    def peers(self) -> dict[str, Any]:
        torch.compiler.reset()  # one shape is compiled after the other
        call = functools.partial(flex_relu_attention, self.query, self.key, self.value, self.case.causal)
        return {"flex log-relu": self._time(call)}


class OtherInputs(ReluInputs):
    """The other activations, which have a weight, be it a small one, for nearly every score."""

    file = "kernels-long-activations-gpu"
    ours = ("relu", "leaky relu", "gelu", "sigmoid")

    @staticmethod
    def has_peers(case: Case) -> bool:
        return False


def flex_relu_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """ReLU attention by FlexAttention: a softmax of log relu(s), times the sum that it divided by."""
    mask = _causal_mask(query.shape[2], query.device.type) if is_causal else None
    wanted = AuxRequest(lse=True)
    out, found = _compiled()(query, key, value, score_mod=_log_relu, block_mask=mask, return_aux=wanted)
    return (out * found.lse.exp()[..., None]).to(out.dtype)


def _log_relu(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(score > 0.0, score.clamp(min=1e-30).log(), -torch.inf)  # the gradient of log 0 would be NaN


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _causal_mask(length: int, device: str) -> BlockMask:
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device)
