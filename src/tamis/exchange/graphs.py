"""A model as graphs without a loop: what torch.export, AOTInductor and ONNX can hold.

Everything of a model is plain operations but the solver of entmax, which goes on until a row is solved.  Here it takes
the number of steps that is proven to be enough for each alpha and the largest width (:mod:`tamis.transforms.fixed`).
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tamis.attention.call import check_call
from tamis.attention.rules import Entmax, Rule, Softmax
from tamis.mechanisms import Mechanism
from tamis.mechanisms.base import Inputs
from tamis.models import CausalLM, Seq2Seq
from tamis.models.config import ModelConfig
from tamis.models.pretrained import PretrainedModel
from tamis.nn import Attention
from tamis.transforms.fixed import SOFTMAX, fixed_entmax, steps_needed


@dataclass(frozen=True)
class FixedEntmax(Rule):
    """alpha-entmax of up to `width` keys, in a number of steps that is known beforehand."""

    powers: tuple[float, ...]
    """alpha - 1, one for each head."""
    width: int

    def dense(self, scores: Tensor, keep: Tensor | None) -> Tensor:
        return fixed_entmax(scores, self.powers, self.width)


class TracedInputs(Inputs):
    """What a mechanism looks at, with counts that do not ask how many queries there are."""

    def visible_counts(self) -> Tensor:
        about = {name: value for name, value in self.options.items() if name not in ("alibi_slopes", "dropout_p")}
        visibility = check_call(self.query, self.key, None, **about).visibility
        keep, bias = visibility.block(slice(None), slice(None), slice(None))
        seen = torch.ones(1, 1, visibility.num_queries, visibility.num_keys, dtype=torch.bool, device=visibility.device)
        seen = seen if keep is None else seen & keep
        return (seen if bias is None else seen & (bias > -math.inf)).sum(-1)


class FixedMechanism(Mechanism):
    """A mechanism whose entmax takes a known number of steps; its alphas are constants."""

    def __init__(self, mechanism: Mechanism, attention: Attention, width: int) -> None:
        super().__init__()
        self.inner, self.width = mechanism, width
        heads, size = attention.num_heads, attention.head_dim
        one = torch.zeros(1, heads, 1, size)
        hidden = torch.zeros(1, 1, attention.q_proj.in_features)
        with torch.no_grad():
            rule = mechanism.rule(Inputs(one, one, hidden, {}))
        self.powers = _powers(rule, heads)

    @property
    def steps(self) -> int:
        """Steps of the solver: the most that a head needs."""
        return max((steps_needed(e, self.width) for e in self.powers or () if e >= SOFTMAX), default=0)

    def resolve(
        self, query: Tensor, key: Tensor, hidden: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Rule]:
        inputs = TracedInputs(query, key, hidden, options)
        scale = self.inner.query_scale(inputs)
        if scale is not None:
            query = query * scale.unsqueeze(-1)
        return query, self.inner.rule(inputs) if self.powers is None else FixedEntmax(self.powers, self.width)

    def merge(self, context: Tensor) -> Tensor:
        return self.inner.merge(context)


def _powers(rule: Rule, heads: int) -> tuple[float, ...] | None:
    """alpha - 1 of each head; None for what is no entmax."""
    if not isinstance(rule, Entmax | Softmax):
        return None
    alpha = rule.alpha if isinstance(rule, Entmax) else 1.0
    if not isinstance(alpha, Tensor):
        return (float(alpha) - 1.0,) * heads
    shaped = alpha if alpha.ndim == 1 else alpha.flatten()
    if shaped.numel() not in (1, heads):
        raise ValueError(f"a graph needs one alpha for each head, got alphas of shape {tuple(alpha.shape)}")
    return tuple((shaped.double() - 1.0).expand(heads).tolist())


def fixed_copy(model: PretrainedModel, width: int) -> Any:
    """A copy of a model for graphs, whose attention sees at most `width` keys."""
    model = copy.deepcopy(model).eval().requires_grad_(False).float().cpu()
    for module in model.modules():
        if isinstance(module, Attention):
            module.mechanism = FixedMechanism(module.mechanism, module, width)
    return model


@dataclass(frozen=True)
class Graph:
    """A part of a model: what is computed from tensors, without any state."""

    name: str
    module: Encoder | Decoder | LanguageModel
    inputs: tuple[str, ...]
    output: str
    dims: tuple[dict[int, str], ...]
    """Which dimensions of each input may vary, and what they are."""
    vocabulary: dict[str, int]
    """Inputs of tokens, and how many kinds there are."""
    width: int
    """What dimensions other than the batch may be at most."""
    embed_dim: int

    def example(self, sizes: dict[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Inputs of these sizes: the second half of what a mask of the first row covers is padding."""
        made = []
        for name, dims in zip(self.inputs, self.dims, strict=True):
            shape = [sizes[dims[axis]] for axis in sorted(dims)]
            if name in self.vocabulary:
                made.append(torch.randint(self.vocabulary[name], shape, generator=generator))
            elif name.endswith("mask"):
                mask = torch.ones(shape, dtype=torch.bool)
                mask[0, (shape[1] + 1) // 2 :] = False
                made.append(mask)
            else:
                made.append(torch.randn(*shape, self.embed_dim, generator=generator))
        return tuple(made)

    def sizes(self) -> list[str]:
        """The names of the dimensions."""
        return list(dict.fromkeys(name for dims in self.dims for name in dims.values()))


class Encoder(nn.Module):
    """Tokens of a source and which of them are real, to what the decoder reads."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model

    def layers(self) -> nn.Module:
        return self.model.encoder

    def forward(self, source: Tensor, source_mask: Tensor) -> Tensor:
        return self.model.encode(source, source_mask)


class Decoder(nn.Module):
    """What was written so far and what was read, to the logits of what follows each token."""

    def __init__(self, model: Seq2Seq) -> None:
        super().__init__()
        self.model = model

    def layers(self) -> nn.Module:
        return self.model.decoder

    def forward(self, target: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        positions = torch.arange(target.shape[1], device=target.device)[None]
        return self.model.decode(target, memory, source_mask, positions=positions)


class LanguageModel(nn.Module):
    """Tokens to the logits of what follows each."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model

    def layers(self) -> nn.Module:
        return self.model.layers

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


def graphs_of(model: PretrainedModel, width: int, *, fixed: bool = True) -> list[Graph]:
    """The parts of a model; those of the model as it is if not `fixed`, to compare with."""
    limit = model.config.position_limit() if isinstance(model.config, ModelConfig) else None
    if limit is not None and width > limit:
        raise ValueError(f"the model has {limit} positions, fewer than max_length = {width}")
    held: Any = fixed_copy(model, width) if fixed else model
    batch = {0: "batch"}
    embed_dim: int = held.config.embed_dim
    whole: list[tuple[str, Encoder | Decoder | LanguageModel, tuple[str, ...], str, tuple[dict[int, str], ...]]]
    if isinstance(held, CausalLM):
        whole = [("model", LanguageModel(held), ("tokens",), "logits", ({**batch, 1: "length"},))]
        vocabulary = {"tokens": held.config.vocab_size}
    elif isinstance(held, Seq2Seq):
        source, target = {**batch, 1: "source_length"}, {**batch, 1: "target_length"}
        whole = [
            ("encoder", Encoder(held), ("source", "source_mask"), "memory", (source, source)),
            ("decoder", Decoder(held), ("target", "memory", "source_mask"), "logits", (target, source, source)),
        ]
        read = held.config.source_vocab_size or held.config.vocab_size
        vocabulary = {"source": read, "target": held.config.vocab_size}
    else:
        raise TypeError(f"only a Seq2Seq or a CausalLM is exported, got {type(model).__name__}")
    return [Graph(*part, vocabulary, width, embed_dim) for part in whole]


def steps_of(graph: Graph) -> int:
    """The most steps that the solver takes in a graph; 0 if there is none."""
    found = [module.steps for module in graph.module.layers().modules() if isinstance(module, FixedMechanism)]
    return max(found, default=0)


def export_program(graph: Graph) -> torch.export.ExportedProgram:
    """A graph as torch.export has it, with sizes from 1 to what it was made for."""
    from torch.export import Dim

    dims = {name: Dim(name) if name == "batch" else Dim(name, max=graph.width) for name in graph.sizes()}
    sizes = {name: 3 + number for number, name in enumerate(dims)}
    example = graph.example(sizes, torch.Generator().manual_seed(0))
    shapes = tuple({axis: dims[name] for axis, name in own.items()} for own in graph.dims)
    with torch.no_grad():
        return torch.export.export(graph.module, example, dynamic_shapes=shapes)
