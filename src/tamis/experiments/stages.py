"""The stages of an experiment of any kind, once.  The run folder is what one hands on to the next.

data/NAME/      what the kind prepares                            prepare
runs/NAME/      config.toml, metrics.jsonl, checkpoints/, model/  train
    evaluation.json                                               evaluate
    analysis.json, analysis.npz                                   analyze
    dispersion.json, heads.json                                   dispersion, heads
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch

from tamis.analysis.analyze import analyze as analyze_model
from tamis.analysis.files import write_arrays
from tamis.analysis.importance import head_importance
from tamis.analysis.learned import alpha_trajectories
from tamis.analysis.nulls import null_signal
from tamis.analysis.results import Analysis
from tamis.decoding.settings import DecodingConfig
from tamis.evaluation.dispersion import DispersionConfig, measure_dispersion, write_dispersion
from tamis.experiments.base import (
    Described,
    Experiment,
    Material,
    Rows,
    attention_rows,
    count_heads,
    counted,
    one_kind,
)
from tamis.experiments.card import write_card
from tamis.experiments.estimate import describe_cost
from tamis.experiments.folder import RunFolder, reading
from tamis.experiments.kinds import open_run
from tamis.files import digest_of, replace_folder, replacing, sweep
from tamis.training.distributed import Process, process
from tamis.training.guards import alone_in, memory_explained
from tamis.training.journal import Advance, Display
from tamis.training.trainer import Trainer

SHOWN = 32
"""Sentences whose weights an analysis keeps to look at."""
MAY_CHANGE = {
    "training": {
        "steps",
        "patience",
        "keep",
        "average",
        "log_every",
        "tensorboard",
        "loggers",
        "device_tokens",
        "compile",
        "cuda_graphs",
        "context_parallel",
        "context",
    },
    "data": {"test", "gold", "folder"},
    "text": {"test", "folder"},
    "decoding": {field.name for field in dataclasses.fields(DecodingConfig)},
}
"""Settings that a run may go on with after they were changed."""
CHOSEN_BY_DATA = ("vocabulary.character_coverage", "vocabulary.byte_fallback", "vocabulary.shared")
"""Settings that the data decide where they are None; what came of it is part of the data's fingerprint."""

T = TypeVar("T")


def prepare(experiment: Experiment, display: Display | None = None) -> Any:
    """Build what training needs besides the recipe, if it is not there yet.

    Args:
        experiment: the recipe.
        display: what is told of the progress.

    Returns:
        what was built.
    """
    return experiment.prepare(display or Display())


def train(experiment: Experiment, folder: Path, device: str | None = None, display: Display | None = None) -> Path:
    """Train, from where an earlier call was interrupted if one was.

    Args:
        experiment: the recipe.
        folder: the run.
        device: by default what there is.
        display: what is told of the progress.

    Returns:
        the folder of the model.
    """
    run = RunFolder(folder)
    with ExitStack() as stack:
        own = stack.enter_context(process(device))
        own.alike(experiment.settings())
        display = display or Display(quiet=not own.leads)
        if own.leads:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone_in(folder))
            sweep(folder)
            _check_recipe(run, experiment)
        own.wait()
        experiment.model_config().check_memory()  # before data are prepared; the model has the sizes that they have
        prepared = _leader_first(own, display, experiment.prepare)
        trainer = _trainer(experiment, prepared, run, own, display)
        if own.leads:  # not before: a recipe that cannot be built does not claim the folder
            with replacing(run.recipe) as file:
                file.write(experiment.to_toml().encode())
        before = trainer.checkpoints.steps()
        trainer.run(begin=lambda: describe_cost(trainer))
        if own.leads:
            replace_folder(run.model, lambda target: _export(experiment, trainer, prepared, target))
            write_card(run, experiment, run.read_evaluation() if trainer.state.step in before else None)
            display.say(f"model: {run.model}")
            after = ["evaluate", "analyze"] if experiment.has_test() else ["analyze"]
            display.say(f"next: {', '.join(f'tamis {stage} {run}' for stage in after)}")
        own.wait()
    return run.model


def _trainer(experiment: Experiment, prepared: Any, run: RunFolder, own: Process, display: Display) -> Trainer:
    torch.manual_seed(experiment.training.seed)
    with memory_explained("the weights of the model", "the sizes under [model]"):
        model = experiment.build_model(prepared)
    task = experiment.build_task(prepared)
    parameters = f"{model.num_parameters():,} parameters"
    display.say(f"{run}: {experiment.what}, {parameters}, {experiment.amount(task)}, on {own.device}")
    return Trainer(
        model,
        task,
        experiment.training,
        run.path,
        own,
        display=display,
        observe=experiment.observe(prepared, task, own),
        settings=experiment.settings(),
    )


def _export(experiment: Experiment, trainer: Trainer, prepared: Any, folder: Path) -> None:
    final = trainer.kind(trainer.model.config)  # without shards
    final.load_state_dict(experiment.final_weights(trainer), strict=False)
    experiment.export(final, prepared, folder)


def _leader_first(own: Process, display: Display, work: Callable[[Display], T]) -> T:
    """What `work` returns, in every process; the leading one does it first, and says what there is to say."""
    if own.leads:
        done = work(display)
        own.wait()
        return done
    own.wait()
    return work(Display(quiet=True))


def _check_recipe(run: RunFolder, experiment: Experiment) -> None:
    """Raise if the folder belongs to a run with other settings, one that has a checkpoint to go on from."""
    if not run.recipe.exists() or not run.has_checkpoint():
        return
    before, now = open_run(run.path).experiment.settings(), experiment.settings()
    differences = [
        f"{name}: {before.get(name)!r} then, {now.get(name)!r} now" for name in different_settings(before, now)
    ]
    if differences:
        raise ValueError(f"{run} holds a run with other settings ({'; '.join(differences)}): use another folder")


def different_settings(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the settings of two runs that make their weights different."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
        and name.partition(".")[2] not in MAY_CHANGE.get(name.partition(".")[0], ())
        and not (name in CHOSEN_BY_DATA and None in (one.get(name), other.get(name)))
    ]


def evaluate(
    folder: Path, device: str | None = None, display: Display | None = None, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score a run on its test set; writes evaluation.json.

    Args:
        folder, device, display: as in :func:`analyze`.
        settings: changes to those of the kind's evaluation.

    Returns:
        what evaluation.json holds.
    """
    display = display or Display()
    run, experiment = open_run(folder)
    experiment.check_evaluation(settings or {})
    result = experiment.evaluate(run, device, settings or {}, display)
    run.write(run.evaluation, result)
    if run.model.is_dir():
        write_card(run, experiment, result)
    _conclude(display, experiment.scores(result), [run.evaluation], f"tamis analyze {run}")
    return result


def analyze(
    folder: Path,
    data: str | list[str] | None = None,
    device: str | None = None,
    display: Display | None = None,
    shown: int = SHOWN,
) -> dict[str, Any]:
    """Measure what the heads of a run do on its validation set, or on `data`; writes analysis.json and analysis.npz.

    Args:
        folder: the run.
        data: text instead of the validation set.
        device: by default what there is.
        display: what is told of the progress.
        shown: how many sentences to keep to look at.

    Returns:
        what analysis.json holds.
    """
    display = display or Display()
    run, experiment = open_run(folder)
    records = run.records()  # an error comes before anything takes time
    material = experiment.material(run, data, device, shown)
    found = _analysis(material, display)
    result: dict[str, Any] = {"name": experiment.name, "data": material.data, **found.to_dict()}
    result["tokens"] = {str(number): material.tokens(number, sentence) for number, sentence in found.shown.items()}
    if records:
        result["trajectories"] = alpha_trajectories(records).to_dict()
    if material.translates and any(share for site in found.sites.values() for share in site.null_share):
        result["null_signal"] = null_signal(material.model, _tracked(material, display, "null attention")).to_dict()
    with display.track("without each head", count_heads(material.model) + 1) as advance:
        result["importance"] = head_importance(material.model, counted(material.loss, advance)).to_dict()
    if material.growing:
        result["dispersion"] = _dispersion(material, display)
    result |= material.further()
    write_arrays(run.arrays, found.arrays())
    result["arrays"] = digest_of(run.arrays)
    run.write(run.analysis, result, indent=None)
    _conclude(display, _heads_found(found, result), [run.analysis, run.arrays], f"tamis report {run}")
    return result


def _analysis(material: Material, display: Display) -> Analysis:
    found = analyze_model(material.model, _tracked(material, display, "analysing"), shown=material.numbers)
    if not material.extracts:
        return found
    numbers = range(sum(map(len, material.extracts)))
    return dataclasses.replace(found, shown=analyze_model(material.model, material.extracts, shown=numbers).shown)


def _tracked(material: Material, display: Display, what: str) -> Iterator[Any]:
    with display.track(what, material.batches) as advance:
        yield from _told(material.sentences(), advance)


def _told(batches: Iterable[Any], advance: Advance) -> Iterator[Any]:
    for number, batch in enumerate(batches, 1):
        yield batch
        advance(number)


def _dispersion(material: Material, display: Display) -> list[dict[str, Any]]:
    """How heads spread as texts grow, at a few lengths."""
    found = []
    queries = DispersionConfig().queries
    with display.track("growing texts", len(material.growing)) as advance:
        for number, (length, texts) in enumerate(material.growing.items(), 1):
            device = next(material.model.parameters()).device
            spread = measure_dispersion(material.model, texts.to(device).split(1), length, queries)  # type: ignore[arg-type]
            found.append(spread.to_dict())
            advance(number)
    return found


def _heads_found(found: Analysis, result: dict[str, Any]) -> Rows:
    rows = [("sentences", f"{found.sentences:,}"), *attention_rows(result)]
    alphas = [alpha for site in found.alphas.values() for alpha in site]
    if alphas:
        rows.append(("alpha", f"{min(alphas):.2f} to {max(alphas):.2f} of {len(alphas)} heads"))
    if chosen := result.get("alignment", {}).get("chosen"):
        rows.append(("AER", f"{chosen['aer']:.1%} of the head that is best on other sentences"))
    rows += [(f"{named.site} head {named.head}", f"{named.role}, {named.score:.1%}") for named in found.named_heads()]
    return [*rows, *((role, reason) for role, _, reason in (text.partition(": ") for text in found.without()))]


def dispersion(
    folder: Path, device: str | None = None, display: Display | None = None, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Measure how the heads of a run spread at the lengths of its recipe; writes dispersion.json.

    Args:
        folder, device, display: as in :func:`analyze`.
        settings: changes to those of the recipe.

    Returns:
        what dispersion.json holds.
    """
    display = display or Display()
    run, experiment = open_run(folder)
    config = DispersionConfig.from_dict({**DispersionConfig().to_dict(), **(settings or {})})
    experiment.check_spreading()
    model, kind, lengths, texts = experiment.spreading(run, device, config)
    return write_dispersion(run.path, experiment.name, kind, model, lengths, texts, config, display.say)


def heads(
    folder: Path, device: str | None = None, display: Display | None = None, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Measure what a run of a task needs each head for, by length; writes heads.json.

    Args:
        folder, device, display: as in :func:`analyze`.
        settings: changes to those of the recipe.

    Returns:
        what heads.json holds.
    """
    run, experiment = open_run(folder)
    return run.write(run.heads, experiment.heads(run, device, settings or {}, display or Display()))


def compare(systems: Mapping[str, Sequence[Path]], baseline: str | None = None) -> Described:
    """Compare evaluated runs of one kind, the runs of a system, such as seeds, pooled.

    Args:
        systems: folders of runs, by name.
        baseline: a name; the first by default.

    Returns:
        what can be printed.
    """
    opened = {name: [open_run(folder) for folder in folders] for name, folders in systems.items()}
    with reading(folder for folders in systems.values() for folder in folders):
        return one_kind(opened).compare(opened, baseline)


def _conclude(display: Display, rows: Rows, written: Sequence[Path], after: str) -> None:
    """A short table, what was written, and what to do next."""
    display.table(rows)
    display.say(f"written: {', '.join(map(str, written))}")
    display.say(f"next: {after}")
