"""LearnedAlpha: never out of range, never stuck."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import Tensor, nn

from tamis import entmax
from tamis.mechanisms import LearnedAlpha


def with_raw(raw: float, size: int = 3, **options) -> LearnedAlpha:
    module = LearnedAlpha(size, **options)
    with torch.no_grad():
        module.raw.fill_(raw)
    return module


def bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().view(torch.int32)


# ---------------------------------------------------------------------------------------------------------------
# Range


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("low", "high"), [(1.0, 2.0), (1.0, 1.0 + 1e-3), (0.25, 8.0), (1.5, 1.6)])
@pytest.mark.parametrize("raw", [-1e3, -50.0, -8.0, 0.0, 8.0, 50.0, 1e3, math.inf, -math.inf])
def test_range_is_never_left(raw: float, low: float, high: float, training: bool):
    module = with_raw(raw, low=low, high=high).train(training)
    alpha = module()
    assert alpha.dtype == torch.float32
    assert (alpha.double() > low).all()
    assert (alpha.double() < high).all()


@pytest.mark.parametrize("direction", [1.0, -1.0])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=1e6),
        lambda p: torch.optim.SGD(p, lr=1e3, momentum=0.99),
        lambda p: torch.optim.Adam(p, lr=100.0),
        lambda p: torch.optim.AdamW(p, lr=10.0, weight_decay=0.1),
    ],
)
def test_huge_steps(optimizer, direction: float):
    module = LearnedAlpha(4, init=1.5)
    steps = optimizer(module.parameters())
    for step in range(30):
        steps.zero_grad()
        alpha = module()
        assert ((alpha > 1.0) & (alpha < 2.0)).all()
        assert (module.raw.abs() <= module.limit).all()
        (direction * (1.0 if step < 15 else -1.0) * alpha.sum()).backward()
        assert torch.isfinite(module.raw.grad).all()
        steps.step()
    assert torch.isfinite(module().detach()).all()


@pytest.mark.parametrize("raw", [-1e3, -9.0, 9.0, 1e3])
def test_a_training_forward_brings_the_raw_value_back(raw: float):
    module = with_raw(raw)
    module.eval()()
    assert (module.raw == raw).all()
    with torch.no_grad():
        module.train()()
    assert (module.raw == raw).all()
    module()
    assert torch.equal(module.raw.detach(), torch.full((3,), math.copysign(module.limit, raw)))


def test_a_forward_leaves_values_inside_alone():
    torch.manual_seed(0)
    module = LearnedAlpha(64)
    before = module.raw.detach().clone()
    module()
    assert torch.equal(module.raw.detach(), before)


# ---------------------------------------------------------------------------------------------------------------
# Gradients


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("raw", [-1e3, -8.5, -8.0, 8.0, 8.5, 1e3])
def test_inward_gradients_pass_and_outward_ones_do_not(raw: float, training: bool):
    module = with_raw(raw).train(training)
    side = math.copysign(1.0, raw)
    (inward,) = torch.autograd.grad(side * module().sum(), module.raw)  # descent lowers |raw|
    (outward,) = torch.autograd.grad(-side * module().sum(), module.raw)
    assert (side * inward > 3e-4).all()
    assert torch.equal(outward, torch.zeros(3))


@pytest.mark.parametrize("raw", [-7.9, -3.0, 0.0, 2.0, 7.9])
def test_gradients_inside_are_those_of_the_sigmoid(raw: float):
    module = with_raw(raw, low=0.5, high=3.0)
    share = torch.sigmoid(torch.tensor(raw))
    for sign in (1.0, -1.0):
        (grad,) = torch.autograd.grad(sign * module().sum(), module.raw)
        torch.testing.assert_close(grad, torch.full((3,), sign * 2.5) * share * (1.0 - share), rtol=1e-5, atol=0.0)


def test_ends_are_handled_one_by_one():
    module = LearnedAlpha(4, init=1.5)
    with torch.no_grad():
        module.raw.copy_(torch.tensor([-20.0, -20.0, 20.0, 20.0]))
    (module() * torch.tensor([1.0, -1.0, 1.0, -1.0])).sum().backward()
    assert (module.raw.grad == 0.0).tolist() == [True, False, False, True]


def test_nan_gradient_is_not_hidden():
    module = with_raw(8.0)
    (module() * math.nan).sum().backward()
    assert module.raw.grad.isnan().all()


@pytest.mark.parametrize("direction", [1.0, -1.0])
@pytest.mark.parametrize("start", [1.05, 1.5, 1.999])
def test_turns_back_after_being_pushed_outward(start: float, direction: float):
    module = LearnedAlpha(2, init=start)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)

    def step(sign: float) -> None:
        optimizer.zero_grad()
        (sign * direction * module().sum()).backward()
        optimizer.step()

    for _ in range(200):
        step(-1.0)
    pushed = module().detach()
    assert (direction * (pushed - start) > 0.0).all()
    for _ in range(400):
        step(1.0)
    assert (direction * (module().detach() - 1.5) < 0.0).all()


def test_alpha_gradient_through_entmax_reaches_the_raw_value():
    torch.manual_seed(0)
    module = LearnedAlpha(4, init=1.5)
    scores = torch.randn(2, 4, 5, 6)
    target = torch.randn(2, 4, 5, 6)
    (entmax(scores, module()) * target).sum().backward()
    assert module.raw.grad.shape == (4,)
    assert (module.raw.grad != 0.0).all()
    step = 1e-3
    for head in range(4):
        values = []
        for sign in (1, -1):
            raw = torch.zeros(4, dtype=torch.float64)
            raw[head] = sign * step
            values.append((entmax(scores.double(), 1.0 + torch.sigmoid(raw)) * target.double()).sum())
        assert module.raw.grad[head].item() == pytest.approx(((values[0] - values[1]) / (2 * step)).item(), rel=1e-3)


@pytest.mark.parametrize("raw", [0.3, 20.0, -20.0])
def test_used_twice_in_one_forward(raw: float):
    module = with_raw(raw)
    first, second = module(), module()
    loss = (first * second).sum()
    loss.backward()
    again = with_raw(raw)
    again().square().sum().backward()
    torch.testing.assert_close(module.raw.grad, again.raw.grad)


def test_clamping_between_forward_and_backward_does_not_spoil_the_graph():
    module = with_raw(0.5)
    loss = module().sum()
    with torch.no_grad():
        module.raw.fill_(30.0)
    module()
    loss.backward()
    torch.testing.assert_close(
        module.raw.grad, torch.sigmoid(torch.full((3,), 0.5)) * torch.sigmoid(torch.tensor(-0.5))
    )


def test_second_derivative():
    module = with_raw(0.7, size=1)
    (first,) = torch.autograd.grad(module().sum(), module.raw, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), module.raw)
    s = torch.sigmoid(torch.tensor([0.7]))
    torch.testing.assert_close(second, s * (1 - s) * (1 - 2 * s), rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------
# Construction


@pytest.mark.parametrize(("low", "high", "init"), [(1.0, 2.0, 1.5), (1.0, 2.0, 1.01), (0.5, 4.0, 3.9), (1.0, 2.0, 1)])
def test_starts_at_a_number(low: float, high: float, init: float):
    alpha = LearnedAlpha((2, 3), low, high, init)()
    slack = (high - low) / (1.0 + math.exp(LearnedAlpha.limit))
    assert alpha.shape == (2, 3)
    assert (alpha - init).abs().max().item() <= (slack if init in (low, high) else 0.0) * 1.001 + 1e-6


@pytest.mark.parametrize(("init", "sign"), [(1.0, -1.0), (2.0, 1.0)])
def test_starts_at_an_end(init: float, sign: float):
    module = LearnedAlpha(3, init=init)
    assert torch.equal(module.raw.detach(), torch.full((3,), sign * module.limit))
    assert (module() - init).abs().max() < 4e-4


def test_starts_from_normal_raw_values():
    torch.manual_seed(0)
    module = LearnedAlpha(4000)
    assert module.raw.mean().abs() < 0.1
    assert (module.raw.std() - 1.0).abs() < 0.05
    torch.manual_seed(0)
    assert torch.equal(LearnedAlpha(4000, init="normal").raw, module.raw)


def test_reset_parameters():
    module = LearnedAlpha(3, init=1.25)
    with torch.no_grad():
        module.raw.fill_(5.0)
    module.reset_parameters()
    torch.testing.assert_close(module().detach(), torch.full((3,), 1.25))


@pytest.mark.parametrize("shape", [1, 8, (8,), (2, 3), (4, 1, 1)])
def test_parameter_has_a_dimension(shape):
    module = LearnedAlpha(shape)
    expected = (shape,) if isinstance(shape, int) else shape
    assert module.raw.ndim >= 1
    assert module.raw.shape == module().shape == expected
    assert [name for name, _ in module.named_parameters()] == ["raw"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shape": ()}, "at least one dimension"),
        ({"shape": 2, "low": 2.0, "high": 1.0}, "low=2.0, high=1.0"),
        ({"shape": 2, "low": 1.0, "high": 1.0}, "low < high"),
        ({"shape": 2, "low": 0.0}, "0 < low"),
        ({"shape": 2, "low": -1.0}, "0 < low"),
        ({"shape": 2, "high": math.inf}, "high=inf"),
        ({"shape": 2, "high": math.nan}, "high=nan"),
        ({"shape": 2, "init": 2.5}, r"\[1.0, 2.0\], got 2.5"),
        ({"shape": 2, "init": 0.5}, r"\[1.0, 2.0\], got 0.5"),
        ({"shape": 2, "init": math.nan}, "got nan"),
        ({"shape": 2, "init": "uniform"}, "'uniform'"),
        ({"shape": -1}, "shape"),
    ],
)
def test_bad_values(options: dict, match: str):
    with pytest.raises(ValueError, match=match):
        LearnedAlpha(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shape": 2, "init": None}, "init"),
        ({"shape": 2, "low": "1"}, "low"),
        ({"shape": 2.5}, "shape"),
        ({"shape": "8"}, "shape"),
    ],
)
def test_bad_types(options: dict, match: str):
    with pytest.raises(TypeError, match=match):
        LearnedAlpha(**options)


@pytest.mark.parametrize("low", [1.0, 0.5])
def test_repr_shows_the_range(low: float):
    text = repr(LearnedAlpha((2, 3), low, 3.0, init=1.5))
    assert "shape=(2, 3)" in text
    assert f"low={low}" in text
    assert "high=3.0" in text
    assert "1.500..1.500" in text


# ---------------------------------------------------------------------------------------------------------------
# Life in a model


@pytest.mark.parametrize("raw", [0.25, 20.0])
def test_state_dict_round_trip(raw: float):
    module, other = with_raw(raw, init=1.2), LearnedAlpha(3)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(bits(other.raw), bits(module.raw))
    assert torch.equal(other(), module())


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.to(torch.zeros(1, dtype=torch.bfloat16)),
        lambda m: m.bfloat16().half().bfloat16(),
        lambda m: m.to(torch.bfloat16).float(),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_casts_to_half_precision_pass_it_by(cast, nested: bool):
    torch.manual_seed(0)
    module = LearnedAlpha(16)
    raw, alpha = bits(module.raw), bits(module())
    module().sum().backward()
    grad = bits(module.raw.grad)
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"alpha": module})) if nested else module
    cast(model)
    assert module.raw.dtype == torch.float32
    assert torch.equal(bits(module.raw), raw)
    assert torch.equal(bits(module()), alpha)
    assert torch.equal(bits(module.raw.grad), grad)
    assert isinstance(module.raw, nn.Parameter)


def test_optimizer_keeps_working_after_a_cast():
    model = nn.ModuleDict({"linear": nn.Linear(3, 3), "alpha": LearnedAlpha(2, init=1.5)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.bfloat16()
    assert model["linear"].weight.dtype == torch.bfloat16
    model["alpha"]().sum().backward()
    optimizer.step()
    assert (model["alpha"]() < 1.5).all()


def test_double_is_allowed():
    module = with_raw(0.3).double()
    alpha = module()
    assert alpha.dtype == torch.float64
    torch.testing.assert_close(
        alpha, 1.0 + torch.sigmoid(torch.full((3,), 0.3, dtype=torch.float64)), rtol=1e-7, atol=0
    )


def test_meta_device():
    module = LearnedAlpha(3).to("meta")
    assert module.raw.device.type == "meta"
    assert module().shape == (3,)
    assert "shape=(3,)" in repr(module)
    module = LearnedAlpha(3, init=1.25).to(device="meta", dtype=torch.bfloat16)
    assert module.raw.dtype == torch.float32
    module.to_empty(device="cpu").reset_parameters()
    torch.testing.assert_close(module().detach(), torch.full((3,), 1.25))
    with torch.device("meta"):
        module = LearnedAlpha(3)
    assert module.raw.device.type == "meta"


def test_default_dtype_does_not_matter():
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert LearnedAlpha(3, init=1.3)().dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_autocast_leaves_it_in_fp32():
    module = with_raw(7.5)
    with torch.autocast("cpu", torch.bfloat16):
        alpha = module()
    assert torch.equal(bits(alpha), bits(module()))


def test_deepcopy():
    module = with_raw(0.4, low=0.5, high=3.0)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(), module())
    assert (twin.low, twin.high) == (0.5, 3.0)
    with torch.no_grad():
        twin.raw.fill_(2.0)
    assert not torch.equal(twin(), module())


def test_frozen():
    module = with_raw(0.4).requires_grad_(False)
    assert not module().requires_grad


@pytest.mark.parametrize("raw", [0.3, 30.0])
def test_compiled_training_step(raw: float):
    torch._dynamo.reset()
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 4, 5)

    def train(compile_it: bool) -> tuple[Tensor, Tensor]:
        module = with_raw(raw)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)

        def loss() -> Tensor:
            return (entmax(scores, module()) * scores.square()).sum()

        step = torch.compile(loss, fullgraph=True, backend="aot_eager") if compile_it else loss
        for _ in range(3):
            optimizer.zero_grad()
            value = step()
            value.backward()
            optimizer.step()
        return value.detach(), module.raw.detach()

    for ours, expected in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(ours, expected)


def test_functional_call_and_grad():
    module = LearnedAlpha(3, init=1.5)
    raw = torch.tensor([0.1, 0.2, 0.3])
    grads = torch.func.grad(lambda p: torch.func.functional_call(module, p, ()).sum())({"raw": raw})
    share = torch.sigmoid(raw)
    torch.testing.assert_close(grads["raw"], share * (1 - share), rtol=1e-5, atol=0.0)
    ensemble = torch.vmap(lambda r: torch.func.functional_call(module.eval(), {"raw": r}, ()))(torch.stack([raw, -raw]))
    torch.testing.assert_close(ensemble, 1.0 + torch.sigmoid(torch.stack([raw, -raw])))
