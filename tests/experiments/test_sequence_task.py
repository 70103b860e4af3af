"""Generated tasks as a user goes: train, evaluate, plot, look into heads."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from experiments.listening import QUIET, Heard
from tamis.cli import app
from tamis.data.tasks import TASKS
from tamis.demo import lengths as demo
from tamis.evaluation.lengths import LengthScore, lengths_table
from tamis.experiments import arms_of, evaluate, heads, plot_lengths, read_recipe, sequence_task, train
from tamis.models import CausalLM

NAMES = tuple(TASKS)  # before documents add tasks of their own
RECIPES = Path(__file__).parents[2] / "recipes" / "tasks"


def test_every_task_has_a_recipe():
    assert {path.stem for path in RECIPES.glob("*.toml")} == {*NAMES, "demo"}


@pytest.mark.parametrize("path", sorted(RECIPES / f"{name}.toml" for name in NAMES), ids=lambda path: path.stem)
def test_shipped_recipes_are_read_with_all_their_arms(path):
    own = (
        {"eight-heads", "longer", "middle", "easier", "narrow", "dense-near", "scaled"}
        if path.stem == "mqmtar"
        else set()
    )
    assert {"short", "softmax", "ssmax", "entmax", "asentmax"} | own == set(arms_of(path))
    for arms in ([], ["short"], *([arm] for arm in arms_of(path)), ["short", "softmax"]):
        recipe = read_recipe(path, arms=arms)
        assert recipe.name == recipe.task.name == path.stem
        assert recipe.model_config().arrangement == "both"
        assert recipe.training.label_smoothing == 0.0
    assert read_recipe(path, arms=["short", "softmax"]).model["mechanism"] == "softmax"
    head = path.read_text().splitlines()[:6]
    for word in ("Hardware", "Time", "Expect"):
        assert any(word in line for line in head), f"{path.name} does not say {word}"


@pytest.fixture
def recipe(tmp_path):
    text = """
name = "small"
[task]
name = "two_back"
options = { symbols = 4 }
lengths = [3, 5]
batch_size = 8
validation_size = 8
[model]
embed_dim = 16
num_heads = 2
ffn_dim = 16
num_layers = 1
[training]
steps = 4
checkpoint_every = 2
[evaluation]
multiples = [1, 2]
samples = 6
[arms.softmax]
model.mechanism = "softmax"
"""
    (tmp_path / "small.toml").write_text(text)
    return tmp_path / "small.toml"


def test_from_a_recipe_to_a_picture(recipe, tmp_path):
    folders = []
    for arm in ([], ["softmax"]):
        folders.append(tmp_path / "-".join(["run", *arm]))
        train(read_recipe(recipe, arms=arm), folders[-1], "cpu", QUIET)
        heard = Heard()
        found = evaluate(folders[-1], "cpu", heard, {"samples": 5})
        assert [(score["length"], score["samples"]) for score in found["scores"]] == [(5, 5), (10, 5)]
        assert sum(" 5 " in line for line in heard.lines) == 2  # samples, at each length
        assert heard.lines[-1] == f"next: tamis analyze {folders[-1]}"
    last = CausalLM.from_pretrained(folders[0] / "checkpoints" / "step-00000004")
    model = CausalLM.from_pretrained(folders[0] / "model")
    assert all(torch.equal(a, b) for a, b in zip(last.parameters(), model.parameters(), strict=True))
    table = plot_lengths(folders, tmp_path / "lengths.png").splitlines()
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert [cell.strip() for cell in table[0].split("|")[1:-1]] == ["exact match, %", "1x", "2x"]
    assert [line.split("|")[1].strip() for line in table[2:4]] == ["asentmax, nape", "softmax, nape"]


def test_only_seeds_of_one_recipe_share_a_line(recipe, tmp_path):
    folders = {}
    for name, changes in {
        "one": [],
        "two": ["training.seed=2", "training.steps=6", "evaluation.samples=9"],
        "small": ["model.mechanism={name='asentmax',init='small'}", "training.lr=0.1"],
    }.items():
        folders[name] = tmp_path / name
        train(read_recipe(recipe, changes), folders[name], "cpu", QUIET)
        evaluate(folders[name], "cpu", QUIET)
    assert plot_lengths([folders["one"], folders["two"]], tmp_path / "seeds.png").count("asentmax, nape") == 2
    with pytest.raises(ValueError, match=r"differ in model\.mechanism, training\.lr; give each line a name"):
        plot_lengths(list(folders.values()), tmp_path / "all.png")
    named = {"paper": [folders["one"], folders["two"]], "small": [folders["small"]]}
    table = plot_lengths(named, tmp_path / "named.png")
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:4]] == ["paper", "small"]
    command = ["tasks", "plot", f"paper={folders['one']},{folders['two']}", f"small={folders['small']}"]
    result = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "called.png")])
    assert result.exit_code == 0, result.output
    assert table in result.stdout
    assert (tmp_path / "called.png").read_bytes() == (tmp_path / "named.png").read_bytes()


def test_what_each_head_is_needed_for(recipe, tmp_path, monkeypatch):
    def score(model, task, length, multiple, config):
        """Some share that every weight has a part in: a model after four steps has nothing right."""
        share = model(torch.arange(length)[None] % task.vocab_size)[0, -1, 0].sigmoid().item()
        return LengthScore(
            multiple=multiple, length=length, samples=6, exact_match=share, token_accuracy=0.0, seconds=0.0
        )

    monkeypatch.setattr(sequence_task, "score_length", score)
    folder, heard = tmp_path / "run", Heard()
    train(read_recipe(recipe), folder, "cpu", QUIET)
    found = heads(folder, "cpu", heard, {"multiples": [1, 3]})
    assert found["heads"] == json.loads((folder / "heads.json").read_text())["heads"]
    assert len(heard.lines) == 4
    model, task = CausalLM.from_pretrained(folder / "model").eval(), read_recipe(recipe).task.build()
    (layer,) = model.layers
    weight = layer.self_attention.out_proj.weight  # (16, 16): eight channels of each of two heads
    for at, length in zip(found["heads"], (5, 15), strict=True):
        assert (at["length"], at["samples"], list(at["without"])) == (length, 6, ["layers.0.self"])
        shares = [at["exact_match"], *at["without"]["layers.0.self"]]
        assert len({round(share, 6) for share in shares}) == 3
        for share, silent in zip(shares, (slice(0), slice(8), slice(8, 16)), strict=True):
            kept = weight.detach().clone()
            with torch.no_grad():
                weight[:, silent] = 0.0
                assert share == pytest.approx(score(model, task, length, 1, None).exact_match, abs=1e-6)
                weight.copy_(kept)


def test_a_folder_keeps_its_run(recipe, tmp_path):
    train(read_recipe(recipe), tmp_path / "run", "cpu", QUIET)
    changed = read_recipe(recipe, ["evaluation.samples=9", "training.keep=9"])
    train(changed, tmp_path / "run", "cpu", QUIET)
    with pytest.raises(ValueError, match=r"other settings \(training.lr: 0.001 then, 1 now\)"):
        train(read_recipe(recipe, ["training.lr=1"]), tmp_path / "run", "cpu")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.vocab_size=9", "follows from the task"),
        ("model.embed_dmi=9", "did you mean 'embed_dim'"),
        ("training.batch_tokens=9", "set task.batch_size"),
        ("training.monitor=bleu", "has no bleu to monitor"),
        ("evaluation.multiples=[]", "multiples must be some numbers"),
        ("evaluation.multiples=[0]", "above 0 and below a million"),
        ("task.name=sotr", "did you mean 'sort'"),
        ("task=3", "task must be a section"),
        ("data.train=x", r"this has \[data\] and \[task\]"),
        ("lr=3", "has no setting 'lr'; did you mean 'training.lr'"),
        ("trainig.lr=3", "did you mean 'training'"),
    ],
)
def test_bad_recipes(recipe, override, message):
    with pytest.raises(ValueError, match=message):
        read_recipe(recipe, [override])


def test_the_commands(recipe, tmp_path):
    def called(*arguments):
        result = CliRunner().invoke(app, ["tasks", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.stdout

    listed = called("list").splitlines()
    assert [line.split()[0] for line in listed] == list(TASKS)
    run = tmp_path / "run"
    called("train", recipe, "--arm", "softmax", "--output", run, "--device", "cpu", "--set", "training.steps=2")
    assert read_recipe(run / "config.toml").model["mechanism"] == "softmax"
    shown = called("evaluate", run, "--device", "cpu", "--set", "multiples=[1,1.5]")
    assert "1.5x        8" in shown
    assert str(tmp_path / "drawn.png") in called("plot", run, "--output", tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 10_000
    spread = ["dispersion", str(run), "--device", "cpu", "--output", str(tmp_path / "spread.png"), "--set", "samples=2"]
    result = CliRunner().invoke(app, spread)
    assert result.exit_code == 0, result.output
    assert len(json.loads((run / "dispersion.json").read_text())["lengths"]) == 2
    assert (tmp_path / "spread.png").exists()


def test_the_demo_gives_both_arms_the_same_but_for_the_mechanism():
    assert (RECIPES / "demo.toml").read_text() == demo.RECIPE.read_text()
    assert set(arms_of(demo.RECIPE)) == set(demo.ARMS)
    softmax, asentmax = (read_recipe(demo.RECIPE, arms=[arm]) for arm in demo.ARMS)
    assert dataclasses.replace(softmax, model=asentmax.model) == asentmax
    different = {key for key in softmax.model if softmax.model[key] != asentmax.model[key]}
    assert different == {"mechanism"}
    assert {1, 2, 4} <= set(softmax.evaluation.multiples)


def test_the_demo_trains_prints_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(app, ["tasks", "demo", "--quick", "--seeds", "2", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    runs = tmp_path / "quick"
    assert {path.name for path in runs.iterdir()} == {
        "softmax-1", "softmax-2", "asentmax-1", "asentmax-2", "lengths.png",
    }  # fmt: skip
    assert (runs / "lengths.png").read_bytes().startswith(b"\x89PNG")
    found = [json.loads((runs / f"asentmax-{seed}" / "evaluation.json").read_text()) for seed in (1, 2)]
    assert [scores["training"]["seed"] for scores in found] == [1, 2]
    scores = [[LengthScore(**score) for score in result["scores"]] for result in found]
    assert lengths_table({"ASEntmax": scores}).splitlines()[-1].split() == next(
        line.split() for line in result.stdout.splitlines() if line.startswith("| ASEntmax")
    )
    assert CliRunner().invoke(app, ["tasks", "demo", "--seeds", "0"]).exit_code == 1


def test_only_evaluated_runs_of_one_task_are_drawn(recipe, tmp_path):
    train(read_recipe(recipe), tmp_path / "run", "cpu", QUIET)
    with pytest.raises(FileNotFoundError, match="has not been evaluated: run `tamis evaluate"):
        plot_lengths([tmp_path / "run"], tmp_path / "x.png")
