"""The `tamis` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main() -> None:
    try:
        import typer  # noqa: F401
    except ModuleNotFoundError:
        sys.exit("the tamis command needs more than the core package: pip install 'tamis[train,plots]'")
    _app()()


def _app() -> Any:
    import typer

    app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
    bench = typer.Typer(no_args_is_help=True, help="Benchmarks, as a table and JSON.")
    app.add_typer(bench, name="bench")
    app.command()(demo)
    app.command()(version)
    bench.command("transforms")(bench_transforms)
    bench.command("attention")(bench_attention)
    bench.command("solver")(bench_solver)
    bench.command("kernels")(bench_kernels)
    return app


def version() -> None:
    """Print the version."""
    from tamis.version import __version__

    print(__version__)


def demo(output: Path = Path("demo")) -> None:
    """Draw the entmax family and print what alpha does to a row of scores.  Writes into the folder --output."""
    from tamis.demo import run

    run(output)


def bench_transforms(output: Path | None = None, repeats: int = 15, threads: int = 2) -> None:
    """Time the transforms against torch.softmax and the `entmax` package, after checking that they are right.

    The table is printed; with --output its numbers are also written there as transforms-cpu.json.
    """
    from tamis.bench.transforms import run

    run(output, repeats=repeats, threads=threads)


def bench_attention(output: Path | None = None, repeats: int = 9, threads: int = 2) -> None:
    """Time attention on the CPU, forward and backward, against F.scaled_dot_product_attention.

    The table is printed; with --output its numbers are also written there as attention-cpu.json.
    """
    from tamis.bench.attention import run

    run(output, repeats=repeats, threads=threads)


def bench_solver(output: Path | None = None, rows: int = 300) -> None:
    """Count the solver's steps and measure how exact its three forms are.

    The tables are printed; with --output their numbers are also written there as solver-cpu.json.
    """
    from tamis.bench.solver import run

    run(output, rows=rows)


def bench_kernels(short: bool = False, output: Path | None = None) -> None:
    """Time the fused GPU kernels against F.scaled_dot_product_attention and the peers that are installed.

    --short: rows of up to 512 keys, as in translation.  The table is printed; with --output its numbers and a picture
    are also written there.
    """
    if not short:
        sys.exit("say which kernels: tamis bench kernels --short")
    from tamis.bench.kernels import run_short

    run_short(output)
