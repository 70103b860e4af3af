"""All that a GPU has to prove: the tests, the kernels under a sanitizer, and the benchmarks behind README's figures.

    python benchmarks/gpu_proof.py --output DIR [--seconds 570] [--only tests sanitize]

`make gpu-proof` runs it whole.  Where time on a GPU comes in pieces, call it again with the same folder: parts that
passed with the same sources are not done again, and a part that did not fit is cut and begins anew.  What each part
printed is in DIR/<part>.log, what it measured in the JSON of its benchmark, and the verdict on all in
DIR/gpu-proof.json.  Exits with 1 if a part failed, with 2 if one is still to be done.

Tests and sanitizer share the GPU; whatever is timed has it for itself.  On one H200 with 16 cores the tests took nine
minutes, `short` seven, `rows` and `cache` two and a half each, short rows, rows and decoding under the sanitizer one;
`long` and `train` more than two.  Most of it is compiling.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tamis.bench.timing import machine, save

ROOT = Path(__file__).parents[1]
RECORD = "gpu-proof.json"


@dataclass(frozen=True)
class Part:
    """One thing to prove: commands that run one after the other, each of which must succeed."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    timed: bool = True
    environment: tuple[tuple[str, str], ...] = ()


def parts(output: Path, workers: int) -> list[Part]:
    python = sys.executable
    # Compiled by the first run, because the sanitizer would watch the compilers too; memory from the driver, because
    # in torch's own pool nothing is out of bounds.
    kernels = (python, "tests/kernels/sanitize.py")
    watched = ("compute-sanitizer", "--error-exitcode", "1", *kernels)
    tests = (python, "-m", "pytest", "-m", "gpu", "-n", str(workers), "-v", f"--junitxml={output / 'tests.xml'}")

    def bench(name: str, *words: str) -> Part:
        return Part(name, ((python, "-m", "tamis", "bench", *words, "--output", str(output)),))

    return [
        Part("tests", (tests,), timed=False),
        Part("sanitize", (kernels, watched), timed=False, environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)),
        bench("short", "kernels", "--short"),
        bench("long", "kernels"),
        bench("relu", "kernels", "--relu"),
        bench("rows", "transforms", "--device", "cuda"),
        bench("cache", "cache"),
        bench("train", "train"),
    ]


class Run:
    """A part under way."""

    def __init__(self, part: Part, output: Path) -> None:
        self.part, self.output = part, output
        self.log = (output / f"{part.name}.log").open("w")
        self.began = time.monotonic()
        self.waiting = list(part.commands)
        self.code: int | None = None
        self._next()

    def _next(self) -> None:
        self.process = subprocess.Popen(
            self.waiting.pop(0),
            cwd=ROOT,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **dict(self.part.environment)},
            start_new_session=True,  # so that workers end with it
        )

    def ended(self) -> bool:
        code = self.process.poll()
        if code is None:
            return False
        if code == 0 and self.waiting:
            self._next()
            return False
        self.code = code
        return True

    def cut(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def verdict(self) -> dict[str, Any]:
        self.log.close()
        verdict = "cut" if self.code is None else "passed" if self.code == 0 else "failed"
        found: dict[str, Any] = {"verdict": verdict, "seconds": round(time.monotonic() - self.began)}
        if (report := self.output / f"{self.part.name}.xml").is_file():
            suite = ET.parse(report).getroot()[0]
            found |= {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
            report.unlink()
        return found


def sources() -> str:
    """A fingerprint of the code that is proved."""
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("tests/**/*.py")]):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def reason_not_to(part: Part) -> str | None:
    """Why a part cannot be done on this machine."""
    missing = [command[0] for command in part.commands if shutil.which(command[0]) is None]
    return f"there is no {missing[0]} here" if missing else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="cut what is not done by then")
    parser.add_argument("--workers", type=int, default=8, help="of the tests")
    parser.add_argument("--only", nargs="+", metavar="PART")
    options = parser.parse_args()
    if machine()["gpu"] is None:
        raise SystemExit("a GPU is to be proved, and there is none")
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    todo = parts(output, options.workers)
    if unknown := set(options.only or ()) - {part.name for part in todo}:
        raise SystemExit(f"--only takes {', '.join(part.name for part in todo)}, got {', '.join(sorted(unknown))}")
    record = read_record(output)
    done = {name for name, found in record["parts"].items() if found["verdict"] == "passed"}
    todo = [part for part in todo if part.name not in done and (not options.only or part.name in options.only)]
    prove(todo, output, record, time.monotonic() + options.seconds)
    verdicts = {part.name: record["parts"].get(part.name, {"verdict": "not begun"}) for part in parts(output, 1)}
    for name, found in verdicts.items():
        print(f"{name:10}", *(f"{key} {value}" for key, value in found.items()))
    found = {verdict["verdict"] for verdict in verdicts.values()}
    raise SystemExit(1 if "failed" in found else 0 if found == {"passed"} else 2)


def read_record(output: Path) -> dict[str, Any]:
    """What was proved before, if it was with these sources."""
    path = output / RECORD
    record = json.loads(path.read_text()) if path.is_file() else {}
    if record.get("sources") == sources():
        return record
    return {"benchmark": "GPU proof", "machine": machine(), "sources": sources(), "parts": {}}


def prove(todo: list[Part], output: Path, record: dict[str, Any], deadline: float) -> None:
    together = [part for part in todo if not part.timed]
    for group in [together, *([part] for part in todo if part.timed)]:
        runs = []
        for part in group:
            if reason := reason_not_to(part):
                record["parts"][part.name] = {"verdict": "failed", "reason": reason}
                save(output / RECORD, record)
            elif time.monotonic() < deadline:
                runs.append(Run(part, output))
        while runs:
            time.sleep(0.2)
            late = time.monotonic() > deadline
            for run in [run for run in runs if run.ended() or late]:
                if run.code is None:
                    run.cut()
                record["parts"][run.part.name] = run.verdict()
                runs.remove(run)
                print(f"{run.part.name}: {record['parts'][run.part.name]}", flush=True)
                save(output / RECORD, record)


if __name__ == "__main__":
    main()
