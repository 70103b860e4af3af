"""The stages from a recipe to its results.  The run folder is what one hands on to the next.

data/NAME/      vocabularies, indexed corpora                     prepare_run
runs/NAME/      config.toml, metrics.jsonl, checkpoints/          train_run
    model/      what to translate with: the best, or an average
    evaluation.json, test.hypotheses.txt                          evaluate_run
    analysis.json, analysis.npz                                   analyze_run
report.html, figures                                              report_runs, plot_runs
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tamis.analysis.analyze import analyze
from tamis.analysis.capture import capture
from tamis.analysis.files import read_arrays, write_arrays
from tamis.analysis.importance import HeadImportance, head_importance
from tamis.analysis.learned import alpha_trajectories
from tamis.analysis.metrics import AttentionMetrics
from tamis.analysis.nulls import null_signal
from tamis.analysis.shown import shown_sentences
from tamis.analysis.tokens import Sentences, named_tokens
from tamis.config import SITES, Recipe, model_settings, read_recipe
from tamis.data.batching import Batch, Updates, collate, split_batch, spread
from tamis.data.corpus import Limits, ParallelCorpus, build_corpus
from tamis.data.prepare import Prepared, Say, prepare
from tamis.data.text import BadLine, Pair, grammar_examples, read_pairs
from tamis.decoding.settings import DecodingConfig
from tamis.decoding.translator import Translator
from tamis.evaluation.alignment import AlignmentReport, attention_alignment
from tamis.evaluation.gold import GoldPair, read_gold
from tamis.evaluation.likelihood import translation_likelihood
from tamis.evaluation.translation import Comparison, compare, score_translations
from tamis.files import replacing, write_json
from tamis.models.pretrained import WEIGHTS, PretrainedModel
from tamis.models.seq2seq import Seq2Seq
from tamis.nn.modes import evaluating
from tamis.report import ReportRun, content, page
from tamis.training.distributed import Process
from tamis.training.guards import memory_explained
from tamis.training.journal import Display, Record, read_journal
from tamis.training.session import MODEL, RECIPE, Save, leader_first, train_in
from tamis.training.trainer import Trainer
from tamis.training.translation import TranslationTask

METRICS = "metrics.jsonl"
EVALUATION, HYPOTHESES, ANALYSIS, ARRAYS = "evaluation.json", "test.hypotheses.txt", "analysis.json", "analysis.npz"
OBSERVED_TOKENS = 4096
"""Of a sample that stands for the validation set: for the densities shown while training and for silencing each head in
turn."""
SHOWN = 32
"""Sentences whose weights an analysis keeps to look at."""


def prepare_run(recipe: Recipe, say: Say = print) -> Prepared:
    """Vocabularies and indexed corpora of a recipe, built now or earlier."""
    folder = Path(recipe.data.folder or f"data/{recipe.name}")
    return prepare(recipe.data, recipe.vocabulary, folder, say)


def train_run(recipe: Recipe, folder: Path, device: str | None = None, display: Display | None = None) -> Path:
    """Train, from where an earlier call was interrupted if one was; returns the folder of the model."""

    def build(own: Process, display: Display) -> tuple[Trainer, Save]:
        prepared = leader_first(own, display, lambda say: prepare_run(recipe, say))
        trainer = _trainer(recipe, prepared, folder, own, display)

        def save(model_folder: Path) -> None:
            model = Seq2Seq(recipe.model_config(prepared))
            model.load_state_dict(trainer.final_weights(), strict=False)
            translator(recipe, prepared, model).save(model_folder)

        return trainer, save

    return train_in(folder, recipe, read_recipe, build, device, display)


def _trainer(recipe: Recipe, prepared: Prepared, folder: Path, own: Process, display: Display) -> Trainer:
    torch.manual_seed(recipe.training.seed)
    with memory_explained("the weights of the model", "the sizes under [model]"):
        model = Seq2Seq(recipe.model_config(prepared))
    task = TranslationTask(prepared, recipe.training)
    display.say(f"{folder}: {model.num_parameters():,} parameters, {len(task.train):,} pairs, on {own.device}")
    validation = _Validation(recipe, prepared, task, own)
    return Trainer(
        model,
        task,
        recipe.training,
        folder,
        own,
        display=display,
        score=validation.bleu if recipe.training.monitor == "bleu" else None,
        observe=validation.density,
    )


def translator(recipe: Recipe, prepared: Prepared, model: Seq2Seq) -> Translator:
    """The model with its vocabularies and the recipe's way of decoding."""
    decoding = recipe.decoding
    if recipe.training.loss == "entmax" and decoding.alpha == 1.0:
        decoding = replace(decoding, alpha=recipe.training.loss_alpha)
    return Translator(model, prepared.source_vocabulary, prepared.target_vocabulary, decoding)


class _Validation:
    """What is found out about a model after each validation, besides its loss."""

    def __init__(self, recipe: Recipe, prepared: Prepared, task: TranslationTask, own: Process) -> None:
        self.recipe, self.prepared, self.task, self.own = recipe, prepared, task, own
        # Now, because a text that cannot be scored should not be found out after the first thousand steps.
        self.pairs = whole_text(recipe.data.valid, recipe) if recipe.training.monitor == "bleu" else []

    def bleu(self, model: PretrainedModel) -> float:
        assert isinstance(model, Seq2Seq)
        found = translator(self.recipe, self.prepared, model)([pair.source for pair in self.pairs])
        return score_translations(found, [pair.target for pair in self.pairs], samples=1).bleu.score

    def density(self, model: PretrainedModel) -> Record:
        metrics = AttentionMetrics()
        for batch in self.task.sample(OBSERVED_TOKENS):
            observe(model, batch.to(self.own.device), self.prepared.target_vocabulary.pad_id, metrics)
        return density_record(metrics)


def density_record(metrics: AttentionMetrics) -> Record:
    """For the journal: the mean density, and that of every head."""
    sites = {site: list(found.density) for site, found in metrics.results().items()}
    return {"density": metrics.summary()["all"]["density"], "densities": sites}


def observe(model: PretrainedModel, batch: Batch, pad_id: int, metrics: AttentionMetrics) -> None:
    """Add the attention of a model on a batch to some metrics."""
    with evaluating(model), capture(model, metrics):
        # A column of padding is not a query: only positions that are labels count.
        model(batch.source, batch.target, target_mask=batch.labels != pad_id)


def whole_text(text: str | list[str], recipe: Recipe) -> list[Pair]:
    """All pairs of a text that nothing may be left out of, such as a test set."""
    pairs = []
    for pair in read_pairs(text, recipe.data.source_language, recipe.data.target_language):
        if isinstance(pair, BadLine):
            raise ValueError(f"line {pair.line} of {text}: {pair.reason}; a set to be scored must be whole")
        pairs.append(pair)
    return pairs


def evaluate_run(
    folder: Path, device: str | None = None, say: Say = print, decoding: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Translate and score the test set of a run, and align its gold pairs; writes evaluation.json.

    `decoding` are settings of DecodingConfig to change, such as ``{"beam": 1}``.
    """
    recipe = read_recipe(folder / RECIPE)
    if recipe.data.test is None:
        raise ValueError(f"{folder / RECIPE} names no [data] test to evaluate on")
    loaded = Translator.load(folder, device)
    settings = DecodingConfig.from_dict({**loaded.decoding.to_dict(), **(decoding or {})}).to_dict()
    pairs = whole_text(recipe.data.test, recipe)
    began = time.perf_counter()
    found = loaded([pair.source for pair in pairs], **settings)
    seconds = time.perf_counter() - began
    scores = score_translations(found, [pair.target for pair in pairs])
    say(f"BLEU {scores.bleu.score:.2f} [{scores.bleu.low:.2f}, {scores.bleu.high:.2f}]  {scores.bleu.signature}")
    say(f"chrF {scores.chrf.score:.2f} [{scores.chrf.low:.2f}, {scores.chrf.high:.2f}]  {scores.chrf.signature}")
    result: dict[str, Any] = {
        "name": recipe.name,
        "scored": _scored(folder, pairs),
        "decoding": settings,
        "translation": scores.to_dict(),
        "sentences_per_second": len(pairs) / seconds,
        "device": str(loaded.device),
        **_teacher_forced(loaded, pairs),
    }
    if recipe.data.gold is not None:
        report = _aligned(loaded, gold_pairs(recipe.data.gold))
        say(report.describe())
        result["alignment"] = report.to_dict()
    with replacing(folder / HYPOTHESES) as file:
        file.write("".join(f"{line}\n" for line in found).encode())
    write_json(folder / EVALUATION, result, indent=1)
    return result


def _teacher_forced(loaded: Translator, pairs: Sequence[Pair]) -> dict[str, Any]:
    """What the model makes of the references: likelihood, and how its heads attend."""
    pad_id = loaded.target_vocabulary.pad_id
    metrics = AttentionMetrics()
    with tempfile.TemporaryDirectory() as scratch:
        batches, _ = _batches(loaded, pairs, Path(scratch))
    likelihood = translation_likelihood(loaded.model, batches, pad_id=pad_id, alpha=loaded.decoding.alpha)
    for batch in batches:
        observe(loaded.model, batch.to(loaded.device), pad_id, metrics)
    return {"likelihood": likelihood.to_dict(), "attention": metrics.to_dict()}


def _batches(loaded: Translator, pairs: Sequence[Pair], scratch: Path) -> tuple[list[Batch], list[Batch]]:
    """All pairs, and a sample that stands for them."""
    vocabularies = loaded.source_vocabulary, loaded.target_vocabulary
    build_corpus(pairs, scratch, "test", *vocabularies, Limits(max_length=1 << 20, max_ratio=1e9))
    corpus = ParallelCorpus.open(scratch, "test")
    updates = Updates(corpus.source_lengths, corpus.target_lengths, OBSERVED_TOKENS)
    sample = split_batch(spread(updates.sizes, OBSERVED_TOKENS), updates.sizes, OBSERVED_TOKENS)
    every, some = ([collate(corpus, part, *vocabularies) for part in parts] for parts in (updates.epoch(0), sample))
    return every, some


def analyze_run(
    folder: Path, data: str | list[str] | None = None, device: str | None = None, say: Say = print, shown: int = SHOWN
) -> dict[str, Any]:
    """What the heads of a run do on its validation set, or on `data`; writes analysis.json and analysis.npz."""
    recipe = read_recipe(folder / RECIPE)
    loaded = Translator.load(folder, device)
    text = recipe.data.valid if data is None else data
    pairs = whole_text(text, recipe)
    with tempfile.TemporaryDirectory() as scratch:
        batches, sample = _batches(loaded, pairs, Path(scratch))
    grammar = isinstance(text, str) and text.startswith("grammar:")
    languages = ("en", "de") if grammar else (recipe.data.source_language, recipe.data.target_language)

    def sentences() -> Iterator[Sentences]:
        for batch in batches:
            yield Sentences.of_batch(batch, loaded.source_vocabulary, loaded.target_vocabulary, languages)

    numbers = sorted(number for batch in batches for number in batch.indices)[:shown]
    found = analyze(loaded.model, sentences(), shown=numbers)
    result: dict[str, Any] = {"name": recipe.name, "data": text, **found.to_dict()}
    result["tokens"] = {
        str(number): {
            **named_tokens(loaded.source_vocabulary, "source", sentence.source, pairs[number].source),
            **named_tokens(loaded.target_vocabulary, "target", sentence.target, pairs[number].target),
        }
        for number, sentence in found.shown.items()
    }
    if (folder / METRICS).is_file():
        result["trajectories"] = alpha_trajectories(read_journal(folder / METRICS)).to_dict()
    if any(share for site in found.sites.values() for share in site.null_share):
        result["null_signal"] = null_signal(loaded.model, sentences()).to_dict()
    result["importance"] = _importance(loaded, sample).to_dict()
    if recipe.data.gold is not None:
        result["alignment"] = _alignment(loaded, gold_pairs(recipe.data.gold))
    for named in found.named_heads():
        say(f"{named.site} head {named.head}: {named.role}, {named.score:.1%}")
    for reason in found.without():
        say(reason)
    write_arrays(folder / ARRAYS, found.arrays())
    write_json(folder / ANALYSIS, result)
    return result


def _importance(loaded: Translator, batches: Sequence[Batch]) -> HeadImportance:
    """How the loss changes without each head."""
    pad_id, alpha = loaded.target_vocabulary.pad_id, loaded.decoding.alpha

    def loss() -> float:
        found = translation_likelihood(loaded.model, batches, pad_id=pad_id, alpha=alpha)
        # A sparse output layer may give a token no probability at all.
        return math.log(found.epsilon_perplexity if alpha > 1.0 else found.perplexity)

    return head_importance(loaded.model, loss)


def _alignment(loaded: Translator, gold: Sequence[GoldPair]) -> dict[str, Any]:
    """AER of every head on every other pair, and there that of the one that is best on the pairs between."""
    if len(gold) < 2:
        return _aligned(loaded, gold).to_dict()
    chosen, tested = _aligned(loaded, gold[1::2]).best, _aligned(loaded, gold[::2])
    score = next(cell.score for cell in tested.cells() if cell[:3] == chosen[:3])
    choice = {"mode": chosen.mode, "layer": chosen.layer, "head": chosen.head, **score.to_dict()}
    return {**tested.to_dict(), "chosen": choice}


def _aligned(loaded: Translator, gold: Sequence[GoldPair]) -> AlignmentReport:
    return attention_alignment(loaded.model, loaded.source_vocabulary, loaded.target_vocabulary, gold)


def gold_pairs(text: str) -> list[GoldPair]:
    """Gold alignments from a file, or from the embedded grammar: "grammar:test:500"."""
    if text.startswith("grammar:"):
        return [GoldPair.from_example(example) for example in grammar_examples(text)]
    return read_gold(text)


def compare_runs(systems: dict[str, list[Path]], baseline: str | None = None) -> Comparison:
    """Paired bootstrap between systems, each one or more evaluated runs, such as seeds."""
    recipes = {folder: read_recipe(folder / RECIPE) for runs in systems.values() for folder in runs}
    tests = {json.dumps(recipe.data.test) for recipe in recipes.values()}
    if len(tests) != 1:
        raise ValueError(f"the runs have different test sets: {', '.join(sorted(tests))}")
    recipe = next(iter(recipes.values()))
    if recipe.data.test is None:
        raise ValueError(f"{next(iter(recipes))} names no [data] test to compare on")
    pairs = whole_text(recipe.data.test, recipe)
    found = {name: [_hypotheses(folder, pairs) for folder in runs] for name, runs in systems.items()}
    return compare(found, [pair.target for pair in pairs], baseline=baseline)


def _hypotheses(folder: Path, pairs: Sequence[Pair]) -> list[str]:
    """What `evaluate_run` wrote, if it did so with the present model and test set."""
    if not (folder / HYPOTHESES).is_file() or not (folder / EVALUATION).is_file():
        raise FileNotFoundError(f"{folder} has not been evaluated: run `tamis evaluate {folder}` first")
    if json.loads((folder / EVALUATION).read_text()).get("scored") != _scored(folder, pairs):
        raise ValueError(f"{folder} was evaluated with another model or test set: run `tamis evaluate {folder}` again")
    return (folder / HYPOTHESES).read_bytes().decode().split("\n")[:-1]


def _scored(folder: Path, pairs: Sequence[Pair]) -> dict[str, str]:
    """What an evaluation depends on, by checksum."""
    with (folder / MODEL / WEIGHTS).open("rb") as file:
        model = hashlib.file_digest(file, "sha256").hexdigest()
    text = "".join(f"{pair.source}\n{pair.target}\n" for pair in pairs)
    return {"model": model, "test": hashlib.sha256(text.encode()).hexdigest()}


Folders = Sequence[Path] | Mapping[str, Path]
"""Of runs, which are called as the mapping says, or as their folders are."""


def report_runs(folders: Folders, output: Path, title: str = "Tamis report") -> None:
    """One page about analysed runs side by side, with all that it needs inside; docs/report.md shows it."""
    text = page(content(analysed_runs(folders), title))
    with replacing(output) as file:
        file.write(text.encode())


def plot_runs(folders: Folders, output: Path, suffix: str = "pdf", dpi: int = 150) -> list[Path]:
    """The papers' figures of analysed runs, drawn by matplotlib into a folder; returns the files."""
    from tamis.report.plots import plot

    return plot(analysed_runs(folders), output, suffix, dpi)


def analysed_runs(folders: Folders) -> list[ReportRun]:
    """What the stages wrote about runs.  An evaluation may be missing, an analysis not."""
    listed = list(folders.values() if isinstance(folders, Mapping) else folders)
    names = _names(listed)  # also where they are not used: a run that comes twice is refused
    if isinstance(folders, Mapping):
        names = list(folders)
    return [_analysed(folder, name) for folder, name in zip(listed, names, strict=True)]


def _analysed(folder: Path, name: str) -> ReportRun:
    for path in (folder / ANALYSIS, folder / ARRAYS):
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has not been analysed: run `tamis analyze {folder}` first")
    evaluation = folder / EVALUATION
    return ReportRun(
        name=name,
        analysis=json.loads((folder / ANALYSIS).read_text()),
        shown=shown_sentences(read_arrays(folder / ARRAYS)),
        evaluation=json.loads(evaluation.read_text()) if evaluation.is_file() else {},
        records=list(read_journal(folder / METRICS)) if (folder / METRICS).is_file() else (),
        mechanism=_mechanism(read_recipe(folder / RECIPE)) if (folder / RECIPE).is_file() else None,
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """The last part of each folder's path, or as many as it takes to tell them apart."""
    whole = [folder.resolve().parts for folder in folders]
    if len(set(whole)) < len(whole):
        raise ValueError(f"each run counts once, got one twice in {', '.join(map(str, folders))}")
    names: list[str] = []
    for depth in range(1, max((len(parts) for parts in whole), default=0) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(names):
            break
    return names


def _mechanism(recipe: Recipe) -> str:
    """In words: "entmax", "entmax alpha 1.5", or what each site has where they differ."""
    settings = model_settings(recipe.model, vocab_size=1)
    found = {site.partition("_")[0]: _spec(getattr(settings, site)) for site in SITES}
    if len(set(found.values())) == 1:
        return found["encoder"]
    return ", ".join(f"{site} {text}" for site, text in found.items())


def _spec(spec: Any) -> str:
    if isinstance(spec, str):
        return spec
    return " ".join([spec["name"], *(f"{key} {value}" for key, value in spec.items() if key != "name")])
