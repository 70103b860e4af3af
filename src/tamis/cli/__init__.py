"""The `tamis` command: a file for each group of commands, none of which imports torch before it is called."""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:
    sys.exit("the tamis command needs more than the core package: pip install 'tamis[train,plots]'")

from tamis.cli import about, models, pages, runs, tasks, text
from tamis.cli.bench import bench
from tamis.version import __version__

# Without markup: it would take [data] for a style, and show nothing.
app = typer.Typer(
    no_args_is_help=True, help="The `tamis` command.", pretty_exceptions_enable=False, rich_markup_mode=None
)
for group in (runs, text, pages, models, about):
    app.add_typer(group.group)
app.add_typer(tasks.group, name="tasks")
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train, compare and look into Transformers whose attention is sparse."""


def main() -> None:
    app()
