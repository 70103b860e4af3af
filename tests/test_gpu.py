"""The transforms and attention on a CUDA device: the same contract as on the CPU."""

import pytest
import torch

import tamis

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ALPHAS = (0.5, 1.0, 1.0 + 1e-6, 1.05, 1.3, 1.5, 2.0, 3.0)


def rows(width: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    z = torch.randn(32, width, generator=generator)
    return {
        "randn": z,
        "small": 1e-6 * z,
        "large": 1e4 * z,
        "equal": torch.full_like(z, 0.3),
        "one above": torch.where(torch.arange(width) == 0, 0.0, -0.9).expand_as(z),
        "ties": z.round(),
    }[kind]


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("width", [1, 63, 512, 8191])
@pytest.mark.parametrize("kind", ["randn", "small", "large", "equal", "one above", "ties"])
def test_weights_equal_those_in_fp64(alpha, width, kind):
    z = rows(width, kind).cuda()
    weights = tamis.entmax(z, alpha).double()
    assert (weights.sum(-1) - 1).abs().max() <= 1e-5
    assert (weights - tamis.entmax(z.double(), alpha)).abs().sum(-1).max() <= 1e-5


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
@pytest.mark.parametrize("kind", ["randn", "equal", "one above"])
def test_mass_at_the_widest(alpha, kind):
    weights = tamis.entmax(rows(131072, kind).cuda(), alpha).double()
    assert (weights.sum(-1) - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients_equal_those_in_fp64(alpha):
    z, upstream = torch.randn(2, 64, 300, generator=torch.Generator().manual_seed(0))
    results = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        leaf = z.to(device, dtype).requires_grad_()
        # one alpha per row: rows of either sign would cancel in a common one
        power = torch.full((64, 1), alpha, dtype=torch.float64, device=device, requires_grad=True)
        grads = torch.autograd.grad(tamis.entmax(leaf, power), (leaf, power), upstream.to(device, dtype))
        results.append([grad.double().cpu() for grad in grads])
    for ours, reference in zip(*results, strict=True):
        assert (ours - reference).norm() <= 1e-5 * reference.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_the_fp32_weights(dtype):
    z = rows(1000, "randn").to(dtype).cuda()
    assert torch.equal(tamis.entmax(z, 1.5), tamis.entmax(z.float(), 1.5).to(dtype))


def test_special_rows():
    inf = float("inf")
    z = torch.tensor([[-inf, -inf], [inf, 0.0], [float("nan"), 1.0], [1.0, -inf]], device="cuda", requires_grad=True)
    weights = tamis.entmax(z, 1.5)
    assert weights[[0, 1, 3]].tolist() == [[0, 0], [1, 0], [1, 0]]
    assert weights[2].isnan().all()
    weights[[0, 1, 3]].square().sum().backward()
    assert z.grad[[0, 1, 3]].abs().max() <= 1e-6


def test_compiles_without_graph_breaks():
    @torch.compile(fullgraph=True, dynamic=True)
    def loss(scores, alpha):
        return tamis.entmax(scores, alpha).square().sum()

    alpha = torch.tensor([1.3, 1.7], device="cuda", requires_grad=True)
    for length in (17, 33):
        z = torch.randn(3, 2, length, length, device="cuda", requires_grad=True)
        compiled = torch.autograd.grad(loss(z, alpha), (z, alpha))
        eager = torch.autograd.grad(tamis.entmax(z, alpha).square().sum(), (z, alpha))
        for one, other in zip(compiled, eager, strict=True):
            torch.testing.assert_close(one, other)


def test_losses_and_relatives():
    z = rows(100, "randn").cuda().requires_grad_()
    target = torch.arange(32, device="cuda")
    for value in (
        tamis.entmax_loss(z, target, 1.5),
        tamis.normmax_loss(z, target, 2.0),
        tamis.normmax(z).square().sum(),
        tamis.budgetmax(z, 3.0).square().sum(),
    ):
        (grad,) = torch.autograd.grad(value, z)
        assert grad.isfinite().all()
        assert grad.abs().sum() > 0


ATTENTION = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (5, 0)},
    "alibi": {"is_causal": True, "alibi_slopes": torch.tensor([1.0, 0.5, 0.25, 0.0])},
    "lengths": {"key_lengths": torch.tensor([0, 37])},
    "mask": {"attn_mask": torch.arange(37) % 3 > 0},
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("settings", [{"alpha": 1.5}, {"alpha": "learn"}, {"activation": "relu"}], ids=str)
def test_attention_equals_dense_fp64(options, dtype, settings):
    """Outputs and gradients, at most twice as far from fp64 as a dense computation in the same dtype."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, heads, 37, 16, generator=generator).to(dtype) for heads in (4, 2, 2, 4)]

    def attend(device, precision, dense=False):
        q, k, v, upstream = (x.to(device, precision) for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        chosen = dict(settings)
        if chosen.get("alpha") == "learn":
            chosen["alpha"] = torch.linspace(1.05, 1.95, 4, dtype=torch.float64, device=device, requires_grad=True)
            leaves.append(chosen["alpha"])
        moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        if dense:
            rule = tamis.Activation() if "activation" in chosen else tamis.Entmax(chosen["alpha"])
            weights = tamis.attention_weights(q, k, enable_gqa=True, rule=rule, **moved).to(precision)
            out = weights @ v.repeat_interleave(2, 1)
        else:
            attention = tamis.relu_attention if "activation" in chosen else tamis.entmax_attention
            out = attention(q, k, v, enable_gqa=True, **chosen, **moved)
        grads = torch.autograd.grad(out, leaves, upstream)
        return [x.double().cpu() for x in (out, *grads)]

    exact = attend("cpu", torch.float64)
    for ours, naive, reference in zip(attend("cuda", dtype), attend("cuda", dtype, dense=True), exact, strict=True):
        bound = max(2 * (naive - reference).norm().item(), 1e-5 * reference.norm().item())
        assert (ours - reference).norm() <= bound


def test_model_trains_on_cuda():
    from tamis.models import Seq2Seq, Seq2SeqConfig

    torch.manual_seed(0)
    config = Seq2SeqConfig(vocab_size=20, embed_dim=32, num_heads=4, ffn_dim=64, encoder_layers=1, decoder_layers=1)
    model = Seq2Seq(config).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    tokens = torch.randint(1, 20, (16, 8), device="cuda")
    losses = []
    for _ in range(30):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens, tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
