"""What shows runs to people: the page and the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tamis.cli.command import Device, command, named, one_each

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
    print(f"written: {output} ({output.stat().st_size / 1e6:.1f} MB), to open in any browser")


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


@command(group, plugins=True)
def explore(
    runs: Annotated[
        list[str] | None, typer.Argument(help="Folders of runs or models, or NAME=RUN to call one so.")
    ] = None,
    hf: Annotated[list[str], typer.Option(help="A folder with a model of transformers; may be repeated.")] = [],  # noqa: B006
    port: Annotated[int, typer.Option(help="Of this machine; by default one that is free.", min=0, max=65535)] = 0,
    tokens: Annotated[int, typer.Option(help="The most that a text may have.", min=1)] = 2048,
    written: Annotated[int, typer.Option(help="The most that an answer may have.", min=1)] = 128,
    seconds: Annotated[float, typer.Option(help="The most that one look may take.", min=1)] = 60.0,
    device: Device = None,
) -> None:
    """Open a page on this machine to look into the heads of models: type a sentence, see what it attends to.

    Only this machine can ask, and nothing is loaded from a network; from another one: ssh -L PORT:127.0.0.1:PORT.
    """
    from tamis.report.explore import serve

    serve(one_each(runs or []), one_each(hf), port, tokens=tokens, written=written, seconds=seconds, device=device)
