"""Every command takes runs of every kind, or says in one line what the kind lacks."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.listening import QUIET, Heard
from tamis.analysis import read_arrays, shown_sentences
from tamis.cli import app
from tamis.experiments import (
    GeneratedSequences,
    LanguageModel,
    TaskTraining,
    Translation,
    read_recipe,
    train,
)
from tamis.training import TaskConfig, TrainingConfig

SMALL = """
[model]
embed_dim = 16
num_heads = 2
ffn_dim = 16
LAYERS
[training]
steps = 2
checkpoint_every = 2
log_every = 1
BATCH
"""
RECIPES = {
    "translation": """
name = "translation"
[data]
train = "grammar:train:300"
valid = "grammar:valid:12"
test = "grammar:test:6"
gold = "grammar:test:6"
folder = "data-translation"
[vocabulary]
size = 150
kind = "bpe"
[decoding]
beam = 2
max_length = 8
"""
    + SMALL.replace("LAYERS", "encoder_layers = 1\ndecoder_layers = 1").replace("BATCH", "batch_tokens = 500"),
    "language": """
name = "language"
[text]
train = "grammar:train:300"
valid = "grammar:valid:60"
test = "grammar:test:80"
folder = "data-language"
length = 40
[vocabulary]
size = 320
kind = "bpe"
byte_fallback = true
[evaluation]
lengths = [40, 80]
tokens = 160
across_documents = true
passkey_samples = 1
passkey_depths = [0.5]
"""
    + SMALL.replace("LAYERS", "num_layers = 1").replace("BATCH", "batch_tokens = 200"),
    "task": """
name = "task"
[task]
name = "copy"
lengths = [3, 5]
batch_size = 8
validation_size = 8
[evaluation]
multiples = [1, 2]
samples = 4
"""
    + SMALL.replace("LAYERS", "num_layers = 1").replace("BATCH", ""),
}
KINDS = tuple(RECIPES)


def called(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One of each kind, trained, evaluated and analysed by the commands, and what these said."""
    place = tmp_path_factory.mktemp("kinds")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for kind, text in RECIPES.items():
            (place / f"{kind}.toml").write_text(text)
            said = called("prepare", f"{kind}.toml")
            said += called("train", f"{kind}.toml", "--device", "cpu")
            short = ["--set", "lengths=[120]"] if kind == "language" else []
            said += called("evaluate", f"runs/{kind}", "--device", "cpu", *short)
            said += called("analyze", f"runs/{kind}", "--device", "cpu", "--shown", 3)
            found[kind] = (place / "runs" / kind, said)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_stages_say_at_their_ends(runs, kind):
    _, said = runs[kind]
    for line in {
        "translation": (
            "  vocabulary  150 subwords of both languages\n",
            "  valid       12 pairs, ",
            "written: data-translation\n",
        ),
        "language": (
            "  vocabulary  320 subwords\n",
            "  train       38 documents, ",
            "next: tamis train language.toml\n",
        ),
        "task": ("there is nothing to prepare",),
    }[kind]:
        assert line in said
    assert "parameters" in said
    assert "for the activations of" in said  # an estimate, before training
    for line in (
        f"next: tamis evaluate runs/{kind}, tamis analyze runs/{kind}",
        f"written: runs/{kind}/evaluation.json",
        f"next: tamis analyze runs/{kind}",
        f"written: runs/{kind}/analysis.json, runs/{kind}/analysis.npz",
        f"next: tamis report runs/{kind}",
    ):
        assert line in said
    for figure in {
        "translation": ("BLEU", "chrF", "perplexity", "density", "diversity", "AER"),
        "language": ("perplexity, 120 tokens", "pass keys, 120 tokens", "density", "diversity"),
        "task": ("1x", "exact match", "density", "diversity"),
    }[kind]:
        assert figure in said, figure


@pytest.mark.parametrize("kind", KINDS)
def test_an_analysis_has_all_that_its_kind_can_have(runs, kind):
    folder, _ = runs[kind]
    found = json.loads((folder / "analysis.json").read_text())
    assert set(found["importance"]["change"]) == set(found["sites"])
    assert found["summary"]["all"]["density"] > 0.0
    assert len(found["tokens"]) == 3
    assert set(shown_sentences(read_arrays(folder / "analysis.npz"))) == {0, 1, 2}
    tokens = found["tokens"]["0"]["target"]
    if kind == "task":
        assert tokens[0] == "<s>"
        assert "=" in tokens
    if kind == "translation":
        assert 0.0 < found["alignment"]["chosen"]["aer"] <= 1.0
    else:
        trained = {"language": 40, "task": 5}[kind]
        assert [row["length"] for row in found["dispersion"]] == [trained, 2 * trained, 4 * trained]
        assert found["scales"]  # ASEntmax is the default


def test_one_page_and_figures_of_all_kinds(runs, tmp_path):
    folders = [folder for folder, _ in runs.values()]
    called("report", *folders, "--output", tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    pytest.importorskip("matplotlib")
    written = called("plot", runs["task"][0], "--output", tmp_path / "figures", "--format", "svg")
    assert "exact match, %" in written
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert {"lengths.svg", "head-density.svg", "positions.svg"} <= names


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        ("translation", ["dispersion", "RUN"], "translation has not got texts of growing length: `tamis analyze`"),
        ("translation", ["generate", "RUN"], "is translation, which cannot generate: `tamis translate"),
        ("language", ["translate", "RUN"], "is a language model, which cannot translate: `tamis generate"),
        ("task", ["generate", "RUN"], "is a generated task, which cannot generate: `tamis evaluate"),
        ("translation", ["generate", "RUN/model"], "is a Seq2Seq, which cannot generate: `tamis translate"),
        ("language", ["translate", "RUN/model"], "is a CausalLM, which cannot translate: `tamis generate"),
        ("language", ["tasks", "heads", "RUN"], "`tamis analyze` says how its loss changes without each head"),
        (
            "task",
            ["analyze", "RUN", "--data", "x.txt"],
            "a task draws its own sequences and reads no text, got 'x.txt'",
        ),
        ("task", ["evaluate", "RUN", "--set", "beam=3"], "LengthsConfig has no setting 'beam'"),
        ("language", ["evaluate", "RUN", "--set", "beam=3"], "LanguageConfig has no setting 'beam'"),
    ],
)
def test_what_a_kind_lacks_is_said_in_one_line(runs, kind, arguments, said):
    output = called(*(str(word).replace("RUN", str(runs[kind][0])) for word in arguments), code=1)
    assert said in output
    assert "Traceback" not in output


def test_runs_of_a_kind_are_compared(runs, tmp_path):
    language, task = runs["language"][0], runs["task"][0]
    assert "| perplexity, tokens | 120" in called("compare", f"mine={language}")
    assert "| exact match, % | 1x" in called("compare", f"mine={task}")
    single = called("compare", f"mine={runs['translation'][0]}")
    assert "BLEU" in single.upper()
    assert "+-" not in single  # one run has no spread
    mixed = called("compare", f"a={language}", f"b={task}", code=1)
    assert "runs of a generated task and a language model have no scores in common" in mixed


def test_pass_keys_that_were_not_trained_are_marked_and_chance_stands_beside_them(runs):
    folder, said = runs["language"]
    assert "not trained: text.passkey_share = 0; chance: 10%" in said
    found = json.loads((folder / "evaluation.json").read_text())
    assert (found["passkeys_trained"], found["passkey_chance"]) == (False, 0.1)


@pytest.mark.parametrize(("kind", "section"), [("translation", "data"), ("language", "text")])
def test_a_run_without_a_test_set_is_not_sent_to_its_evaluation(runs, kind, section, tmp_path, monkeypatch):
    folder, _ = runs[kind]
    monkeypatch.chdir(folder.parents[1])
    text = "".join(line for line in RECIPES[kind].splitlines(True) if not line.startswith("test = "))
    (tmp_path / "r.toml").write_text(text)
    said = called("train", tmp_path / "r.toml", "--output", tmp_path / "run", "--device", "cpu")
    assert f"next: tamis analyze {tmp_path / 'run'}\n" in said
    wrong = called("evaluate", tmp_path / "run", "--device", "cpu", code=1)
    assert f"names no [{section}] test to evaluate on: add it to the recipe and run `tamis train` again" in wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run_says_so(runs, kind, monkeypatch):
    folder, _ = runs[kind]
    monkeypatch.chdir(folder.parents[1])
    before = (folder / "model" / "model.safetensors").read_bytes()
    heard = Heard()
    train(read_recipe(f"{kind}.toml"), folder, "cpu", heard)
    said = "\n".join(heard.lines)
    assert "is finished, at step 2 of 2: raise training.steps to go on" in said
    assert "going on" not in said
    assert "memory" not in said
    assert (folder / "model" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_card_lies_beside_every_model(runs, kind):
    folder, _ = runs[kind]
    card = (folder / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: tamis\n")
    assert f"# {kind}" in card
    assert 'model"' in card  # how to load it
    assert "validation loss" in card
    assert {"translation": "| BLEU |", "language": "| perplexity, 120 tokens |", "task": "| 1x |"}[kind] in card
    recipe = card.split("```toml\n")[1].split("```")[0]
    (folder / "again.toml").write_text(recipe)
    assert read_recipe(folder / "again.toml") == read_recipe(folder / "config.toml")
    (folder / "again.toml").unlink()


def test_a_recipe_in_python_has_the_defaults_of_one_in_toml(tmp_path):
    (tmp_path / "r.toml").write_text('name = "r"\n[task]\nname = "copy"\n[training]\nsteps = 3\n')
    read = read_recipe(tmp_path / "r.toml")
    built = GeneratedSequences(name="r", task=TaskConfig(name="copy"), training=TaskTraining(steps=3))
    assert (
        read == built == GeneratedSequences.from_dict({"name": "r", "task": {"name": "copy"}, "training": {"steps": 3}})
    )
    assert (read.training.optimizer, read.training.betas) == ("adamw", (0.9, 0.99))
    with pytest.raises(ValueError, match="training must be TaskTraining, which has the defaults of recipes"):
        GeneratedSequences(name="r", task=TaskConfig(name="copy"), training=TrainingConfig(steps=3))


def test_a_setting_without_its_section_is_found(tmp_path):
    (tmp_path / "r.toml").write_text('name = "r"\n[data]\ntrain = "a.tsv"\nvalid = "b.tsv"\n')
    for override, offered in {
        "lr=3": "'training.lr'",
        "beam=3": "'decoding.beam'",
        "embed_dim=3": "'model.embed_dim'",
        "max_length=9": "'data.max_length' or 'decoding.max_length' or 'model.max_length'",
        "stepz=9": "'training.steps'",
        "vocabulry.size=9": "'vocabulary'",
    }.items():
        with pytest.raises(ValueError, match="did you mean") as raised:
            read_recipe(tmp_path / "r.toml", [override])
        assert str(raised.value).endswith(f"did you mean {offered}?")


def test_the_kinds_of_shipped_recipes():
    recipes = Path(__file__).parents[2] / "recipes"
    assert isinstance(read_recipe(recipes / "demo.toml"), Translation)
    assert isinstance(read_recipe(recipes / "lm-demo.toml"), LanguageModel)
    assert isinstance(read_recipe(recipes / "tasks" / "reverse.toml", arms=["short", "softmax"]), GeneratedSequences)


def test_names_of_before_say_where_things_are():
    for module, new in {
        "runs": "train, evaluate, analyze",
        "config": "Translation",
        "language_runs": "LanguageModel",
        "task_runs": "GeneratedSequences",
    }.items():
        with pytest.raises(
            ImportError, match=f"tamis.{module} is gone: .*{new}.*tamis.experiments|tamis.{module} is gone"
        ):
            __import__(f"tamis.{module}")


def test_quiet_is_quiet(capsys):
    QUIET.say("x")
    with QUIET.track("y", 3) as advance:
        advance(1)
    QUIET.table([("a", "b")])
    assert capsys.readouterr() == ("", "")
