import pytest
import torch

from tamis.training.muon import Muon, orthogonal


def decomposed(values, rows, columns):
    """A matrix with these singular values, and U V^T."""
    u = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(columns, len(values), dtype=torch.float64))[0]
    return u * torch.tensor(values, dtype=torch.float64) @ v.T, u @ v.T


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (8, 20), (20, 8)])
def test_singular_values_come_near_to_one(rows, columns):
    torch.manual_seed(0)
    found = [decomposed([1.0, 0.7, 0.3, 0.1, 0.03, 0.02, 0.01, 0.005], rows, columns) for _ in range(3)]
    near = orthogonal(torch.stack([matrix for matrix, _ in found]))
    for result, (_, exact) in zip(near, found, strict=True):
        # The same singular vectors: U^T X V is diagonal, and its diagonal is near to 1.
        u, _, vt = torch.linalg.svd(exact, full_matrices=False)
        between = u[:, :8].T @ result @ vt[:8].T
        values = torch.linalg.svdvals(result)
        assert values.min() > 0.68
        assert values.max() < 1.21
        assert torch.linalg.norm(between - between.T) < 1e-8
        assert torch.linalg.matrix_norm(result - exact, 2) < 0.33


def test_no_scale_and_nothing_from_nothing():
    matrices = torch.randn(2, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(orthogonal(matrices * 1e3), orthogonal(matrices), rtol=1e-10, atol=1e-12)
    assert torch.equal(orthogonal(torch.zeros(1, 4, 6)), torch.zeros(1, 4, 6))


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_the_equation(shape, weight_decay):
    """Three matrices together, against one at a time with plain operations and an exact decomposition's bounds."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=torch.float64)) for _ in range(3)]
    expected = [parameter.detach().clone() for parameter in parameters]
    memory = [torch.zeros(shape, dtype=torch.float64) for _ in parameters]
    optimizer = Muon(parameters, lr=0.05, momentum=0.9, weight_decay=weight_decay)
    for _ in range(4):
        for k, parameter in enumerate(parameters):
            parameter.grad = torch.randn(shape, dtype=torch.float64)
            memory[k] = 0.9 * memory[k] + 0.1 * parameter.grad
            direction = orthogonal((0.9 * memory[k] + 0.1 * parameter.grad)[None])[0]
            size = 0.05 * max(1.0, shape[0] / shape[1]) ** 0.5
            expected[k] = expected[k] * (1.0 - 0.05 * weight_decay) - size * direction
        optimizer.step()
    for parameter, value, buffer in zip(parameters, expected, memory, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(optimizer.state[parameter]["momentum"], buffer, rtol=1e-12, atol=1e-12)


def test_it_is_what_torch_has():
    """Whose products are in bf16."""
    ours, theirs = (torch.nn.Parameter(torch.ones(16, 40)) for _ in range(2))
    optimizers = Muon([ours], lr=0.02, weight_decay=0.1), torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1)
    torch.manual_seed(0)
    for _ in range(5):
        ours.grad = torch.randn(16, 40)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (theirs.detach() - 1.0).norm()
    assert (ours - theirs).norm() < 0.02 * moved


def test_rare_directions_get_a_step_as_large_as_common_ones():
    weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    weight.grad = torch.diag(torch.tensor([1.0, 0.5, 0.1, 0.01], dtype=torch.float64))
    Muon([weight], lr=1.0).step()
    steps = -weight.detach().diagonal()
    assert steps.min() > 0.68
    assert steps.max() < 1.21


def test_only_matrices():
    with pytest.raises(ValueError, match=r"Muon is for matrices, got a parameter of shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.zeros(3))])


def test_what_has_no_gradient_stays():
    moved, still = (torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    moved.grad = torch.randn(3, 3)
    Muon([moved, still], weight_decay=0.1).step()
    assert torch.equal(still, torch.ones(3, 3))
    assert not torch.equal(moved, torch.ones(3, 3))
