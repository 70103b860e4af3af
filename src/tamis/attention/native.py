"""Attention on CPUs by C++ kernels: only q k^T is dense, everything after it looks at the support alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tamis.attention.backend import Backend, full_precision, schema_of
from tamis.attention.call import Call, Dropout
from tamis.attention.dense import Dense
from tamis.attention.rules import BoundActivation, BoundEntmax, Rule
from tamis.attention.statistics import SparseWeights, Statistics, row_statistics
from tamis.native import attention, library
from tamis.native.arguments import DIFFERENTIABLE, RULES, Arguments
from tamis.native.attention import Gradients, Results
from tamis.transforms.dispatch import transforming, unwatched

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Native(Backend):
    """Takes what the kernels know, which is nearly everything but fp64."""

    name = "native"

    def suits(self, call: Call, rule: Rule) -> bool:
        return call.query.device.type == "cpu"

    def obstacle(self, call: Call, rule: Rule) -> str | None:
        visibility = call.visibility
        if call.query.device.type != "cpu":
            return f"the C++ kernels are for CPUs, and the inputs are on {call.query.device.type}"
        if torch.compiler.is_exporting():
            return "an exported graph is to run where tamis is not"
        if (reason := library.missing()) is not None:
            return f"no C++ kernels were loaded ({reason})"
        if (reason := transforming() or _rule_obstacle(rule)) is not None:
            return reason
        if call.query.dtype not in DTYPES:
            return f"there are C++ kernels for fp32, bf16 and fp16, not for {call.query.dtype}"
        if visibility.attn_mask is not None and visibility.attn_mask.requires_grad and torch.is_grad_enabled():
            return "attn_mask needs a gradient"
        return None

    def attend(self, call: Call, rule: Rule) -> Tensor:
        return _attend(call, rule, counted=False)[0]

    def attend_with_statistics(self, call: Call, rule: Rule) -> tuple[Tensor, Statistics]:
        out, rows = _attend(call, rule, counted=True)
        return out, row_statistics(rows, call.visibility)

    @torch.no_grad()
    def statistics(self, call: Call, rule: Rule) -> Statistics:
        return self.attend_with_statistics(replace(call, dropout=Dropout()), rule)[1]

    @torch.no_grad()
    def sparse_weights(self, call: Call, rule: Rule) -> SparseWeights:
        if torch.compiler.is_compiling():  # how many there are only a run can tell
            return Dense().sparse_weights(call, rule)
        crow, col, val = attention.collect(_arguments(replace(call.collected(), dropout=Dropout()), rule))
        return SparseWeights(crow, col, val, call.shape)


def _rule_obstacle(rule: Rule) -> str | None:
    if isinstance(rule, BoundEntmax):
        return None
    if not isinstance(rule, BoundActivation):
        return f"there is no C++ kernel for {type(rule).__name__}"
    if rule.name not in RULES:
        known = ", ".join(RULES[1:])
        return f"{rule.name} has no zeros to leave out: there are C++ kernels for {known}"
    if rule.name == "leaky_relu" and rule.slope < 0.0:
        return f"leaky_relu of a negative slope, {rule.slope:g}, does not show its score in the sign of its weight"
    return None


def _arguments(call: Call, rule: Rule) -> Arguments:
    part = call.dropout.part
    e = row_scale = None
    name, bias, slope = "entmax", 0.0, 0.0
    if isinstance(rule, BoundActivation):
        name, bias, slope, row_scale = rule.name, rule.bias, rule.slope, rule.scale
    else:
        assert isinstance(rule, BoundEntmax)
        assert rule.e is not None
        e = rule.e if isinstance(rule.e, Tensor) else torch.full((1, 1, 1, 1), rule.e)
    return Arguments(
        **call.flat(),
        e=e,
        row_scale=row_scale,
        table=None if call.pages is None else call.pages.table.int().contiguous(),
        seed=_seed(call.dropout),
        rule=name,
        bias=bias,
        slope=slope,
        first_head=0 if part is None else part.head,
        first_query=0 if part is None else part.query,
    )


def _seed(dropout: Dropout) -> Tensor | None:
    """One number from the generator, as the other backends on CPUs take it."""
    p, generator, part = dropout
    if p == 0.0:
        return None
    if part is not None:
        return torch.tensor(part.seed)
    if generator is not None and torch.compiler.is_compiling():
        raise ValueError("dropout under torch.compile takes no generator")
    return torch.randint(2**62, (), generator=generator)


def _attend(call: Call, rule: Rule, counted: bool) -> tuple[Tensor, Tensor]:
    """The output; if `counted` also support size, entropy and distance, (3, B, H, Lq)."""
    arguments = _arguments(call, rule)
    trains = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in arguments[:DIFFERENTIABLE]
    )
    if arguments.table is not None and (trains or not _reads_pages(call)):
        arguments, call = _arguments(call.collected(), rule), call.collected()
    with full_precision(call.query):
        if trains:
            return _Attend.apply(*_distinct(arguments), counted)
        forward = _forward if unwatched(call.query) else native_forward
        results = Results(*forward(*arguments, False, counted))
    return results.out, results.statistics


def _distinct(arguments: Arguments) -> Arguments:
    """torch.compile takes no tensor twice."""
    if not torch.compiler.is_compiling():
        return arguments
    given: list[Any] = []
    for x in arguments:
        if isinstance(x, Tensor) and any(x is other for other in given):
            given.append(x.view_as(x))
        else:
            given.append(x)
    return Arguments(*given)


def _reads_pages(call: Call) -> bool:
    """Whether pages are read where they lie, and not copied: in fp32, and whole vectors."""
    sizes = (call.query.shape[3], call.value.shape[3])
    plain = call.key.stride(3) == 1 and call.value.stride(3) == 1
    return call.query.dtype == torch.float32 and plain and not any(size % attention.UNIT for size in sizes)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *given, train, counted = arguments
    return attention.forward(Arguments(*given), train, counted)


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    *given, grad, kept, places, counts, with_e, with_slopes = arguments
    return attention.backward(Arguments(*given), grad, kept, places, counts, with_e, with_slopes)


SCHEMA = schema_of(Arguments)
_FIVE = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
native_forward = torch.library.custom_op(
    "tamis::native_attention",
    _forward,
    mutates_args=(),
    device_types="cpu",
    schema=f"({SCHEMA}, bool train, bool counted) -> {_FIVE}",
)
native_backward = torch.library.custom_op(
    "tamis::native_attention_backward",
    _backward,
    mutates_args=(),
    device_types="cpu",
    schema=f"({SCHEMA}, Tensor grad, Tensor kept, Tensor places, Tensor counts, bool with_e, bool with_slopes)"
    f" -> {_FIVE}",
)


@native_forward.register_fake
def _(*arguments: Any) -> Results:
    *given, train, counted = arguments
    return attention.empty_results(Arguments(*given), train, counted)


@native_backward.register_fake
def _(*arguments: Any) -> Gradients:
    *given, _, _, _, _, with_e, with_slopes = arguments
    return attention.empty_gradients(Arguments(*given), with_e, with_slopes)


class _Attend(torch.autograd.Function):
    """The two operations as one with a gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *given, counted = arguments
        forward = _forward if unwatched(given[0]) else native_forward
        results = Results(*forward(*given, True, counted))
        tensors = [x if isinstance(x, Tensor) else None for x in given]
        ctx.save_for_backward(results.kept, results.places, results.counts, *tensors)
        ctx.others = [None if isinstance(x, Tensor) else x for x in given]
        ctx.mark_non_differentiable(results.statistics)
        return results.out, results.statistics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        kept, places, counts, *tensors = ctx.saved_tensors
        given = [other if x is None else x for x, other in zip(tensors, ctx.others, strict=True)]
        wanted = ctx.needs_input_grad
        backward = _backward if unwatched(grad) else native_backward
        gradients = Gradients(*backward(*given, grad, kept, places, counts, wanted[3], wanted[4]))
        return *(x if want else None for x, want in zip(gradients, wanted, strict=False)), *(None,) * (len(given) - 4)
