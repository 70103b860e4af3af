"""Whether a call of attention can run fused, and running it."""

from __future__ import annotations

import torch
from torch import Tensor

from tamis.attention.backend import Backend
from tamis.attention.call import Call, Dropout
from tamis.attention.dropout import NO_PARTS
from tamis.attention.rules import BoundActivation, BoundEntmax, Rule
from tamis.attention.statistics import Statistics, row_statistics
from tamis.kernels.attention import ops as attention
from tamis.kernels.attention.arguments import ELEMENTWISE_RULES, FEW, Arguments
from tamis.kernels.decode import ops as decoding
from tamis.kernels.runtime.support import tensor_obstacle

MAX_HEAD_DIM = 256
LEAKY_SLOPE = 0.01


class Triton(Backend):
    """Fused kernels for CUDA devices."""

    name = "triton"
    is_fused = True

    def suits(self, call: Call, rule: Rule) -> bool:
        return call.query.is_cuda

    def obstacle(self, call: Call, rule: Rule) -> str | None:
        visibility = call.visibility
        if (reason := _rule_obstacle(rule) or tensor_obstacle(call.query)) is not None:
            return reason
        if max(call.query.shape[3], call.value.shape[3]) > MAX_HEAD_DIM:
            return f"head sizes go up to {MAX_HEAD_DIM}, got {call.query.shape[3]} and {call.value.shape[3]}"
        if call.dropout.part is not None and call.dropout.p > 0.0:
            return NO_PARTS
        for name, x in (("attn_mask", visibility.attn_mask), ("alibi_slopes", visibility.alibi_slopes)):
            if x is not None and x.requires_grad and torch.is_grad_enabled():
                return f"{name} needs a gradient"
        return None if call.pages is None else _page_obstacle(call, rule)

    def attend(self, call: Call, rule: Rule) -> Tensor:
        return attend(call, rule)[0] if call.pages is None else _attend_pages(call, rule)

    def attend_with_statistics(self, call: Call, rule: Rule) -> tuple[Tensor, Statistics]:
        out, rows = attend(call, rule, counted=True)
        return out, row_statistics(rows, call.visibility)

    @torch.no_grad()
    def statistics(self, call: Call, rule: Rule) -> Statistics:
        return self.attend_with_statistics(call, rule)[1]


def _page_obstacle(call: Call, rule: Rule) -> str | None:
    if call.query.shape[2] > FEW:
        return f"decoding takes up to {FEW} queries, got {call.query.shape[2]}"
    trains = _trains(call, rule.e if isinstance(rule, BoundEntmax) and isinstance(rule.e, Tensor) else None)
    return "decoding has no gradient" if trains else None


def _rule_obstacle(rule: Rule) -> str | None:
    if isinstance(rule, BoundActivation):
        if rule.name == "leaky_relu" and rule.slope != LEAKY_SLOPE:
            return f"the kernel of leaky_relu has the slope {LEAKY_SLOPE}, not {rule.slope:g}"
        known = rule.name in ELEMENTWISE_RULES
        return None if known else f"there are kernels for {', '.join(ELEMENTWISE_RULES)}, not for {rule.name}"
    if not isinstance(rule, BoundEntmax):
        return f"there is no kernel for {type(rule).__name__}"
    if isinstance(rule.e, Tensor) and any(rule.e.shape[dim] != 1 for dim in (0, 2)):
        return "alpha is one number or one per head, not one per sequence or query"
    return None


def attend(call: Call, rule: Rule, counted: bool = False) -> tuple[Tensor, Tensor]:
    """The output of a call without an obstacle; if `counted` also support size, entropy and distance, (3, B, H, Lq)."""
    arguments = _arguments(call, rule, counted)
    trains = _trains(call, arguments.e)
    if arguments.is_decoding and not trains:
        return decoding.decode(arguments), arguments.query.new_empty(0)
    return attention.attend(arguments, trains)


def _attend_pages(call: Call, rule: Rule) -> Tensor:
    assert call.pages is not None
    table, norms = call.pages
    if call.visibility.alibi_slopes is None or (isinstance(rule, BoundActivation) and rule.name == "sigmoid"):
        norms = None  # there is nothing that they could rule out
    norms = None if norms is None else norms.float().contiguous()
    return decoding.decode(_arguments(call, rule, False), table.int().contiguous(), norms)


def _trains(call: Call, e: Tensor | None) -> bool:
    inputs = (call.query, call.key, call.value, e)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _arguments(call: Call, rule: Rule, counted: bool) -> Arguments:
    name, e, e_value, bias, row_scale = _rule_arguments(rule, call.query.shape[1])
    return Arguments(
        **call.flat(),
        e=e,
        row_scale=row_scale,
        seed=_seed(call.dropout, call.query.device),
        rule=name,
        e_value=e_value,
        bias=bias,
        counted=counted,
    )


def _rule_arguments(rule: Rule, heads: int) -> tuple[str, Tensor | None, float, float, Tensor | None]:
    """Name, e per head, e for all, bias, scale per row."""
    if isinstance(rule, BoundActivation):
        return rule.name, None, 0.0, rule.bias, rule.scale
    assert isinstance(rule, BoundEntmax)
    assert rule.e is not None
    if isinstance(rule.e, Tensor):
        e = rule.e.flatten()
        return "power", (e if e.shape[0] == heads else e.expand(heads)).contiguous(), 0.0, 0.0, None
    return {0.5: "squares", 1.0: "identity"}.get(rule.e, "power"), None, rule.e, 0.0, None


def _seed(dropout: Dropout, device: torch.device) -> Tensor | None:
    """One number from the generator, on the device: nothing waits for it, and a captured graph draws it anew."""
    p, generator, _ = dropout
    if p == 0.0:
        return None
    source = device if generator is None else generator.device
    return torch.randint(2**62, (1,), generator=generator, device=source).to(device)
