"""What an experiment is: the sections of its recipe, and what the stages ask of it."""

from __future__ import annotations

import difflib
import itertools
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, Self

from torch import Tensor, nn

from tamis.analysis.metrics import AttentionMetrics
from tamis.analysis.shown import ShownSentence
from tamis.analysis.sites import attention_sites
from tamis.analysis.tokens import Sentences
from tamis.evaluation.dispersion import DispersionConfig
from tamis.experiments.folder import RunFolder
from tamis.experiments.recipe import as_toml, check_name
from tamis.models.causal_lm import CausalLM
from tamis.models.config import ModelConfig
from tamis.models.pretrained import PretrainedModel
from tamis.settings import Config, strings
from tamis.training.distributed import Process
from tamis.training.journal import Advance, Display, Record
from tamis.training.protocol import Task
from tamis.training.settings import TrainingConfig
from tamis.training.trainer import Trainer

OBSERVED_TOKENS = 4096
"""Tokens of a sample that stands for a whole set: for densities shown in training, and for silencing heads in turn."""

Folders = Sequence[Path] | Mapping[str, Path]
"""Folders of runs, which are called as the mapping says, or as their folders are."""
Rows = list[tuple[str, str]]
"""Names and values of a short table for people."""


@dataclass(frozen=True, kw_only=True)
class Material:
    """What an analysis looks at."""

    model: nn.Module
    data: Any
    """What the sentences are of, as it is written down."""
    sentences: Callable[[], Iterable[Sentences]]
    batches: int
    """How many of them there are."""
    loss: Callable[[], float]
    """On a sample of them, for silencing each head in turn."""
    tokens: Callable[[int, ShownSentence], dict[str, Any]]
    """How the tokens of a sentence to look at are written, by its number: what analysis.json has as "tokens"."""
    translates: bool = False
    """Whether there are sources, to shuffle."""
    numbers: Sequence[int] = ()
    """Numbers of the sentences whose weights are kept to look at."""
    extracts: Sequence[Sentences] = ()
    """To look at in place of those, where they are too long."""
    growing: Mapping[int, Tensor] = field(default_factory=dict)
    """Texts (samples, n) by n, for how heads spread as they grow."""
    further: Callable[[], dict[str, Any]] = dict
    """What else an analysis of this kind finds."""


class Spreading(NamedTuple):
    """What the dispersion of heads is measured on."""

    model: CausalLM
    kind: str
    """Kind of the texts: only runs on the same are drawn together."""
    lengths: Sequence[int]
    texts: Callable[[int], Tensor]
    """(samples, n) of each length."""


class Described(Protocol):
    """What can be printed."""

    def describe(self) -> str: ...


class OpenRun(NamedTuple):
    """A run, and the experiment that its recipe says it is."""

    folder: RunFolder
    experiment: Experiment


@dataclass(frozen=True, kw_only=True)
class Experiment(Config, ABC):
    """One experiment: the sections of a recipe, each checked by its own class, and what can be done with them.

    A new kind is a subclass that `tamis.experiments.KINDS` has under the name of its section.  It defines the abstract
    methods; what it leaves out of the others is said to be lacking when somebody asks for it.
    """

    section: ClassVar[str]
    """Whose presence in a recipe tells this kind."""
    what: ClassVar[str]
    """Such as "a language model"."""
    model_class: ClassVar[type[ModelConfig]]
    """Class of the section [model]."""
    monitors: ClassVar[tuple[str, ...]] = ()
    """What may be monitored besides the loss: `observe` finds it as valid_NAME, and higher is better."""
    not_of_the_weights: ClassVar[tuple[str, ...]] = ("evaluation",)
    """Sections on which the weights of a run do not depend."""

    writes: ClassVar[str | None] = None
    """The command with which its models write text: "translate" or "generate"."""

    name: str
    description: str = ""
    plugins: tuple[str, ...] = ()
    """Code to run first: files, or entry points of the group `tamis.plugins`."""
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of `model_class` but for those that the data decide."""
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        strings(self, "name", "description")
        check_name(self.name)
        object.__setattr__(self, "plugins", tuple(self.plugins))  # which TOML has not
        for name, kind in self.sections().items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"{name} must be {kind.__name__}, which has the defaults of recipes, "
                    f"got {type(getattr(self, name)).__name__}"
                )
        if self.training.monitor not in ("loss", *self.monitors):
            known = " or ".join(f"'{name}'" for name in ("loss", *self.monitors))
            raise ValueError(f"{self.what} has no {self.training.monitor} to monitor: training.monitor is {known}")
        self.model_config()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Make an experiment from the tables of a recipe; a section that is not there has its defaults."""
        sections = cls.sections()
        for key in values:
            if key not in {known.name for known in fields(cls)}:
                raise ValueError(f"a recipe of {cls.what} has no setting {key!r}; did you mean {cls._nearest(key)}?")
        if "name" not in values:
            raise ValueError("a recipe needs 'name'")
        built = dict(values)
        required = {known.name for known in fields(cls) if known.default_factory is MISSING and known.name in sections}
        for name in (*sections, "model"):
            if name in required:
                built.setdefault(name, {})
            if not isinstance(built.get(name, {}), dict | Config):
                raise ValueError(f"{name} must be a section, got {built[name]!r}")
        for name in (name for name in sections if name in built):
            try:
                built[name] = sections[name].from_dict(built[name]) if isinstance(built[name], dict) else built[name]
            except TypeError as error:  # a setting without a default is missing
                raise ValueError(f"[{name}] {error}") from error
        return cls(**built)

    @classmethod
    def sections(cls) -> dict[str, type[Config]]:
        """Return the classes that check the sections, but for [model]; that of the kind comes first."""
        return dict(sorted(_sections(cls).items(), key=lambda item: item[0] != cls.section))

    @classmethod
    def _nearest(cls, key: str) -> str:
        """A setting in some section or a name at the top that may be meant."""
        tables: dict[str, type[Config]] = {**cls.sections(), "model": cls.model_class}
        known = [(known.name, f"{name}.{known.name}") for name, kind in tables.items() for known in fields(kind)]  # type: ignore[arg-type]
        if exact := [whole for name, whole in known if name == key]:
            return " or ".join(map(repr, exact))
        top = [(known.name, known.name) for known in fields(cls)]
        names = dict([*known, *top])
        return repr(names[difflib.get_close_matches(key, names, 1, 0.0)[0]])

    def to_toml(self) -> str:
        """Write a file that `read_recipe` reads back."""
        values = self.to_dict()
        first = {name: values.pop(name) for name in ("name", "description")}
        if not (loaded := values.pop("plugins")):
            return as_toml({**first, self.section: values.pop(self.section), **values})
        return as_toml({**first, "plugins": loaded, self.section: values.pop(self.section), **values})

    def settings(self) -> dict[str, Any]:
        """Return all that the weights depend on, as section.key, defaults included."""
        tables = {**self.to_dict(), "model": self.model_config().to_dict()}
        return {
            f"{section}.{key}": value
            for section, table in tables.items()
            if isinstance(table, dict) and section not in self.not_of_the_weights
            for key, value in table.items()
        }

    # -----------------------------------------------------------------------------------------------------------
    # What a kind defines to be trained

    @abstractmethod
    def model_config(self, prepared: Any = None) -> ModelConfig:
        """With the sizes that the data have, or with any before they are prepared."""

    def prepare(self, display: Display) -> Any:
        """Build what training and export need besides the recipe, built now or earlier; None where that is nothing."""
        return None

    @abstractmethod
    def build_model(self, prepared: Any) -> PretrainedModel:
        """Build the model to be trained."""

    @abstractmethod
    def build_task(self, prepared: Any) -> Task:
        """Build what is learned."""

    def observe(self, prepared: Any, task: Task, process: Process) -> Callable[[PretrainedModel], Record] | None:
        """Finds further numbers for the record of a validation, among them what is monitored."""
        return None

    def final_weights(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the weights that are exported."""
        return trainer.final_weights()

    @abstractmethod
    def export(self, model: PretrainedModel, prepared: Any, folder: Path) -> None:
        """Write the model into a folder, with all that it takes to use it."""

    @abstractmethod
    def usage(self, folder: str) -> str:
        """Return a few lines of Python that load the model of a folder and use it."""

    def contents(self, prepared: Any) -> Rows:
        """Describe what `prepare` made, in a few lines."""
        return []

    @abstractmethod
    def amount(self, task: Task) -> str:
        """Say how much there is to learn from, for people."""

    def told(self) -> str:
        """Return what it is trained on, for the model card."""
        named = getattr(self, self.section).train
        return named if isinstance(named, str) else ", ".join(named)

    def mechanism(self) -> str:
        """In words: "entmax", "entmax alpha 1.5", or what each site has where they differ."""
        config = self.model_config().to_dict()
        sites = {name.removesuffix("mechanism").rstrip("_"): config[name] for name in config if "mechanism" in name}
        found = {site: _spec(spec) for site, spec in sites.items()}
        if len(set(found.values())) == 1:
            return next(iter(found.values()))
        return ", ".join(f"{site} {text}" for site, text in found.items())

    # -----------------------------------------------------------------------------------------------------------
    # What a kind defines to be looked at afterwards, or lacks

    def has_test(self) -> bool:
        """Whether there is anything to evaluate on."""
        return type(self).evaluate is not Experiment.evaluate

    def check_evaluation(self, settings: dict[str, Any]) -> None:
        """Raise if an evaluation cannot have these settings, before anything takes time."""
        self._lacks("an evaluation", "see what its validation found in metrics.jsonl")

    def evaluate(
        self, run: RunFolder, device: str | None, settings: dict[str, Any], display: Display
    ) -> dict[str, Any]:
        """Score a run on its test set; returns what evaluation.json is to hold."""
        self._lacks("an evaluation", "see what its validation found in metrics.jsonl")

    def scores(self, evaluation: dict[str, Any]) -> Rows:
        """Return an evaluation in a few lines."""
        return []

    def material(self, run: RunFolder, data: Any, device: str | None, shown: int) -> Material:
        """Return what an analysis looks at: `data`, or by default the validation set."""
        self._lacks("sentences to analyse", f"define {type(self).__name__}.material")

    def check_spreading(self) -> None:
        """Raise if there are no texts to measure the dispersion of heads on, before anything takes time."""
        if type(self).spreading is Experiment.spreading:
            self._lacks("texts of growing length", "`tamis analyze` shows the support of its heads by length")

    def spreading(self, run: RunFolder, device: str | None, config: DispersionConfig) -> Spreading:
        """Return what the dispersion of heads is measured on."""
        raise NotImplementedError(f"{type(self).__name__}.spreading")

    def compare(self, systems: Mapping[str, Sequence[OpenRun]], baseline: str | None) -> Described:
        """Several evaluated runs of this kind side by side; each system is some runs, such as seeds."""
        self._lacks("a comparison", "`tamis report` shows runs side by side")

    def draw(self, systems: Mapping[str, Sequence[OpenRun]], path: Path, dpi: int) -> str:
        """Draw what evaluations found, and the same as a table."""
        self._lacks("a figure of its evaluation", "`tamis plot` draws its heads once it is analysed")

    def label(self, evaluation: dict[str, Any]) -> str:
        """Return what a run is called beside others when nobody says: its mechanism and positions."""
        return f"{evaluation['mechanism']}, {evaluation['position']}"

    def heads(self, run: RunFolder, device: str | None, settings: dict[str, Any], display: Display) -> dict[str, Any]:
        """Measure what a run needs each of its heads for; returns what heads.json is to hold."""
        self._lacks("lengths at which to silence heads", "`tamis analyze` says how its loss changes without each head")

    def _lacks(self, thing: str, instead: str) -> NoReturn:
        raise ValueError(f"{self.what} has not got {thing}: {instead}")


@cache
def _sections(kind: type[Experiment]) -> dict[str, type[Config]]:
    hints = typing.get_type_hints(kind)
    found = {known.name: hints[known.name] for known in fields(kind)}
    return {name: hint for name, hint in found.items() if isinstance(hint, type) and issubclass(hint, Config)}


def _spec(spec: Any) -> str:
    if isinstance(spec, str):
        return spec
    return " ".join([spec["name"], *(f"{key} {value}" for key, value in spec.items() if key != "name")])


def one_kind(systems: Mapping[str, Sequence[OpenRun]]) -> Experiment:
    """The experiment of the first run, if all are of its kind."""
    every = [run.experiment for runs in systems.values() for run in runs]
    kinds = sorted({experiment.what for experiment in every})
    if len(kinds) > 1:
        raise ValueError(f"runs of {' and '.join(kinds)} have no scores in common: take them apart")
    return every[0]


def density_record(metrics: AttentionMetrics) -> Record:
    """For the journal: the mean density, and that of every head."""
    sites = {site: list(found.density) for site, found in metrics.results().items()}
    return {"density": metrics.summary()["all"]["density"], "densities": sites}


def attention_rows(found: Mapping[str, Any]) -> Rows:
    """What an evaluation or an analysis says of all heads together, for people."""
    heads = found.get("attention", found).get("summary", {}).get("all", {})
    shown = {
        "density": "of the keys that a query sees have a weight",
        "null_share": "of the rows have no weight",
        "diversity": "is how differently heads attend, from 0 to 1",
    }
    return [(name.replace("_", " "), f"{heads[name]:.3f} {text}") for name, text in shown.items() if heads.get(name)]


def growing(model: CausalLM, trained: int, most: int) -> list[int]:
    """Lengths at which an analysis looks how heads spread: one, two and four times that in training, where they fit."""
    known = model.config.position_limit()
    return [n * trained for n in (1, 2, 4) if n * trained <= min(most, most if known is None else known)]


def count_heads(model: nn.Module) -> int:
    """Count the heads of all attention in a model."""
    return sum(site.num_heads for site in attention_sites(model).values())


def counted(work: Callable[[], float], advance: Advance) -> Callable[[], float]:
    """The same work, which says how often it was done."""
    done = itertools.count(1)

    def told() -> float:
        found = work()
        advance(next(done))
        return found

    return told
