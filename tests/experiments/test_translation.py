"""From a recipe to translations, as a user goes: prepare, train, stop, go on, translate, evaluate, compare."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from experiments.listening import QUIET, Heard
from tamis.analysis import read_arrays, shown_sentences
from tamis.cli import app
from tamis.decoding import Translator
from tamis.experiments import analyze, compare, evaluate, open_run, prepare, read_recipe, train, translation
from tamis.training import TrainingError
from tamis.training.guards import alone_in
from tamis.training.journal import read_journal

RECIPE = """
name = "tiny"
[data]
train = "grammar:train:1500"
valid = "grammar:valid:40"
test = "grammar:test:30"
gold = "grammar:test:30"
folder = "FOLDER/data"
[vocabulary]
size = 400
kind = "bpe"
[model]
embed_dim = 32
num_heads = 2
ffn_dim = 64
encoder_layers = 1
decoder_layers = 2
[training]
steps = 40
batch_tokens = 1000
lr = 5e-3
warmup = 20
checkpoint_every = 10
log_every = 5
average = 2
[decoding]
beam = 2
max_ratio = 1.0
max_extra = 5
[arms.softmax]
model.mechanism = "softmax"
[arms.entmax]
model.mechanism = "entmax"
"""


def tamis(*arguments):
    command = [sys.executable, "-c", "from tamis.cli import main; main()", *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


def output_of(process, text=""):
    out, err = process.communicate(text, timeout=300)
    assert process.returncode == 0, err
    return out


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.toml").write_text(RECIPE.replace("FOLDER", str(folder)))
    return folder


@pytest.fixture(scope="module")
def runs(place):
    """Two arms, each trained and evaluated."""
    torch.set_num_threads(1)  # as in the processes that tests start: sums are rounded alike
    found = {}
    for arm in ("softmax", "entmax"):
        found[arm] = place / arm
        train(read_recipe(place / "tiny.toml", arms=arm), place / arm, "cpu", QUIET)
        evaluate(place / arm, "cpu", display=QUIET)
    return found


def test_a_run_folder_holds_what_the_next_stage_reads(runs):
    for run in runs.values():
        names = {path.name for path in run.iterdir()} - {".lock"}
        assert names == {
            "config.toml", "metrics.jsonl", "checkpoints", "model", "evaluation.json", "test.hypotheses.txt",
        }  # fmt: skip
        records = read_journal(run / "metrics.jsonl")
        assert [record["step"] for record in records if "loss" in record] == list(range(5, 41, 5))
        validations = [record for record in records if "valid_loss" in record]
        assert validations[-1]["valid_loss"] < validations[0]["valid_loss"]
        assert set(validations[0]["densities"]) == {
            "encoder.0.self", "decoder.0.self", "decoder.0.cross", "decoder.1.self", "decoder.1.cross",
        }  # fmt: skip
    assert all(density == 1.0 for density in validations_of(runs["softmax"]))
    assert all(density < 1.0 for density in validations_of(runs["entmax"]))


def validations_of(run):
    return [record["density"] for record in read_journal(run / "metrics.jsonl") if "density" in record]


def test_the_exported_model_is_the_average(runs):
    translator = Translator.load(runs["entmax"], "cpu")
    tables = [
        load_file(str(runs["entmax"] / "checkpoints" / f"step-{step:08d}" / "model.safetensors")) for step in (30, 40)
    ]
    for name, weight in translator.model.state_dict().items():
        if name in tables[0]:
            torch.testing.assert_close(weight, (tables[0][name] + tables[1][name]) / 2, rtol=1e-6, atol=1e-7)


def test_evaluation(runs):
    for arm, run in runs.items():
        found = json.loads((run / "evaluation.json").read_text())
        assert found["translation"]["sentences"] == 30
        assert 0.0 <= found["translation"]["bleu"]["score"] <= 100.0
        assert "version:" in found["translation"]["bleu"]["signature"]
        assert found["likelihood"]["perplexity"] > 1.0
        assert 0.0 < found["alignment"]["best"]["aer"] < 1.0
        assert found["attention"]["summary"]["all"]["density"] <= 1.0
        lines = (run / "test.hypotheses.txt").read_text().splitlines()
        assert len(lines) == 30
        sources = [pair.source for pair in _test_pairs(run)]
        assert Translator.load(run, "cpu")(sources) == lines, arm


def _test_pairs(run):
    recipe = read_recipe(run / "config.toml")
    return recipe.whole_text(recipe.data.test)


def test_analysis(runs):
    for arm, run in runs.items():
        found = analyze(run, device="cpu", display=QUIET, shown=4)
        assert open_run(run).folder.analysed() == json.loads(json.dumps(found))
        sites = {"encoder.0.self", "decoder.0.self", "decoder.0.cross", "decoder.1.self", "decoder.1.cross"}
        assert set(found["sites"]) == set(found["importance"]["change"]) == sites
        assert len(found["tokens"]) == 4
        assert 0.0 < found["alignment"]["chosen"]["aer"] <= 1.0
        assert bool(found["trajectories"]["sites"]) == (arm == "entmax")
        arrays = read_arrays(run / "analysis.npz")
        assert set(shown_sentences(arrays)) == {0, 1, 2, 3}
        for path in (run / "analysis.json", run / "analysis.npz"):
            path.unlink()


def test_heads_are_observed_on_pairs_that_stand_for_all(runs, place, monkeypatch):
    """Batches are sorted by length, so the first ones do not."""
    monkeypatch.setattr(translation, "OBSERVED_TOKENS", 100)
    used = {"importance": [], "density": []}
    score, look = translation.translation_likelihood, translation.observe

    def scored(model, batches, **options):
        used["importance"] = list(batches)
        return score(model, batches, **options)

    def observed(model, batch, *rest):
        used["density"].append(batch)
        look(model, batch, *rest)

    monkeypatch.setattr(translation, "translation_likelihood", scored)
    monkeypatch.setattr(translation, "observe", observed)
    analyze(runs["entmax"], device="cpu", display=QUIET, shown=1)
    short = read_recipe(place / "tiny.toml", ["training.steps=1", "training.checkpoint_every=1"], "entmax")
    train(short, place / "observed", "cpu", QUIET)
    valid = prepare(short, QUIET).corpus("valid")
    sizes = np.maximum(valid.source_lengths, valid.target_lengths) + 1
    for batches in used.values():
        chosen = [index for batch in batches for index in batch.indices]
        assert 0.5 * 100 < sizes[chosen].sum() < 1.5 * 100 < sizes.sum()
        assert sizes[chosen].mean() == pytest.approx(sizes.mean(), rel=0.1)
        assert sizes[chosen].min() < np.quantile(sizes, 0.25) <= np.quantile(sizes, 0.75) < sizes[chosen].max()
    for name in ("analysis.json", "analysis.npz"):
        (runs["entmax"] / name).unlink()


def test_comparison(runs, tmp_path):
    comparison = compare({arm: [run] for arm, run in runs.items()})
    assert comparison.baseline == "softmax"
    assert "entmax" in comparison.describe()
    shutil.copy(runs["softmax"] / "config.toml", tmp_path / "config.toml")
    with pytest.raises(FileNotFoundError, match="has not been evaluated"):
        compare({"a": [runs["softmax"]], "b": [tmp_path]})


@pytest.fixture
def copied(runs, tmp_path):
    """A run that a test may damage."""
    shutil.copytree(runs["entmax"], tmp_path / "copied")
    return tmp_path / "copied"


def test_changed_translations_are_not_compared(runs, copied):
    lines = (copied / "test.hypotheses.txt").read_text().splitlines(keepends=True)
    (copied / "test.hypotheses.txt").write_text("".join(lines[::-1]))
    with pytest.raises(ValueError, match=r"test\.hypotheses\.txt is missing, or not as it was written"):
        compare({"softmax": [runs["softmax"]], "changed": [copied]})
    (copied / "evaluation.json").write_text((copied / "evaluation.json").read_text().replace("0.", "1.", 1))
    with pytest.raises(ValueError, match=r"evaluation\.json is not as it was written"):
        compare({"softmax": [runs["softmax"]], "changed": [copied]})


def test_changed_records_are_not_drawn_and_stop_nothing_else(copied):
    path = copied / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": ', '"loss": 1', 1))
    with pytest.raises(ValueError, match=r"metrics\.jsonl is not as it was written up to step 40: remove it"):
        analyze(copied, device="cpu", display=QUIET)
    evaluate(copied, "cpu", display=QUIET)
    assert "valid" not in (copied / "model" / "README.md").read_text().partition("## Scores")[2].partition("BLEU")[0]


def test_what_stands_for_a_model_is_evaluated(copied):
    """As if a process that exports it again had been killed between two steps."""
    (copied / "model").rename(copied / ".model.before")
    assert evaluate(copied, "cpu", display=QUIET)["scored"] == open_run(copied).folder.evaluated()["scored"]


def test_leftovers_of_kills_go_with_the_next_run(place, copied):
    for name in (".config.toml.7.partial", ".metrics.jsonl.8.partial", ".evaluation.json.9.partial"):
        (copied / name).write_bytes(b"half")
    (copied / "checkpoints" / ".unfinished-step-00000099").mkdir()
    train(read_recipe(place / "tiny.toml", arms="entmax"), copied, "cpu", QUIET)
    assert not [path for path in copied.rglob(".*") if path.name != ".lock"]


def test_translating_from_the_command_line(runs):
    text = "The man sees the dog.\n\nShe sings.\n"
    plain = output_of(tamis("translate", runs["entmax"], "--device", "cpu"), text).split("\n")
    assert len(plain) == 4
    assert plain[1] == ""
    assert plain[:3] == Translator.load(runs["entmax"], "cpu")(text.split("\n")[:3])
    rich = output_of(
        tamis("translate", runs["entmax"], "--alignments", "--scores", "--set", "n_best=2", "--device", "cpu"), text
    ).splitlines()
    assert len(rich) == 5  # an empty line has one translation
    score, best, links = rich[0].split("\t")
    assert best == plain[0]
    assert float(score) < 0.0
    for link in links.split():
        source, target = map(int, link.split("-"))
        assert 0 <= source < 5
        assert 0 <= target < len(best.split())


def test_killed_and_called_again(place, runs):
    """Through the command, with SIGKILL: the journal of the second call is that of an undisturbed run."""
    arguments = ("train", place / "tiny.toml", "--arm", "entmax", "--output", place / "killed", "--device", "cpu")
    process = tamis(*arguments)
    journal = place / "killed" / "metrics.jsonl"
    while process.poll() is None and (not journal.exists() or journal.read_text().count("\n") < 6):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    said = output_of(tamis(*arguments))
    assert "going on from step" in said
    keys = ("step", "loss", "valid_loss", "density", "alphas")
    straight, killed = (
        [[record.get(key) for key in keys] for record in read_journal(run / "metrics.jsonl")]
        for run in (runs["entmax"], place / "killed")
    )
    assert killed == straight


def test_another_recipe_in_the_same_folder(place, runs):
    recipe = read_recipe(place / "tiny.toml", ["training.lr=1e-4", "model.ffn_dim=32"], "softmax")
    with pytest.raises(
        ValueError, match=r"other settings \(model\.ffn_dim: 64 then, 32 now; training\.lr: 0\.005 then"
    ):
        train(recipe, runs["softmax"], "cpu", QUIET)


def test_a_setting_that_is_no_longer_given_is_another_setting(place, tmp_path):
    small = ["training.steps=10", "training.checkpoint_every=5"]
    train(read_recipe(place / "tiny.toml", [*small, "model.dropout=0.0"], "softmax"), tmp_path, "cpu", QUIET)
    with pytest.raises(ValueError, match=r"model\.dropout: 0\.0 then, 0\.1 now"):
        train(read_recipe(place / "tiny.toml", small, "softmax"), tmp_path, "cpu", QUIET)


def test_a_recipe_that_failed_does_not_claim_the_folder(place, tmp_path):
    wrong = ["training.steps=5", "model.mechanism={name='entmax',alfa=1.5}"]
    with pytest.raises((ValueError, TypeError), match="alfa"):
        train(read_recipe(place / "tiny.toml", wrong), tmp_path, "cpu", QUIET)
    train(read_recipe(place / "tiny.toml", ["training.steps=5"], "softmax"), tmp_path, "cpu", QUIET)


def test_a_model_that_no_memory_holds(place, tmp_path):
    recipe = read_recipe(place / "tiny.toml", ["model.embed_dim=1000000000"], "softmax")
    with pytest.raises(
        ValueError, match=r"a model of about [0-9,]+ weights would take .* lower the sizes under \[model\]"
    ):
        train(recipe, tmp_path / "run", "cpu", QUIET)


def test_one_run_at_a_time(place, tmp_path):
    with alone_in(tmp_path), pytest.raises(TrainingError, match="another process is training"):
        train(read_recipe(place / "tiny.toml", arms="softmax"), tmp_path, "cpu", QUIET)
    assert not (tmp_path / "config.toml").exists()


def test_hypotheses_of_another_test_set_are_not_compared(runs, tmp_path):
    shutil.copytree(runs["softmax"], tmp_path / "copy")
    recipe = (tmp_path / "copy" / "config.toml").read_text()
    (tmp_path / "copy" / "config.toml").write_text(recipe.replace("grammar:test:30", "grammar:test:30:7"))
    with pytest.raises(ValueError, match="was evaluated with another model or test set"):
        compare({"a": [tmp_path / "copy"]})


def test_more_steps_are_no_other_recipe(place, tmp_path):
    small = ["training.steps=10", "training.checkpoint_every=5"]
    train(read_recipe(place / "tiny.toml", small, "softmax"), tmp_path, "cpu", QUIET)
    more = ["training.steps=15", "training.checkpoint_every=5"]
    train(read_recipe(place / "tiny.toml", more, "softmax"), tmp_path, "cpu", QUIET)
    assert read_journal(tmp_path / "metrics.jsonl")[-1]["step"] == 15


def test_sparse_output_layer_monitored_by_bleu(place, tmp_path):
    changes = ["training.loss=entmax", "training.monitor=bleu", "training.steps=10", "training.average=1"]
    train(read_recipe(place / "tiny.toml", changes, "entmax"), tmp_path, "cpu", QUIET)
    assert Translator.load(tmp_path, "cpu").decoding.alpha == 1.5
    found = evaluate(tmp_path, "cpu", display=QUIET)
    assert found["likelihood"]["support"] < 399
    assert found["likelihood"]["epsilon_perplexity"] > 1.0
    assert "valid_bleu" in read_journal(tmp_path / "metrics.jsonl")[-1]


def test_prepared_data_are_used_again_and_rebuilt_when_they_change(place, tmp_path):
    heard = Heard()
    changes = [f"data.folder={tmp_path}", "data.train=grammar:train:300", "vocabulary.size=200"]
    recipe = read_recipe(place / "tiny.toml", changes)
    prepare(recipe, heard)
    count = len(heard.lines)
    assert count
    prepare(recipe, heard)
    assert len(heard.lines) == count
    prepare(read_recipe(place / "tiny.toml", [*changes, "vocabulary.size=210"]), heard)
    assert len(heard.lines) == 2 * count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "none.toml"), "there is no recipe none.toml"),
        (("translate", "none"), "there is no folder none"),
        (("evaluate", "none"), "there is no recipe none/config.toml"),
        (("compare", "a"), "a system is NAME=RUN"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    with pytest.raises(SystemExit) as left:
        app(list(arguments))
    assert str(left.value.code).startswith("error: ")
    assert message in left.value.code


def test_a_torn_model_folder_is_a_clear_error(runs, tmp_path):
    shutil.copytree(runs["softmax"] / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"model\.safetensors is not as it was written"):
        Translator.load(tmp_path, "cpu")
    (tmp_path / "model" / "checksums.json").unlink()
    with pytest.raises(ValueError, match="cannot be loaded"):
        Translator.load(tmp_path, "cpu")
