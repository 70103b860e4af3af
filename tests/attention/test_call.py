"""A call is checked once and then travels: what autograd saves of it, and pages put side by side."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tamis
from tamis.attention.call import Pages, check_call


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 6, 4, generator=generator).requires_grad_() for _ in range(3)]


def saved_by(run: Callable[[], Tensor]) -> list[Tensor]:
    """What hooks of saved tensors get to see, as for offloading."""
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        run()
    return seen


INPUTS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "boolean mask": {"attn_mask": torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) > 0.3},
    "additive mask": {"attn_mask": torch.randn(6, 6, generator=torch.Generator().manual_seed(1))},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.0])},
    "query positions": {"query_positions": torch.arange(6) + 1, "is_causal": True},
    "key lengths": {"key_lengths": torch.tensor([4, 6])},
    "sequences": {"cu_seqlens_q": torch.tensor([0, 2, 6])},
}
RULES = {
    "entmax": tamis.Entmax(1.5),
    "learned": tamis.Entmax(torch.tensor([1.2, 1.5, 1.8])),
    "relu per count": tamis.Activation(per_count=True),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", INPUTS)
def test_hooks_of_saved_tensors_see_every_input(name: str, rule: str) -> None:
    batch = slice(0, 1 if name == "sequences" else 2)
    inputs = [x[batch] for x in leaves()]
    given = next(x for x in INPUTS[name].values() if isinstance(x, Tensor))
    seen = saved_by(lambda: tamis.attention(*inputs, rule=RULES[rule], **INPUTS[name]))
    assert any(x.numel() == given.numel() and torch.equal(x.flatten(), given.flatten()) for x in seen)
    if rule == "learned":
        assert any(x.shape == (1, 3, 1, 1) and torch.allclose(x.flatten() + 1.0, RULES[rule].alpha) for x in seen)
    if rule == "relu per count":
        counts = tamis.visible_counts(*inputs[:2], **{k: v for k, v in INPUTS[name].items() if k != "alibi_slopes"})
        scale = 1.0 / counts.clamp(min=1)
        assert any(x.shape == (*scale.shape, 1) and torch.allclose(x[..., 0], scale) for x in seen)


@pytest.mark.parametrize("name", INPUTS)
def test_what_changes_in_place_before_the_backward_pass_is_noticed(name: str) -> None:
    batch = slice(0, 1 if name == "sequences" else 2)
    options = {key: x.clone() if isinstance(x, Tensor) else x for key, x in INPUTS[name].items()}
    out = tamis.entmax_attention(*(x[batch] for x in leaves()), **options)
    given = next(x for x in options.values() if isinstance(x, Tensor))
    given.copy_(torch.zeros_like(given))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_graph_keeps_nothing_that_hooks_took_away() -> None:
    """As when activations are moved to another device until the backward pass."""
    query, key, value = leaves()
    mask, alpha = torch.randn(6, 6), torch.tensor([1.2, 1.5, 1.8])
    stored: dict[int, Tensor] = {}

    def pack(x: Tensor) -> int:
        stored[len(stored)] = x.detach().clone()
        return len(stored) - 1

    def run(mask: Tensor) -> Tensor:
        return tamis.entmax_attention(query * 1.0, key, value, mask, alpha=alpha)

    expected = torch.autograd.grad(run(mask).sum(), (query, key, value))
    watched = mask.clone()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: stored[place]):
        out = run(watched)
    held = weakref.ref(watched)
    del watched
    gc.collect()
    assert held() is None
    for got, want in zip(torch.autograd.grad(out.sum(), (query, key, value)), expected, strict=True):
        assert torch.equal(got, want)


def test_tensors_are_taken_out_and_put_back() -> None:
    query, key, value = leaves()
    call = check_call(
        query,
        key,
        value,
        torch.ones(6, 6, dtype=torch.bool),
        is_causal=True,
        scale=0.5,
        alibi_slopes=torch.ones(3),
        window=(2, 0),
        query_positions=torch.arange(6),
        key_positions=torch.arange(6),
        key_lengths=torch.tensor([6, 3]),
    )
    empty = call.with_tensors([None] * len(call.tensors()))
    assert empty.tensors() == (None,) * len(call.tensors())
    again = empty.with_tensors(call.tensors())
    assert all(one is other for one, other in zip(again.tensors(), call.tensors(), strict=True))
    assert (again.scale, again.visibility.window, again.visibility.is_causal) == (0.5, (2, 0), True)


def test_pages_side_by_side() -> None:
    pages, table, lengths = torch.randn(5, 2, 3, 4), torch.tensor([[4, 1], [2, 99]]), torch.tensor([3, 2])
    query = torch.randn(2, 2, 1, 4)
    shape = torch.empty(2, 2, 6, 4)
    call = check_call(query, shape, shape, is_causal=True, key_lengths=lengths)
    assert call.collected() is call
    call = replace(call, key=pages, value=pages, pages=Pages(table, None))
    assert call.shape == (2, 2, 1, 6)
    assert call.counts().tolist() == [[[3]], [[2]]]
    found = call.collected()
    assert found.pages is None
    torch.testing.assert_close(found.key[0, :, :3], pages[4])
    torch.testing.assert_close(found.key[1, :, :2], pages[2, :, :2])
    assert (found.key[0, :, 3:] == 0.0).all()
    assert found.visibility.query_positions.tolist() == [[2], [1]]
