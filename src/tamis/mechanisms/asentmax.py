"""Length-aware scales: ASEntmax, and the softmax ones it is compared with.

Long-Context Generalization with Sparse Attention, Vasylenko et al. 2025, https://arxiv.org/abs/2506.16640

    ASEntmax   entmax_1.5((delta + beta log(n + 1)^gamma) q k^T / sqrt(d)),
               beta = softplus(W_b x + b_b),  gamma = 2 tanh(W_g x + b_g),  x the input of the layer, per head and query
    ASSMax     the same scale with softmax
    SSMax      softmax(s log(n + 1) q k^T / sqrt(d)),  s per head, https://arxiv.org/abs/2501.19399

n is the number of keys that the query sees, i + 1 in a causal row, so that caches, padding and packing cannot change
it.  With NAPE positions only the heads without a position bias are scaled.

Deviations: `init="small"` starts with zero weights and beta near 0.05, which leaves the plateau that associative-recall
tasks have at the start; `init="paper"` is N(0, 0.02) weights and zero biases.  `unscaled_alpha=1` keeps those heads
dense that have a position bias, as a steep one leaves a sparse head a few keys to learn from.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tamis.attention.rules import Entmax, Rule, Softmax
from tamis.functional.sharding import Heads
from tamis.mechanisms.base import Inputs, Mechanism, ScaleParts, span
from tamis.precision import KeepsPrecision, precise_linear
from tamis.settings import check_heads, check_switch, choose

INITS = ("paper", "small")


class AdaptiveScale(KeepsPrecision):
    """delta + beta log(n + 1)^gamma, (B, H, Lq), with beta and gamma read off the layer's input or one per head."""

    def __init__(
        self, embed_dim: int | None, num_heads: int, *, delta: float = 1.0, per_head: bool = False, init: str = "paper"
    ) -> None:
        super().__init__()
        choose("init", init, INITS)
        check_heads(num_heads)
        if embed_dim is None and not per_head:
            raise ValueError("embed_dim is needed unless per_head=True")
        self.num_heads, self.delta, self.init = num_heads, delta, init
        self.per_head = check_switch("per_head", per_head)
        shape = (2 * num_heads,) if per_head else (2 * num_heads, embed_dim or 0)
        self.weight = None if per_head else nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(2 * num_heads, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.bias.zero_()
            if self.weight is not None:
                self.weight.normal_(0.0, 0.02) if self.init == "paper" else self.weight.zero_()
            if self.init == "small":
                self.bias[: self.num_heads] = math.log(math.expm1(0.05))

    def coefficients(self, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """beta and gamma, (B or 1, H, Lq or 1)."""
        if self.weight is None:
            raw = self.bias[None, :, None]
        else:
            if hidden is None:
                raise ValueError("this mechanism needs hidden, the input of the attention layer (B, Lq, embed_dim)")
            raw = precise_linear(hidden, self.weight, self.bias).transpose(1, 2)  # (B, 2H, Lq)
        beta, gamma = raw.chunk(2, 1)
        return F.softplus(beta), 2.0 * torch.tanh(gamma)

    def forward(self, hidden: Tensor | None, counts: Tensor) -> Tensor:
        beta, gamma = self.coefficients(hidden)
        log_n = counts.clamp(min=1).to(beta.dtype).log1p()
        return self.delta + beta * log_n**gamma

    def split_heads(self, heads: Heads) -> None:
        self.num_heads //= heads.size
        heads.choose(self, "bias", *(() if self.weight is None else ("weight",)), blocks=2)

    def extra_repr(self) -> str:
        beta, gamma = self.bias.detach().chunk(2)
        learned = f"beta={span(F.softplus(beta))}, gamma={span(2.0 * torch.tanh(gamma))}"
        where = "" if self.per_head else " at a zero input"
        chosen = f"delta={self.delta}, per_head={self.per_head}, init={self.init!r}"
        return f"num_heads={self.num_heads}, {chosen}, {learned}{where}"


class ASEntmaxAttention(KeepsPrecision, Mechanism):
    """Entmax attention with an adaptive, length-aware scale.

    Args:
        embed_dim: width of the layer's input, which the scale is read off.
        num_heads: query heads.
        alpha: a number in [1, 2]; 1 is ASSMax.
        delta: the constant part of the scale.
        per_head: learn one (beta, gamma) per head instead of reading them off the input.
        scaled_heads: which heads are scaled, as booleans (num_heads,); all by default.  Pass those of `NAPE`.
        init: "paper" or "small", see above.
        unscaled_alpha: of the heads that are not scaled; `alpha` by default.
    """

    has_alphas = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        alpha: float = 1.5,
        delta: float = 1.0,
        *,
        per_head: bool = False,
        scaled_heads: Tensor | None = None,
        init: str = "paper",
        unscaled_alpha: float | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("alpha", alpha), ("unscaled_alpha", unscaled_alpha)):
            if value is not None and not 1.0 <= value <= 2.0:
                raise ValueError(f"{name} must lie in [1, 2] for attention, got {value}")
        self.num_heads, self.alpha, self.unscaled_alpha = num_heads, float(alpha), unscaled_alpha
        self.scale = AdaptiveScale(embed_dim, num_heads, delta=delta, per_head=per_head, init=init)
        scaled_heads = _head_mask(scaled_heads, num_heads)
        alphas = None
        if unscaled_alpha is not None:
            if scaled_heads is None:
                raise ValueError(
                    "unscaled_alpha is for heads that are not scaled, and here all are: use NAPE positions"
                )
            alphas = torch.where(scaled_heads, float(alpha), float(unscaled_alpha))
        self.register_buffer("scaled_heads", scaled_heads, persistent=False)
        self.register_buffer("alphas", alphas, persistent=False)

    scaled_heads: Tensor | None
    alphas: Tensor | None
    """One per head, where they differ."""

    def rule(self, inputs: Inputs) -> Rule:
        if (moved := self.moved("alpha")) is not None:
            return Entmax(moved)
        return Entmax(self.alpha if self.alphas is None else self.alphas)

    def movable(self) -> dict[str, float]:
        return {"alpha": self.alpha} if self.alphas is None else {}

    def query_scale(self, inputs: Inputs) -> Tensor:
        return _only(self.scale(inputs.hidden, inputs.visible_counts()), self.scaled_heads)

    def scale_parts(self, hidden: Tensor, counts: Tensor) -> ScaleParts:
        beta, gamma = self.scale.coefficients(hidden)
        scaled = self.scaled_heads
        return ScaleParts(
            delta=self.scale.delta,
            heads=tuple(range(self.num_heads)) if scaled is None else tuple(scaled.nonzero().flatten().tolist()),
            beta=beta,
            gamma=gamma,
            scale=self.scale(hidden, counts),
        )

    def check_layer(self, embed_dim: int, num_heads: int, head_dim: int) -> None:
        super().check_layer(embed_dim, num_heads, head_dim)
        weight = self.scale.weight
        if weight is not None and weight.shape[1] != embed_dim:
            built = f"{type(self).__name__} was built for embed_dim={weight.shape[1]}"
            raise ValueError(f"{built}, but the input of the layer has {embed_dim}")

    def split_heads(self, heads: Heads) -> None:
        self.num_heads //= heads.size
        self.scale.split_heads(heads)
        heads.split(self, *(name for name in ("scaled_heads", "alphas") if getattr(self, name) is not None))

    def extra_repr(self) -> str:
        unscaled = "" if self.unscaled_alpha is None else f", unscaled_alpha={self.unscaled_alpha:g}"
        return f"num_heads={self.num_heads}, alpha={self.alpha:g}{unscaled}"


class ASSMaxAttention(ASEntmaxAttention):
    """The adaptive scale with softmax."""

    initial_spread = 1.0

    def __init__(self, embed_dim: int, num_heads: int, delta: float = 1.0, **arguments: Any) -> None:
        super().__init__(embed_dim, num_heads, 1.0, delta, **arguments)


class ScalableSoftmaxAttention(KeepsPrecision, Mechanism):
    """SSMax: softmax with scores times s log(n + 1), one learned s per head."""

    has_alphas = True
    initial_spread = 1.0

    scaled_heads: Tensor | None

    def __init__(self, num_heads: int, *, init: float = 1.0, scaled_heads: Tensor | None = None) -> None:
        super().__init__()
        check_heads(num_heads)
        self.num_heads = num_heads
        self.s = nn.Parameter(torch.full((num_heads,), float(init), dtype=torch.float32))
        self.register_buffer("scaled_heads", _head_mask(scaled_heads, num_heads), persistent=False)

    def rule(self, inputs: Inputs) -> Rule:
        return Softmax()

    def query_scale(self, inputs: Inputs) -> Tensor:
        log_n = inputs.visible_counts().clamp(min=1).to(self.s.dtype).log1p()
        return _only(self.s[None, :, None] * log_n, self.scaled_heads)

    def split_heads(self, heads: Heads) -> None:
        self.num_heads //= heads.size
        heads.split(self, "s", *(() if self.scaled_heads is None else ("scaled_heads",)))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, s={span(self.s)}"


def _head_mask(scaled_heads: Tensor | None, num_heads: int) -> Tensor | None:
    if scaled_heads is not None and (scaled_heads.dtype != torch.bool or scaled_heads.shape != (num_heads,)):
        raise ValueError(
            f"scaled_heads must be booleans of shape ({num_heads},), "
            f"got {scaled_heads.dtype} of shape {tuple(scaled_heads.shape)}"
        )
    return scaled_heads


def _only(scale: Tensor, heads: Tensor | None) -> Tensor:
    return scale if heads is None else torch.where(heads[None, :, None], scale, 1.0)
