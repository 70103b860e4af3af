"""Training by the C++ kernels is training by the plain path, up to rounding; and a run says that it changed over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from native.random_calls import needs_kernels
from tamis.attention.backend import Backend
from tamis.attention.native import Native
from tamis.functional import backends
from tamis.training import TranslationTask, environment
from training.tiny import HERE, losses, model, prepared, settings, trainer

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory):
    return prepared(tmp_path_factory.mktemp("task"))


# ReLA's zeros come and go with the last bits, so its losses drift apart sooner.
@pytest.mark.parametrize(("mechanism", "steps"), [("entmax", 50), ("rela", 25)])
def test_steps_lose_what_those_of_the_plain_path_lose(
    mechanism: str, steps: int, data, tmp_path: Path, monkeypatch
) -> None:
    found = []
    for name in ("native", "plain"):
        if name == "plain":
            monkeypatch.setattr(backends, "BACKENDS", without_kernels())
        torch.manual_seed(0)
        trainer(data, tmp_path / name, dropout=0.0, mechanism=mechanism, steps=steps).run()
        found.append([record["loss"] for record in losses(tmp_path / name) if "loss" in record])
    assert len(found[0]) >= steps
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert found[0] != found[1]  # else both ran on the same path


@pytest.mark.parametrize("mechanism", ["entmax", "rela"])
def test_from_the_same_weights_each_step_is_that_of_the_plain_path(mechanism: str, data) -> None:
    """What accumulates over steps apart: losses and gradients of fifty steps, each from weights that both share."""
    sites = dict.fromkeys(("encoder_mechanism", "decoder_mechanism", "cross_mechanism"), mechanism)
    learner = model(data, dropout=0.0, attention_dropout=0.0, **sites)
    task = TranslationTask(data, settings(steps=50))
    optimizer = torch.optim.Adam(learner.parameters(), lr=3e-3)
    (batch,) = task.update(np.arange(40), HERE).parts

    def loss_and_gradient() -> tuple[float, Tensor]:
        optimizer.zero_grad()
        loss = task.loss(learner, batch)
        loss.backward()
        return loss.item(), torch.cat([x.grad.flatten() for x in learner.parameters() if x.grad is not None])

    for _ in range(50):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backends, "BACKENDS", without_kernels())
            plain = loss_and_gradient()
        native = loss_and_gradient()
        assert native[0] == pytest.approx(plain[0], rel=1e-5)
        assert (native[1] - plain[1]).norm() <= 1e-4 * plain[1].norm()
        optimizer.step()


def without_kernels() -> list[Backend]:
    return [backend for backend in backends.BACKENDS if not isinstance(backend, Native)]


def test_a_run_that_began_on_the_plain_path_says_so() -> None:
    now = environment.environment(HERE)
    assert now["attention"] == "native"
    said = environment.differences(now | {"attention": "blocked"}, now)
    assert said == "attention blocked then and native now"


NOT_REACHED = pytest.mark.xfail(
    reason="1.0e-3 after 50 steps: rounding grows, for plain fp32 and native are both 0.9e-3 from a run in fp64"
)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["entmax", pytest.param("rela", marks=NOT_REACHED)])
def test_fifty_steps_of_the_demo(arm: str, tmp_path: Path) -> None:
    native, plain = (demo_losses(arm, tmp_path, path, 2) for path in ("1", "0"))
    assert len(native) == len(plain) >= 50
    assert native == pytest.approx(plain, abs=1e-4)


def demo_losses(arm: str, folder: Path, native: str, threads: int) -> list[float]:
    recipe = (Path(__file__).parents[2] / "recipes/demo.toml").read_text()
    own = folder / f"{native}-{threads}"
    own.mkdir()
    (own / "demo.toml").write_text(
        recipe.replace("steps = 800", "steps = 50").replace("log_every = 50", "log_every = 1")
    )
    settings = {"TAMIS_NATIVE": native, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tamis", "train", "demo.toml", "--arm", arm, "--set", f"data.folder={folder}/data"]
    subprocess.run(command, cwd=own, env=os.environ | settings, check=True, capture_output=True, timeout=900)
    (metrics,) = own.rglob("metrics.jsonl")
    return [record["loss"] for line in metrics.read_text().splitlines() if "loss" in (record := json.loads(line))]
