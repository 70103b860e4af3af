"""Recording the attention weights of a model while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from tamis.analysis.sites import NamedSite, attention_sites, kind_of, refuse_compiled, site_name
from tamis.attention.call import check_call
from tamis.functional import SparseWeights
from tamis.mechanisms import Mechanism
from tamis.nn import Attention, MultiheadAttention
from tamis.nn.layers import TransformerLayer

Consumer = Callable[[str, Tensor, Tensor], None]
"""Called with a site, its weights (B, H, Lq, Lk) and what is visible, (B, 1 or H, Lq, Lk)."""

InputConsumer = Callable[[str, Mechanism, Tensor, Tensor], None]
"""Called with a site, its mechanism, the input of its layer (B, Lq, embed_dim) and what is visible."""

_NOT_ABOUT_WEIGHTS = ("dropout_p", "generator", "backend", "page_norms")


class Captured(dict[str, Tensor]):
    """Site to the weights (B, H, Lq, Lk) of its latest call; `visible` has the masks under the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.visible: dict[str, Tensor] = {}

    def keep(self, site: str, weights: Tensor, visible: Tensor) -> None:
        self[site], self.visible[site] = weights, visible


@contextmanager
def capture(
    model: nn.Module,
    consumer: Consumer | None = None,
    *,
    sites: Callable[[str], bool] | None = None,
    inputs: InputConsumer | None = None,
) -> Iterator[Captured]:
    """Record the weights of every attention of ours in a model while it runs.

    Args:
        model: any module with :class:`tamis.nn.Attention` or :class:`tamis.nn.MultiheadAttention` in it, or a model of
            `tamis.hf`; its outputs do not change.  A wrapper such as DDP may be given.
        consumer: gets each site's weights as they come, and nothing is kept: memory does not grow with the data.
        sites: which sites to record, by name; all by default.
        inputs: gets what each site's mechanism was given, for what is read off the input, such as a scale.

    Yields a mapping from site to weights, empty if there is a consumer.  Sites are module paths without "_attention":
    "encoder.0.self", "decoder.0.self", "decoder.0.cross", "layers.0.self"; in layers of
    torch "self_attn" is "self" and "multihead_attn" "cross".  Weights are those before dropout, detached and on the
    model's device.  Queries that the model was told are padding see nothing: pass `target_mask` to a
    `Seq2Seq` to have padded targets among them.
    """
    captured = Captured()
    with _recording(model, _Recorder(captured.keep if consumer is None else consumer, inputs), sites):
        yield captured


@contextmanager
def capture_sparse(
    model: nn.Module, *, sites: Callable[[str], bool] | None = None
) -> Iterator[dict[str, list[SparseWeights]]]:
    """Record only the exact non-zeros of weights, on the CPU: no array of all queries and keys is made.

    Yields a mapping from site to the weights of its calls; `joined` puts those of a text read in parts together.

    Args:
        model, sites: as in :func:`capture`.
    """
    found: dict[str, list[SparseWeights]] = {}
    with _recording(model, _SparseRecorder(found), sites):
        yield found


def joined(parts: Sequence[SparseWeights]) -> SparseWeights:
    """The weights of one text (1, H, L, L) from those of its parts, each of which sees all keys up to its end."""
    if len(parts) == 1:
        return parts[0]
    heads = parts[0].shape[1]
    counts = torch.cat([part.crow.diff().reshape(heads, part.shape[2]) for part in parts], 1)
    ends = [part.crow[part.shape[2] :: part.shape[2]].tolist() for part in parts]
    pieces = [
        (part, slice(end[head - 1] if head else 0, end[head]))
        for head in range(heads)
        for part, end in zip(parts, ends, strict=True)
    ]
    crow = torch.cat([counts.new_zeros(1), counts.flatten().cumsum(0)])
    col, val = (torch.cat([getattr(part, name)[own] for part, own in pieces]) for name in ("col", "val"))
    return SparseWeights(crow, col, val, (1, heads, counts.shape[1], parts[-1].shape[3]))


@contextmanager
def _recording(model: nn.Module, recorder: _Recorder, sites: Callable[[str], bool] | None) -> Iterator[None]:
    """With the hooks of a recorder in a model."""
    handles: list[Any] = []
    refuse_compiled(model)
    attention_sites(model)  # raises if there is none: recording nothing would look like a model that attends to nothing
    try:
        for name, module in model.named_modules():
            if isinstance(module, TransformerLayer):
                handles.append(module.register_forward_pre_hook(recorder.enter_layer, with_kwargs=True))
                handles.append(module.register_forward_hook(recorder.leave_layer, always_call=True))
            elif isinstance(module, nn.TransformerDecoderLayer):
                handles.append(module.register_forward_pre_hook(recorder.enter_torch_layer, with_kwargs=True))
                handles.append(module.register_forward_hook(recorder.leave_layer, always_call=True))
            elif isinstance(module, MultiheadAttention):
                site = site_name(name)
                if sites is None or sites(site):
                    handles.append(recorder.attach_multihead(site, module))
            elif isinstance(module, Attention):
                site = site_name(name)
                if sites is None or sites(site):
                    handles.extend(recorder.attach(site, module))
            elif isinstance(module, NamedSite):
                wanted = sites is None or sites(module.site)
                handles.extend(recorder.attach_named(module.site if wanted else None, module))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder:
    """Hooks that follow one call through a layer, its attention and the mechanism inside.

    Weights are computed where the mechanism is called: queries and keys are there as the model uses them, rotated,
    cached and packed.  Only the layer knows which queries are padding.
    """

    def __init__(self, consumer: Consumer, inputs: InputConsumer | None) -> None:
        self.consumer, self.inputs = consumer, inputs
        self.mechanisms: set[nn.Module] = set()
        self.layer_mask: Tensor | None = None
        self.site: str | None = None
        self.query_mask: Tensor | None = None

    def attach(self, site: str, attention: Attention) -> Iterator[Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.site, self.query_mask = site, self._query_mask(args, kwargs)

        yield from self._hooks(attention, enter)

    def attach_named(self, site: str | None, attention: NamedSite) -> Iterator[Any]:
        """Sites that are not asked for are followed too: only self-attention can tell what is padding."""
        is_cross = kind_of(attention.site) == "cross"

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not is_cross:
                self.layer_mask = _seeing_themselves(args[0], args[1], kwargs["attn_mask"])
            self.site, self.query_mask = site, self.layer_mask

        yield from self._hooks(attention, enter)

    def attach_multihead(self, site: str, attention: MultiheadAttention) -> Any:
        """Recorded as it is called: asked for weights, it never calls its mechanism."""

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = signature(attention.forward).bind(*args, **kwargs).arguments
            query, key, padding = given["query"], given["key"], given.get("key_padding_mask")
            if query.is_nested:  # it calls itself with padded tensors
                return
            self.site = site
            self.query_mask = _real(padding) if query is key else self.layer_mask
            with torch.no_grad():
                made = attention.prepare(query, key, given["value"], padding, given.get("attn_mask"))
            queries, keys, _, hidden, mask = made
            self.record(attention.mechanism, (queries, keys), {"hidden": hidden, "attn_mask": mask})
            self.site = None

        return attention.register_forward_pre_hook(enter, with_kwargs=True)

    def _hooks(self, attention: Attention | NamedSite, enter: Callable[..., None]) -> Iterator[Any]:
        def leave(*_: Any) -> None:
            self.site = None

        yield attention.register_forward_pre_hook(enter, with_kwargs=True)
        yield attention.register_forward_hook(leave, always_call=True)
        if attention.mechanism not in self.mechanisms:  # layers may share one
            self.mechanisms.add(attention.mechanism)
            yield attention.mechanism.register_forward_pre_hook(self.record, with_kwargs=True)

    def enter_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layer_mask = _of_queries(args, kwargs)

    def enter_torch_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = signature(module.forward).bind(*args, **kwargs).arguments
        self.layer_mask = _real(given.get("tgt_key_padding_mask"))

    def leave_layer(self, *_: Any) -> None:
        self.layer_mask = None

    def _query_mask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """(B, Lq), False for padding: from the layer, or from self-attention that stands alone."""
        memory = args[1] if len(args) > 1 else kwargs.get("memory")
        return _of_queries(args, kwargs) if memory is None else self.layer_mask

    @torch.no_grad()
    def record(self, mechanism: Mechanism, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        site = self.site
        if site is None:  # the mechanism is shared with a site that nobody asked for
            return
        query, key = args[0].detach(), args[1].detach()
        hidden = kwargs["hidden"]
        options = {name: value for name, value in kwargs.items() if name not in (*_NOT_ABOUT_WEIGHTS, "hidden")}
        weights = mechanism.weights(query, key, hidden=hidden, **options)
        visible = _visible(query, key, options, self.query_mask)
        self.consumer(site, weights.detach(), visible)
        if self.inputs is not None:
            self.inputs(site, mechanism, hidden.detach(), visible)


class _SparseRecorder(_Recorder):
    """The same, of exact non-zeros alone."""

    def __init__(self, found: dict[str, list[SparseWeights]]) -> None:
        super().__init__(lambda *_: None, None)
        self.found = found

    @torch.no_grad()
    def record(self, mechanism: Mechanism, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.site is None:
            return
        options = {name: value for name, value in kwargs.items() if name not in _NOT_ABOUT_WEIGHTS}
        weights = mechanism.sparse_weights(args[0].detach(), args[1].detach(), **options)
        parts = weights.crow.cpu(), weights.col.cpu().int(), weights.val.detach().cpu().float()
        self.found.setdefault(self.site, []).append(SparseWeights(*parts, weights.shape))


def _of_queries(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The part of a mask over the keys of self-attention that is about its queries, which are the last of them."""
    x, mask = args[0] if args else kwargs["x"], kwargs.get("key_mask")
    return None if mask is None else mask[:, mask.shape[1] - x.shape[1] :]


def _real(padding: Tensor | None) -> Tensor | None:
    """(B, L), False for padding, from a mask of torch's: True for padding, or added to scores."""
    if padding is None:
        return None
    rows = padding if padding.ndim == 2 else padding[None]
    return ~rows if rows.dtype == torch.bool else rows > float("-inf")


def _seeing_themselves(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """(B, Lq), False for padding, from the mask of self-attention, whose queries are the last of its keys."""
    if mask is None:
        return None
    behind = key.shape[2] - query.shape[2]
    own = mask.expand(-1, -1, query.shape[2], key.shape[2]).diagonal(behind, -2, -1)  # (B, 1 or H, Lq)
    return (own if own.dtype == torch.bool else own > float("-inf")).any(1)


def _visible(query: Tensor, key: Tensor, options: dict[str, Any], query_mask: Tensor | None) -> Tensor:
    """What each query may see, (B, 1 or H, Lq, Lk)."""
    biased = check_call(query, key, None, **options).visibility
    visibility = replace(biased, alibi_slopes=None)  # they hide nothing, and are one for each head
    everything = slice(None)
    keep, bias = visibility.block(everything, everything, everything)
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device) if keep is None else keep
    if bias is not None:
        visible = visible & (bias > float("-inf"))
    if query_mask is not None:
        visible = visible & query_mask[:, None, :, None]
    return visible.expand(query.shape[0], visible.shape[1], query.shape[2], key.shape[2])
