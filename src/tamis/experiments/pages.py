"""The page and the figures of runs, from what their stages wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tamis.analysis.files import read_arrays
from tamis.analysis.shown import shown_sentences
from tamis.experiments.base import Experiment, Folders, OpenRun, one_kind
from tamis.experiments.folder import RunFolder, reading
from tamis.experiments.kinds import open_run
from tamis.experiments.stages import different_settings
from tamis.files import replacing
from tamis.report import ReportRun, content, page
from tamis.report.drawing import check_format
from tamis.report.plots import plot as plot_heads

Systems = Sequence[Path] | Mapping[str, Sequence[Path]]
"""Runs, or by name some runs each, such as seeds."""


def report(systems: Systems, output: Path, title: str = "Tamis report") -> None:
    """One page about analysed runs side by side, with all that it needs inside; docs/report.md shows it."""
    with reading(_every(systems)):
        text = page(content(analysed_runs(_single(systems)), title))
    with replacing(output) as file:
        file.write(text.encode())


def plot(systems: Systems, output: Path, suffix: str = "pdf", dpi: int = 150) -> tuple[list[Path], str]:
    """Draw runs with matplotlib into a folder: the heads of those that are analysed, and scores against length.

    Returns the files, and the scores as a table where there are some.
    """
    check_format(suffix, dpi)
    folders = _every(systems)
    by_length = _scored_by_length(folders)
    written: list[Path] = []
    for folder in folders:
        if not by_length and RunFolder(folder).recipe.is_file() and not RunFolder(folder).analysis.is_file():
            raise FileNotFoundError(
                f"{folder} has nothing to draw yet: run `tamis analyze {folder}` for its heads, or, of a language "
                f"model or a task, `tamis evaluate {folder}` for its scores against length"
            )
    if not by_length or (_is_single(systems) and all(RunFolder(folder).analysis.is_file() for folder in folders)):
        with reading(folders):
            written = plot_heads(analysed_runs(_single(systems)), output, suffix, dpi)
    if not by_length:
        return written, ""
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"lengths.{suffix}"
    return [*written, path], plot_lengths(systems, path, dpi)


def plot_lengths(systems: Systems, path: Path, dpi: int = 200) -> str:
    """Draw scores of evaluated runs against length, a line for each name, and return them as a table.

    Without names there is a line for each mechanism and kind of positions, and its runs are seeds of one recipe.
    """
    with reading(_every(systems)):
        if isinstance(systems, Mapping):
            opened = {name: [open_run(folder) for folder in folders] for name, folders in systems.items()}
        else:
            opened = _seeds([open_run(folder) for folder in systems])
        return one_kind(opened).draw(opened, path, dpi)


def _every(systems: Systems) -> list[Path]:
    if isinstance(systems, Mapping):
        return [folder for folders in systems.values() for folder in folders]
    return list(systems)


def _is_single(systems: Systems) -> bool:
    return not isinstance(systems, Mapping) or all(len(folders) == 1 for folders in systems.values())


def _single(systems: Systems) -> Folders:
    """The run of each name, for what shows runs one by one."""
    if not isinstance(systems, Mapping):
        return systems
    if pooled := [name for name, folders in systems.items() if len(folders) > 1]:
        raise ValueError(f"runs are shown one by one, got several for {', '.join(pooled)}")
    return {name: folder for name, (folder,) in systems.items()}


def _scored_by_length(folders: Sequence[Path]) -> bool:
    """Whether the kind of some runs draws scores, and all of them have been evaluated."""
    if not all(RunFolder(folder).recipe.is_file() for folder in folders):
        return False
    runs = [open_run(folder) for folder in folders]
    draws = {type(run.experiment) for run in runs if type(run.experiment).draw is not Experiment.draw}
    return len(draws) == len({type(run.experiment) for run in runs}) == 1 and all(
        run.folder.read_evaluation() is not None for run in runs
    )


def _seeds(runs: Sequence[OpenRun]) -> dict[str, list[OpenRun]]:
    """Runs of one mechanism and kind of positions under its name; an error if they differ in more than the seed."""
    found: dict[str, list[OpenRun]] = {}
    for run in runs:
        found.setdefault(run.experiment.label(run.folder.evaluated()), []).append(run)
    for name, (first, *others) in found.items():
        for other in others:
            different = set(different_settings(first.experiment.settings(), other.experiment.settings()))
            if different := different - {"training.seed"}:
                raise ValueError(
                    f"{first.folder} and {other.folder} are both {name}, but no seeds of one recipe: they differ in "
                    f"{', '.join(sorted(different))}; give each line a name, NAME=RUN[,RUN...]"
                )
    return found


def analysed_runs(folders: Folders) -> list[ReportRun]:
    """What the stages wrote about runs.  An evaluation may be missing, an analysis not."""
    listed = list(folders.values() if isinstance(folders, Mapping) else folders)
    names = _names(listed)  # also where they are not used: a run that comes twice is refused
    if isinstance(folders, Mapping):
        names = list(folders)
    return [_analysed(RunFolder(folder), name) for folder, name in zip(listed, names, strict=True)]


def _analysed(run: RunFolder, name: str) -> ReportRun:
    analysis = run.analysed()
    return ReportRun(
        name=name,
        analysis=analysis,
        shown=shown_sentences(read_arrays(run.arrays)),
        evaluation=run.read_evaluation() or {},
        records=run.records(),
        mechanism=open_run(run.path).experiment.mechanism() if run.recipe.is_file() else None,
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each folder's path, or as many as it takes to tell them apart."""
    whole = [folder.resolve().parts for folder in folders]
    if len(set(whole)) < len(whole):
        raise ValueError(f"each run counts once, got one twice in {', '.join(map(str, folders))}")
    names: list[str] = []
    for depth in range(1, max((len(parts) for parts in whole), default=0) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(names):
            break
    return names
