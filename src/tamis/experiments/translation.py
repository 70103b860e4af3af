"""Translation, whole: pairs of texts, an encoder-decoder, BLEU and chrF, alignments.

name = "multi30k-en-de"
[data]        files, languages, limits            tamis.data.prepare.DataConfig
[vocabulary]  SentencePiece                       tamis.data.prepare.VocabularyConfig
[model]       sizes and mechanisms                tamis.models.Seq2SeqConfig
[training]    the loop                            tamis.training.settings.TrainingConfig
[decoding]    beam search                         tamis.decoding.DecodingConfig
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tamis.analysis.capture import capture
from tamis.analysis.metrics import AttentionMetrics
from tamis.analysis.tokens import Sentences, named_tokens
from tamis.data.batching import Batch, Updates, collate, split_batch, spread
from tamis.data.corpus import Limits, ParallelCorpus, build_corpus
from tamis.data.prepare import DataConfig, Prepared, VocabularyConfig, prepare
from tamis.data.text import BadLine, Pair, grammar_examples, read_pairs
from tamis.decoding.settings import DecodingConfig
from tamis.decoding.translator import Translator
from tamis.evaluation.alignment import AlignmentReport, attention_alignment
from tamis.evaluation.gold import GoldPair, read_gold
from tamis.evaluation.likelihood import translation_likelihood
from tamis.evaluation.translation import Comparison, compare, score_translations
from tamis.experiments.base import (
    OBSERVED_TOKENS,
    Experiment,
    Material,
    OpenRun,
    Rows,
    attention_rows,
    density_record,
)
from tamis.experiments.folder import RunFolder
from tamis.files import digest_of, replacing
from tamis.models.config import ModelConfig
from tamis.models.pretrained import WEIGHTS, PretrainedModel
from tamis.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tamis.nn.modes import evaluating
from tamis.training.distributed import Process
from tamis.training.journal import Display, Record
from tamis.training.protocol import Task
from tamis.training.translation import TranslationTask

SITES = ("encoder_mechanism", "decoder_mechanism", "cross_mechanism")
OF_THE_DATA = ("vocab_size", "source_vocab_size", "pad_id")


@dataclass(frozen=True, kw_only=True)
class Translation(Experiment):
    """From pairs of texts to a model that translates.  `mechanism` under [model] stands for all three sites."""

    section: ClassVar[str] = "data"
    what: ClassVar[str] = "translation"
    model_class: ClassVar[type[ModelConfig]] = Seq2SeqConfig
    writes: ClassVar[str | None] = "translate"
    monitors: ClassVar[tuple[str, ...]] = ("bleu",)
    not_of_the_weights: ClassVar[tuple[str, ...]] = ()

    data: DataConfig
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.model_config().position_limit()
        if known is not None and known < self.data.max_length:
            raise ValueError(
                f"model.max_length = {known} learned positions are fewer than "
                f"data.max_length = {self.data.max_length} subwords"
            )

    def model_config(self, prepared: Prepared | None = None) -> Seq2SeqConfig:
        for name in OF_THE_DATA:
            if name in self.model:
                raise ValueError(f"[model] {name} follows from the vocabulary and cannot be set")
        settings = dict(self.model)
        everywhere = settings.pop("mechanism", None)
        sizes: dict[str, Any] = {"vocab_size": 1}
        if prepared is not None:
            source, target = prepared.source_vocabulary, prepared.target_vocabulary
            sizes = {"vocab_size": len(target), "pad_id": source.pad_id}
            sizes["source_vocab_size"] = None if source is target else len(source)
        shared = {} if everywhere is None else dict.fromkeys(SITES, everywhere)
        return Seq2SeqConfig.from_dict({**shared, **settings, **sizes})

    def prepare(self, display: Display) -> Prepared:
        folder = Path(self.data.folder or f"data/{self.name}")
        return prepare(self.data, self.vocabulary, folder, display.say, display.track)

    def contents(self, prepared: Prepared) -> Rows:
        return prepared.contents()

    def build_model(self, prepared: Prepared) -> Seq2Seq:
        return Seq2Seq(self.model_config(prepared))

    def build_task(self, prepared: Prepared) -> TranslationTask:
        return TranslationTask(prepared, self.training)

    def observe(self, prepared: Prepared, task: Task, process: Process) -> Callable[[PretrainedModel], Record]:
        """Measure the density of every head, and BLEU where that is monitored."""
        assert isinstance(task, TranslationTask)
        # Now, because a text that cannot be scored should not be found out after the first thousand steps.
        pairs = self.whole_text(self.data.valid) if self.training.monitor == "bleu" else []

        def found(model: PretrainedModel) -> Record:
            metrics = AttentionMetrics()
            for batch in task.sample(OBSERVED_TOKENS):
                observe(model, batch.to(process.device), prepared.target_vocabulary.pad_id, metrics)
            record = density_record(metrics)
            if pairs:
                lines = self.translator(model, prepared)([pair.source for pair in pairs])
                scored = score_translations(lines, [pair.target for pair in pairs], samples=1)
                record["valid_bleu"] = scored.bleu.score
            return record

        return found

    def translator(self, model: PretrainedModel, prepared: Prepared) -> Translator:
        """Return the model with its vocabularies and this way of decoding."""
        assert isinstance(model, Seq2Seq)
        decoding = self.decoding.of_output(self.training.output_alpha)
        return Translator(model, prepared.source_vocabulary, prepared.target_vocabulary, decoding)

    def amount(self, task: Task) -> str:
        assert isinstance(task, TranslationTask)
        return f"{len(task.train):,} pairs"

    def export(self, model: PretrainedModel, prepared: Prepared, folder: Path) -> None:
        self.translator(model, prepared).save(folder)

    def usage(self, folder: str) -> str:
        return (
            "from tamis.decoding import Translator\n\n"
            f'translator = Translator.load("{folder}")\ntranslator(["A sentence."])'
        )

    def has_test(self) -> bool:
        return self.data.test is not None

    def check_evaluation(self, settings: dict[str, Any]) -> None:
        DecodingConfig.from_dict({**self.decoding.to_dict(), **settings})

    def evaluate(
        self, run: RunFolder, device: str | None, settings: dict[str, Any], display: Display
    ) -> dict[str, Any]:
        """Translate and score the test set, and align the gold pairs; `settings` change the decoding."""
        pairs = self._test_pairs(run)
        loaded = Translator.load(run.path, device)
        settings = DecodingConfig.from_dict({**loaded.decoding.to_dict(), **settings}).to_dict()
        began = time.perf_counter()
        with display.track("translating", len(pairs)) as advance:
            found = loaded([pair.source for pair in pairs], progress=lambda done, total: advance(done), **settings)
        seconds = time.perf_counter() - began
        display.say("scoring, with a thousand resamples")
        scores = score_translations(found, [pair.target for pair in pairs])
        result: dict[str, Any] = {
            "name": self.name,
            "scored": _scored(run, pairs),
            "decoding": settings,
            "translation": scores.to_dict(),
            "sentences_per_second": len(pairs) / seconds,
            "device": str(loaded.device),
            **_teacher_forced(loaded, pairs),
        }
        if self.data.gold is not None:
            report = _aligned(loaded, gold_pairs(self.data.gold))
            display.say(report.describe())
            result["alignment"] = report.to_dict()
        with replacing(run.hypotheses) as file:
            file.write("".join(f"{line}\n" for line in found).encode())
        result["hypotheses"] = digest_of(run.hypotheses)
        return result

    def scores(self, evaluation: dict[str, Any]) -> Rows:
        rows = []
        for name, title in (("bleu", "BLEU"), ("chrf", "chrF")):
            score = evaluation["translation"][name]
            interval = f"[{score['low']:.2f}, {score['high']:.2f}]"
            rows.append((title, f"{score['score']:.2f}  {interval}  {score['signature']}"))
        likelihood = evaluation["likelihood"]
        name = "perplexity" if likelihood["perplexity"] is not None else "epsilon_perplexity"
        rows.append((name.replace("_", "-"), f"{likelihood[name]:.2f} a subword"))
        rows += attention_rows(evaluation)
        if "alignment" in evaluation:
            best = evaluation["alignment"]["best"]
            head = "the average of heads" if best["head"] is None else f"head {best['head']}"
            where = f"{head} of layer {best['layer']}, {best['mode']}"
            rows.append(("AER", f"{best['aer']:.1%}  [{best['low']:.1%}, {best['high']:.1%}]  {where}"))
        return [*rows, ("speed", f"{evaluation['sentences_per_second']:.1f} sentences/s")]

    def material(self, run: RunFolder, data: Any, device: str | None, shown: int) -> Material:
        loaded = Translator.load(run.path, device)
        text = self.data.valid if data is None else data
        pairs = self.whole_text(text)
        with tempfile.TemporaryDirectory() as scratch:
            batches, sample = _batches(loaded, pairs, Path(scratch))
        grammar = isinstance(text, str) and text.startswith("grammar:")
        languages = ("en", "de") if grammar else (self.data.source_language, self.data.target_language)
        sides = loaded.source_vocabulary, loaded.target_vocabulary
        return Material(
            model=loaded.model,
            data=text,
            sentences=lambda: (Sentences.of_batch(batch, *sides, languages) for batch in batches),
            batches=len(batches),
            loss=lambda: _log_perplexity(loaded, sample),
            tokens=lambda number, sentence: {
                **named_tokens(loaded.source_vocabulary, "source", sentence.source, pairs[number].source),
                **named_tokens(loaded.target_vocabulary, "target", sentence.target, pairs[number].target),
            },
            translates=True,
            numbers=sorted(number for batch in batches for number in batch.indices)[:shown],
            further=lambda: {} if self.data.gold is None else {"alignment": _alignment(loaded, self.data.gold)},
        )

    def compare(self, systems: Mapping[str, Sequence[OpenRun]], baseline: str | None) -> Comparison:
        """Paired bootstrap between systems on their test set, the runs of a system pooled."""
        every = [run for runs in systems.values() for run in runs]
        tests = {json.dumps(run.experiment.data.test) for run in every if isinstance(run.experiment, Translation)}
        if len(tests) != 1:
            raise ValueError(f"the runs have different test sets: {', '.join(sorted(tests))}")
        pairs = self._test_pairs(every[0].folder)
        found = {name: [_hypotheses(run.folder, pairs) for run in runs] for name, runs in systems.items()}
        return compare(found, [pair.target for pair in pairs], baseline=baseline)

    def whole_text(self, text: str | list[str]) -> list[Pair]:
        """Read all pairs of a text that nothing may be left out of, such as a test set."""
        pairs = []
        for pair in read_pairs(text, self.data.source_language, self.data.target_language):
            if isinstance(pair, BadLine):
                raise ValueError(f"line {pair.line} of {text}: {pair.reason}; a set to be scored must be whole")
            pairs.append(pair)
        return pairs

    def _test_pairs(self, run: RunFolder) -> list[Pair]:
        if self.data.test is None:
            raise ValueError(
                f"{run.recipe} names no [data] test to evaluate on: add it to the recipe and run `tamis train` again, "
                "which keeps what is trained"
            )
        return self.whole_text(self.data.test)


def observe(model: PretrainedModel, batch: Batch, pad_id: int, metrics: AttentionMetrics) -> None:
    """Add the attention of a model on a batch to some metrics."""
    with evaluating(model), capture(model, metrics):
        # A column of padding is not a query: only positions that are labels count.
        model(batch.source, batch.target, target_mask=batch.labels != pad_id)


def gold_pairs(text: str) -> list[GoldPair]:
    """Gold alignments from a file, or from the embedded grammar: "grammar:test:500"."""
    if text.startswith("grammar:"):
        return [GoldPair.from_example(example) for example in grammar_examples(text)]
    return read_gold(text)


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


def _log_perplexity(loaded: Translator, batches: Sequence[Batch]) -> float:
    pad_id, alpha = loaded.target_vocabulary.pad_id, loaded.decoding.alpha
    found = translation_likelihood(loaded.model, batches, pad_id=pad_id, alpha=alpha)
    # A sparse output layer may give a token no probability at all.
    return math.log(found.epsilon_perplexity if alpha > 1.0 else found.perplexity)


def _alignment(loaded: Translator, text: str) -> dict[str, Any]:
    """AER of every head on every other gold pair, and there that of the one that is best on the pairs between."""
    gold = gold_pairs(text)
    if len(gold) < 2:
        return _aligned(loaded, gold).to_dict()
    chosen, tested = _aligned(loaded, gold[1::2]).best, _aligned(loaded, gold[::2])
    score = next(cell.score for cell in tested.cells() if cell[:3] == chosen[:3])
    choice = {"mode": chosen.mode, "layer": chosen.layer, "head": chosen.head, **score.to_dict()}
    return {**tested.to_dict(), "chosen": choice}


def _aligned(loaded: Translator, gold: Sequence[GoldPair]) -> AlignmentReport:
    return attention_alignment(loaded.model, loaded.source_vocabulary, loaded.target_vocabulary, gold)


def _hypotheses(run: RunFolder, pairs: Sequence[Pair]) -> list[str]:
    """What an evaluation wrote, if it was of the present model and test set."""
    evaluation = run.evaluated()
    if evaluation.get("scored") != _scored(run, pairs):
        raise ValueError(f"{run} was evaluated with another model or test set: run `tamis evaluate {run}` again")
    if not run.hypotheses.is_file() or evaluation.get("hypotheses") not in (None, digest_of(run.hypotheses)):
        raise ValueError(f"{run.hypotheses} is missing, or not as it was written: run `tamis evaluate {run}` again")
    return run.hypotheses.read_bytes().decode().split("\n")[:-1]


def _scored(run: RunFolder, pairs: Sequence[Pair]) -> dict[str, str]:
    """What an evaluation depends on, by checksum."""
    text = "".join(f"{pair.source}\n{pair.target}\n" for pair in pairs)
    return {"model": digest_of(run.standing_model() / WEIGHTS), "test": hashlib.sha256(text.encode()).hexdigest()}
