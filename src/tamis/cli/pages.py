"""What shows runs to people: the page and the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tamis.cli.command import command, named

group = typer.Typer(rich_markup_mode=None)


@command(group, plugins=True)
def report(
    runs: Annotated[list[str], typer.Argument(help="Folders of analysed runs, or NAME=RUN to call one so.")],
    output: Path = Path("report.html"),
    title: str = "Tamis report",
) -> None:
    """Write one page about runs, to open in any browser: scores, training, and every head to look into.

    Nothing is loaded from a network.  Run `tamis analyze` on the runs first, and `tamis evaluate` to have scores.
    """
    from tamis.experiments import report

    report(named(runs), output, title)
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB")


@command(group, plugins=True)
def plot(
    runs: Annotated[
        list[str], typer.Argument(help="Folders of runs, or NAME=RUN[,RUN...] for what each is called and pooled in.")
    ],
    output: Annotated[Path, typer.Option(help="The folder for the figures.")] = Path("figures"),
    suffix: Annotated[str, typer.Option("--format", help="pdf, svg or png.")] = "pdf",
    dpi: Annotated[int, typer.Option(help="Dots per inch of a png.")] = 150,
) -> None:
    """Draw the papers' figures of analysed runs: alphas, densities, diversity, positions, one head.

    Of evaluated language models: perplexity and pass keys against length.  Of evaluated tasks: exact match.
    """
    from tamis.experiments import plot

    written, table = plot(named(runs), output, suffix, dpi)
    for text in (*([f"{table}\n"] if table else []), *written):
        print(text)
