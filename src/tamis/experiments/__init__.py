"""Experiments of every kind, from a recipe to its results: `read_recipe`, and then the stages on a run folder."""

from tamis.experiments.base import Experiment, Material, OpenRun, Spreading
from tamis.experiments.folder import RunFolder
from tamis.experiments.kinds import KINDS, check_writes, open_run, read_recipe
from tamis.experiments.language_model import LanguageDecoding, LanguageModel, LanguageTraining
from tamis.experiments.pages import analysed_runs, plot, plot_lengths, report
from tamis.experiments.recipe import arms_of, read_settings
from tamis.experiments.sequence_task import GeneratedSequences, TaskTraining
from tamis.experiments.stages import analyze, compare, dispersion, evaluate, heads, prepare, train
from tamis.experiments.translation import Translation

__all__ = [
    "KINDS",
    "Experiment",
    "GeneratedSequences",
    "LanguageDecoding",
    "LanguageModel",
    "LanguageTraining",
    "Material",
    "OpenRun",
    "RunFolder",
    "Spreading",
    "TaskTraining",
    "Translation",
    "analysed_runs",
    "analyze",
    "arms_of",
    "check_writes",
    "compare",
    "dispersion",
    "evaluate",
    "heads",
    "open_run",
    "plot",
    "plot_lengths",
    "prepare",
    "read_recipe",
    "read_settings",
    "report",
    "train",
]
