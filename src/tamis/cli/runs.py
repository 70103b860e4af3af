"""From a recipe to what a run scores: the stages of an experiment of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tamis.cli.command import Arms, Device, Overrides, Settings, command, named_plugins, systems

group = typer.Typer(rich_markup_mode=None)


@command(group, plugins=True)
def prepare(recipe: Path, arms: Arms = [], overrides: Overrides = []) -> None:  # noqa: B006
    """Build the vocabularies and the indexed texts of a recipe, and report the lines that cannot be used."""
    from tamis.experiments import prepare, read_recipe
    from tamis.training.journal import Display

    said: list[str] = []

    class Listening(Display):
        def say(self, text: str) -> None:
            said.append(text)
            super().say(text)

    display = Listening()
    experiment = read_recipe(recipe, overrides, arms, also=named_plugins())
    prepared = prepare(experiment, display)
    if prepared is None:
        display.say("there is nothing to prepare: its sequences are drawn while it is trained")
        return
    for split in ("train", "valid"):
        report = f"{split}: {prepared.corpus(split).report.describe()}"
        if report not in said:  # it was built earlier
            display.say(report)
    display.table(experiment.contents(prepared))
    display.say(f"written: {prepared.folder}")
    display.say(" ".join([f"next: tamis train {recipe}", *(f"--arm {arm}" for arm in arms)]))


@command(group, plugins=True)
def train(
    recipe: Path,
    output: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME[-ARM...] by default.")] = None,
    arms: Arms = [],  # noqa: B006
    overrides: Overrides = [],  # noqa: B006
    device: Device = None,
) -> None:
    """Train a model; the same command resumes after an interruption, bit-exactly.  Works under torchrun.

    A recipe with a [data] section is for translation, one with [text] for a language model, one with [task] for a
    generated task.
    """
    from tamis.experiments import read_recipe, train

    loaded = read_recipe(recipe, overrides, arms, also=named_plugins())
    train(loaded, output or Path("runs") / "-".join([loaded.name, *arms]), device)


@command(group, plugins=True)
def evaluate(runs: list[Path], overrides: Settings = [], device: Device = None) -> None:  # noqa: B006
    """Score runs on the test set of their recipe: BLEU, chrF, likelihood, attention, and AER where there is gold.

    For language models: perplexity by place and by length, and how often a pass key is found.  For tasks: exact match
    and token accuracy at multiples of the length in training.
    """
    from tamis.experiments import evaluate, open_run, read_settings

    settings = read_settings(overrides)
    for run in runs:
        open_run(run).experiment.check_evaluation(settings)
    for run in runs:
        print(run)
        evaluate(run, device, settings=settings)


@command(group, plugins=True)
def analyze(
    runs: list[Path],
    data: Annotated[
        list[str], typer.Option(help="Text instead of the validation set; parallel text is one path, or twice for two.")
    ] = [],  # noqa: B006
    shown: Annotated[int, typer.Option(help="Sentences whose weights are kept to look at.")] = 32,
    device: Device = None,
) -> None:
    """Measure what the heads of runs do: density, roles, alphas, null attention, alignment, spread, importance."""
    from tamis.experiments import analyze

    text = None if not data else data[0] if len(data) == 1 else data
    for run in runs:
        print(run)
        analyze(run, text, device, shown=shown)


@command(group, plugins=True)
def dispersion(
    runs: Annotated[list[Path], typer.Argument(help="Runs of language models or of tasks.")],
    overrides: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="lengths=[512,4096], samples=8, queries=32 ...")
    ] = [],  # noqa: B006
    output: Annotated[Path, typer.Option(help="A .pdf, .svg or .png file.")] = Path("dispersion.png"),
    device: Device = None,
) -> None:
    """Measure how heads spread as texts grow: entropy, support, and how far those with an ALiBi bias reach.

    Writes dispersion.json into each run, and one picture of all.
    """
    from tamis.experiments import dispersion, open_run, read_settings
    from tamis.experiments.folder import RunFolder
    from tamis.report.drawing import check_figure
    from tamis.report.lengths import plot_dispersion

    check_figure(output)
    settings = read_settings(overrides)
    for run in runs:
        open_run(run).experiment.check_spreading()
    for run in runs:
        print(run)
        dispersion(run, device, settings=settings)
    plot_dispersion(runs, output)
    print(f"written: {', '.join(map(str, [*(RunFolder(run).dispersion for run in runs), output]))}")


@command(group, plugins=True)
def compare(
    runs: Annotated[list[str], typer.Argument(help="NAME=RUN[,RUN...]: the runs of a system, such as its seeds.")],
    baseline: Annotated[str | None, typer.Option(help="A name; the first system by default.")] = None,
) -> None:
    """Compare evaluated runs, the seeds of a system pooled; translation by paired bootstrap."""
    from tamis.experiments import compare

    print(compare(systems(runs), baseline).describe())
