"""Code of users: a mechanism, a position, a task, a kind and a logger by name, without touching the package."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from experiments.listening import QUIET
from tamis import plugins
from tamis.cli import app
from tamis.data.tasks import TASKS
from tamis.experiments import evaluate, read_recipe, train
from tamis.models import CausalLM
from tamis.plugins import Registry

pytestmark = pytest.mark.usefixtures("registries")

MINE = '''
"""A mechanism, a position, a task, a logger and a kind of experiment."""
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from tamis.attention.rules import Entmax
from tamis.data.tasks import TASKS, SequenceTask
from tamis.experiments import KINDS, GeneratedSequences
from tamis.mechanisms import Mechanism
from tamis.mechanisms.registry import MECHANISMS
from tamis.positions import POSITIONS, ALiBi
from tamis.positions.registry import Kind
from tamis.settings import Config
from tamis.training import TaskConfig
from tamis.training.loggers import LOGGERS


class Gentle(Mechanism):
    """Entmax of an alpha that is given."""

    def __init__(self, alpha=1.2):
        super().__init__()
        self.alpha = alpha

    def rule(self, inputs):
        return Entmax(self.alpha)


class Steep(ALiBi):
    """ALiBi by another name."""


@dataclass(frozen=True)
class Parity(SequenceTask):
    """Whether the ones are odd in number."""

    @property
    def num_symbols(self):
        return 2

    def pairs(self, count, length, generator):
        source = torch.randint(2, (count, length), generator=generator, device=generator.device)
        return source, source.sum(1, keepdim=True) % 2


class Lines:
    """Writes losses into a file of the run."""

    def __init__(self, run, name="mine.txt"):
        self.path = run.folder / name

    def write(self, record):
        if "loss" in record:
            with self.path.open("a") as file:
                file.write(f"{record['step']}\\n")

    def close(self):
        pass


@dataclass(frozen=True, kw_only=True)
class Puzzle(Config):
    """What is to be solved."""

    length: int = 4
    """Of a puzzle."""


@dataclass(frozen=True, kw_only=True)
class Puzzles(GeneratedSequences):
    """A kind that is a task of one length."""

    section: ClassVar[str] = "puzzle"
    what: ClassVar[str] = "a puzzle"

    task: TaskConfig = field(default_factory=lambda: TaskConfig(name="parity", lengths=(4, 4), batch_size=8))
    puzzle: Puzzle = field(default_factory=Puzzle)


MECHANISMS["gentle"] = lambda layer, **own: Gentle(**own)
POSITIONS["steep"] = Kind(Steep, "num_heads")
TASKS["parity"] = Parity
LOGGERS["lines"] = Lines
KINDS["puzzle"] = Puzzles
'''
RECIPE = """
name = "mine"
plugins = ["mine.py"]
[task]
name = "parity"
lengths = [3, 5]
batch_size = 8
validation_size = 8
[model]
embed_dim = 16
num_heads = 2
ffn_dim = 16
num_layers = 1
mechanism = { name = "gentle", alpha = 1.3 }
position = "steep"
[training]
steps = 2
checkpoint_every = 2
log_every = 1
loggers = [{ name = "lines", name_of_file = "x" }]
[evaluation]
multiples = [1]
samples = 4
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "mine.toml").write_text(RECIPE.replace(', name_of_file = "x"', ""))
    return tmp_path / "mine.toml"


def test_a_recipe_brings_all_of_them_along(recipe, tmp_path):
    loaded = read_recipe(recipe)
    assert loaded.plugins == (str(tmp_path / "mine.py"),)
    train(loaded, tmp_path / "run", "cpu", QUIET)
    assert (tmp_path / "run" / "mine.txt").read_text() == "1\n2\n"
    assert evaluate(tmp_path / "run", "cpu", QUIET)["mechanism"] == "gentle"
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "It needs the plugin `mine.py`" in card
    assert 'plugins = ["mine.py"]' in card
    assert str(tmp_path / "mine.py") not in card
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["plugins"] == ["mine.py"]  # a model travels
    model = CausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.layers[0].self_attention.mechanism.alpha == 1.3


def test_what_needs_a_plugin_says_which_and_runs_nothing(recipe, tmp_path):
    train(read_recipe(recipe), tmp_path / "run", "cpu", QUIET)
    code = "import sys; from tamis.models import CausalLM; CausalLM.from_pretrained(sys.argv[1])"
    for arguments, needed in (
        (["-m", "tamis", "evaluate", tmp_path / "run", "--device", "cpu"], tmp_path / "mine.py"),
        (["-c", code, tmp_path / "run" / "model"], "mine.py"),
    ):
        done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode != 0
        assert f"needs {needed}, whose code is only run when you name it: --plugin {needed}" in done.stderr
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "mine.py").rename(tmp_path / "elsewhere" / "mine.py")
    named = [sys.executable, "-m", "tamis", "evaluate", tmp_path / "run", "--device", "cpu", "--plugin", moved]
    assert "exact match" in subprocess.run(list(map(str, named)), capture_output=True, text=True, check=True).stdout


def test_the_command_takes_a_plugin_and_the_run_remembers_it(recipe, tmp_path):
    recipe.write_text(recipe.read_text().replace('plugins = ["mine.py"]\n', ""))
    with pytest.raises(ValueError, match=r"task must be one of .* got 'parity'"):
        read_recipe(recipe)
    arguments = ["train", recipe, "--output", tmp_path / "run", "--device", "cpu", "--plugin", tmp_path / "mine.py"]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    assert f'plugins = ["{tmp_path / "mine.py"}"]' in (tmp_path / "run" / "config.toml").read_text()


def test_a_kind_of_ones_own(recipe, tmp_path):
    plugins.load([str(tmp_path / "mine.py")])
    (tmp_path / "puzzle.toml").write_text(
        'name = "p"\n[puzzle]\nlength = 4\n[model]\nembed_dim = 16\nnum_heads = 2\nnum_layers = 1\n'
        "[training]\nsteps = 2\ncheckpoint_every = 2\n[evaluation]\nmultiples = [1]\nsamples = 4\n"
    )
    loaded = read_recipe(tmp_path / "puzzle.toml")
    assert type(loaded).__name__ == "Puzzles"
    train(loaded, tmp_path / "run", "cpu", QUIET)
    assert len(evaluate(tmp_path / "run", "cpu", QUIET)["scores"]) == 1
    shown = CliRunner().invoke(app, ["settings", "puzzle"])
    assert "length = 4    whole number\n      Of a puzzle." in shown.output


def test_entry_points_are_run_by_name_alone(monkeypatch, tmp_path):
    (tmp_path / "sieves.py").write_text("from tamis.data.tasks import TASKS, Copy\nTASKS['again'] = Copy\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("sieves", "sieves", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == plugins.GROUP else [])
    assert "again" not in TASKS
    assert plugins.load(["sieves"]) == ("sieves",)
    assert "again" in TASKS
    with pytest.raises(ValueError, match=r"got 'sieve'; did you mean 'sieves'\?"):
        plugins.load(["sieve"])


def test_a_plugin_that_fails_or_is_not_there(tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"bad\.py failed: ZeroDivisionError"):
        plugins.load(["bad.py"], tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no plugin"):
        plugins.load(["none.py"], tmp_path)
    (tmp_path / "thief.py").write_text("from tamis.data.tasks import TASKS, Copy\nTASKS['sort'] = Copy\n")
    with pytest.raises(ValueError, match="'sort' is a name of the package"):
        plugins.load(["thief.py"], tmp_path)
    assert plugins.loaded() == []
    (tmp_path / "r.toml").write_text("name = 'x'\nplugins = 'a.py'\n[task]\nname = 'copy'\n")
    with pytest.raises(ValueError, match=r"plugins must be a list of files and names, got 'a\.py'"):
        read_recipe(tmp_path / "r.toml")


def test_a_registry_lets_what_is_not_its_own_be_replaced():
    registry = Registry({"own": 1})
    registry["mine"] = 2
    registry["mine"] = 3  # a cell of a notebook that is run again
    assert registry == {"own": 1, "mine": 3}
    assert registry.plugin_of("mine") is None
