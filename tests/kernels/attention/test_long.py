"""Long rows in Triton's interpreter, where every length counts as long."""

import pytest
import torch
import torch.nn.functional as F

import tamis
from kernels.cases import (
    ACTIVATIONS,
    ADVERSARIAL,
    FACTORS,
    Problem,
    check,
    check_mass,
    covering,
    describe,
    fused,
    parameters,
    plant,
)

pytest.importorskip("triton")
from tamis.kernels.attention import arguments, launch

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="runs compiled in test_compiled.py"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("everything_is_long"),
]

LONG = {
    **FACTORS,
    "rule": (1.5, 2.0, 1.3, 1.0, "learned", "near one"),
    "lengths": ((37, 37), (1, 20), (70, 20), (5, 150), (70, 130)),
    "head_dims": ((16, 16), (24, 40)),
    "structure": ("full", "causal", "window", "causal alibi", "positions"),
    "layout": ("contiguous", "odd strides"),
}


@pytest.mark.parametrize("case", parameters(covering(LONG), every=9))
def test_pairs_of_features(case, known_dropout):
    check(Problem(case, torch.float32))


@pytest.mark.parametrize("case", covering({**LONG, "lengths": ((5, 150),), "rule": (1.5, "learned")})[:1], ids=describe)
def test_fp16(case, known_dropout):
    check(Problem(case, torch.float16))


@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.2])
@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_mass_is_one_on_adversarial_rows(alpha, kind):
    check_mass(kind, alpha, 300)


@pytest.fixture
def bits(monkeypatch):
    """A bit for each tile, of the first call."""
    found = []
    forward = launch.forward
    monkeypatch.setattr(launch, "forward", lambda a, train: found.append(forward(a, train)) or found[-1])
    return lambda tiles: (found[0][3][..., None] >> torch.arange(32) & 1).flatten(3)[..., :tiles].bool()


@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.3])
def test_no_tile_with_weights_is_skipped_and_few_others_are_kept(alpha, bits):
    # Clusters of keys far apart: most tiles hold nothing.
    centres = 6.0 * torch.randn(10, 16)
    key = (centres.repeat_interleave(32, 0) + torch.randn(320, 16))[None, None]
    query = (centres[::3].repeat_interleave(32, 0) + torch.randn(128, 16))[None, None]
    tamis.entmax_attention(query, key, key, alpha=alpha, backend="triton")
    support = tamis.functional.attention_weights(query.double(), key.double(), rule=tamis.Entmax(alpha)) > 0.0
    held = support.view(1, 1, 4, 32, 10, 32).any(5).any(3)
    assert (bits(10) | ~held).all()
    assert held.float().mean() < 0.5
    assert bits(10).sum() <= 1.3 * held.sum()


ELEMENTWISE = {
    **LONG,
    "rule": ACTIVATIONS,
    "lengths": ((1, 20), (70, 20), (5, 150), (40, 70)),
    "structure": (*LONG["structure"], "packed"),
}


@pytest.mark.parametrize("case", parameters(covering(ELEMENTWISE), every=12))
def test_pairs_of_features_of_elementwise_rules(case, known_dropout):
    check(Problem(case, torch.float32))


# More tiles than a word has bits, and a program with two blocks of queries.
@pytest.mark.parametrize(
    ("rule", "lengths", "run", "dtype"),
    [("relu", (20, 1060), 32, torch.float32), ("squared_relu", (100, 200), 64, torch.float16)],
)
def test_rectified_rules_skip_exactly_the_tiles_without_weights(rule, lengths, run, dtype, bits):
    problem = plant(rule, lengths, run, dtype)
    results = check(problem)
    weights = tamis.functional.attention_weights(
        problem.query.double(), problem.key.double(), rule=problem.rule, **problem.options
    )
    held = F.max_pool2d(weights, run, ceil_mode=True) > 0.0
    assert held.float().mean() <= 0.25
    assert torch.equal(bits(held.shape[3]), held)
    for a, b in zip(results, fused(problem), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("activation", ["relu", "squared_relu", "sigmoid"])
@pytest.mark.parametrize("long", [True, False])
def test_division_by_the_number_of_visible_keys(activation, long, monkeypatch):
    monkeypatch.setattr(arguments, "LONG", 1 if long else 10**9)
    leaves = [torch.randn(2, heads, n, 16, requires_grad=True) for heads, n in ((4, 70), (2, 150), (2, 150))]
    options = {"activation": activation, "divide_by_count": True, "window": (40, 3), "enable_gqa": True}
    grad = torch.randn(2, 4, 70, 16)
    found = []
    for backend in ("triton", "reference"):
        out = tamis.relu_attention(*leaves, key_lengths=torch.tensor([150, 101]), backend=backend, **options)
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


def test_nan_is_not_skipped():
    query, key, value = (torch.randn(1, 1, n, 16) for n in (4, 200, 200))
    key[0, 0, 150] = torch.nan
    out = tamis.entmax_attention(query, key, value, backend="triton")
    assert out.isnan().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slope", [0.02, 4.0])
def test_far_keys_count_where_they_outweigh_their_distance(slope, causal):
    query, key, value = (torch.randn(1, 1, 140, 16) for _ in range(3))
    key[0, 0, 2] = 40.0 * query[0, 0, 120] / query[0, 0, 120].norm()
    key[0, 0, 130] = 40.0 * query[0, 0, 20] / query[0, 0, 20].norm()
    options = {"alibi_slopes": torch.tensor([slope]), "is_causal": causal}
    fused = tamis.entmax_attention(query, key, value, backend="triton", **options)
    weights = tamis.functional.attention_weights(query.double(), key.double(), **options)
    torch.testing.assert_close(fused, (weights @ value.double()).float(), rtol=1e-4, atol=1e-4)
    assert slope > 0.1 or weights[0, 0, 120, 2] > 0.0
