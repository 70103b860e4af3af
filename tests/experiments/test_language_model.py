"""Language models as a user goes: prepare, train, kill, go on, evaluate, generate."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from experiments.listening import QUIET, Heard
from tamis.cli import app
from tamis.data.vocabulary import Vocabulary
from tamis.decoding import TextGenerator
from tamis.experiments import LanguageModel, arms_of, evaluate, open_run, plot, prepare, read_recipe, train
from tamis.models import CausalLM
from tamis.training.journal import read_journal

RECIPES = Path(__file__).parents[2] / "recipes"
DEMO = RECIPES / "lm-demo.toml"
ARMS = ["softmax-rope", "softmax-nape", "entmax-nape", "asentmax-nape"]
SMALL = [
    "text.train=grammar:train:600",
    "text.valid=grammar:valid:40",
    "text.test=grammar:test:120",
    "text.length=160",
    "vocabulary.size=400",
    "model.embed_dim=32",
    "model.ffn_dim=32",
    "training.steps=12",
    "training.batch_tokens=480",
    "training.device_tokens=240",
    "training.checkpoint_every=4",
    "training.log_every=2",
    "training.warmup=4",
    "evaluation.lengths=[160,320]",
    "evaluation.tokens=640",
    "evaluation.passkey_samples=2",
    "decoding.max_length=10",
]


def small(place, *changes, arm=None):
    return read_recipe(DEMO, [*SMALL, f"text.folder={place / 'data'}", *changes], arm or ())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with prepared data, and the recipe as a file."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "small.toml").write_text(small(folder).to_toml())
    prepare(small(folder), QUIET)
    return folder


@pytest.fixture(scope="module")
def run(place):
    torch.set_num_threads(1)  # as in the processes that tests start: sums are rounded alike
    train(read_recipe(place / "small.toml"), place / "run", "cpu", QUIET)
    return place / "run"


def called(*arguments, text=""):
    return CliRunner().invoke(app, list(map(str, arguments)), input=text)


def test_a_run_folder(run):
    assert {path.name for path in run.iterdir()} - {".lock"} == {"config.toml", "metrics.jsonl", "checkpoints", "model"}
    records = read_journal(run / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == [2, 4, 6, 8, 10, 12]
    validations = [record for record in records if "valid_loss" in record]
    assert validations[-1]["valid_loss"] < validations[0]["valid_loss"]
    assert 0.0 < validations[0]["density"] < 1.0
    assert len(validations[0]["densities"]) == 2
    model = CausalLM.from_pretrained(run / "model")
    assert model.config.vocab_size == 400
    assert isinstance(read_recipe(run / "config.toml"), LanguageModel)
    assert read_recipe(run / "config.toml") == read_recipe(run.parent / "small.toml")


def test_killed_and_called_again(place, run):
    """Through the command, with SIGKILL: the journal of the second call is that of an undisturbed run."""
    arguments = ("train", place / "small.toml", "--output", place / "killed", "--device", "cpu")
    command = [sys.executable, "-c", "from tamis.cli import main; main()", *map(str, arguments)]
    options = {"text": True, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, **options)
    journal = place / "killed" / "metrics.jsonl"
    while process.poll() is None and (not journal.exists() or journal.read_text().count("\n") < 4):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    said = subprocess.run(command, **options, timeout=300, check=True).stdout
    assert "going on from step" in said
    keys = ("step", "loss", "valid_loss", "density")
    straight, killed = (
        [[record.get(key) for key in keys] for record in read_journal(folder / "metrics.jsonl")]
        for folder in (run, place / "killed")
    )
    assert killed == straight
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (run, place / "killed")]
    assert weights[0] == weights[1]


def test_evaluation(run):
    heard = Heard()
    found = evaluate(run, "cpu", heard, {"passkey_depths": [0.5]})
    assert open_run(run).folder.evaluated() == json.loads(json.dumps(found))
    assert [(row["length"], row["mode"]) for row in found["perplexity"]] == [
        (160, "full"), (160, "sliding"), (320, "full"),
    ]  # fmt: skip
    assert {row["tokens"] for row in found["perplexity"]} == {640}
    assert all(1.0 < row["perplexity"] < 400.0 for row in found["perplexity"])
    assert [bucket["end"] for bucket in found["perplexity"][-1]["buckets"]] == [64, 128, 256, 320]
    assert [(row["length"], row["depth"]) for row in found["passkeys"]] == [(160, 0.5), (320, 0.5)]
    assert (found["mechanism"], found["position"], found["trained_length"]) == ("asentmax", "nape", 160)
    assert sum("perplexity " in line and " s" in line for line in heard.lines) == 3
    keys = [line for line in heard.lines if "passkey" in line and " at 0.5" in line]
    assert len(keys) == 2
    assert all(line.endswith("(chance: 10%)") for line in keys)
    assert 0.0 < found["attention"]["summary"]["all"]["density"] < 1.0
    assert heard.lines[-2:] == [f"written: {run}/evaluation.json", f"next: tamis analyze {run}"]


def test_the_commands(place, run):
    prepared = called("prepare", place / "small.toml")
    assert prepared.exit_code == 0, prepared.output
    assert "train: 75 of 75 documents kept" in prepared.output
    shown = called("evaluate", run, "--device", "cpu", "--set", "passkey_samples=0", "--set", "stride=0")
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("perplexity ") == 2
    assert shown.output.count("perplexity, ") == 2
    written = called("generate", run, "--device", "cpu", text="The old man\n\n")
    assert written.exit_code == 0, written.output
    lines = written.stdout.split("\n")
    assert len(lines) == 3
    assert lines[0].startswith("The old man")
    assert lines[:2] == TextGenerator.load(run, "cpu")(["The old man", ""])
    spread = called("dispersion", run, "--device", "cpu", "--output", place / "spread.svg", "--set", "samples=2")
    assert spread.exit_code == 0, spread.output
    found = json.loads((run / "dispersion.json").read_text())
    assert [(row["length"], row["keys"], row["samples"]) for row in found["lengths"]] == [(160, 160, 2), (320, 320, 2)]
    assert (place / "spread.svg").exists()
    figures = called("plot", run, f"{run}/../{run.name}", "--output", place / "figures", "--format", "png")
    assert figures.exit_code == 0, figures.output
    assert (place / "figures" / "lengths.png").exists()
    several = called(
        "generate", run, "--device", "cpu", "--prompt", "The", "--set", "n_best=3", "--set", "max_length=4"
    )
    assert several.stdout.count("\n") == 3


MECHANISMS = {
    "softmax": "'softmax'",
    "ssmax": "'ssmax'",
    "assmax": "'assmax'",
    "entmax 1.5": "{ name = 'entmax', alpha = 1.5 }",
    "learned alpha": "'entmax'",
    "asentmax": "'asentmax'",
    "rela": "'rela'",
}


@pytest.mark.parametrize("position", ["rope", "alibi", "nape", "none"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_with_all_positions(place, tmp_path, mechanism, position):
    changes = [f"model.mechanism={MECHANISMS[mechanism]}", f"model.position={position}", "model.num_layers=1"]
    recipe = small(place, *changes, "training.steps=2", "training.checkpoint_every=2", "training.log_every=1")
    train(recipe, tmp_path, "cpu", QUIET)
    records = read_journal(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 2]
    assert all(record.get("loss", record.get("valid_loss")) < 7.5 for record in records)
    assert records[1]["grad_norm"] > 0.0
    (found,) = TextGenerator.load(tmp_path, "cpu")([""], max_length=3)
    assert isinstance(found, str)


def test_a_sparse_output_layer(place, tmp_path):
    recipe = small(place, "training.loss=entmax", "training.steps=4")
    train(recipe, tmp_path, "cpu", QUIET)
    assert TextGenerator.load(tmp_path, "cpu").decoding.alpha == 1.5
    settings = {"lengths": [160], "passkey_depths": [0.5], "passkey_samples": 1}
    found = evaluate(tmp_path, "cpu", QUIET, settings)
    assert found["perplexity"][0]["support"] < 399


def test_a_vocabulary_is_brought_along(place, tmp_path):
    brought = place / "data" / "vocabulary.model"
    recipe = read_recipe(DEMO, [*SMALL, f"text.folder={tmp_path}", f"vocabulary.model={brought}"])
    prepared = prepare(recipe, QUIET)
    assert prepared.vocabulary.fingerprint == Vocabulary.load(brought).fingerprint


def test_prepared_text_is_used_again_and_rebuilt_when_it_changes(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one two three\n\nthree four\n" * 30)
    changes = [f"text.train={path}", f"text.valid={path}", "text.documents=blank", "vocabulary.size=275"]

    def said(*more):
        heard = Heard()
        prepare(read_recipe(DEMO, [*changes, f"text.folder={tmp_path / 'data'}", *more]), heard)
        return len(heard.lines)

    assert said() == 3
    assert said() == 0
    assert said("text.length=64", "text.passkey_share=0") == 0  # which only training looks at
    assert said("text.documents=line") == 3
    path.write_text("one two three four\n" * 30)
    assert said("text.documents=line") == 3
    (tmp_path / "data" / "train.tokens").write_bytes(b"torn")
    assert said("text.documents=line") == 4  # and that it is damaged


@pytest.mark.parametrize(
    "name", [path.stem for path in sorted(RECIPES.glob("*.toml")) if isinstance(read_recipe(path), LanguageModel)]
)
def test_shipped_recipes_are_read_with_all_their_arms(name):
    path = RECIPES / f"{name}.toml"
    assert arms_of(path) == ARMS
    found = {arm: read_recipe(path, arms=arm) for arm in ARMS}
    assert [recipe.model["position"] for recipe in found.values()] == ["rope", "nape", "nape", "nape"]
    for recipe in found.values():
        assert recipe.name == name
        assert recipe.text.passkey_share == 0.05
        assert recipe.training.label_smoothing == 0.0
    if name != "lm-demo":
        model = CausalLM(replace(found["asentmax-nape"].model_config(), vocab_size=8000))
        assert 20e6 < model.num_parameters() < 40e6
        assert found["asentmax-nape"].training.cuda_graphs
    head = path.read_text().splitlines()[:6]
    for word in ("Hardware", "Time", "Expect"):
        assert any(word in line for line in head), f"{path.name} does not say {word}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.vocab_size=9", "follows from the vocabulary"),
        ("model.embed_dmi=9", "did you mean 'embed_dim'"),
        ("text.lenght=9", "did you mean 'length'"),
        ("text.documents=page", "documents must be one of"),
        ("training.monitor=bleu", "has no bleu to monitor"),
        ("decoding.method=beam", 'method is "sample" or "greedy"'),
        ("evaluation.lengths=[100,150]", "divide the greatest"),
        ("data.train=x", r"this has \[data\] and \[text\]"),
        ("text=3", "text must be a section"),
        ("name=a/b", "one that a folder can have"),
    ],
)
def test_bad_recipes(override, message):
    with pytest.raises(ValueError, match=message):
        read_recipe(DEMO, [override])


def test_figures_of_what_is_not_evaluated(run, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.toml").write_text((run / "config.toml").read_text())
    with pytest.raises(FileNotFoundError, match=r"tamis analyze .* `tamis evaluate"):
        plot([plain], tmp_path / "figures")
    with pytest.raises(ValueError, match="pdf, svg, png"):
        plot([run], tmp_path / "figures", "gif")


def test_what_is_missing(tmp_path):
    (tmp_path / "r.toml").write_text("name = 'r'\n[text]\ntrain = 'x'\n")
    with pytest.raises(ValueError, match=r"\[text\] .*valid"):
        read_recipe(tmp_path / "r.toml")
    learned = ["model.position=learned", "model.max_length=100"]
    with pytest.raises(ValueError, match=r"100 learned positions are fewer than text\.length = 128"):
        read_recipe(DEMO, learned)


def test_what_it_does_not_do_is_said_with_what_does(run):
    translated = called("translate", run, "--device", "cpu", text="x\n")
    assert translated.exit_code == 1
    assert f"is a language model, which cannot translate: `tamis generate {run}`" in translated.output
    silenced = called("tasks", "heads", run)
    assert "a language model has not got lengths at which to silence heads: `tamis analyze`" in silenced.output


def test_two_vocabularies_are_one_too_many(place, tmp_path):
    recipe = small(tmp_path, "vocabulary.shared=false")
    with pytest.raises(ValueError, match="a language model has one vocabulary"):
        prepare(recipe)


def test_another_recipe_in_the_same_folder(place, run):
    with pytest.raises(ValueError, match=r"other settings \(model\.ffn_dim: 32 then, 64 now; text\.length: 160 then"):
        train(small(place, "model.ffn_dim=64", "text.length=200"), run, "cpu", QUIET)
    changed = small(place, "evaluation.stride=0.25", "decoding.top_p=0.5", "training.keep=9")
    train(changed, run, "cpu", QUIET)  # what may change
    assert isinstance(read_recipe(run / "config.toml"), LanguageModel)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": [64]}, "a pass key and its question take"),
        ({"lengths": [1 << 20]}, "cannot be tested"),
        ({"candidates": 90}, "no 90 different numbers of 2 digits"),
        ({"lenghts": [64]}, "did you mean 'lengths'"),
    ],
)
def test_evaluations_that_cannot_be(run, settings, message):
    with pytest.raises(ValueError, match=message):
        evaluate(run, "cpu", QUIET, settings)
