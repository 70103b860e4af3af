"""`tamis demo`: what alpha does, and what three small models learn with and without it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console


def run(folder: Path, quick: bool = False) -> None:
    from tamis.demo import family, translation

    console = Console(highlight=False)
    folder.mkdir(parents=True, exist_ok=True)
    family.run(folder, console)
    translation.run(folder, console, quick)
