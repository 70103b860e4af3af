"""The losses as modules: equal to the functions, with the arguments of nn.CrossEntropyLoss."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn

from tamis import entmax_loss, normmax_loss, sparsemax_loss
from tamis.mechanisms import LearnedAlpha
from tamis.nn import EntmaxLoss, NormmaxLoss, SparsemaxLoss

WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0])
WITH_ALPHA = [pytest.param(EntmaxLoss, entmax_loss, id="entmax"), pytest.param(NormmaxLoss, normmax_loss, id="normmax")]


def scores(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def targets(*shape: int) -> Tensor:
    return torch.randint(4, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"reduction": "none", "ignore_index": 2},
        {"weight": WEIGHT},
        {"label_smoothing": 0.2},
        {"weight": WEIGHT, "label_smoothing": 0.2, "ignore_index": 1, "reduction": "mean"},
    ],
    ids=lambda options: "+".join(options) or "defaults",
)
@pytest.mark.parametrize(
    ("make", "function"),
    [
        (EntmaxLoss, entmax_loss),
        (lambda **k: EntmaxLoss(1.2, **k), lambda *a, **k: entmax_loss(*a, 1.2, **k)),
        (SparsemaxLoss, sparsemax_loss),
        (NormmaxLoss, normmax_loss),
        (lambda **k: NormmaxLoss(3.0, **k), lambda *a, **k: normmax_loss(*a, 3.0, **k)),
    ],
    ids=["entmax", "entmax1.2", "sparsemax", "normmax", "normmax3"],
)
@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 3)])
def test_equals_its_function(make, function, options: dict, shape: tuple[int, ...]):
    z, target = scores(*shape), targets(shape[0], *shape[2:])
    module = make(**options)
    assert torch.equal(module(z, target), function(z, target, **options))
    assert list(module.parameters()) == []
    if "ignore_index" not in options:
        q = torch.softmax(z.roll(1, 0), 1)
        assert torch.equal(module(z, q), function(z, q, **options))


def test_alpha_one_is_the_cross_entropy_module():
    options = {"weight": WEIGHT, "ignore_index": 2, "label_smoothing": 0.1, "reduction": "none"}
    z, target = scores(6, 4), targets(6)
    torch.testing.assert_close(EntmaxLoss(1.0, **options)(z, target), nn.CrossEntropyLoss(**options)(z, target))


@pytest.mark.parametrize("cls", [EntmaxLoss, SparsemaxLoss, NormmaxLoss])
def test_options_are_those_of_cross_entropy_and_keyword_only(cls):
    theirs = inspect.signature(nn.CrossEntropyLoss).parameters
    for name, parameter in inspect.signature(cls).parameters.items():
        if name == "alpha":
            continue
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default == theirs[name].default


@pytest.mark.parametrize(("cls", "function"), WITH_ALPHA)
def test_tensor_becomes_a_buffer(cls, function):
    alpha = torch.tensor([1.2, 1.5, 2.0])
    module = cls(alpha, reduction="none")
    z, target = scores(3, 4), targets(3)
    assert torch.equal(module(z, target), function(z, target, alpha, reduction="none"))
    assert list(module.parameters()) == []
    assert "alpha" in module.state_dict()
    assert module.double().alpha.dtype == torch.float64
    assert module.to("meta").alpha.device.type == "meta"


@pytest.mark.parametrize(("cls", "function"), WITH_ALPHA)
def test_parameter_is_trained(cls, function):
    alpha = nn.Parameter(torch.tensor(1.5))
    module = cls(alpha)
    z, target = scores(3, 4), targets(3)
    assert dict(module.named_parameters()) == {"alpha": alpha}
    assert "alpha" in module.state_dict()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    before = module(z, target)
    assert torch.equal(before, function(z, target, alpha))
    before.backward()
    optimizer.step()
    assert module.alpha != 1.5
    assert module(z, target) < before


@pytest.mark.parametrize(("cls", "function"), WITH_ALPHA)
def test_learned_alpha_is_a_submodule(cls, function):
    learned = LearnedAlpha(1, low=1.1, high=2.5, init=1.7)
    module = cls(learned)
    z, target = scores(3, 4), targets(3)
    value = module(z, target)
    assert torch.equal(value, function(z, target, learned()))
    assert "alpha.raw" in module.state_dict()
    value.backward()
    assert learned.raw.grad.abs() > 0.0
    assert "LearnedAlpha" in repr(module)
    module.bfloat16()
    assert learned.raw.dtype == torch.float32


def test_weight_is_a_buffer_and_moves():
    module = EntmaxLoss(1.5, weight=WEIGHT)
    assert [name for name, _ in module.named_buffers()] == ["weight"]
    assert module.double().weight.dtype == torch.float64
    assert module.to("meta").weight.device.type == "meta"
    assert EntmaxLoss().weight is None
    assert EntmaxLoss().state_dict() == {}


@pytest.mark.parametrize("cls", [EntmaxLoss, SparsemaxLoss, NormmaxLoss])
def test_state_dict_round_trip(cls):
    module, other = cls(weight=WEIGHT), cls(weight=torch.ones(4))
    other.load_state_dict(module.state_dict())
    z, target = scores(3, 4), targets(3)
    assert torch.equal(other(z, target), module(z, target))


@pytest.mark.parametrize(
    ("module", "fragments"),
    [
        (EntmaxLoss(1.3), ["EntmaxLoss(", "alpha=1.3", "ignore_index=-100", "reduction='mean'"]),
        (SparsemaxLoss(reduction="sum"), ["SparsemaxLoss(", "reduction='sum'"]),
        (NormmaxLoss(3.0, ignore_index=0), ["NormmaxLoss(", "alpha=3.0", "ignore_index=0"]),
        (EntmaxLoss(label_smoothing=0.1), ["label_smoothing=0.1"]),
        (EntmaxLoss(torch.full((3, 1), 1.5)), ["alpha=(3, 1)"]),
    ],
)
def test_repr_says_what_it_computes(module: nn.Module, fragments: list[str]):
    for fragment in fragments:
        assert fragment in repr(module)
    assert "\n" not in repr(module)


def test_deepcopy_does_not_share():
    module = EntmaxLoss(nn.Parameter(torch.tensor(1.5)), weight=WEIGHT.clone())
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.alpha.fill_(2.0)
        twin.weight.fill_(1.0)
    assert module.alpha == 1.5
    assert torch.equal(module.weight, WEIGHT)


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (EntmaxLoss(-1.0), "alpha"),
        (NormmaxLoss(1.0), "alpha"),
        (EntmaxLoss(reduction="men"), "reduction"),
        (SparsemaxLoss(label_smoothing=1.5), "label_smoothing"),
        (EntmaxLoss(weight=torch.ones(3)), "weight"),
    ],
)
def test_bad_arguments_are_reported(module: nn.Module, match: str):
    with pytest.raises(ValueError, match=match):
        module(scores(3, 4), targets(3))


def test_compiles_whole_with_dynamic_shapes():
    torch._dynamo.reset()
    module = EntmaxLoss(LearnedAlpha(1, init=1.4), weight=WEIGHT)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for samples in (5, 8):
        z, target = scores(samples, 4), targets(samples)
        torch.testing.assert_close(compiled(z, target), module(z, target))
