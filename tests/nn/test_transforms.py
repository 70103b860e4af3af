"""The transforms as modules: equal to the functions, and good citizens of torch.nn."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tamis import budgetmax, entmax, entmax15, normmax, sparsemax
from tamis.mechanisms import LearnedAlpha
from tamis.nn import Budgetmax, Entmax, Entmax15, Normmax, Sparsemax

WITH_PARAMETER = [
    pytest.param(Entmax, entmax, "alpha", id="entmax"),
    pytest.param(Normmax, normmax, "alpha", id="normmax"),
    pytest.param(Budgetmax, budgetmax, "budget", id="budgetmax"),
]


def scores(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Doubled(nn.Module):
    """A module that returns a tensor: what LearnedAlpha is to the transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.tensor([0.75]))

    def forward(self) -> Tensor:
        return 2.0 * self.part


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (Entmax(), lambda z, **k: entmax(z, 1.5, **k)),
        (Entmax(1.3), lambda z, **k: entmax(z, 1.3, **k)),
        (Entmax(2), sparsemax),
        (Sparsemax(), sparsemax),
        (Entmax15(), entmax15),
        (Normmax(), lambda z, **k: normmax(z, 2.0, **k)),
        (Normmax(5.0), lambda z, **k: normmax(z, 5.0, **k)),
        (Budgetmax(), lambda z, **k: budgetmax(z, 2.0, **k)),
        (Budgetmax(2.5), lambda z, **k: budgetmax(z, 2.5, **k)),
    ],
    ids=lambda x: repr(x) if isinstance(x, nn.Module) else "",
)
def test_equals_its_function(module: nn.Module, function):
    z = scores(3, 4, 5)
    assert torch.equal(module(z), function(z))
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(1)) < 0.7
    assert not mask.all()
    assert torch.equal(module(z, mask=mask), function(z, mask=mask))
    assert (module(z, mask=mask)[~mask.expand(3, 4, 5)] == 0.0).all()
    assert list(module.parameters()) == []
    assert module.state_dict() == {}


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(
    ("make", "function"),
    [
        (lambda dim: Entmax(1.4, dim), lambda z, dim: entmax(z, 1.4, dim)),
        (lambda dim: Entmax(1.4, dim=dim), lambda z, dim: entmax(z, 1.4, dim)),
        (lambda dim: Sparsemax(dim), sparsemax),
        (lambda dim: Entmax15(dim=dim), entmax15),
        (lambda dim: Normmax(3.0, dim), lambda z, dim: normmax(z, 3.0, dim)),
        (lambda dim: Budgetmax(1.5, dim), lambda z, dim: budgetmax(z, 1.5, dim)),
    ],
)
def test_dim(make, function, dim: int):
    z = scores(3, 4, 5)
    assert torch.equal(make(dim)(z), function(z, dim))


def test_mask_is_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        Entmax()(scores(2, 3), torch.ones(2, 3, dtype=torch.bool))


@pytest.mark.parametrize(("cls", "function", "name"), WITH_PARAMETER)
def test_tensor_becomes_a_buffer(cls, function, name: str):
    value = torch.tensor([[1.2], [1.8], [2.5]])
    module = cls(value)
    z = scores(3, 4)
    assert torch.equal(module(z), function(z, value))
    assert list(module.parameters()) == []
    assert list(module.state_dict()) == [name]
    other = cls(torch.ones(3, 1))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(z), module(z))
    assert getattr(module.double(), name).dtype == torch.float64
    assert module(z.double()).dtype == torch.float64
    assert getattr(module.to("meta"), name).device.type == "meta"


@pytest.mark.parametrize(("cls", "function", "name"), WITH_PARAMETER)
def test_parameter_is_trained(cls, function, name: str):
    parameter = nn.Parameter(torch.tensor([[1.3], [1.9]]))
    module = cls(parameter)
    assert dict(module.named_parameters()) == {name: parameter}
    assert list(module.state_dict()) == [name]
    z, target = scores(2, 6), scores(2, 6).roll(1, 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    before = parameter.detach().clone()
    loss = (module(z) * target).sum()
    assert torch.equal(loss, (function(z, parameter) * target).sum())
    loss.backward()
    assert (parameter.grad != 0.0).all()
    optimizer.step()
    assert (getattr(module, name) != before).all()
    assert (module(z) * target).sum() < loss


@pytest.mark.parametrize(("cls", "function", "name"), WITH_PARAMETER)
def test_learned_alpha_is_a_submodule(cls, function, name: str):
    learned = LearnedAlpha(3, low=1.1, high=2.5, init=1.7)
    module = cls(learned)
    assert list(module.state_dict()) == [f"{name}.raw"]
    z = scores(2, 3, 4, 5)
    weights = module(z)
    assert torch.equal(weights, function(z, learned()))
    (weights * z.roll(1, -1)).sum().backward()
    assert (learned.raw.grad != 0.0).all()
    assert "LearnedAlpha" in repr(module)
    module.bfloat16()
    assert learned.raw.dtype == torch.float32
    assert module(z.bfloat16()).dtype == torch.bfloat16
    module.eval()
    assert not learned.training


@pytest.mark.parametrize(("cls", "function", "name"), WITH_PARAMETER)
def test_any_module_may_give_the_parameter(cls, function, name: str):
    module = cls(Doubled())
    z = scores(2, 6)
    assert torch.equal(module(z), function(z, torch.tensor([1.5])))
    module(z).square().sum().backward()
    assert getattr(module, name).part.grad.abs() > 0.0


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Entmax(1.3, 1), "Entmax(alpha=1.3, dim=1)"),
        (Sparsemax(0), "Sparsemax(alpha=2.0, dim=0)"),
        (Entmax15(), "Entmax15(alpha=1.5, dim=-1)"),
        (Normmax(), "Normmax(alpha=2.0, dim=-1)"),
        (Budgetmax(3.5), "Budgetmax(budget=3.5, dim=-1)"),
        (Entmax(torch.ones(3, 1)), "Entmax(alpha=(3, 1), dim=-1)"),
        (Budgetmax(nn.Parameter(torch.ones(4))), "Budgetmax(budget=(4,), dim=-1)"),
    ],
)
def test_repr(module: nn.Module, expected: str):
    assert repr(module) == expected


@pytest.mark.parametrize("value", [1.4, torch.tensor([[1.2], [1.9]]), nn.Parameter(torch.tensor([[1.2], [1.9]]))])
def test_deepcopy_and_sequential(value):
    model = nn.Sequential(nn.Linear(5, 6), Entmax(value))
    twin = copy.deepcopy(model)
    x = scores(2, 5)
    assert torch.equal(model(x), twin(x))
    model(x).square().sum().backward()
    assert model[0].weight.grad.abs().sum() > 0.0
    assert twin[0].weight.grad is None


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (Entmax(-1.0), "alpha"),
        (Entmax(1.5, 7), "dim"),
        (Normmax(1.0), "alpha"),
        (Budgetmax(9.0), "budget"),
        (Entmax(torch.tensor([1.5, -1.0])), "alpha"),
    ],
)
def test_bad_arguments_are_reported(module: nn.Module, match: str):
    with pytest.raises(ValueError, match=match):
        module(scores(3, 4))


@pytest.mark.parametrize("cls", [Entmax, Normmax, Budgetmax])
def test_compiles_whole_with_dynamic_shapes(cls):
    torch._dynamo.reset()
    module = cls(LearnedAlpha(3, low=1.1, high=2.5, init=1.7))
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 3, 4, 5), (5, 3, 2, 7)):
        z = scores(*shape)
        torch.testing.assert_close(compiled(z), module(z))
