"""The start of the scores on the embedded corpus: every arm of recipes/demo.toml searched alike, then three seeds.

    python benchmarks/start_search.py search --output benchmarks/results/start-search-cpu.json --folder runs/start
    python benchmarks/start_search.py seeds --output benchmarks/results/demo-seeds-cpu.json --folder runs/start

`search` compares validation losses of one seed; `seeds` scores the test set too.  Runs share the cores, one thread
each.  A run that is in the output already is not done again; one on another machine than the first says so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from tamis.bench.timing import machine, save
from tamis.training.journal import read_journal

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.toml"
ARMS = ("softmax", "entmax", "rela")
SPREADS = (1.0, 0.2, 0.05)
NARROW = 0.2
Settings = dict[str, Any]


def searched() -> list[tuple[str, int, Settings]]:
    """Spreads at the recipe's rates; rates, arrangement and the mechanisms' own rate around the narrow start.  Softmax,
    which has no rate of its own, is searched further on both sides instead."""
    changes: list[Settings] = [{"model.initial_spread": spread} for spread in SPREADS]
    around = [{"training.lr": lr} for lr in (2e-3, 4.5e-3)] + [{"model.arrangement": "post"}]
    learned = [{"training.mechanism_lr": rate} for rate in (1.0, 10.0)]
    runs = [(arm, 1, change) for change in changes for arm in ARMS]
    runs += [(arm, 1, {"model.initial_spread": NARROW, **change}) for change in around for arm in ARMS]
    runs += [(arm, 1, {"model.initial_spread": NARROW, **change}) for change in learned for arm in ARMS[1:]]
    runs += [("softmax", 1, {"model.initial_spread": 1.0, **change}) for change in around]
    runs += [("softmax", 1, {"model.initial_spread": 0.5})]
    fast: Settings = {"model.initial_spread": NARROW, "training.lr": 4.5e-3}
    runs += [("entmax", 1, {**fast, **change}) for change in learned]
    runs += [(arm, 1, {**fast, "model.arrangement": "post"}) for arm in ARMS]
    runs += [("softmax", 1, {**fast, "training.lr": 6.5e-3})]
    return runs


def seeded(best_softmax: Settings) -> list[tuple[str, int, Settings]]:
    """The demo's arms as the recipe has them, and softmax as it was best in the search, learned alphas beside it."""
    runs: list[tuple[str, int, Settings]] = [(arm, seed, {}) for seed in (1, 2, 3) for arm in ARMS]
    return runs + [(arm, seed, best_softmax) for arm in ARMS[:2] for seed in (1, 2, 3)] if best_softmax else runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "seeds"))
    parser.add_argument("--best-softmax", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=2)
    options = parser.parse_args()
    best = {key: json.loads(value) for key, value in (item.split("=") for item in options.best_softmax)}
    runs = searched() if options.what == "search" else seeded(best)
    here = machine()
    record: dict[str, Any] = {
        "benchmark": f"demo: {options.what}",
        "machine": here,
        "recipe": "recipes/demo.toml",
        "runs": [],
    }
    if options.output.is_file():
        record = json.loads(options.output.read_text())
    done = [(run["arm"], run["seed"], run["changes"]) for run in record["runs"]]
    lock = Lock()

    def one(arm: str, seed: int, changes: Settings) -> None:
        result = run_alone(options.folder, arm, seed, changes, score=options.what == "seeds")
        if here != record["machine"]:
            result["machine"] = here
        with lock:
            record["runs"].append(result)
            save(options.output, record)
            print(json.dumps(result), flush=True)

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(lambda run: one(*run), [run for run in runs if run not in done]))


def run_alone(folder: Path, arm: str, seed: int, changes: Settings, score: bool) -> dict[str, Any]:
    """Train, and score where asked, as the command line does."""
    name = "-".join([arm, str(seed), *(f"{key.split('.')[-1]}={value}" for key, value in changes.items())])
    run = folder / name
    settings = [f"training.seed={seed}", f"data.folder={json.dumps(str(folder / 'data'))}"]
    settings += [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    words = ["train", str(RECIPE), "--arm", arm, "--output", str(run), "--device", "cpu"]
    tamis(*words, *(word for setting in settings for word in ("--set", setting)))
    journal = read_journal(run / "metrics.jsonl")
    last = [entry for entry in journal if "loss" in entry][-1]
    validated = [entry["valid_loss"] for entry in journal if "valid_loss" in entry]
    result: dict[str, Any] = {
        "arm": arm,
        "seed": seed,
        "changes": changes,
        "steps": last["step"],
        "valid_density": last_density(journal),
    }
    result |= {"valid_loss": min(validated), "alphas": last.get("alphas"), "seconds": last["seconds"]}
    if score:
        tamis("evaluate", str(run), "--device", "cpu")
        found = json.loads((run / "evaluation.json").read_text())
        summary = found["attention"]["summary"]["all"]
        result |= {"bleu": found["translation"]["bleu"]["score"], "chrf": found["translation"]["chrf"]["score"]}
        result |= {"aer": found["alignment"]["best"]["aer"], "density": summary["density"]}
    return result


def last_density(journal: list[dict[str, Any]]) -> float | None:
    """The share of keys with a weight, over all heads, on the validation set."""
    return next((entry["density"] for entry in reversed(journal) if "density" in entry), None)


def tamis(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tamis", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"tamis {' '.join(words)}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
