"""What the package is, shows and can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tamis.cli.command import command

group = typer.Typer(rich_markup_mode=None)


@command(group)
def version() -> None:
    """Print the version."""
    from tamis.version import __version__

    print(__version__)


@command(group)
def demo(output: Path = Path("demo"), quick: bool = False) -> None:
    """Train three small translation models side by side and show what their heads do.

    Six minutes on two cores, nothing to download.  Writes into the folder --output.  --quick takes seconds and learns
    next to nothing: it shows that everything works.
    """
    from tamis.demo import run

    run(output, quick=quick)


@command(group, plugins=True)
def settings(
    wanted: Annotated[
        str | None,
        typer.Argument(
            metavar="[SECTION|SETTING]", help="data, text, task, model, training ..., or a setting; all by default."
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option(help="As docs/settings.md has it.")] = False,
) -> None:
    """Print every setting of a recipe: its default, what it takes, and what it means."""
    from tamis.experiments.reference import as_markdown, as_text

    print(as_markdown() if markdown else as_text(wanted))
