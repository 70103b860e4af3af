"""Two tiny models that learn a task on short sequences and are then asked to do it on longer ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from tamis.experiments import evaluate, plot_lengths, read_recipe, train
from tamis.training.journal import Display

RECIPE = Path(__file__).with_name("lengths.toml")
ARMS = {"softmax": "softmax", "asentmax": "ASEntmax"}
QUICK = ("training.steps=2", "training.checkpoint_every=2", "task.validation_size=8", "evaluation.samples=4")
"""Enough to see that everything works, in seconds."""


def run(folder: Path, seeds: int = 1, quick: bool = False) -> None:
    """Train both arms of the recipe with each of the seeds, score them, print a table and draw a picture."""
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models so small lose more by sharing their work than they gain
    try:
        _run(folder / "quick" if quick else folder, seeds, QUICK if quick else ())
    finally:
        torch.set_num_threads(threads)


def _run(place: Path, seeds: int, overrides: Sequence[str]) -> None:
    console = Console(highlight=False)
    display = Display(console)
    began = time.monotonic()
    runs: dict[str, list[Path]] = {name: [] for name in ARMS.values()}
    for seed in range(1, seeds + 1):
        for arm, name in ARMS.items():
            recipe = read_recipe(RECIPE, [f"training.seed={seed}", *overrides], [arm])
            console.print(f"\n[bold]{name}[/bold]" + (f", seed {seed}" if seeds > 1 else ""))
            folder = place / f"{arm}-{seed}"
            train(recipe, folder, "cpu", display)
            evaluate(folder, "cpu", Display(quiet=True))
            runs[name].append(folder)
    picture = place / "lengths.png"
    tables = plot_lengths(runs, picture)
    console.print(f"\n[bold]{recipe.description}[/bold]; 1x is the longest text in training\n")
    console.print(tables.split("\n\n")[0], soft_wrap=True)
    console.print()
    console.print(
        "The rate is the same for both.  With one four times as high softmax holds as well: see docs/tasks.md."
    )
    console.print(f"{time.monotonic() - began:.0f} seconds.  What to open next:")
    for line in (
        f"{picture}  accuracy against length",
        "recipes/tasks/demo.toml  the recipe, to copy and change",
        "docs/tasks.md  more seeds, other rates, and the tasks that show no difference when they are so small",
    ):
        console.print(f"  {line}", soft_wrap=True)
