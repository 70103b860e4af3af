import math

import pytest
import torch

from tamis.models import Seq2Seq, Seq2SeqConfig
from tamis.training.distributed import optimizer_tensors
from tamis.training.optim import MovingAverage, build_optimizers, learning_rate, parameter_groups, step
from tamis.training.settings import TrainingConfig

SITES = ("encoder_mechanism", "decoder_mechanism", "cross_mechanism")


def model(mechanism="entmax"):
    sizes = {"embed_dim": 16, "num_heads": 2, "ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 1}
    return Seq2Seq(Seq2SeqConfig(vocab_size=20, **sizes, **dict.fromkeys(SITES, mechanism)))


@pytest.mark.parametrize("mechanism", ["entmax", "rela", "asentmax"])
def test_what_a_mechanism_learns_has_its_own_rate_and_never_decays(mechanism):
    net = model(mechanism)
    groups = parameter_groups(net, TrainingConfig(weight_decay=0.1, mechanism_lr=5.0)).values()
    learned = {id(p) for name, p in net.named_parameters() if ".mechanism." in name}
    assert learned
    seen = set()
    for group in groups:
        for parameter in group["params"]:
            seen.add(id(parameter))
            assert (group["factor"] == 5.0) == (id(parameter) in learned)
            decays = id(parameter) not in learned and parameter.ndim > 1
            assert group["weight_decay"] == (0.1 if decays else 0.0)
    assert seen == {id(p) for p in net.parameters()}


@pytest.mark.parametrize("kind", ["adam", "adamw", "muon"])
def test_a_wrong_step_changes_nothing(kind):
    net = model()
    optimizers = build_optimizers(net, TrainingConfig(optimizer=kind, weight_decay=0.1))
    loss = net(torch.randint(1, 20, (2, 5)), torch.randint(1, 20, (2, 4))).square().mean()
    loss.backward()
    step(optimizers, 1e-3, torch.tensor(0.0))
    before = [p.detach().clone() for p in net.parameters()]
    memory = {name: value.clone() for name, value in optimizer_tensors(net, optimizers).items()}
    assert {name.rpartition(".")[0] for name in memory} == {name for name, _ in net.named_parameters()}
    for parameter in net.parameters():
        parameter.grad.fill_(math.nan)
    step(optimizers, 1e-3, torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    after = optimizer_tensors(net, optimizers)
    assert all(torch.equal(value, after[name]) for name, value in memory.items())


def test_fused_adam_is_adam():
    ours, plain = model(), model()
    plain.load_state_dict(ours.state_dict())
    optimizers = build_optimizers(ours, TrainingConfig(optimizer="adamw", weight_decay=0.1, mechanism_lr=3.0))
    learned = [p for n, p in plain.named_parameters() if ".mechanism." in n]
    matrices = [p for n, p in plain.named_parameters() if ".mechanism." not in n and p.ndim > 1]
    vectors = [p for n, p in plain.named_parameters() if ".mechanism." not in n and p.ndim == 1]
    reference = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1, "lr": 1e-3},
            {"params": vectors, "weight_decay": 0.0, "lr": 1e-3},
            {"params": learned, "weight_decay": 0.0, "lr": 3e-3},
        ],
        betas=(0.9, 0.98),
        eps=1e-9,
        foreach=False,
    )
    for _ in range(3):
        # Not those of a loss: where one is 0 but for rounding, a step would be as large as any, and of either sign.
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        step(optimizers, 1e-3, torch.tensor(0.0))
        reference.step()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_muon_has_the_matrices_of_layers_and_adamw_the_rest():
    net = model()
    config = TrainingConfig(optimizer="muon", lr=1e-3, muon_lr=0.03, weight_decay=0.1)
    plain, muon = build_optimizers(net, config)
    assert isinstance(plain, torch.optim.AdamW)
    names = {id(p): name for name, p in net.named_parameters()}
    orthogonal = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    projections = ("q_proj", "k_proj", "v_proj", "out_proj", "up", "gate", "down")
    assert {name.split(".")[-2] for name in orthogonal} <= set(projections)
    assert orthogonal == {
        name for name, p in net.named_parameters() if name.split(".")[-2] in projections and p.ndim == 2
    }
    others = {names[id(p)] for group in plain.param_groups for p in group["params"]}
    assert orthogonal | others == set(names.values())
    assert not orthogonal & others
    net(torch.randint(1, 20, (2, 5)), torch.randint(1, 20, (2, 4))).square().mean().backward()
    step([plain, muon], 5e-4, torch.tensor(0.0))  # half way up the schedule
    assert [(group["lr"], group["weight_decay"]) for group in muon.param_groups] == [(pytest.approx(0.015), 0.1)]


def rates(steps=400, **settings):
    config = TrainingConfig(steps=steps, lr=0.5, warmup=100, **settings)
    return [learning_rate(config, number, 64) for number in range(1, steps + 1)]


def test_schedules():
    for schedule in ("inverse-sqrt", "cosine", "constant"):
        curve = rates(schedule=schedule)
        assert curve[:99] == pytest.approx([0.5 * n / 100 for n in range(1, 100)])
        assert max(curve) == pytest.approx(0.5)
    assert rates(schedule="inverse-sqrt")[399] == pytest.approx(0.25)
    assert rates(schedule="constant")[399] == 0.5
    cosine = rates(schedule="cosine")
    assert cosine[249] == pytest.approx(0.25)
    assert cosine[399] == pytest.approx(0.0)
    noam = rates(schedule="noam")
    assert noam == pytest.approx([0.5 * 64**-0.5 * min(n**-0.5, n * 100**-1.5) for n in range(1, 401)])


def test_no_warm_up():
    config = TrainingConfig(lr=0.5, warmup=0)
    assert learning_rate(config, 1, 64) == 0.5
    assert learning_rate(config, 4, 64) == 0.25


def test_moving_average():
    net = torch.nn.Linear(3, 2)
    average = MovingAverage(net, 0.9)
    expected = net.weight.detach().double().clone()
    for number in range(1, 200):
        with torch.no_grad():
            net.weight.add_(0.1 * number)
        average.update(number)
        decay = min(0.9, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * net.weight.detach().double()
    torch.testing.assert_close(average.named()["weight"].double(), expected, rtol=1e-5, atol=1e-4)
    weight = net.weight.detach().clone()
    average.swap()
    torch.testing.assert_close(net.weight.double(), expected, rtol=1e-5, atol=1e-4)
    average.swap()
    assert torch.equal(net.weight, weight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "lr must be a number above 0"),
        ({"muon_lr": 0.0}, "muon_lr must be a number above 0"),
        ({"optimizer": "moun"}, "did you mean 'muon'"),
        ({"lr": math.nan}, "lr must be a number above 0"),
        ({"steps": 0}, "steps must be an int of at least 1"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"average": 9}, "average = 9 needs as many checkpoints"),
        ({"loss": "entmax", "loss_alpha": 3.0}, "loss_alpha must lie in"),
        ({"label_smoothing": 2}, "label_smoothing must lie in"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**changes)


def test_unknown_setting_offers_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'warmup'"):
        TrainingConfig.from_dict({"warm_up": 4000})
