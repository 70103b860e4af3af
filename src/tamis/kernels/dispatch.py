"""Whether a call can run fused, and running it."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tamis.attention.checks import Call
from tamis.attention.rules import ActivationRule, EntmaxRule, Rule
from tamis.kernels.arguments import ELEMENTWISE_RULES, FEW, Arguments

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def obstacle(call: Call, rule: Rule) -> str | None:
    """Why no fused kernel can take this call, or None."""
    visibility = call.visibility
    if (reason := tensor_obstacle(call.query)) is not None:
        return reason
    if max(call.query.shape[3], call.value.shape[3]) > MAX_HEAD_DIM:
        return f"head sizes go up to {MAX_HEAD_DIM}, got {call.query.shape[3]} and {call.value.shape[3]}"
    for name, x in (("attn_mask", visibility.attn_mask), ("alibi_slopes", visibility.alibi_slopes)):
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            return f"{name} needs a gradient"
    return _rule_obstacle(rule)


def tensor_obstacle(x: Tensor) -> str | None:
    """Why no kernel of any kind can take this tensor now, or None."""
    if (reason := _machine(x.device.type)) is not None:
        return reason
    if needs_plain_operations():
        return "torch.func transforms and forward-mode derivatives need the plain operations"
    return None if x.dtype in DTYPES else f"there are kernels for fp16, bf16 and fp32, not for {x.dtype}"


def needs_plain_operations() -> bool:
    """Whether somebody differentiates in a way that no kernel has: a transform of torch.func, or forward mode."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def page_obstacle(call: Call, rule: Rule) -> str | None:
    """Why no kernel can take this call, whose keys and values are pages, or None."""
    if (reason := obstacle(call, rule)) is not None:
        return reason
    if call.query.shape[2] > FEW:
        return f"decoding takes up to {FEW} queries, got {call.query.shape[2]}"
    return "decoding has no gradient" if _trains(call, *rule.parameters()) else None


def _rule_obstacle(rule: Rule) -> str | None:
    if isinstance(rule, ActivationRule):
        known = rule.activation in ELEMENTWISE_RULES
        return None if known else f"there are kernels for {', '.join(ELEMENTWISE_RULES)}, not for {rule.activation}"
    if not isinstance(rule, EntmaxRule):
        return f"there is no kernel for {type(rule).__name__}"
    if isinstance(rule.e, Tensor) and any(rule.e.shape[dim] != 1 for dim in (0, 2)):
        return "alpha is one number or one per head, not one per sequence or query"
    return None


@functools.cache
def _generation(device: int) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _machine(device: str) -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed"
    interpreted = device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device != "cuda" and not interpreted:
        return f"kernels run on CUDA devices, and the inputs are on {device}"
    if device == "cuda" and _generation(torch.cuda.current_device()) < 8:
        return "kernels need a GPU of compute capability 8.0 or more"
    return None


# What torch.compiler.assume_constant_result does; calling that would import the compiler, half the time of an import.
_machine._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unwatched(x: Tensor) -> bool:
    """Whether nobody sees the difference between an operation and its implementation: no compiler, mode or subclass.

    The way through the dispatcher takes the host longer than all the rest of a call.
    """
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return torch._C._len_torch_dispatch_stack() == 0


def attend(
    call: Call, rule: Rule, dropout_p: float, generator: torch.Generator | None, counted: bool = False
) -> tuple[Tensor, Tensor]:
    """The output of a call without an obstacle; if `counted` also support size, entropy and distance, (3, B, H, Lq)."""
    from tamis.kernels import ops

    arguments = _arguments(call, rule, dropout_p, generator, counted)
    return ops.attend(arguments, _trains(call, arguments.e))


def attend_pages(call: Call, rule: Rule, table: Tensor, norms: Tensor | None) -> Tensor:
    """The output of a call whose keys and values are pages (pages, Hk, page, D), without an obstacle."""
    from tamis.kernels import ops

    if call.visibility.alibi_slopes is None or (isinstance(rule, ActivationRule) and rule.activation == "sigmoid"):
        norms = None  # there is nothing that they could rule out
    norms = None if norms is None else norms.float().contiguous()
    return ops.decode(_arguments(call, rule, 0.0, None, False), table.int().contiguous(), norms)


def _trains(call: Call, e: Tensor | None) -> bool:
    inputs = (call.query, call.key, call.value, e)
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _arguments(call: Call, rule: Rule, dropout_p: float, generator: torch.Generator | None, counted: bool) -> Arguments:
    visibility = call.visibility
    left, right = visibility.window or (-1, -1)
    cu_q, cu_k = visibility.cu_seqlens or (None, None)
    name, e, e_value, bias, row_scale = _rule_arguments(rule, call.query.shape[1])
    return Arguments(
        query=call.query,
        key=call.key,
        value=call.value,
        e=e,
        row_scale=row_scale,
        attn_mask=visibility.attn_mask,
        key_lengths=_dense(visibility.key_lengths),
        alibi_slopes=_dense(visibility.alibi_slopes),
        query_positions=_dense(visibility.query_positions),
        key_positions=_dense(visibility.key_positions),
        cu_q=_dense(cu_q),
        cu_k=_dense(cu_k),
        seed=_seed(dropout_p, generator, call.query.device),
        rule=name,
        e_value=e_value,
        bias=bias,
        scale=call.scale,
        left=left,
        right=0 if visibility.is_causal else right,
        dropout_p=dropout_p,
        counted=counted,
    )


def _dense(x: Tensor | None) -> Tensor | None:
    """Small vectors, which the kernels read without strides."""
    return None if x is None else x.contiguous()


def _rule_arguments(rule: Rule, heads: int) -> tuple[str, Tensor | None, float, float, Tensor | None]:
    """Name, e per head, e for all, bias, scale per row."""
    if isinstance(rule, ActivationRule):
        return rule.activation, None, 0.0, rule.bias, rule.scale
    assert isinstance(rule, EntmaxRule)
    if isinstance(rule.e, Tensor):
        e = rule.e.flatten()
        return "power", (e if e.shape[0] == heads else e.expand(heads)).contiguous(), 0.0, 0.0, None
    return {0.5: "squares", 1.0: "identity"}.get(rule.e, "power"), None, rule.e, 0.0, None


def _seed(dropout_p: float, generator: torch.Generator | None, device: torch.device) -> Tensor | None:
    """One number from the generator, on the device: nothing waits for it, and a captured graph draws it anew."""
    if dropout_p == 0.0:
        return None
    source = device if generator is None else generator.device
    return torch.randint(2**62, (1,), generator=generator, device=source).to(device)
