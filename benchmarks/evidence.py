"""What the three papers claim, shown on a CPU: `make evidence` runs every unit that has no result yet.

    python benchmarks/evidence.py list                      what there is, what is done, how long the rest takes
    python benchmarks/evidence.py run [--only WORD] [--hours H]
    python benchmarks/evidence.py tables                    mean and spread over the seeds that are done

A unit is one run of a recipe: trained, evaluated and, where heads are looked at, analysed, in forty minutes of one core
at most.  It writes benchmarks/results/evidence/NAME.json.  A file made from the same recipe stands, as long as
the version that made it gives the same results (SINCE); a unit that was interrupted goes on where it was.  Two run at a
time, one thread each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from start_search import last_density, tamis

from tamis import __version__
from tamis.bench.timing import machine, save
from tamis.experiments.folder import RunFolder
from tamis.experiments.recipe import read_tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "evidence"
SEEDS = (1, 2, 3)
OFFSETS = (-1, 1)
"""Previous and next position."""
SINCE = "0.1.0"
"""The first version whose results stand: raise it with a change of the code that changes what runs give."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One run, and what is looked at in it."""

    group: str
    """Of units that answer one question."""
    variant: str
    """What is compared within it; seeds of one variant belong together."""
    recipe: str
    arms: tuple[str, ...]
    seed: int
    changes: dict[str, Any] = field(default_factory=dict)
    minutes: float
    """Of one core of the machine named in the results, measured or estimated from like runs."""
    heads: bool = True
    """Whether its heads are analysed."""

    @property
    def name(self) -> str:
        return f"{self.group}-{self.variant}-{self.seed}"

    @property
    def result(self) -> Path:
        return RESULTS / f"{self.name}.json"

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={_toml(value)}" for key, value in {**self.changes, "training.seed": self.seed}.items()]

    def asked(self) -> dict[str, Any]:
        """What a result must have been made from to stand."""
        tables = read_tables(ROOT / self.recipe, self.overrides, self.arms)
        whole = json.dumps({**tables, "heads": self.heads}, sort_keys=True)
        return {
            "recipe": self.recipe,
            "arms": list(self.arms),
            "changes": self.changes,
            "seed": self.seed,
            "settings": hashlib.sha256(whole.encode()).hexdigest()[:16],
        }

    def is_done(self) -> bool:
        if not self.result.is_file():
            return False
        found = json.loads(self.result.read_text())
        if _numbers(found.get("version", "0")) < _numbers(SINCE):
            return False
        return {key: found.get(key) for key in self.asked()} == self.asked()

    def run(self, folder: Path) -> dict[str, Any]:
        """Train, evaluate, analyse, as the command line does; returns what the result file is to hold."""
        run = RunFolder(folder / self.name)
        began = time.monotonic()
        words = ["train", str(ROOT / self.recipe), "--output", str(run), "--device", "cpu"]
        words += [word for arm in self.arms for word in ("--arm", arm)]
        settings = list(self.overrides)
        if "data" in read_tables(ROOT / self.recipe):  # units of a group have one text, units side by side may not
            settings.append(f"data.folder={json.dumps(str(folder / 'data' / self.group))}")
        tamis(*words, *(word for setting in settings for word in ("--set", setting)))
        tamis("evaluate", str(run), "--device", "cpu")
        if self.heads:
            tamis("analyze", str(run), "--device", "cpu")
        found = {"benchmark": f"evidence: {self.group}", "machine": machine(), "version": __version__, **self.asked()}
        found |= {"variant": self.variant, "seconds_of_last_start": time.monotonic() - began, **figures(run)}
        return {key: rounded(value) for key, value in found.items()}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def units() -> list[Unit]:
    """In the order in which they are worth most."""
    return [*adaptive(), *rectified(), *lengths()]


def adaptive() -> Iterable[Unit]:
    """Alphas that have time to travel: the sum of their rates is 45, that of the paper's schedule 44; and the same with
    the recipe's own rate, and under pressure that begins after the warm-up.  Beside them softmax and ReLA, as long."""
    long: dict[str, Any] = {
        "data.train": "grammar:train:120000",
        "training.steps": 3000,
        "training.checkpoint_every": 1000,
        "training.mechanism_lr": 10.0,
    }
    pressed = {"training.schedules": [{"name": "pressure", "target": 0.02}]}
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "entmax": ("entmax", {}),
        "softmax": ("softmax", {}),
        "slow-entmax": ("entmax", {"training.mechanism_lr": 4.0}),
        "pressed-entmax": ("entmax", pressed),
        "rela": ("rela", {"training.mechanism_lr": 4.0}),
    }
    for seed in SEEDS:
        for variant, (arm, changes) in variants.items():
            yield Unit(
                group="long",
                variant=variant,
                recipe="recipes/demo.toml",
                arms=(arm,),
                seed=seed,
                changes={**long, **changes},
                minutes=16,
            )


def rectified() -> Iterable[Unit]:
    """ReLA as it is, and with what might close its gap to softmax: a slope that goes to 0, and the rest of the list.
    Sparsemax as it is, and with an alpha that comes to 2 from 1."""
    slopes = {
        "leaky-400": {"name": "slope", "end": 400},
        "leaky-700": {"name": "slope", "end": 700},
        "leaky-from-0.2": {"name": "slope", "start": 0.2, "end": 400},
    }
    tried: dict[str, dict[str, Any]] = {
        "softmax": {},
        "rela": {},
        **{name: {"training.schedules": [spec]} for name, spec in slopes.items()},
        "by-count": {"model.mechanism": {"name": "rela", "divide_by_count": True}},
        "long-warm-up": {"training.warmup": 300},
        "sparsemax": {"model.mechanism": "sparsemax"},
        "sparsemax-from-softmax": {
            "model.mechanism": "sparsemax",
            "training.schedules": [{"name": "alpha", "end": 400}],
        },
    }
    for seed in SEEDS:
        for variant, changes in tried.items():
            yield Unit(
                group="demo",
                variant=variant,
                recipe="recipes/demo.toml",
                arms=("softmax" if variant == "softmax" else "rela",),
                seed=seed,
                changes=changes,
                minutes=5,
            )
    more = {"training.steps": 2400}
    for arm in ("rela", "softmax"):
        yield Unit(
            group="demo-2400", variant=arm, recipe="recipes/demo.toml", arms=(arm,), seed=1, changes=more, minutes=14
        )


def lengths() -> Iterable[Unit]:
    """ASEntmax against entmax and softmax: three seeds as the recipe has them, then every mechanism searched alike over
    start, rate and heads, one seed each."""
    wide, narrow = {"model.initial_spread": 1.0}, {"model.initial_spread": 0.2}
    four, eight = ({"model.num_heads": heads, "model.head_dim": 16} for heads in (4, 8))
    tasks: list[tuple[str, tuple[str, ...], float, float, dict[str, dict[str, Any]]]] = [
        ("sort", ("short",), 3.0, 2e-3, {"narrow": narrow, "eight-heads": eight}),
        ("reverse", ("short",), 8.0, 4e-3, {"narrow": narrow, "eight-heads": eight}),
        ("mqmtar", ("short", "eight-heads", "narrow", "longer"), 25.0, 2e-3, {"wide": wide, "four-heads": four}),
    ]
    for task, arms, minutes, rate, others in tasks:
        rates = {"half-rate": {"training.lr": rate / 2}, "twice-rate": {"training.lr": 2 * rate}}
        seeds: list[tuple[str, str, int, dict[str, Any]]] = [(task, "", seed, {}) for seed in SEEDS]
        searched = [(f"{task}-search", f"-{name}", 1, changes) for name, changes in (others | rates).items()]
        for group, ending, seed, changes in seeds + searched:
            for arm in ("softmax", "entmax", "asentmax"):
                yield Unit(
                    group=group,
                    variant=arm + ending,
                    recipe=f"recipes/tasks/{task}.toml",
                    arms=(*arms, arm),
                    seed=seed,
                    changes=changes,
                    minutes=minutes,
                    heads=False,
                )


def figures(run: RunFolder) -> dict[str, Any]:
    """What the papers' figures are drawn from, out of a run folder."""
    records, evaluation = run.records(), run.evaluated()
    training = [record for record in records if "loss" in record]
    found: dict[str, Any] = {
        "steps": training[-1]["step"],
        "seconds": training[-1]["seconds"],
        "losses": {str(record["step"]): record["loss"] for record in some(training)},
        "valid": {str(record["step"]): record["valid_loss"] for record in records if "valid_loss" in record},
        "valid_density": last_density(records),
        "schedules": {str(record["step"]): record["schedules"] for record in some(training) if "schedules" in record},
    }
    if "translation" in evaluation:
        found |= {name: evaluation["translation"][name]["score"] for name in ("bleu", "chrf")}
        found["alignment"] = alignment(evaluation["alignment"])
    else:
        found |= {"loss": training[-1]["loss"], "scores": evaluation["scores"]}
    if run.analysis.is_file():
        analysis = run.analysed()
        found |= {name: analysis[name] for name in ("summary", "alphas", "named_heads") if name in analysis}
        if analysis.get("alphas"):
            alphas = analysis["trajectories"]
            sites = {name: some(rows) for name, rows in alphas["sites"].items()}
            found["trajectories"] = {"steps": some(alphas["steps"]), "sites": sites}
        found["importance"] = analysis["importance"]
        found["null_signal"] = analysis.get("null_signal")
        found["sites"] = {name: site(of, analysis["offsets"]) for name, of in analysis["sites"].items()}
    return found


def alignment(found: dict[str, Any]) -> dict[str, Any]:
    """AER of each layer: every head, the average, and that of weights whose rows sum to one."""
    layers = {
        mode: [
            {
                "heads": [head["aer"] for head in layer["heads"]],
                "average": layer["average"]["aer"],
                "normalised": layer["normalised"]["aer"],
            }
            for layer in found[mode]
        ]
        for mode in ("normal", "shifted")
    }
    return {"best": found["best"], **layers}


def site(found: dict[str, Any], offsets: list[int]) -> dict[str, Any]:
    """What is told of the heads of one layer."""
    names = ("density", "diversity", "null_share", "split_word_merging", "interrogation")
    at = {str(offset): [head[offsets.index(offset)] for head in found["confidence"]] for offset in OFFSETS}
    return {"kind": found["kind"], **{name: found[name] for name in names}, "confidence": at}


def some(values: list[Any], most: int = 60) -> list[Any]:
    """No more than so many, evenly, the first and the last among them."""
    return [values[place] for place in sorted({round(i * (len(values) - 1) / (most - 1)) for i in range(most)})]


def rounded(value: Any) -> Any:
    """To four places: what a table shows, in a file that stays small."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if abs(value) < 1e-3 else round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _toml(value: Any) -> str:
    """As an override has it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return "[" + ", ".join(map(_toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


def run(chosen: list[Unit], folder: Path, at_once: int, hours: float | None) -> None:
    """Those that are not done, in their order; none is begun after so many hours, and one that fails stops no other."""
    began = time.monotonic()
    failed: list[str] = []

    def one(unit: Unit) -> None:
        if hours is not None and time.monotonic() - began > 3600 * hours:
            print(f"{unit.name}: not begun, {hours:g} hours are over", flush=True)
            return
        print(f"{unit.name}: begun, {unit.minutes:g} minutes of one core", flush=True)
        try:
            save(unit.result, unit.run(folder))
        except RuntimeError as error:
            failed.append(unit.name)
            print(f"{unit.name}: {error}", flush=True)
            return
        print(f"{unit.name}: done, {unit.result.relative_to(ROOT)}", flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, [unit for unit in chosen if not unit.is_done()]))
    if failed:
        sys.exit(f"failed, and goes on when it is run again: {', '.join(failed)}")


def estimate(chosen: list[Unit], at_once: int) -> str:
    left = [unit for unit in chosen if not unit.is_done()]
    hours = sum(unit.minutes for unit in left) / 60
    return (
        f"{len(chosen) - len(left)} of {len(chosen)} units are done; the others take {hours:.1f} hours of one core, "
        f"{hours / at_once:.1f} with {at_once} at a time"
    )


def tables(chosen: list[Unit]) -> str:
    """Mean and spread over seeds, of whatever is done."""
    lines = []
    done: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for unit in chosen:
        if unit.is_done():
            done.setdefault((unit.group, unit.variant), []).append(json.loads(unit.result.read_text()))
    for (group, variant), runs in done.items():
        if "bleu" in runs[0]:
            told = {name: [run[name] for run in runs] for name in ("bleu", "valid_density")}
            told["aer"] = [100 * run["alignment"]["best"]["aer"] for run in runs]
        else:
            told = {
                f"{score['multiple']:g}x": [100 * run["scores"][place]["exact_match"] for run in runs]
                for place, score in enumerate(runs[0]["scores"])
            }
        shown = "  ".join(f"{name} {spread(values)}" for name, values in told.items())
        lines.append(f"{group:16} {variant:20} {len(runs)} seeds  {shown}")
    return "\n".join(lines) or "no unit is done"


def spread(values: list[float]) -> str:
    """Mean and standard deviation, as far as there are several."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} +-{statistics.stdev(values):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("list", "run", "tables"))
    parser.add_argument(
        "--only", nargs="*", default=[""], metavar="WORD", help="units whose names begin so, in this order"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "evidence", help="of the runs themselves")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--hours", type=float, help="begin no unit later than this")
    options = parser.parse_args()
    known = units()
    chosen = list(dict.fromkeys(unit.name for word in options.only for unit in known if unit.name.startswith(word)))
    by_name = {unit.name: unit for unit in known}
    found = [by_name[name] for name in chosen]
    if not found:
        parser.error(f"no unit begins with {' or '.join(options.only)}: see list")
    if options.what == "tables":
        print(tables(found))
        return
    if options.what == "list":
        for unit in found:
            print(f"{unit.name:32} {unit.minutes:4g} min  {'done' if unit.is_done() else ''}".rstrip())
    print(estimate(found, options.at_once), flush=True)
    if options.what == "run":
        run(found, options.folder, options.at_once, options.hours)


if __name__ == "__main__":
    main()
