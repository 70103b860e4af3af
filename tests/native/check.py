"""`make native-check`: the C++ kernels under sanitizers, and random calls of the builds that this CPU would not choose.

The driver calls the kernels without Python.  It is compiled for each instruction set, and watched for accesses out of
bounds and undefined behaviour.  Builds that this CPU cannot run are named and left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tamis.native import library

ROOT = Path(__file__).parents[2]
CPP = ROOT / "src/tamis/native/cpp"
MARCH = {"v4": ["-march=x86-64-v4"], "v3": ["-march=x86-64-v3"], "baseline": ["-march=x86-64"], "generic": []}
FLAGS = ["-std=c++17", "-O1", "-g", "-Wno-psabi", "-Wno-maybe-uninitialized", "-ffp-contract=fast"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math"]
WATCHED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
DRIVERS = {"driver": "400", "attention_driver": "300"}
"""Programs beside this file, and how many random calls they make."""


def main() -> None:
    built = library.status().built
    if not built:
        raise SystemExit(f"no C++ kernels to check: {library.status().reason}")
    level = library._level(built)
    runs_here = [name for needed, name in library.NAMES.items() if name in built and needed <= level]
    left_out = [name for name in built if name not in runs_here]
    print(f"checked: {', '.join(runs_here)}" + (f"; this CPU cannot run {', '.join(left_out)}" if left_out else ""))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        wanted = [(name, program) for name in runs_here for program in DRIVERS]
        for name, driver in pool.map(lambda one: (one, _compile(*one, Path(folder))), wanted):
            print(*name, "under sanitizers:", end=" ", flush=True)
            subprocess.run([driver, DRIVERS[name[1]]], check=True)
    for name in runs_here:
        tests = "two_thousand"  # the rest `make test` runs with the best build
        if name != runs_here[0]:
            tests += " or to_the_bit or adversarial or no_bit or (random_calls and not many)"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests]
        command += ["tests/native/test_rows.py", "tests/native/test_attention.py"]
        print(f"TAMIS_NATIVE={name}", *command[2:], flush=True)
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {library.VARIABLE: name})


def _compile(name: str, program: str, folder: Path) -> Path:
    driver = folder / f"{program}_{name}"
    sources = [ROOT / f"tests/native/{program}.cpp", *sorted(CPP.glob("*.cpp"))]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, *FLAGS, *WATCHED, *MARCH[name], f"-I{CPP}", *sources, "-o", driver], check=True)
    return driver


if __name__ == "__main__":
    main()
