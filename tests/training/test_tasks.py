import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tamis import task_runs
from tamis.cli import app
from tamis.config import arms_of
from tamis.data.batching import Position
from tamis.data.tasks import TASKS
from tamis.demo import lengths as demo
from tamis.evaluation.lengths import LengthScore, lengths_table
from tamis.models import CausalLM, CausalLMConfig
from tamis.nn.layers import TransformerLayer
from tamis.task_runs import evaluate_task, plot_tasks, read_task_recipe, task_heads, train_task
from tamis.training import GeneratedTask, Process, TaskConfig, Trainer, TrainingConfig
from tamis.training.journal import Display
from tamis.training.tasks import IGNORED, Part
from training import tiny

NAMES = tuple(TASKS)  # before documents add tasks of their own
RECIPES = Path(__file__).parents[2] / "recipes" / "tasks"
SMALL = TaskConfig(name="reverse", options={"symbols": 4}, lengths=(3, 6), batch_size=16, validation_size=32)


def settings(**changes):
    base = {"steps": 30, "checkpoint_every": 10, "log_every": 1, "warmup": 5, "lr": 3e-3, "label_smoothing": 0.0}
    return TrainingConfig(**(base | changes))


def trainer(folder, config=SMALL, model=None, **changes):
    training = settings(**changes)
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "num_heads": 2, "ffn_dim": 64, "num_layers": 1}
    model = CausalLM(CausalLMConfig(vocab_size=config.build().vocab_size, **(sizes | (model or {}))))
    return Trainer(model, GeneratedTask(config, training), training, folder, tiny.HERE, display=Display(quiet=True))


def update(task, number, process=tiny.HERE):
    _, indices = next(task.updates.iterate(Position(0, number)))
    return task.parts(indices, process), task.tokens(indices)


def test_labels_are_the_answers_one_place_ahead():
    ((part,), tokens) = update(GeneratedTask(SMALL, settings()), 3)
    task = SMALL.build()
    assert part.inputs.shape[0] == SMALL.batch_size
    assert (part.labels != IGNORED).sum() == tokens
    lengths = set()
    for inputs, labels in zip(part.inputs.tolist(), part.labels.tolist(), strict=True):
        sep = inputs.index(task.sep_id)
        answer = [label for label in labels if label != IGNORED]
        assert labels[sep : sep + len(answer)] == answer
        assert inputs[sep + 1 : sep + len(answer)] == answer[:-1]
        assert answer == [*inputs[1:sep][::-1], task.eos_id]
        lengths.add(sep - 1)
    assert len(lengths) > 1
    assert lengths <= {3, 4, 5, 6}


def test_an_update_is_a_function_of_the_seed_and_its_number():
    task, again, other = (GeneratedTask(SMALL, settings(seed=seed)) for seed in (1, 1, 2))
    for number in (0, 1):
        update(again, number)
    inputs = update(task, 7)[0][0].inputs
    assert torch.equal(inputs, update(again, 7)[0][0].inputs)
    for different in (update(other, 7), update(task, 8)):
        assert not torch.equal(inputs, different[0][0].inputs)


@pytest.mark.parametrize("device_tokens", [None, 40])
def test_processes_share_an_update(device_tokens):
    task = GeneratedTask(SMALL, settings(device_tokens=device_tokens))
    ((whole,), tokens) = update(GeneratedTask(SMALL, settings()), 5)
    shares = [update(task, 5, Process(rank, 3, torch.device("cpu")))[0] for rank in range(3)]
    assert len({len(parts) for parts in shares}) == 1
    rows = [row for parts in shares for part in parts for row in part.inputs.tolist()]
    assert sorted(rows) == sorted(whole.inputs.tolist())
    assert sum((part.labels != IGNORED).sum() for parts in shares for part in parts) == tokens
    if device_tokens:
        assert all(part.inputs.numel() <= device_tokens for parts in shares for part in parts)


def test_validation_is_the_same_for_every_seed_and_never_trained_on():
    first, second = (list(GeneratedTask(SMALL, settings(seed=seed)).validation(tiny.HERE)) for seed in (1, 2))
    assert torch.equal(first[0].inputs, second[0].inputs)
    sep = SMALL.build().sep_id
    valid = {tuple(row[: row.index(sep)]) for row in first[0].inputs.tolist()}
    task = GeneratedTask(SMALL, settings())
    seen = {tuple(row[: row.index(sep)]) for n in range(200) for row in update(task, n)[0][0].inputs.tolist()}
    assert not valid & seen


def test_easier_forms_are_drawn_in_training_alone():
    hard = TaskConfig(name="mqmtar", options={"symbols": 8, "queries": 3}, batch_size=16, validation_size=8)
    mixed = dataclasses.replace(hard, also=[{"queries": 1}, {"queries": 2}])
    task, plain = GeneratedTask(mixed, settings()), GeneratedTask(hard, settings())
    counts: Counter[int] = Counter()
    for number in range(60):
        ((part,), tokens) = update(task, number)
        answers = (part.labels != IGNORED).sum(1)
        assert answers.sum() == tokens
        counts.update(answers.tolist())
    assert set(counts) == {3 * queries + 1 for queries in (1, 2, 3)}
    assert all(240 < count < 400 for count in counts.values())  # of 960, in groups of four
    (valid,), (own,) = list(task.validation(tiny.HERE)), list(plain.validation(tiny.HERE))
    assert torch.equal(valid.labels, own.labels)
    assert task.fingerprint() != plain.fingerprint()


def test_a_part_in_a_room_trains_the_same():
    task = GeneratedTask(SMALL, settings())
    model = CausalLM(CausalLMConfig(vocab_size=7, embed_dim=16, num_heads=2, ffn_dim=16, num_layers=1))
    for number in (0, 1):
        ((part,), _) = update(task, number)
        odd = Part(part.inputs[:13], part.labels[:13])
        room = odd.room("cpu")
        room.labels.fill_(3)  # of what was there before
        room.fill(odd)
        assert room.inputs.shape == odd.room_shape() != odd.inputs.shape
        torch.testing.assert_close(task.loss(model, room), task.loss(model, odd))


def test_it_learns(tmp_path):
    config = TaskConfig(
        name="local_count",
        options={"symbols": 4, "longest_run": 4},
        lengths=(4, 12),
        batch_size=32,
        validation_size=64,
    )
    state = trainer(tmp_path, config, steps=150, checkpoint_every=75, log_every=50, lr=1e-2).run()
    assert state.best_step == 150
    assert tiny.losses(tmp_path)[-1]["valid_accuracy"] > 0.65  # by chance 0.3


def test_a_run_in_two_sittings_is_the_run_in_one(tmp_path):
    trainer(tmp_path / "one").run()
    trainer(tmp_path / "two", steps=10).run()
    trainer(tmp_path / "two").run()
    assert tiny.losses(tmp_path / "two") == tiny.losses(tmp_path / "one")
    weights = [tmp_path / run / "checkpoints" / "step-00000030" / "model.safetensors" for run in ("one", "two")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "revers"}, "did you mean 'reverse'"),
        ({"options": {"symbol": 4}}, "no option 'symbol'"),
        ({"options": 4}, "options must be a table"),
        ({"also": {"symbols": 4}}, "also must be a list of tables"),
        ({"also": [{"symbol": 4}]}, "no option 'symbol'"),
        ({"name": "max_retrieval", "options": {"base": 6}, "lengths": (4, 40)}, "no 40 different integers below 36"),
        ({"also": [{"symbols": 3}]}, "easier forms of reverse must have its symbols"),
        ({"lengths": (6, 3)}, "lengths of reverse must ascend from 1 or more"),
        ({"lengths": (3,)}, "two ints"),
        ({"lengths": 3}, "two ints"),
        ({"name": "mqmtar", "options": {"symbols": 1}, "lengths": (20, 40)}, "no 2 different integers below 1"),
        ({"batch_size": 0}, "batch_size must be an int of at least 1"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_every_task_has_a_recipe():
    assert {path.stem for path in RECIPES.glob("*.toml")} == {*NAMES, "demo"}


@pytest.mark.parametrize("path", sorted(RECIPES / f"{name}.toml" for name in NAMES), ids=lambda path: path.stem)
def test_shipped_recipes_are_read_with_all_their_arms(path):
    own = {"eight-heads", "longer", "middle", "easier", "narrow", "dense-near"} if path.stem == "mqmtar" else set()
    assert {"short", "softmax", "ssmax", "entmax", "asentmax"} | own == set(arms_of(path))
    for arms in ([], ["short"], *([arm] for arm in arms_of(path)), ["short", "softmax"]):
        recipe = read_task_recipe(path, arms=arms)
        assert recipe.name == recipe.task.name == path.stem
        assert recipe.model_config().arrangement == "both"
        assert recipe.training.label_smoothing == 0.0
    assert read_task_recipe(path, arms=["short", "softmax"]).model["mechanism"] == "softmax"
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
        train_task(read_task_recipe(recipe, arms=arm), folders[-1], "cpu", Display(quiet=True))
        said = []
        found = evaluate_task(folders[-1], "cpu", said.append, {"samples": 5})
        assert [(score["length"], score["samples"]) for score in found["scores"]] == [(5, 5), (10, 5)]
        assert len(said) == 3
    last = CausalLM.from_pretrained(folders[0] / "checkpoints" / "step-00000004")
    model = CausalLM.from_pretrained(folders[0] / "model")
    assert all(torch.equal(a, b) for a, b in zip(last.parameters(), model.parameters(), strict=True))
    scores = plot_tasks(folders, tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert {name: [[score.length for score in run] for run in runs] for name, runs in scores.items()} == {
        "asentmax, nape": [[5, 10]],
        "softmax, nape": [[5, 10]],
    }


def test_only_seeds_of_one_recipe_share_a_line(recipe, tmp_path):
    folders = {}
    for name, changes in {
        "one": [],
        "two": ["training.seed=2", "training.steps=6", "evaluation.samples=9"],
        "small": ["model.mechanism={name='asentmax',init='small'}", "training.lr=0.1"],
    }.items():
        folders[name] = tmp_path / name
        train_task(read_task_recipe(recipe, changes), folders[name], "cpu", Display(quiet=True))
        evaluate_task(folders[name], "cpu", lambda text: None)
    (runs,) = plot_tasks([folders["one"], folders["two"]], tmp_path / "seeds.png").values()
    assert len(runs) == 2
    with pytest.raises(ValueError, match=r"differ in model\.mechanism, training\.lr; give each line a name"):
        plot_tasks(list(folders.values()), tmp_path / "all.png")
    named = {"paper": [folders["one"], folders["two"]], "small": [folders["small"]]}
    scores = plot_tasks(named, tmp_path / "named.png")
    assert {name: len(runs) for name, runs in scores.items()} == {"paper": 2, "small": 1}
    command = ["tasks", "plot", f"paper={folders['one']},{folders['two']}", f"small={folders['small']}"]
    result = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "called.png")])
    assert result.exit_code == 0, result.output
    assert lengths_table(scores) in result.stdout
    assert (tmp_path / "called.png").read_bytes() == (tmp_path / "named.png").read_bytes()


def test_what_each_head_is_needed_for(recipe, tmp_path, monkeypatch):
    def score(model, task, length, multiple, config):
        """Some share that every weight has a part in: a model after four steps has nothing right."""
        share = model(torch.arange(length)[None] % task.vocab_size)[0, -1, 0].sigmoid().item()
        return LengthScore(
            multiple=multiple, length=length, samples=6, exact_match=share, token_accuracy=0.0, seconds=0.0
        )

    monkeypatch.setattr(task_runs, "score_length", score)
    folder, said = tmp_path / "run", []
    train_task(read_task_recipe(recipe), folder, "cpu", Display(quiet=True))
    found = task_heads(folder, "cpu", said.append, {"multiples": [1, 3]})
    assert found["heads"] == json.loads((folder / "heads.json").read_text())["heads"]
    assert len(said) == 4
    model, task = CausalLM.from_pretrained(folder / "model").eval(), read_task_recipe(recipe).task.build()
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
    train_task(read_task_recipe(recipe), tmp_path / "run", "cpu", Display(quiet=True))
    changed = read_task_recipe(recipe, ["evaluation.samples=9", "training.keep=9"])
    train_task(changed, tmp_path / "run", "cpu", Display(quiet=True))
    with pytest.raises(ValueError, match=r"other settings \(training.lr: 0.001 then, 1 now\)"):
        train_task(read_task_recipe(recipe, ["training.lr=1"]), tmp_path / "run", "cpu")


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
        ("data.train=x", "has no setting 'data'"),
    ],
)
def test_bad_recipes(recipe, override, message):
    with pytest.raises(ValueError, match=message):
        read_task_recipe(recipe, [override])


def test_the_commands(recipe, tmp_path):
    def called(*arguments):
        result = CliRunner().invoke(app, ["tasks", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.stdout

    listed = called("list").splitlines()
    assert [line.split()[0] for line in listed] == list(TASKS)
    run = tmp_path / "run"
    called("train", recipe, "--arm", "softmax", "--output", run, "--device", "cpu", "--set", "training.steps=2")
    assert read_task_recipe(run / "config.toml").model["mechanism"] == "softmax"
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
    softmax, asentmax = (read_task_recipe(demo.RECIPE, arms=[arm]) for arm in demo.ARMS)
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
    found = [json.loads((runs / f"asentmax-{seed}" / "lengths.json").read_text()) for seed in (1, 2)]
    assert [scores["training"]["seed"] for scores in found] == [1, 2]
    scores = [[LengthScore(**score) for score in result["scores"]] for result in found]
    assert lengths_table({"ASEntmax": scores}).splitlines()[-1].split() == next(
        line.split() for line in result.stdout.splitlines() if line.startswith("| ASEntmax")
    )
    assert CliRunner().invoke(app, ["tasks", "demo", "--seeds", "0"]).exit_code == 1


def test_only_evaluated_runs_of_one_task_are_drawn(recipe, tmp_path):
    with pytest.raises(FileNotFoundError, match="run `tamis tasks evaluate` on it first"):
        plot_tasks([tmp_path], tmp_path / "x.png")


@pytest.mark.parametrize("mechanism", ["softmax", "entmax", "asentmax", "rela"])
def test_layers_alike_are_compiled_once(tmp_path, monkeypatch, mechanism):
    def traced(module, **arguments):
        nn.Module.compile(module, backend="eager", **arguments)  # and nothing to wait for

    def graphs():
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def observe(model):
        before = graphs()
        model(torch.ones(1, 2, dtype=torch.int64))  # of a shape that would be compiled anew
        assert graphs() == before
        return {}

    monkeypatch.setattr(TransformerLayer, "compile", traced)
    found = {}
    for name, compile in (("plain", False), ("compiled", True)):
        model = {"num_layers": 10, "mechanism": mechanism, "position": "nape"}
        run = trainer(tmp_path / name, model=model, steps=6, checkpoint_every=3, compile=compile)
        run.observe = observe
        torch._dynamo.reset()
        before = graphs()
        run.run()
        found[name] = graphs() - before
    assert found == {"plain": 0, "compiled": 2}  # one of training, one of validation
    for plain, compiled in zip(tiny.losses(tmp_path / "plain"), tiny.losses(tmp_path / "compiled"), strict=True):
        key = "loss" if "loss" in plain else "valid_loss"
        assert compiled[key] == pytest.approx(plain[key], rel=1e-5)
