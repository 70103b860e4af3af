"""Generated tasks: what there is, and short names for what every kind of run has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tamis.cli import runs as stages
from tamis.cli.command import Device, Settings, command, named

group = typer.Typer(
    no_args_is_help=True,
    help="Train and test models on generated tasks, at greater lengths than in training.",
    rich_markup_mode=None,
)
group.command("train")(stages.train)
group.command("evaluate")(stages.evaluate)


@command(group, "list", plugins=True)
def list_tasks() -> None:
    """List the tasks, each with what it wants."""
    from tamis.data.tasks import TASKS

    for name, kind in TASKS.items():
        print(f"{name:14} {(kind.__doc__ or '').splitlines()[0]}")


@command(group, plugins=True)
def heads(runs: list[Path], overrides: Settings = [], device: Device = None) -> None:  # noqa: B006
    """Measure exact match of runs with each of their heads silenced: which heads a task needs, and at which lengths."""
    from tamis.experiments import heads, read_settings

    for run in runs:
        print(run)
        heads(run, device, settings=read_settings(overrides))


@command(group)
def demo(
    output: Annotated[Path, typer.Option(help="A folder.")] = Path("demo/lengths"),
    seeds: Annotated[int, typer.Option(help="How often to train each model; the mean is shown.")] = 1,
    quick: bool = False,
) -> None:
    """Train softmax and ASEntmax on short sequences, and see which of them still does the task on longer ones.

    Half a minute on one core, nothing to download.  --quick takes seconds and learns nothing: it shows that everything
    works.
    """
    from tamis.demo.lengths import run

    run(output, seeds, quick)


@command(group, plugins=True)
def plot(
    runs: Annotated[
        list[str], typer.Argument(help="Folders of evaluated runs of one task, or NAME=RUN[,RUN...] for each line.")
    ],
    output: Annotated[Path, typer.Option(help="A .pdf, .svg or .png file.")] = Path("lengths.png"),
) -> None:
    """Draw accuracy against length into one file and print it as tables; `tamis plot` draws the heads too."""
    from tamis.experiments import plot_lengths

    print(plot_lengths(named(runs), output), end="\n\n")
    print(output)
