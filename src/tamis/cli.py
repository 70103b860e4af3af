"""The `tamis` command."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

try:
    import typer
except ModuleNotFoundError:
    sys.exit("the tamis command needs more than the core package: pip install 'tamis[train,plots]'")

Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change a setting of the recipe; may be repeated."),
]
LengthsOverrides = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change the evaluation: multiples=[1,2,64] ...")
]
Arm = Annotated[str | None, typer.Option(help="One of the arms of the recipe.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default what there is.")]


def main() -> None:
    app()


def _name_results(*_: Any, **__: Any) -> None:
    from tamis.bench.timing import written

    for path in written:
        print(f"written: {path}")


app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True, help="Benchmarks, as a table and JSON.", result_callback=_name_results)
tasks = typer.Typer(no_args_is_help=True, help="Generated tasks, and how well models do them at greater lengths.")
app.add_typer(bench, name="bench")
app.add_typer(tasks, name="tasks")


def command(group: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose expected errors are one line, not a traceback."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def explained(*args: Any, **kwargs: Any) -> None:
            from tamis.training.guards import TrainingError

            try:
                function(*args, **kwargs)
                sys.stdout.flush()
            except BrokenPipeError:  # who read, such as `head`, has enough; Python flushes once more when it ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            except (ValueError, OSError, ImportError, TrainingError) as error:
                sys.exit(f"error: {error}")

        return group.command(name)(explained)

    return register


@command(app)
def version() -> None:
    """Print the version."""
    from tamis.version import __version__

    print(__version__)


@command(app)
def demo(output: Path = Path("demo"), quick: bool = False) -> None:
    """Train three small translation models side by side and show what their heads do.

    Six minutes on two cores, nothing to download.  Writes into the folder --output.  --quick takes seconds and learns
    next to nothing: it shows that everything works.
    """
    from tamis.demo import run

    run(output, quick=quick)


@command(app)
def prepare(recipe: Path, arm: Arm = None, overrides: Overrides = []) -> None:  # noqa: B006
    """Build the vocabularies and the indexed corpora of a recipe, and report the lines that cannot be used."""
    from tamis.config import read_recipe
    from tamis.language_runs import is_language, prepare_language, read_language_recipe
    from tamis.runs import prepare_run

    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        print(text)

    prepared: Any
    if is_language(recipe):
        prepared = prepare_language(read_language_recipe(recipe, overrides, arm), say)
    else:
        prepared = prepare_run(read_recipe(recipe, overrides, arm), say)
    for split in ("train", "valid"):
        report = f"{split}: {prepared.corpus(split).report.describe()}"
        if report not in said:  # it was built earlier
            print(report)
    print(f"ready in {prepared.folder}")


@command(app)
def train(
    recipe: Path,
    output: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME[-ARM] by default.")] = None,
    arm: Arm = None,
    overrides: Overrides = [],  # noqa: B006
    device: Device = None,
) -> None:
    """Train a model; the same command goes on after an interruption, to the bit.  Works under torchrun.

    A recipe with a [data] section is for translation, one with a [text] section for a language model.
    """
    from tamis.config import read_recipe
    from tamis.language_runs import is_language, read_language_recipe, train_language
    from tamis.runs import train_run

    def folder(name: str) -> Path:
        return output or Path("runs") / "-".join(part for part in (name, arm) if part)

    if is_language(recipe):
        language = read_language_recipe(recipe, overrides, arm)
        train_language(language, folder(language.name), device)
    else:
        loaded = read_recipe(recipe, overrides, arm)
        train_run(loaded, folder(loaded.name), device)


@command(app)
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
    device: Device = None,
) -> None:
    """Translate plain text, a sentence a line."""
    from tamis.config import read_settings
    from tamis.decoding import DecodingConfig, Translator
    from tamis.decoding.lines import AT_A_TIME, translate_lines

    settings = read_settings(overrides)
    translator = Translator.load(run, device)
    DecodingConfig.from_dict({**translator.decoding.to_dict(), **settings})
    # Who types wants an answer to each line; a file is translated best many lines at a time.
    at_a_time = 1 if not files and sys.stdin.isatty() else AT_A_TIME
    with _writer(output) as out:
        translate_lines(
            translator, _lines(files), out, settings, alignments=alignments, scores=scores, at_a_time=at_a_time
        )


@command(app)
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
    device: Device = None,
) -> None:
    """Continue texts with a language model, each as a line; an empty prompt begins a document."""
    from tamis.config import read_settings
    from tamis.decoding import TextGenerator
    from tamis.decoding.translator import SPACED

    settings = read_settings(overrides)
    generator = TextGenerator.load(run, device)
    generator.settings(settings)
    with _writer(output) as out:
        for line in prompt or _lines(files):
            for found in generator.generate([line], **settings)[0]:
                out.write(found.text.translate(SPACED) + "\n")
            out.flush()


@command(app)
def evaluate(
    runs: list[Path],
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change decoding: beam=10 ...; or the evaluation of a language model: lengths=[512,4096] ...",
        ),
    ] = [],  # noqa: B006
    device: Device = None,
) -> None:
    """Score runs on the test set of their recipe: BLEU, chrF, likelihood, attention, and AER where there is gold.

    Of language models: perplexity by place and by length, and how often a pass key is found.
    """
    from tamis.config import read_settings
    from tamis.decoding import DecodingConfig
    from tamis.evaluation import LanguageConfig
    from tamis.language_runs import evaluate_language, is_language
    from tamis.runs import evaluate_run

    settings = read_settings(overrides)
    kinds: dict[bool, type[Any]] = {False: DecodingConfig, True: LanguageConfig}
    languages = [is_language(run) for run in runs]
    for language in set(languages):
        kinds[language].from_dict({**kinds[language]().to_dict(), **settings})
    for run, language in zip(runs, languages, strict=True):
        print(run)
        if language:
            evaluate_language(run, device, settings=settings)
        else:
            evaluate_run(run, device, decoding=settings)


@command(app)
def analyze(
    runs: list[Path],
    data: Annotated[
        list[str], typer.Option(help="Parallel text instead of the validation set: one path, or twice for two.")
    ] = [],  # noqa: B006
    shown: Annotated[int, typer.Option(help="Sentences whose weights are kept to look at.")] = 32,
    device: Device = None,
) -> None:
    """What the heads of runs do: density, roles, alphas, null attention, alignment, importance."""
    from tamis.runs import analyze_run

    text = None if not data else data[0] if len(data) == 1 else data
    for run in runs:
        print(run)
        analyze_run(run, text, device, shown=shown)


@command(app)
def dispersion(
    runs: Annotated[list[Path], typer.Argument(help="Runs of language models or of tasks.")],
    overrides: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="lengths=[512,4096], samples=8, queries=32 ...")
    ] = [],  # noqa: B006
    output: Annotated[Path, typer.Option(help="A .pdf, .svg or .png file.")] = Path("dispersion.png"),
    device: Device = None,
) -> None:
    """How heads spread as texts grow: entropy, support, and how far those with an ALiBi bias reach.

    Writes dispersion.json into each run, and one picture of all.
    """
    from tamis.config import read_settings
    from tamis.evaluation.dispersion import plot_dispersion
    from tamis.language_runs import is_language, language_dispersion
    from tamis.report.plots import check_figure
    from tamis.task_runs import is_task, task_dispersion

    check_figure(output)
    settings = read_settings(overrides)
    for run in runs:
        if not (is_language(run) or is_task(run)):
            raise ValueError(f"{run} is not a run of a language model or of a task")
    for run in runs:
        print(run)
        measure = language_dispersion if is_language(run) else task_dispersion
        measure(run, device, settings=settings)
    plot_dispersion(runs, output)
    print(output)


@command(app)
def report(
    runs: Annotated[list[str], typer.Argument(help="Folders of analysed runs, or NAME=RUN to call one so.")],
    output: Path = Path("report.html"),
    title: str = "Tamis report",
) -> None:
    """Write one page about runs, to open in any browser: scores, training, and every head to look into.

    Nothing is loaded from a network.  Run `tamis analyze` on the runs first, and `tamis evaluate` to have scores.
    """
    from tamis.runs import report_runs

    report_runs(_folders(runs), output, title)
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB")


@command(app)
def plot(
    runs: Annotated[list[str], typer.Argument(help="Folders of analysed runs, or NAME=RUN to call one so.")],
    output: Annotated[Path, typer.Option(help="The folder for the figures.")] = Path("figures"),
    suffix: Annotated[str, typer.Option("--format", help="pdf, svg or png.")] = "pdf",
    dpi: Annotated[int, typer.Option(help="Dots per inch of a png.")] = 150,
) -> None:
    """Draw the papers' figures of runs with matplotlib: alphas, densities, diversity, positions, one head.

    Of evaluated language models: perplexity and pass keys against length.
    """
    from tamis.language_runs import is_language, plot_language
    from tamis.runs import plot_runs

    folders = _folders(runs)
    languages = [is_language(folder) for folder in (folders.values() if isinstance(folders, dict) else folders)]
    if any(languages) and not all(languages):
        raise ValueError("language models and others have no figure in common: plot them apart")
    for path in (plot_language if any(languages) else plot_runs)(folders, output, suffix, dpi):
        print(path)


@command(app)
def compare(
    systems: Annotated[list[str], typer.Argument(help="NAME=RUN[,RUN...]: the runs of a system, such as its seeds.")],
    baseline: Annotated[str | None, typer.Option(help="A name; the first system by default.")] = None,
) -> None:
    """Paired bootstrap between evaluated runs, the seeds of a system pooled."""
    from tamis.runs import compare_runs

    print(compare_runs(_systems(systems), baseline).describe())


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
def bench_decode(output: Path | None = None, repeats: int = 3, threads: int = 2) -> None:
    """Time beam search on the CPU against MarianMTModel.generate of Hugging Face transformers, same size and work.

    The table is printed; with --output its numbers are also written there as decode-cpu.json.
    """
    from tamis.bench.decode import run

    run(output, repeats=repeats, threads=threads)


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


@command(tasks, "list")
def list_tasks() -> None:
    """Name the tasks, each with what it asks for."""
    from tamis.data.tasks import TASKS

    for name, kind in TASKS.items():
        print(f"{name:14} {(kind.__doc__ or '').splitlines()[0]}")


@command(tasks, "train")
def train_task(
    recipe: Path,
    output: Annotated[Path | None, typer.Option(help="The run folder; runs/NAME[-ARM...] by default.")] = None,
    arm: Annotated[list[str], typer.Option(help="An arm of the recipe; may be repeated: short, softmax.")] = [],  # noqa: B006
    overrides: Overrides = [],  # noqa: B006
    device: Device = None,
) -> None:
    """Train a model on a task; the same command goes on after an interruption, to the bit."""
    from tamis.task_runs import read_task_recipe, train_task

    loaded = read_task_recipe(recipe, overrides, arm)
    train_task(loaded, output or Path("runs") / "-".join([loaded.name, *arm]), device)


@command(tasks, "evaluate")
def evaluate_task(runs: list[Path], overrides: LengthsOverrides = [], device: Device = None) -> None:  # noqa: B006
    """Exact match and token accuracy of runs at multiples of the length they were trained at."""
    from tamis.config import read_settings
    from tamis.task_runs import evaluate_task

    for run in runs:
        print(run)
        evaluate_task(run, device, settings=read_settings(overrides))


@command(tasks, "heads")
def task_heads(runs: list[Path], overrides: LengthsOverrides = [], device: Device = None) -> None:  # noqa: B006
    """Exact match of runs with each of their heads silenced: which heads a task needs, and at which lengths."""
    from tamis.config import read_settings
    from tamis.task_runs import task_heads

    for run in runs:
        print(run)
        task_heads(run, device, settings=read_settings(overrides))


@command(tasks, "demo")
def demo_tasks(
    output: Annotated[Path, typer.Option(help="A folder.")] = Path("demo/lengths"),
    seeds: Annotated[int, typer.Option(help="How often to train each model; the mean is shown.")] = 1,
    quick: bool = False,
) -> None:
    """Train softmax and ASEntmax on short sequences, and see which of them still does the task on longer ones.

    Half a minute on one core, nothing to download.  --quick takes seconds and learns nothing: it shows that everything
    works.
    """
    from tamis.demo.lengths import run

    run(output, seeds, quick)


@command(tasks, "plot")
def plot_tasks(
    runs: Annotated[
        list[str], typer.Argument(help="Folders of evaluated runs of one task, or NAME=RUN[,RUN...] for each line.")
    ],
    output: Annotated[Path, typer.Option(help="A .pdf, .svg or .png file.")] = Path("lengths.png"),
) -> None:
    """Draw accuracy against length and print it as tables: a line for each mechanism, the mean of its seeds."""
    from tamis.evaluation.lengths import lengths_table
    from tamis.task_runs import plot_tasks

    scores = plot_tasks(_named(runs), output)
    for share in ("exact_match", "token_accuracy"):
        print(lengths_table(scores, share), end="\n\n")
    print(output)


def _systems(texts: list[str]) -> dict[str, list[Path]]:
    """Of NAME=RUN[,RUN...]"""
    named: dict[str, list[Path]] = {}
    for text in texts:
        name, _, listed = text.partition("=")
        folders = listed.split(",")
        if not name or not all(folders):
            raise ValueError(f"a system is NAME=RUN[,RUN...], got {text!r}")
        if name in named:
            raise ValueError(f"each system has a name of its own, got {name!r} twice: NAME=RUN,RUN pools runs")
        if len({Path(folder).resolve() for folder in folders}) < len(folders):
            raise ValueError(f"each run counts once in a system, got one twice in {text!r}")
        named[name] = [Path(folder) for folder in folders]
    return named


def _named(texts: list[str]) -> list[Path] | dict[str, list[Path]]:
    """Of RUN..., or of NAME=RUN[,RUN...] by name."""
    named = ["=" in text and not Path(text).exists() for text in texts]
    if not any(named):
        return [Path(text) for text in texts]
    if not all(named):
        raise ValueError(f"either all runs are NAME=RUN or none is, got {' '.join(texts)}")
    return _systems(texts)


def _folders(texts: list[str]) -> list[Path] | dict[str, Path]:
    """Of RUN..., or of NAME=RUN... by name."""
    named = _named(texts)
    if isinstance(named, list):
        return named
    if pooled := [name for name, folders in named.items() if len(folders) > 1]:
        raise ValueError(f"runs are shown one by one, got several for {', '.join(pooled)}")
    return {name: folder for name, (folder,) in named.items()}


def _lines(files: list[Path]) -> Iterator[str]:
    from tamis.data.text import decode_lines, read_lines

    if files:
        return (line for path in files for line in read_lines(path))
    return decode_lines(sys.stdin.buffer, "standard input")


@contextmanager
def _writer(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
    else:
        with output.open("w", encoding="utf-8", newline="\n") as file:
            yield file
