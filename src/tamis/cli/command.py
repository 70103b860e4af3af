"""What all commands share: how errors end them, options, and runs with names."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting of the recipe; may be repeated."),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change the evaluation: beam=10 ... for translation, lengths=[512,4096] ... for a language model, "
        "multiples=[1,2,64] ... for a task; may be repeated.",
    ),
]
Arms = Annotated[
    list[str], typer.Option("--arm", help="An arm of the recipe; may be repeated, the later ones on the earlier.")
]
Int8 = Annotated[bool, typer.Option("--int8", help="Multiply in int8: faster on a CPU.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default what there is.")]
Plugins = Annotated[
    list[str],
    typer.Option(
        "--plugin", metavar="NAME", help="Run code of yours first: a file, or an entry point of tamis.plugins."
    ),
]


def command(
    group: typer.Typer, name: str | None = None, *, plugins: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose expected errors are one line, not a traceback; with `plugins` it takes --plugin."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def explained(*args: Any, plugin: list[str] | None = None, **kwargs: Any) -> None:
            try:
                if plugin:
                    from tamis.plugins import load

                    load(plugin)
                function(*args, **kwargs)
                sys.stdout.flush()
            except BrokenPipeError:  # who read, such as `head`, has enough; Python flushes once more when it ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            except _expected() as error:
                sys.exit(f"error: {error}")

        if plugins:
            _take_plugins(explained, function)
        return group.command(name)(explained)

    return register


def _expected() -> tuple[type[Exception], ...]:
    """Errors that are explained in one line.  Only who has imported training can meet one of its own."""
    guards = sys.modules.get("tamis.training.guards")
    return (ValueError, OSError, ImportError, *(() if guards is None else (guards.TrainingError,)))


def _take_plugins(explained: Callable[..., None], function: Callable[..., None]) -> None:
    """Have typer see an option --plugin."""
    signature = inspect.signature(function, eval_str=True)
    option = inspect.Parameter("plugin", inspect.Parameter.KEYWORD_ONLY, default=[], annotation=Plugins)
    parameters = [*signature.parameters.values(), option]
    explained.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    explained.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def named_plugins() -> list[str]:
    """Those that the command was told to run, for the recipe of a run to remember."""
    from tamis.plugins import loaded

    return loaded()


def named(texts: list[str]) -> list[Path] | dict[str, list[Path]]:
    """Return the folders of RUN..., or of NAME=RUN[,RUN...] by name."""
    are = ["=" in text and not Path(text).exists() for text in texts]
    if not any(are):
        return [Path(text) for text in texts]
    if not all(are):
        raise ValueError(f"either all runs are NAME=RUN or none is, got {' '.join(texts)}")
    return systems(texts)


def one_each(texts: list[str]) -> list[Path] | dict[str, Path]:
    """Return the folders of RUN..., or of NAME=RUN... by name."""
    found = named(texts)
    if isinstance(found, list):
        return found
    if pooled := [name for name, folders in found.items() if len(folders) > 1]:
        raise ValueError(f"runs are shown one by one, got several for {', '.join(pooled)}")
    return {name: folder for name, (folder,) in found.items()}


def systems(texts: list[str]) -> dict[str, list[Path]]:
    """Return the folders of NAME=RUN[,RUN...] by name."""
    found: dict[str, list[Path]] = {}
    for text in texts:
        name, _, listed = text.partition("=")
        folders = listed.split(",")
        if not name or not all(folders):
            raise ValueError(f"a system is NAME=RUN[,RUN...], got {text!r}")
        if name in found:
            raise ValueError(f"each system has a name of its own, got {name!r} twice: NAME=RUN,RUN pools runs")
        if len({Path(folder).resolve() for folder in folders}) < len(folders):
            raise ValueError(f"each run counts once in a system, got one twice in {text!r}")
        found[name] = [Path(folder) for folder in folders]
    return found


def lines_of(files: list[Path]) -> Iterator[str]:
    """Yield the lines of files, or of standard input."""
    from tamis.data.text import decode_lines, read_lines

    if files:
        return (line for path in files for line in read_lines(path))
    return decode_lines(sys.stdin.buffer, "standard input")


@contextmanager
def writer(output: Path | None) -> Iterator[TextIO]:
    """A file, or standard output."""
    if output is None:
        yield sys.stdout
    else:
        with output.open("w", encoding="utf-8", newline="\n") as file:
            yield file
