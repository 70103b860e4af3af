"""How long a run takes to compare a corpus with its checksums before it starts, from memory and without a disk's delay.

python benchmarks/verify_corpus.py --output benchmarks/results/verify-cpu.json
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from pathlib import Path

from tamis.bench.timing import alternate, machine, save
from tamis.files import checksums

SIZE = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens"
        part = os.urandom(SIZE >> 6)
        with path.open("wb") as file:
            for _ in range(SIZE // len(part)):
                file.write(part)
        times = alternate({"checksums": lambda: checksums(path), "sha256": lambda: sha256(path)}, repeats=5)
    seconds = {name: found["min_ms"] / 1e3 * 1e10 / SIZE for name, found in times.items()}
    save(
        options.output,
        {"benchmark": "verify", "machine": machine(), "bytes": SIZE, "times": times, "seconds_of_10_gb": seconds},
    )
    print(seconds)


def sha256(path: Path) -> str:
    """What would tell more and takes longer."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
