"""Several runs of one task recipe side by side on one machine, trained and evaluated, with their scores in one JSON.

    python benchmarks/side_by_side.py recipes/tasks/reverse.toml --arms softmax ssmax entmax asentmax --seeds 2 \
        --seconds 540 --evaluate 90 --output results/reverse-gpu.json \
        --set training.steps=12000 training.warmup=1000 training.precision=bf16 training.cuda_graphs=true

Runs that are not done after `seconds` less those of `evaluate` are ended where they are, as by ctrl-C, and what they
have learnt by then is evaluated; the JSON says how many steps that were.  Small models share a GPU better under MPS
(nvidia-cuda-mps-control -d).  Everything else is what `tamis tasks train` and `tamis tasks evaluate` do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tamis.bench.timing import machine, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--arms", nargs="+", required=True)
    parser.add_argument("--also", nargs="*", default=[], help="arms that all runs have, such as short")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], dest="changes")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--evaluate", type=float, default=90.0, help="of these, for scoring")
    parser.add_argument("--at-once", type=int, default=64, help="runs that share the machine; the others wait")
    parser.add_argument("--folder", type=Path, default=Path("runs/side-by-side"))
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    began = time.monotonic()
    deadline = began + options.seconds
    runs = [Run(options, arm, seed) for seed in range(1, options.seeds + 1) for arm in options.arms]
    compiled = any("compile=true" in change.replace(" ", "") for change in options.changes)
    waiting = list(runs)
    while not all(run.is_scored() for run in runs) and time.monotonic() < deadline:
        under_way = sum(not run.is_scored() for run in runs) - len(waiting)
        for run in waiting[: options.at_once - under_way]:
            if compiled and run.seed == 2 and run.arm == options.arms[0]:  # others find in a cache what seed 1 compiled
                wait_for(lambda: all(run.steps() > 0 or run.ended() for run in runs if run.seed == 1), deadline)
            run.train()
            waiting.remove(run)
        for run in runs:
            run.go_on(cut=time.monotonic() > deadline - options.evaluate)
        time.sleep(0.5)
    record = {"benchmark": f"tasks: {options.recipe.stem}", "machine": machine(), "recipe": str(options.recipe)}
    record |= {
        "also": options.also,
        "changes": options.changes,
        "note": f"{len(runs)} runs, {min(options.at_once, len(runs))} at a time, in {time.monotonic() - began:.0f} s",
    }
    save(options.output, {**record, "runs": [run.result() for run in runs]})
    for run in runs:
        run.stop()
        print(run.line(), flush=True)


def wait_for(condition: Any, deadline: float) -> None:
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.5)


class Run:
    """One of them: trained, exported where it was cut, and evaluated, one process after the other."""

    def __init__(self, options: argparse.Namespace, arm: str, seed: int) -> None:
        self.options, self.arm, self.seed = options, arm, seed
        self.folder = options.folder / f"{options.recipe.stem}-{arm}-{seed}"
        self.process: subprocess.Popen[bytes] | None = None
        self.doing = ""
        self.cut = False

    def train(self, *changes: str) -> None:
        arms = [argument for arm in (*self.options.also, self.arm) for argument in ("--arm", arm)]
        settings = (*self.options.changes, f"training.seed={self.seed}", *changes)
        sets = [argument for setting in settings for argument in ("--set", setting)]
        self._start("train", str(self.options.recipe), *arms, *sets, "--output", str(self.folder))

    def go_on(self, *, cut: bool) -> None:
        """To what comes next, if what is under way has ended or is to be cut."""
        if not self.ended():
            if cut and self.doing == "train" and not self.cut:
                self.cut = True
                assert self.process is not None
                self.process.terminate()  # ctrl-C is ignored by what a shell started in the background
        elif self.doing == "train" and self.cut and self.steps() > 0 and not (self.folder / "model").is_dir():
            self.train(f"training.steps={self.steps()}")  # what is there already: it is exported at once
        elif self.doing == "train" and (self.folder / "model").is_dir():
            self._start("evaluate", str(self.folder))

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def is_scored(self) -> bool:
        untrained = not self.cut or self.steps() == 0
        failed = self.ended() and self.doing == "train" and untrained and not (self.folder / "model").is_dir()
        return failed or (self.ended() and self.doing == "evaluate")

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()

    def steps(self) -> int:
        """Of the last record or checkpoint."""
        saved = [
            int(found[0])
            for path in (self.folder / "checkpoints").glob("*")
            if (found := re.findall(r"\d+", path.name))
        ]
        return max([*saved, *(record["step"] for record in self._records()[-1:])], default=0)

    def result(self) -> dict[str, Any]:
        scores = self.folder / "evaluation.json"
        records = self._records()
        loss, seconds = (
            next((record[name] for record in reversed(records) if name in record), None)
            for name in ("valid_loss", "seconds")
        )
        found = json.loads(scores.read_text())["scores"] if scores.is_file() else None
        return {
            "arm": self.arm,
            "seed": self.seed,
            "steps": self.steps(),
            "cut": self.cut,
            "seconds": seconds,
            "loss": loss,
            "scores": found,
        }

    def line(self) -> str:
        result = self.result()
        if result["scores"] is None:
            return f"{self.folder.name}: no scores after {result['steps']} steps; see {self.folder}.log"
        shares = [f"{s['multiple']:g}x {s['exact_match']:.1%} ({s['token_accuracy']:.1%})" for s in result["scores"]]
        return f"{self.folder.name}: {result['steps']} steps, {', '.join(shares)}"

    def _records(self) -> list[dict[str, Any]]:
        metrics = self.folder / "metrics.jsonl"
        if not metrics.is_file():
            return []
        lines = metrics.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def _start(self, doing: str, *arguments: str) -> None:
        self.doing = doing
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "3", **os.environ}
        with self.folder.with_name(self.folder.name + ".log").open("ab") as log:
            command = [sys.executable, "-m", "tamis", "tasks", doing, *arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)


if __name__ == "__main__":
    main()
