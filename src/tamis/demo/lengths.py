"""Two tiny models that learn a task on short sequences and are then asked to do it on longer ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from tamis.task_runs import evaluate_task, plot_tasks, read_task_recipe, train_task
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
    runs: list[Path] = []
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for seed in range(1, seeds + 1):
        for arm, name in ARMS.items():
            recipe = read_task_recipe(RECIPE, [f"training.seed={seed}", *overrides], [arm])
            console.print(f"\n[bold]{name}[/bold]" + (f", seed {seed}" if seeds > 1 else ""))
            runs.append(place / f"{arm}-{seed}")
            train_task(recipe, runs[-1], "cpu", display)
            results[arm].append(evaluate_task(runs[-1], "cpu", say=lambda text: None))
    picture = place / "lengths.png"
    plot_tasks(runs, picture)
    console.print()
    console.print(_table(recipe.description, results))
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


def _table(title: str, results: dict[str, list[dict[str, Any]]]) -> Table:
    """Exact match at each length, the mean over seeds."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    for column in ("length", "tokens", *ARMS.values()):
        table.add_column(column, justify="right", no_wrap=True)
    every = [[found["scores"] for found in seeds] for seeds in results.values()]
    for place, score in enumerate(every[0][0]):
        shares = [[scores[place]["exact_match"] for scores in seeds] for seeds in every]
        means = [f"{sum(values) / len(values):.1%}" for values in shares]
        table.add_row(f"{score['multiple']:g}x", str(score["length"]), *means)
    table.caption = "share of answers with every token right\n1x is the longest length in training"
    return table
