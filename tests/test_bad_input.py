"""Every mistake at the public edge is a TypeError or a ValueError that says what was expected and what came."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from tamis import (
    budgetmax,
    entmax,
    entmax15,
    entmax_loss,
    entmax_threshold,
    normmax,
    normmax_loss,
    sparsemax,
    sparsemax_loss,
)

TRANSFORMS = [entmax, sparsemax, entmax15, entmax_threshold, normmax, budgetmax]
WITH_ALPHA = [entmax, entmax_threshold, normmax]
LOSSES = [entmax_loss, sparsemax_loss, normmax_loss]
Z = torch.zeros(2, 3, 4)
LOGITS = torch.zeros(5, 3)
TARGET = torch.tensor([0, 1, 2, 0, 1])


def by_name(function) -> str:
    return function.__name__ if hasattr(function, "__name__") else repr(function)


@pytest.fixture(params=TRANSFORMS, ids=by_name)
def transform(request):
    return request.param


@pytest.fixture(params=LOSSES, ids=by_name)
def loss(request):
    return request.param


# ---------------------------------------------------------------------------------------------------------------
# Scores, dim, mask


@pytest.mark.parametrize(
    ("scores", "got"),
    [
        (torch.zeros(3, dtype=torch.long), "torch.int64"),
        (torch.zeros(3, dtype=torch.bool), "torch.bool"),
        (torch.zeros(3, dtype=torch.complex64), "torch.complex64"),
        ([1.0, 2.0], "list"),
        (np.zeros(3), "ndarray"),
        (1.0, "float"),
        (None, "NoneType"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_scores_of_the_wrong_type(transform, scores, got: str):
    with pytest.raises(TypeError, match=f"input must be a floating-point tensor, got {got}"):
        transform(scores)


@pytest.mark.parametrize(
    ("dim", "got"), [(1.0, "float"), (True, "bool"), ("1", "str"), (None, "NoneType"), ((0, 1), "tuple")]
)
def test_dim_of_the_wrong_type(transform, dim, got: str):
    with pytest.raises(TypeError, match=f"dim must be an int, got {got}"):
        transform(Z, dim=dim)


@pytest.mark.parametrize("dim", [3, -4, 100])
def test_dim_out_of_range(transform, dim: int):
    with pytest.raises(ValueError, match=rf"dim must lie in \[-3, 2\] for input of shape \(2, 3, 4\), got {dim}"):
        transform(Z, dim=dim)


@pytest.mark.parametrize("dim", [1, -2])
def test_dim_out_of_range_of_a_scalar(dim: int):
    with pytest.raises(ValueError, match=rf"\[-1, 0\].*got {dim}"):
        entmax(torch.tensor(1.0), dim=dim)


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (torch.ones(2, 3, 4), "torch.float32"),
        (torch.ones(2, 3, 4, dtype=torch.long), "torch.int64"),
        (torch.ones(2, 3, 4, dtype=torch.uint8), "torch.uint8"),
        ([True, False, True, True], "list"),
        (True, "bool"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_mask_of_the_wrong_type(transform, mask, got: str):
    with pytest.raises(TypeError, match=rf"mask must be a boolean tensor \(True = keep\), got {got}"):
        transform(Z, mask=mask)


@pytest.mark.parametrize("shape", [(3,), (2, 4), (1, 2, 3, 4), (5, 2, 3, 4), (2, 3, 5), (0,)])
def test_mask_of_the_wrong_shape(transform, shape: tuple[int, ...]):
    expected = f"mask of shape {shape} does not broadcast to input (2, 3, 4)".replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=expected):
        transform(Z, mask=torch.ones(shape, dtype=torch.bool))


# ---------------------------------------------------------------------------------------------------------------
# alpha and budget

PARAMETERS = [
    pytest.param(entmax, "alpha", "above 0", id="entmax"),
    pytest.param(entmax_threshold, "alpha", "above 0", id="entmax_threshold"),
    pytest.param(normmax, "alpha", "above 1", id="normmax"),
    pytest.param(budgetmax, "budget", "at least 0", id="budgetmax"),
    pytest.param(lambda z, alpha: entmax_loss(LOGITS, TARGET, alpha), "alpha", "above 0", id="entmax_loss"),
    pytest.param(lambda z, alpha: normmax_loss(LOGITS, TARGET, alpha), "alpha", "above 1", id="normmax_loss"),
]


@pytest.mark.parametrize("value", [0, 0.0, -1, -1.5, math.nan, -math.inf])
@pytest.mark.parametrize(("function", "name", "bound"), PARAMETERS)
def test_number_out_of_range(function, name: str, bound: str, value: float):
    if bound == "at least 0" and value == 0:
        return
    with pytest.raises(ValueError, match=f"{name} must be a finite number (of )?{bound}, got {value}"):
        function(Z, value)


@pytest.mark.parametrize("value", [1, 1.0, 0.5])
@pytest.mark.parametrize("function", [normmax, lambda z, alpha: normmax_loss(LOGITS, TARGET, alpha)])
def test_normmax_needs_more_than_one(function, value: float):
    with pytest.raises(ValueError, match=f"alpha must be a finite number above 1, got {value}"):
        function(Z, value)
    with pytest.raises(ValueError, match=f"alpha must be finite and above 1 everywhere, got {value:g}"):
        function(Z, torch.tensor(float(value)))


@pytest.mark.parametrize(("function", "name", "bound"), PARAMETERS)
def test_infinity(function, name: str, bound: str):
    with pytest.raises(ValueError, match=f"{name} must .*got inf"):
        function(Z, math.inf)
    with pytest.raises(ValueError, match=f"{name} must be finite and {bound} everywhere, got inf"):
        function(Z, torch.tensor(math.inf))


@pytest.mark.parametrize(
    ("value", "got"), [(True, "bool"), ("1.5", "str"), (None, "NoneType"), ([1.5], "list"), (1.5j, "complex")]
)
@pytest.mark.parametrize(("function", "name", "bound"), PARAMETERS)
def test_parameter_of_the_wrong_type(function, name: str, bound: str, value, got: str):
    with pytest.raises(TypeError, match=f"{name} must be a number or a tensor, got {got}"):
        function(Z, value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize(("function", "name", "bound"), PARAMETERS)
def test_parameter_tensor_of_the_wrong_dtype(function, name: str, bound: str, dtype: torch.dtype):
    with pytest.raises(TypeError, match=f"{name} must be a floating-point tensor, got {dtype}"):
        function(Z, torch.ones((), dtype=dtype))


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("function", "name", "bound"), PARAMETERS)
def test_one_bad_value_in_a_tensor(
    function, name: str, bound: str, value: float, requires_grad: bool, dtype: torch.dtype
):
    if bound == "at least 0" and value == 0.0:
        return
    tensor = torch.tensor(value, dtype=dtype, requires_grad=requires_grad)
    with pytest.raises(ValueError, match=f"{name} must be finite and {bound} everywhere, got {value:g}"):
        function(Z, tensor)


def test_the_bad_value_is_named_among_good_ones():
    with pytest.raises(ValueError, match=r"alpha must be finite and above 0 everywhere, got -2\.5"):
        entmax(Z, torch.tensor([[1.5], [-2.5], [2.0]]))
    with pytest.raises(ValueError, match=r"alpha must be finite and above 0 everywhere, got -2\.5"):
        entmax_loss(LOGITS, TARGET, torch.tensor([1.5, 1.5, -2.5, 1.5, 2.0]))


@pytest.mark.parametrize("shape", [(4,), (3,), (2, 1), (2, 3, 4), (1, 2, 3, 1), (0,), (3, 4)])
@pytest.mark.parametrize("function", [*WITH_ALPHA, budgetmax])
def test_parameter_tensor_of_the_wrong_shape(function, shape: tuple[int, ...]):
    shown = str(shape).replace("(", r"\(").replace(")", r"\)")
    pattern = rf"of shape {shown} does not fit input \(2, 3, 4\) and dim 2: .*broadcasts to \(2, 3, 1\)"
    with pytest.raises(ValueError, match=pattern):
        function(Z, torch.full(shape, 1.5))


@pytest.mark.parametrize("function", [*WITH_ALPHA, budgetmax])
def test_per_head_parameter_of_the_wrong_length(function):
    with pytest.raises(ValueError, match=r"of shape \(4,\) does not fit input \(2, 3, 4, 5\).*one per head \(3,\)"):
        function(torch.zeros(2, 3, 4, 5), torch.full((4,), 1.5))


@pytest.mark.parametrize("function", [entmax_loss, normmax_loss])
@pytest.mark.parametrize("shape", [(3,), (4,), (5, 3), (1, 3), (5, 1, 1), (0,)])
def test_loss_alpha_of_the_wrong_shape(function, shape: tuple[int, ...]):
    shown = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=rf"alpha of shape {shown} does not fit input \(5, 3\).*\(5, 1\)"):
        function(LOGITS, TARGET, torch.full(shape, 1.5))


@pytest.mark.parametrize("budget", [4.5, 5, math.inf])
def test_budget_beyond_the_size(budget: float):
    with pytest.raises(ValueError, match=f"budget must be at most the size of dim 2, 4, got {budget}"):
        budgetmax(Z, budget)
    with pytest.raises(ValueError, match=f"budget must be at most the size of dim 0, 2, got {budget}"):
        budgetmax(Z, budget, dim=0)


def test_a_budget_of_hundreds_of_digits_is_told_in_short():
    with pytest.raises(ValueError, match=r"size of dim 2, 4, got about 2\*\*1329$"):
        budgetmax(Z, 10**400)


# ---------------------------------------------------------------------------------------------------------------
# Losses


@pytest.mark.parametrize(
    ("scores", "got"),
    [
        (torch.zeros(5, 3, dtype=torch.long), "torch.int64"),
        (torch.zeros(5, 3, dtype=torch.complex64), "torch.complex64"),
        ([[0.0] * 3] * 5, "list"),
    ],
    ids=["int", "complex", "list"],
)
def test_loss_scores_of_the_wrong_type(loss, scores, got: str):
    with pytest.raises(TypeError, match=f"input must be a floating-point tensor, got {got}"):
        loss(scores, TARGET)


def test_loss_of_a_scalar(loss):
    with pytest.raises(ValueError, match="dimension of classes, got a 0-dim tensor"):
        loss(torch.tensor(1.0), torch.tensor(0))


@pytest.mark.parametrize(("target", "got"), [([0, 1, 2, 0, 1], "list"), (3, "int"), (None, "NoneType")])
def test_target_not_a_tensor(loss, target, got: str):
    with pytest.raises(TypeError, match=f"target must be a tensor, got {got}"):
        loss(LOGITS, target)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_target_of_the_wrong_dtype(loss, dtype: torch.dtype):
    with pytest.raises(TypeError, match=f"target must hold class indices or probabilities, got {dtype}"):
        loss(LOGITS, TARGET.to(dtype))


@pytest.mark.parametrize(
    ("shape", "target", "expected"),
    [
        ((5, 3), (4,), (5,)),
        ((5, 3), (5, 1), (5,)),
        ((5, 3), (), (5,)),
        ((3,), (1,), ()),
        ((5, 3, 2), (5,), (5, 2)),
        ((5, 3, 2), (5, 3), (5, 2)),
    ],
)
def test_indices_of_the_wrong_shape(loss, shape, target, expected):
    message = f"target of class indices must have shape {expected} for input {shape}, got {target}"
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        loss(torch.zeros(shape), torch.zeros(target, dtype=torch.long))


@pytest.mark.parametrize("target", [(5,), (5, 4), (3,), (1, 3), (5, 3, 1)])
def test_probabilities_of_the_wrong_shape(loss, target: tuple[int, ...]):
    message = f"target of probabilities must have shape (5, 3) for input (5, 3), got {target}"
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        loss(LOGITS, torch.zeros(target))


@pytest.mark.parametrize("value", [3, -1, -100, 2**40])
def test_index_out_of_range(loss, value: int):
    target = TARGET.clone()
    target[3] = value
    with pytest.raises(ValueError, match=rf"target must lie in \[0, 2\], got {value}"):
        loss(LOGITS, target, ignore_index=-7)


@pytest.mark.parametrize("reduction", ["men", "MEAN", "", None, 1])
def test_reduction(loss, reduction):
    with pytest.raises(ValueError, match=f'reduction must be "none", "sum" or "mean", got {reduction!r}'):
        loss(LOGITS, TARGET, reduction=reduction)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
@pytest.mark.parametrize("target", [TARGET, torch.softmax(LOGITS, -1)], ids=["indices", "probabilities"])
def test_label_smoothing_out_of_range(loss, target: torch.Tensor, value: float):
    with pytest.raises(ValueError, match=rf"label_smoothing must lie in \[0, 1\], got {value}"):
        loss(LOGITS, target, label_smoothing=value)


@pytest.mark.parametrize("value", ["0.1", None, [0.1]])
def test_label_smoothing_of_the_wrong_type(loss, value):
    with pytest.raises(TypeError, match="label_smoothing"):
        loss(LOGITS, TARGET, label_smoothing=value)


@pytest.mark.parametrize("value", ["-100", None, 1.5])
def test_ignore_index_of_the_wrong_type(loss, value):
    with pytest.raises(TypeError, match="ignore_index"):
        loss(LOGITS, TARGET, ignore_index=value)


def test_ignore_index_means_nothing_for_probabilities(loss):
    """As in cross_entropy: silently counting what the caller wants ignored would be worse."""
    with pytest.raises(ValueError, match="ignore_index"):
        loss(LOGITS, torch.softmax(LOGITS, -1), ignore_index=2)


@pytest.mark.parametrize(
    ("weight", "got"),
    [
        (torch.ones(4), r"\(4,\)"),
        (torch.ones(5), r"\(5,\)"),
        (torch.ones(1, 3), r"\(1, 3\)"),
        (torch.ones(()), r"\(\)"),
        ([1.0, 1.0, 1.0], "list"),
        (2.0, "float"),
    ],
)
@pytest.mark.parametrize("target", [TARGET, torch.softmax(LOGITS, -1)], ids=["indices", "probabilities"])
def test_class_weight_of_the_wrong_shape(loss, target: torch.Tensor, weight, got: str):
    with pytest.raises(ValueError, match=rf"weight must be a tensor of shape \(3,\), one per class, got {got}"):
        loss(LOGITS, target, weight=weight)


def test_on_another_device(loss):
    with pytest.raises(ValueError, match="target must be on the device of input, cpu, got meta"):
        loss(LOGITS, TARGET.to("meta"))
    with pytest.raises(ValueError, match="weight must be on the device of input, cpu, got meta"):
        loss(LOGITS, TARGET, weight=torch.ones(3, device="meta"))


# ---------------------------------------------------------------------------------------------------------------
# Where values cannot be looked at beforehand they are still not silently accepted


@pytest.mark.parametrize(
    ("function", "bad", "match"),
    [
        pytest.param(entmax, -0.5, "alpha must be above 0", id="entmax"),
        pytest.param(normmax, 0.75, "alpha must be above 1", id="normmax"),
        pytest.param(budgetmax, -0.5, "budget must be at least 0", id="budgetmax"),
    ],
)
def test_bad_values_inside_vmap(function, bad: float, match: str):
    with pytest.raises(ValueError, match=match):
        torch.vmap(function)(torch.zeros(3, 4), torch.tensor([1.5, bad, 2.0]))


def test_good_arguments_pass():
    """What the tests above break, one thing at a time, works when it is whole."""
    mask = torch.ones(2, 3, 4, dtype=torch.bool)
    for function in (entmax, sparsemax, entmax15, normmax, budgetmax):
        weights = function(Z, dim=-1, mask=mask)
        torch.testing.assert_close(weights, torch.full_like(Z, 0.5 if function is budgetmax else 0.25))
    for function in LOSSES:
        options = {"weight": torch.ones(3), "ignore_index": -7, "reduction": "mean", "label_smoothing": 0.1}
        assert partial(function, **options)(LOGITS, TARGET) > 0.0
