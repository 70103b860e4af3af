"""Pictures of what changes with the length of a text: dispersion, accuracy, perplexity and pass keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tamis.evaluation.dispersion import DISPERSION, heads_with
from tamis.evaluation.lengths import LengthScore, Scores, percents
from tamis.files import read_signed
from tamis.report.drawing import COLOURS, check_figure, save, thousands


def plot_dispersion(folders: Sequence[Path], output: Path) -> None:
    """Draw what `write_dispersion` wrote, one colour for each mechanism and kind of positions."""
    found: dict[str, list[Any]] = {}
    results = [read_signed(folder / DISPERSION)[0] for folder in folders]
    if len(kinds := sorted({result["kind"] for result in results})) > 1:
        raise ValueError(f"one picture shows runs on the same kind of text, got {' and '.join(kinds)}")
    for result in results:
        found.setdefault(f"{result['mechanism']}, {result['position']}", []).append(result["lengths"])
    draw_dispersion(found, output)


def draw_dispersion(runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], path: Path, title: str = "") -> None:
    """Entropy and support against the number of keys, and reach against horizon, one colour for each name.

    Args:
        runs: for each name the runs to be averaged, each a list of what `LengthDispersion.to_dict` gives.
    """
    figure = check_figure(path)(figsize=(11, 3.2), layout="constrained")
    figure.suptitle(title, fontsize=10)
    entropy, support, reach = figure.subplots(1, 3)
    for place, (name, found) in enumerate(runs.items()):
        colour = COLOURS[place % len(COLOURS)]
        for panel, quantity in ((entropy, "entropy"), (support, "support")):
            _draw_means(panel, found, quantity, False, label=name, color=colour)
            _draw_means(panel, found, quantity, True, label=f"{name}, with a bias", color=colour, linestyle=":")
        longest = [max(run, key=lambda length: length["keys"]) for run in found]
        for head in (head for run in longest for head in heads_with(run, biased=True) if head["horizon"] is not None):
            reach.scatter(head["horizon"], head["reach"], s=12, color=colour)
    reach.axline((1, 1), (2, 2), color="grey", linewidth=0.8)
    entropy.set(xlabel="keys", xscale="log", ylim=(0, None))
    entropy.set_title("entropy / log n", fontsize=9)
    support.set(xlabel="keys", xscale="log", yscale="log")
    support.set_title("keys with a weight", fontsize=9)
    keys = sorted({length["keys"] for found in runs.values() for run in found for length in run})
    for panel in (entropy, support):
        thousands(panel, keys)
    reach.set(xlabel="horizon", xscale="symlog", yscale="symlog")  # either may be 0
    reach.set_title(f"greatest distance with a weight, {keys[-1]:,} keys", fontsize=9)
    for panel in (entropy, support, reach):
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*entropy.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=4)
    save(figure, path)


def _draw_means(panel: Any, runs: Sequence[Sequence[Any]], quantity: str, biased: bool, **style: Any) -> None:
    """The mean over heads and runs against the number of keys, where there are such heads."""
    points: dict[int, list[float]] = {}
    for length in (length for run in runs for length in run):
        points.setdefault(length["keys"], []).extend(head[quantity] for head in heads_with(length, biased))
    known = sorted((keys, sum(values) / len(values)) for keys, values in points.items() if values)
    if known:
        panel.plot(*zip(*known, strict=True), marker="o", markersize=4, **style)


def draw_lengths(scores: Scores, path: Path, title: str = "") -> None:
    """Exact match and token accuracy against length, one line for each mechanism: the mean of its runs."""
    figure = check_figure(path)(figsize=(8, 3.2), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for panel, share in zip(figure.subplots(1, 2, sharey=True), ("exact_match", "token_accuracy"), strict=True):
        for place, (name, runs) in enumerate(scores.items()):
            _draw_mechanism(panel, runs, share, COLOURS[place % len(COLOURS)], name)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        panel.set(xlabel="length, of that in training", ylim=(-3, 103))
        panel.set_title(f"{share.replace('_', ' ')}, %", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save(figure, path)


def _draw_mechanism(panel: Any, runs: Sequence[Sequence[LengthScore]], share: str, colour: str, name: str) -> None:
    found = percents(runs, share)
    panel.plot(found.keys(), [fmean(values) for values in found.values()], color=colour, marker="o", ms=4, label=name)
    if len(runs) > 1:
        points = [(multiple, value) for multiple, values in found.items() for value in values]
        panel.scatter(*zip(*points, strict=True), color=colour, s=6, alpha=0.5)


def draw_language(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, dpi: int) -> None:
    """Perplexity and pass keys against length, one line for each name: the mean of its evaluations."""
    figure = check_figure(path)(figsize=(8, 3.2), layout="constrained")
    perplexity, passkeys = figure.subplots(1, 2)
    ticks: set[int] = set()
    for place, (name, found) in enumerate(runs.items()):
        style = {"color": COLOURS[place % len(COLOURS)], "marker": "o", "markersize": 4, "label": name}
        rows = [row for run in found for row in run["perplexity"] if row["mode"] == "full"]
        scored = [row for row in rows if row["perplexity"] is not None]
        perplexity.plot(*_means((row["length"], row["perplexity"]) for row in scored), **style)
        keys = [row for run in found for row in run["passkeys"]]
        passkeys.plot(*_means((row["length"], 100 * row["accuracy"]) for row in keys), **style)
        ticks |= {row["length"] for row in (*rows, *keys)}
    for panel, title in ((perplexity, "perplexity"), (passkeys, "pass keys found, %")):
        panel.set_xscale("log")
        thousands(panel, sorted(ticks))
        panel.set_xlabel("tokens")
        panel.set_title(title, fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    perplexity.set_yscale("log")
    perplexity.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    perplexity.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    passkeys.set_ylim(-3, 103)
    figure.legend(
        *perplexity.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=4
    )
    save(figure, path, dpi)


def _means(points: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    found: dict[int, list[float]] = {}
    for length, value in points:
        found.setdefault(length, []).append(value)
    return sorted(found), [sum(found[length]) / len(found[length]) for length in sorted(found)]
