"""Models from elsewhere, and models for elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tamis.cli.command import command

group = typer.Typer(rich_markup_mode=None)


@command(group, "import-hf")
def import_hf(
    folder: Annotated[Path, typer.Argument(help="A folder of transformers: Marian, GPT-2, Llama, Mistral or Qwen2.")],
    output: Annotated[Path, typer.Option(help="The model folder to write.")] = Path("imported"),
) -> None:
    """Import a model of transformers, to train it from dense to sparse; writes a recipe that begins with it."""
    from tamis.exchange.importing import import_folder

    import_folder(folder, output)


@command(group, plugins=True)
def export(
    run: Annotated[Path, typer.Argument(help="A run folder or a model folder.")],
    to: Annotated[str, typer.Option(help="onnx, pt2 or hf.")],
    output: Annotated[Path | None, typer.Option(help="The folder to write; RUN/export-FORMAT by default.")] = None,
    max_length: Annotated[int, typer.Option(help="The longest text that graphs take, in tokens.")] = 128,
) -> None:
    """Write a model for ONNX Runtime, for C++ (AOTInductor) or for transformers, and check it by running it."""
    from tamis.exchange.export import export_run

    export_run(run, output or run / f"export-{to}", to, max_length)
