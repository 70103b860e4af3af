"""What trained models write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tamis.cli.command import Device, Int8, command, lines_of, writer

group = typer.Typer(rich_markup_mode=None)


@command(group, plugins=True)
def translate(
    run: Annotated[Path, typer.Argument(help="A run folder or a model folder.")],
    files: Annotated[list[Path], typer.Argument(help="Text, a sentence a line; standard input by default.")] = [],  # noqa: B006
    output: Annotated[Path | None, typer.Option(help="Standard output by default.")] = None,
    alignments: Annotated[bool, typer.Option(help="Write word alignments behind a tab: 0-0 1-2 ...")] = False,
    scores: Annotated[bool, typer.Option(help="Write scores before a tab.")] = False,
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Change decoding: beam=10, method=sample, n_best=3 ..."),
    ] = [],  # noqa: B006
    int8: Int8 = False,
    device: Device = None,
) -> None:
    """Translate plain text, a sentence a line."""
    from tamis.decoding import DecodingConfig, Translator
    from tamis.decoding.lines import AT_A_TIME, translate_lines
    from tamis.experiments import check_writes, read_settings

    settings = read_settings(overrides)
    check_writes(run, "translate")
    translator = Translator.load(run, "cpu" if int8 else device, quantize="int8" if int8 else None)
    DecodingConfig.from_dict({**translator.decoding.to_dict(), **settings})
    # Who types wants an answer to each line; a file is translated best many lines at a time.
    at_a_time = 1 if not files and sys.stdin.isatty() else AT_A_TIME
    with writer(output) as out:
        translate_lines(
            translator, lines_of(files), out, settings, alignments=alignments, scores=scores, at_a_time=at_a_time
        )


@command(group, plugins=True)
def generate(
    run: Annotated[Path, typer.Argument(help="A run folder or a model folder, of a language model.")],
    files: Annotated[list[Path], typer.Argument(help="Prompts, one a line; standard input by default.")] = [],  # noqa: B006
    prompt: Annotated[list[str], typer.Option(help="A prompt; may be repeated.  Nothing else is read then.")] = [],  # noqa: B006
    output: Annotated[Path | None, typer.Option(help="Standard output by default.")] = None,
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change decoding: max_length=64, top_p=0.9, n_best=3, seed=7 ..."
        ),
    ] = [],  # noqa: B006
    int8: Int8 = False,
    device: Device = None,
) -> None:
    """Continue texts with a language model, each as a line; an empty prompt begins a document."""
    from tamis.decoding import TextGenerator
    from tamis.decoding.translator import SPACED
    from tamis.experiments import check_writes, read_settings

    settings = read_settings(overrides)
    check_writes(run, "generate")
    generator = TextGenerator.load(run, "cpu" if int8 else device, quantize="int8" if int8 else None)
    generator.settings(settings)
    with writer(output) as out:
        for line in prompt or lines_of(files):
            for found in generator.generate([line], **settings)[0]:
                out.write(found.text.translate(SPACED) + "\n")
            out.flush()
