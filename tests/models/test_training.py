"""Models learn, in every dtype, compiled too."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from models.cases import CLOSE, VOCAB, causal_lm, every_mechanism, logits, seq2seq, tokens
from tamis import functional
from tamis.models import CausalLM


@every_mechanism
def test_gradients_reach_every_parameter(mechanism: str):
    for model in (
        causal_lm(mechanism, position="learned", arrangement="both", tie_embeddings=False, bias=True),
        seq2seq(mechanism, position="learned", source_vocab_size=VOCAB, tie_embeddings=False),
    ):
        model.train()
        x = tokens(2, 6)
        out = model(x) if isinstance(model, CausalLM) else model(x, tokens(2, 6, 1))
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            assert torch.isfinite(parameter.grad).all(), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "rela", "softpick", "asentmax"])
def test_other_dtypes_train(dtype: torch.dtype, mechanism: str):
    for model in (causal_lm(mechanism), seq2seq(mechanism)):
        exact, model = logits(model), model.to(dtype)
        out = logits(model)
        assert out.dtype == dtype
        assert (out.float() - exact).norm() < (0.1 if dtype == torch.bfloat16 else 1e-4) * exact.norm()
        model.train()
        x = tokens(2, 6)
        out = model(x) if isinstance(model, CausalLM) else model(x, x)
        F.cross_entropy(out.flatten(0, 1).float(), x.flatten()).backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@every_mechanism
def test_a_copy_task_is_learned(mechanism: str):
    model = seq2seq(mechanism, embed_dim=32, encoder_layers=1, decoder_layers=1, dropout=0.0, attention_dropout=0.0)
    model.train()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(30):
        x = torch.randint(2, VOCAB, (16, 4), generator=generator)
        shifted = F.pad(x[:, :-1], (1, 0), value=1)
        loss = F.cross_entropy(model(x, shifted).flatten(0, 1), x.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@every_mechanism
def test_a_language_model_learns_to_repeat(mechanism: str):
    model = causal_lm(mechanism, embed_dim=32, num_layers=1).train()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(25):
        x = torch.randint(1, VOCAB, (16, 1), generator=generator).expand(-1, 6)
        loss = F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "mechanism", ["entmax", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rela", "asentmax"))]
)
def test_seq2seq_compiles_without_a_break(mechanism: str):
    torch._dynamo.reset()
    model, source, target = seq2seq(mechanism, encoder_layers=1, decoder_layers=1), tokens(2, 5), tokens(2, 4, 1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(source, target), model(source, target), **CLOSE)


@pytest.mark.parametrize("position", ["nape", pytest.param("rope", marks=pytest.mark.slow)])
def test_causal_lm_compiles_without_a_break(position: str):
    torch._dynamo.reset()
    model, x = causal_lm(position=position, num_layers=1), tokens(2, 5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), **CLOSE)
    mask = torch.arange(5) >= torch.tensor([[0], [2]])
    torch.testing.assert_close(compiled(x, mask), model(x, mask), **CLOSE)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(
    "mechanism",
    [
        "asentmax",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("softmax", "ssmax", "entmax")),
        pytest.param({"name": "entmax", "alpha": 1.5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_language_models_are_compiled_once_for_all_lengths(mechanism: Any, backend: str, monkeypatch):
    if backend == "triton":  # in Triton's interpreter, and opaque to the compiler as on a GPU
        pytest.importorskip("triton")
        monkeypatch.setattr(functional, "attention", partial(functional.attention, backend=backend))
    torch._dynamo.reset()
    model = causal_lm(mechanism, num_layers=1, num_heads=2, arrangement="both").train()
    if backend == "reference":  # in which rounding tells nothing apart; the kernels do not take it
        model.double()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, (batch, length) in enumerate([(2, 8), (3, 12)]):
        x = tokens(batch, length, number)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            out = compiled(x)
            gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()))
        expected = model(x)
        torch.testing.assert_close(out, expected, **CLOSE)
        for ours, other in zip(
            gradients, torch.autograd.grad(expected.square().sum(), list(model.parameters())), strict=True
        ):
            torch.testing.assert_close(ours, other, **CLOSE)


def test_training_with_dropout_compiles_without_a_break():
    """The defaults of the base model, attention dropout included."""
    torch._dynamo.reset()
    model = seq2seq(encoder_layers=1, decoder_layers=1).train()
    assert model.config.attention_dropout > 0.0
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens(2, 5), tokens(2, 4, 1))
    out.square().sum().backward()
    assert torch.isfinite(model.embedding.weight.grad).all()
