"""Benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from tamis.cli.command import Device, command


def _name_results(*_: Any, **__: Any) -> None:
    from tamis.bench.timing import written

    for path in written:
        print(f"written: {path}")


bench = typer.Typer(
    no_args_is_help=True,
    help="Run benchmarks, as a table and JSON.",
    result_callback=_name_results,
    rich_markup_mode=None,
)


@command(bench, "transforms")
def bench_transforms(output: Path | None = None, repeats: int = 15, threads: int = 2, device: Device = None) -> None:
    """Time the transforms against torch.softmax and the peers that are installed, after checking that they are right.

    On the GPU if there is one, unless with --device cpu.  The table is printed; with --output its numbers are also
    written there as transforms-gpu.json or transforms-cpu.json.
    """
    from tamis.bench.transforms import run

    run(output, repeats=repeats, threads=threads, device=device)


@command(bench, "attention")
def bench_attention(output: Path | None = None, repeats: int = 5, threads: int = 2) -> None:
    """Time attention on the CPU, forward and backward, against F.scaled_dot_product_attention.

    The table is printed; with --output its numbers are also written there as attention-cpu-v4.json, by the C++ kernels
    in use (TAMIS_NATIVE chooses them), and a picture of time against length beside it.
    """
    from tamis.bench.attention import run

    run(output, repeats=repeats, threads=threads)


@command(bench, "solver")
def bench_solver(output: Path | None = None, rows: int = 300) -> None:
    """Count the solver's steps and measure how exact its three forms are.

    The tables are printed; with --output their numbers are also written there as solver-cpu.json.
    """
    from tamis.bench.solver import run

    run(output, rows=rows)


@command(bench, "kernels")
def bench_kernels(
    short: bool = False,
    relu: bool = False,
    activations: bool = False,
    norm: bool = False,
    output: Path | None = None,
) -> None:
    """Time the fused GPU kernels against F.scaled_dot_product_attention and the peers that are installed.

    Rows of 4k to 64k keys of entmax; with --relu of ReLU attention; with --activations of leaky relu, gelu and sigmoid,
    4k and 16k; with --short rows of up to 512, as in translation; with --norm the norm of ReLA.  The table is
    printed; with --output its numbers, and of sparse attention a picture, are also written there.
    """
    if sum((short, relu, activations, norm)) > 1:
        raise SystemExit("--short, --relu, --activations and --norm are benchmarks of their own: give one of them")
    if short:
        from tamis.bench.kernels import run_short

        run_short(output)
    elif relu:
        from tamis.bench.relu import run as run_relu

        run_relu(output)
    elif activations:
        from tamis.bench.relu import run_others

        run_others(output)
    elif norm:
        from tamis.bench.norm import run as run_norm

        run_norm(output)
    else:
        from tamis.bench.long import run

        run(output)


@command(bench, "cache")
def bench_cache(output: Path | None = None) -> None:
    """Time attention of a few queries to a long cache on a GPU against dense attention, and a whole model's tokens/s.

    The tables are printed; with --output their numbers are also written there as cache-gpu.json.
    """
    from tamis.bench.cache import run

    run(output)


@command(bench, "decode")
def bench_decode(output: Path | None = None, repeats: int = 3, threads: int = 2, only: str | None = None) -> None:
    """Time translating on the CPU beside CTranslate2 and Hugging Face's Marian, with the same weights and work.

    The table is printed; with --output its numbers are also written there as decode-cpu.json.  --only base-1-5-equal
    runs one case and keeps what the file has of the others.
    """
    from tamis.bench.decode import run

    run(output, repeats=repeats, threads=threads, only=only)


@command(bench, "train")
def bench_train(
    output: Path | None = None, steps: int = 240, batch_tokens: int = 25_000, cuda_graphs: bool = True
) -> None:
    """Time the training loop with each kind of attention, the base model, beside the fastest dense attention.

    The table is printed; with --output its numbers are also written there as train-cuda-graphs.json, train-cuda.json
    or train-cpu.json.
    """
    from tamis.bench.train import run

    run(output, steps=steps, batch_tokens=batch_tokens, cuda_graphs=cuda_graphs)


@command(bench, "context")
def bench_context(output: Path | None = None, length: int = 1 << 16, new: int = 32, repeats: int = 3) -> None:
    """Time and memory of one long text, to train on and to continue: sparse attention beside softmax and flash.

    The table is printed; with --output its numbers are also written there as context-gpu.json or context-cpu.json.
    """
    from tamis.bench.context import run

    run(output, length=length, new=new, repeats=repeats)


@command(bench, "parallel")
def bench_parallel(output: Path | None = None, length: int = 4096, repeats: int = 5) -> None:
    """Time and bytes of attention over sequences that 2 and 4 processes share, and what a 7B model would need.

    The second table is computed, not measured.  With --output the numbers are also written there as parallel-cpu.json
    or parallel-gpu.json.
    """
    from tamis.bench.parallel import run

    run(output, length=length, repeats=repeats)
