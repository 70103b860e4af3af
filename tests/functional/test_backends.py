"""One list of backends: who takes a call, who says why not, and that all of them compute the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tamis
from tamis.attention.backend import Backend
from tamis.attention.call import Call
from tamis.attention.rules import BoundEntmax, Rule
from tamis.attention.statistics import SparseWeights, Statistics
from tamis.functional import backends
from tamis.native import library

RULES = {
    "entmax": tamis.Entmax(1.5),
    "learned": tamis.Entmax(torch.tensor([1.1, 1.9])),
    "softmax": tamis.Softmax(),
    "relu": tamis.Activation(),
    "softpick": tamis.Softpick(),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.arange(7) < 5},
    "window": {"is_causal": True, "window": 3},
}

NATIVE = "blocked" if library.load() is None else "native"


def inputs(requires_grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, 7, 4, generator=generator).requires_grad_(requires_grad) for _ in range(3)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", OPTIONS)
def test_whoever_can_take_a_call_computes_the_same(rule: str, options: str) -> None:
    leaves = inputs(requires_grad=True)
    found = tamis.attention_backends(*leaves, rule=RULES[rule], **OPTIONS[options])
    results = []
    for name in [name for name, reason in found.obstacles.items() if reason is None and name != "triton"]:
        out = tamis.attention(*leaves, rule=RULES[rule], backend=name, **OPTIONS[options])
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    plain = 1 if rule == "softpick" else 3 if rule == "softmax" and options != "window" else 2
    assert len(results) == plain + (NATIVE == "native" and rule != "softpick")
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", OPTIONS)
def test_auto_takes_whom_the_explanation_names(rule: str, options: str) -> None:
    found = tamis.attention_backends(*inputs(), rule=RULES[rule], **OPTIONS[options])
    assert list(found.obstacles) == [backend.name for backend in backends.BACKENDS]
    assert found.obstacles[found.chosen] is None
    assert f"{found.chosen:<8} takes the call" in str(found)
    auto = tamis.attention(*inputs(), rule=RULES[rule], **OPTIONS[options])
    named = tamis.attention(*inputs(), rule=RULES[rule], backend=found.chosen, **OPTIONS[options])
    assert torch.equal(auto, named)
    for name, reason in found.obstacles.items():
        if reason is not None:  # in Triton's interpreter there may be none for kernels either
            assert reason in str(found)
            with pytest.raises(RuntimeError, match=f'^backend="{name}": ') as raised:
                tamis.attention(*inputs(), rule=RULES[rule], backend=name, **OPTIONS[options])
            assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("rule", "chosen"),
    [("entmax", NATIVE), ("learned", NATIVE), ("softmax", "sdpa"), ("relu", NATIVE), ("softpick", "dense")],
)
def test_who_computes_on_a_cpu(rule: str, chosen: str) -> None:
    assert tamis.attention_backends(*inputs(), rule=RULES[rule]).chosen == chosen


def test_reference_is_the_first_of_blocked_and_dense() -> None:
    for rule, name in (("entmax", "blocked"), ("softmax", "blocked"), ("softpick", "dense")):
        reference = tamis.attention(*inputs(), rule=RULES[rule], backend="reference")
        assert torch.equal(reference, tamis.attention(*inputs(), rule=RULES[rule], backend=name))


@pytest.mark.parametrize("rule", RULES)
def test_statistics_and_sparse_weights_ask_the_same_list(rule: str) -> None:
    query, key, value = inputs()
    names = ("blocked", "dense") if rule != "softpick" else ("dense",)
    expected = tamis.attention_weights(query, key, rule=RULES[rule], is_causal=True)
    for name in ("auto", "reference", *names):
        options: dict[str, Any] = {"rule": RULES[rule], "is_causal": True, "backend": name}
        torch.testing.assert_close(tamis.sparse_attention_weights(query, key, **options).to_dense(), expected)
        alone = tamis.attention_statistics(query, key, **options)
        out, beside = tamis.attention_with_statistics(query, key, value, **options)
        torch.testing.assert_close(alone.support_size, (expected != 0.0).sum((0, 2, 3)) / 14)
        assert torch.equal(alone.support_size, beside.support_size)
        torch.testing.assert_close(out, expected @ value)
    with pytest.raises(RuntimeError, match='backend="sdpa": it does not do sparse_weights'):
        tamis.sparse_attention_weights(query, key, rule=RULES[rule], backend="sdpa")


# ---------------------------------------------------------------------------------------------------------------
# A backend of one's own


class Own(Backend):
    """Computes what `dense` does, of calls without a mask, and counts."""

    name = "own"
    is_fused = True

    def __init__(self) -> None:
        self.calls = 0

    def obstacle(self, call: Call, rule: Rule) -> str | None:
        if not isinstance(rule, BoundEntmax):
            return f"it knows no {type(rule).__name__}"
        return "it takes no attn_mask" if call.visibility.attn_mask is not None else None

    def attend(self, call: Call, rule: Rule) -> Tensor:
        self.calls += 1
        return backends.BACKENDS[-1].attend(call, rule)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    backend = Own()
    monkeypatch.setattr(backends, "BACKENDS", [*backends.BACKENDS])
    backends.BACKENDS.insert(0, backend)  # as a plugin does
    backends._say_once.cache_clear()
    yield backend
    backends._say_once.cache_clear()


def test_a_new_backend_is_one_entry_of_the_list(own: Own) -> None:
    query, key, value = inputs()
    torch.testing.assert_close(tamis.entmax_attention(query, key, value), tamis.attention_weights(query, key) @ value)
    tamis.nn.Attention(8, 2, mechanism=tamis.mechanisms.EntmaxAttention(2))(torch.randn(1, 5, 8))
    pages, table, lengths = torch.randn(4, 16, 2, 4), torch.tensor([[1, 3], [0, 0]]), torch.tensor([20, 9])
    assert own.calls == 2
    statistics = tamis.attention_statistics(query, key)  # which it does not have
    assert isinstance(statistics, Statistics)
    assert isinstance(tamis.sparse_attention_weights(query, key), SparseWeights)
    assert own.calls == 2
    tamis.entmax_attention(query, key, value, backend="reference")
    assert own.calls == 2
    with pytest.raises(RuntimeError, match='backend="own": it takes no attn_mask'):
        tamis.entmax_attention(query, key, value, torch.ones(7, 7, dtype=torch.bool), backend="own")
    out = tamis.paged_attention(query[:, :, :1], pages, pages, table, lengths, backend="blocked")
    assert out.shape == (2, 2, 1, 4)


def test_what_was_passed_over_is_said_once(own: Own, caplog: pytest.LogCaptureFixture) -> None:
    query, key, value = inputs()
    mask = torch.ones(7, 7, dtype=torch.bool)
    with caplog.at_level(logging.INFO, "tamis"):
        for _ in range(3):
            tamis.entmax_attention(query, key, value, mask)
            tamis.attention_statistics(query, key, attn_mask=mask)
            tamis.attention(query, key, value, rule=tamis.Softpick())
            tamis.entmax_attention(query, key, value, mask, backend="blocked")
            tamis.entmax_attention(query, key, value)
    native = [("INFO", "attention takes the backend 'dense' and not 'native': there is no C++ kernel for Softpick")]
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    if NATIVE != "native":
        native = [line for line in said if "and not 'native': no C++ kernels were loaded" in line[1]]
    assert said == [
        ("WARNING", f"attention takes the backend '{NATIVE}' and not 'own': it takes no attn_mask"),
        ("WARNING", "attention takes the backend 'dense' and not 'own': it knows no Softpick"),
        *native,
        (
            "INFO",
            "attention takes the backend 'dense' and not 'blocked': "
            "Softpick has no form for blocks: the whole matrix of weights is in memory",
        ),
    ]


def test_kernels_of_another_device_are_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    backends._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "tamis"):
        tamis.entmax_attention(*inputs())
        tamis.softmax_attention(*inputs())
    assert caplog.records == []
