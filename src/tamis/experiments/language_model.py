"""Language models, whole: documents, a decoder, perplexity and pass keys at lengths never trained.

name = "novels"
[text]        documents, and the length of a row  tamis.data.prepare.TextConfig
[vocabulary]  SentencePiece                       tamis.data.prepare.VocabularyConfig
[model]       sizes, mechanism and positions      tamis.models.CausalLMConfig
[training]    the loop                            LanguageTraining
[decoding]    drawing                             LanguageDecoding
[evaluation]  at which lengths                    tamis.evaluation.language.LanguageConfig
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tamis.analysis.capture import capture
from tamis.analysis.metrics import AttentionMetrics
from tamis.analysis.tokens import Sentences, describe_tokens
from tamis.data.documents import DocumentCorpus, build_documents, read_documents
from tamis.data.packing import Places, Row
from tamis.data.passkey import PasskeyText
from tamis.data.prepare import PreparedText, TextConfig, VocabularyConfig, prepare_text
from tamis.decoding.generator import TextGenerator, check_method
from tamis.decoding.settings import DecodingConfig
from tamis.evaluation.dispersion import DispersionConfig
from tamis.evaluation.language import LanguageConfig, score_passkeys, score_perplexity, spans
from tamis.evaluation.likelihood import LikelihoodMeter
from tamis.evaluation.table import Table
from tamis.experiments.base import (
    OBSERVED_TOKENS,
    Experiment,
    Material,
    OpenRun,
    Rows,
    Spreading,
    attention_rows,
    density_record,
    growing,
)
from tamis.experiments.folder import RunFolder
from tamis.mechanisms.registry import read_mechanism
from tamis.models.causal_lm import CausalLM, CausalLMConfig
from tamis.models.config import ModelConfig
from tamis.models.pretrained import PretrainedModel
from tamis.nn.modes import evaluating
from tamis.training.distributed import Process
from tamis.training.journal import Display, Record
from tamis.training.language import LanguageTask
from tamis.training.protocol import Task
from tamis.training.settings import TrainingConfig

ANALYSED_TOKENS = 1 << 15
"""Tokens of the text that an analysis looks at."""
SHOWN_TOKENS = 64
"""Tokens of a piece whose weights are kept to look at."""


@dataclass(frozen=True, kw_only=True)
class LanguageTraining(TrainingConfig):
    """The loop, with the defaults of language models."""

    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: str = "cosine"
    label_smoothing: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LanguageDecoding(DecodingConfig):
    """How to draw, with the defaults of language models."""

    method: str = "sample"


@dataclass(frozen=True, kw_only=True)
class LanguageModel(Experiment):
    """From documents to a model that continues texts."""

    section: ClassVar[str] = "text"
    what: ClassVar[str] = "a language model"
    model_class: ClassVar[type[ModelConfig]] = CausalLMConfig
    writes: ClassVar[str | None] = "generate"

    text: TextConfig
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    training: LanguageTraining = field(default_factory=LanguageTraining)
    decoding: LanguageDecoding = field(default_factory=LanguageDecoding)
    evaluation: LanguageConfig = field(default_factory=LanguageConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_method(self.decoding)
        known = self.model_config().position_limit()
        if known is not None and known < self.text.length:
            raise ValueError(
                f"model.max_length = {known} learned positions are fewer than text.length = {self.text.length} tokens"
            )

    def model_config(self, prepared: PreparedText | None = None) -> CausalLMConfig:
        if "vocab_size" in self.model:
            raise ValueError("[model] vocab_size follows from the vocabulary and cannot be set")
        size = 1 if prepared is None else len(prepared.vocabulary)
        return CausalLMConfig.from_dict({**self.model, "vocab_size": size})

    def prepare(self, display: Display) -> PreparedText:
        folder = Path(self.text.folder or f"data/{self.name}")
        return prepare_text(self.text, self.vocabulary, folder, display.say, display.track)

    def contents(self, prepared: PreparedText) -> Rows:
        return prepared.contents()

    def build_model(self, prepared: PreparedText) -> CausalLM:
        return CausalLM(self.model_config(prepared))

    def build_task(self, prepared: PreparedText) -> LanguageTask:
        return LanguageTask(prepared, self.text, self.training)

    def observe(self, prepared: PreparedText, task: Task, process: Process) -> Callable[[PretrainedModel], Record]:
        """Measure the density of every head, on rows that stand for the validation set."""
        assert isinstance(task, LanguageTask)

        def found(model: PretrainedModel) -> Record:
            metrics = AttentionMetrics()
            with evaluating(model), capture(model, metrics):
                for part in task.sample(OBSERVED_TOKENS):
                    task.measure(model, part.to(process.device))
            return density_record(metrics)

        return found

    def amount(self, task: Task) -> str:
        assert isinstance(task, LanguageTask)
        return f"{len(task.train):,} documents, {task.updates.places:,} tokens"

    def export(self, model: PretrainedModel, prepared: PreparedText, folder: Path) -> None:
        assert isinstance(model, CausalLM)
        decoding = self.decoding.of_output(self.training.output_alpha)
        TextGenerator(model, prepared.vocabulary, decoding).save(folder)

    def usage(self, folder: str) -> str:
        return (
            "from tamis.decoding import TextGenerator\n\n"
            f'generator = TextGenerator.load("{folder}")\ngenerator(["How a text begins"], max_length=50)'
        )

    def has_test(self) -> bool:
        return self.text.test is not None

    def check_evaluation(self, settings: dict[str, Any]) -> None:
        LanguageConfig.from_dict({**self.evaluation.to_dict(), **settings})

    def evaluate(
        self, run: RunFolder, device: str | None, settings: dict[str, Any], display: Display
    ) -> dict[str, Any]:
        """Perplexity and pass keys at some lengths; written as it goes.  `settings` change [evaluation]."""
        config = LanguageConfig.from_dict({**self.evaluation.to_dict(), **settings})
        loaded = TextGenerator.load(run.path, device)
        pieces = self._pieces(run, config, loaded)
        passkeys = self._passkeys(config, loaded) if config.passkey_samples else None
        result: dict[str, Any] = {
            "name": self.name,
            "mechanism": read_mechanism(loaded.model.config.mechanism)[0],
            "position": loaded.model.config.describe_position(),
            "trained_length": self.text.length,
            "training": {"steps": self.training.steps, "seed": self.training.seed},
            "evaluation": config.to_dict(),
            "device": str(loaded.device),
            "passkeys_trained": self.text.passkey_share > 0.0,
            "passkey_chance": 1.0 / config.candidates,
            "perplexity": [],
            "passkeys": [],
        }
        modes = [
            (length, mode)
            for length in config.lengths
            # Windows as long as the pieces cannot slide.
            for mode in (("full", "sliding") if config.stride and length < max(config.lengths) else ("full",))
        ]
        depths, alpha = [] if passkeys is None else config.passkey_depths, self.training.output_alpha
        steps = len(modes) + len(config.lengths) * len(depths)
        with self._autocast(loaded), display.track("evaluating", steps) as advance:
            for done, (length, mode) in enumerate(modes, 1):
                found = score_perplexity(loaded.model, pieces, length, mode, config, alpha)
                display.say(found.describe())
                result["perplexity"].append(found.to_dict())
                run.write(run.evaluation, result)
                advance(done)
            for length in config.lengths if passkeys is not None else ():
                assert passkeys is not None
                scores = []
                for depth in depths:
                    scores.append(score_passkeys(loaded.model, passkeys, length, depth, config, alpha))
                    advance(len(modes) + len(result["passkeys"]) + len(scores))
                shown = "  ".join(f"{score.accuracy:.0%} at {score.depth:g}" for score in scores)
                display.say(f"{length:>7} tokens, passkey  {shown}  ({self._told_of_passkeys(result)})")
                result["passkeys"] += [score.to_dict() for score in scores]
                run.write(run.evaluation, result)
            result["attention"] = self._attention(loaded, pieces).to_dict()
        return result

    @staticmethod
    def _told_of_passkeys(evaluation: dict[str, Any]) -> str:
        chance = f"chance: {evaluation.get('passkey_chance', 0.1):.0%}"
        return chance if evaluation.get("passkeys_trained", True) else f"not trained: text.passkey_share = 0; {chance}"

    def scores(self, evaluation: dict[str, Any]) -> Rows:
        rows = [
            (f"perplexity, {row['length']:,} tokens", f"{row['perplexity']:.2f} a subword")
            for row in evaluation["perplexity"]
            if row["mode"] == "full" and row["perplexity"] is not None
        ]
        lengths = sorted({row["length"] for row in evaluation["passkeys"]})
        for length in lengths:
            found = [row["accuracy"] for row in evaluation["passkeys"] if row["length"] == length]
            told = self._told_of_passkeys(evaluation)
            rows.append((f"pass keys, {length:,} tokens", f"{sum(found) / len(found):.0%} of all depths  ({told})"))
        return rows + attention_rows(evaluation)

    def material(self, run: RunFolder, data: Any, device: str | None, shown: int) -> Material:
        loaded = TextGenerator.load(run.path, device)
        text = self.text.valid if data is None else data
        with tempfile.TemporaryDirectory() as scratch:
            corpus = self._corpus(text, loaded, Path(scratch))
            rows = _windows(corpus, loaded, self.text.length, ANALYSED_TOKENS)
            extracts = _windows(corpus, loaded, SHOWN_TOKENS, shown * SHOWN_TOKENS)[:shown]
            places = Places(corpus, loaded.vocabulary)
            texts = growing(loaded.model, self.text.length, len(places))
            longer = {n: _spread(places, n, 4) for n in texts}
        language = "en" if isinstance(text, str) and text.startswith("grammar:") else None
        sample = rows[:: max(1, len(rows) * self.text.length // OBSERVED_TOKENS)]

        def sentences(some: Sequence[Row]) -> Iterator[Sentences]:
            for row in some:
                ids = torch.from_numpy(row.inputs)[None]
                yield Sentences(target=describe_tokens(ids, loaded.vocabulary, language))

        return Material(
            model=loaded.model,
            data=text,
            sentences=lambda: sentences(rows),
            batches=len(rows),
            loss=lambda: self._log_perplexity(loaded, sample),
            tokens=lambda _, sentence: {"source": [], "target": loaded.vocabulary.pieces(sentence.target.tolist())},
            extracts=list(sentences(extracts)),
            growing=longer,
        )

    def _log_perplexity(self, loaded: TextGenerator, rows: Sequence[Row]) -> float:
        meter = LikelihoodMeter(self.training.output_alpha)
        with evaluating(loaded.model), self._autocast(loaded):
            for row in rows:
                inputs, labels = (torch.from_numpy(side)[None].to(loaded.device) for side in (row.inputs, row.labels))
                meter.update(loaded.model(inputs), labels)
        found = meter.result()
        # A sparse output layer may give a token no probability at all.
        return math.log(found.epsilon_perplexity if self.training.output_alpha > 1.0 else found.perplexity)

    def spreading(self, run: RunFolder, device: str | None, config: DispersionConfig) -> Spreading:
        loaded = TextGenerator.load(run.path, device)
        lengths = config.lengths or self.evaluation.lengths
        longest = max(lengths)
        wanted = replace(self.evaluation, lengths=(longest,), tokens=config.samples * longest)
        pieces = [torch.from_numpy(piece.inputs) for piece in self._pieces(run, wanted, loaded)]
        return Spreading(loaded.model, "text", lengths, lambda length: torch.stack(pieces)[:, :length])

    def compare(self, systems: Mapping[str, Sequence[OpenRun]], baseline: str | None) -> Table:
        """Perplexities at each length, runs averaged."""
        found = {name: [run.folder.evaluated()["perplexity"] for run in runs] for name, runs in systems.items()}
        return Table.of("perplexity, tokens", {
            name: [(row["length"], row["perplexity"]) for rows in runs for row in rows if row["mode"] == "full"]
            for name, runs in found.items()
        }, digits=2)  # fmt: skip

    def draw(self, systems: Mapping[str, Sequence[OpenRun]], path: Path, dpi: int) -> str:
        """Perplexity and pass keys against length."""
        from tamis.report.lengths import draw_language

        draw_language({name: [run.folder.evaluated() for run in runs] for name, runs in systems.items()}, path, dpi)
        return self.compare(systems, None).describe()

    def _attention(self, loaded: TextGenerator, pieces: Sequence[Row]) -> AttentionMetrics:
        """How heads attend within the length in training."""
        metrics = AttentionMetrics()
        length = self.text.length
        with evaluating(loaded.model), capture(loaded.model, metrics):
            for piece in pieces[: max(1, OBSERVED_TOKENS // length)]:
                loaded.model(torch.from_numpy(piece.inputs[:length])[None].to(loaded.device))
        return metrics

    def _autocast(self, loaded: TextGenerator) -> torch.autocast:
        return torch.autocast(loaded.device.type, torch.bfloat16, enabled=self.training.precision == "bf16")

    def _corpus(self, text: str | list[str], loaded: TextGenerator, scratch: Path) -> DocumentCorpus:
        documents = read_documents(text, self.text.documents, self.text.key)
        build_documents(documents, scratch, "test", loaded.vocabulary)
        return DocumentCorpus.open(scratch, "test")

    def _pieces(self, run: RunFolder, config: LanguageConfig, loaded: TextGenerator) -> list[Row]:
        """Test texts as long as the greatest length."""
        if self.text.test is None:
            raise ValueError(
                f"{run.recipe} names no [text] test to evaluate on: add it to the recipe and run `tamis train` again, "
                "which keeps what is trained"
            )
        with tempfile.TemporaryDirectory() as scratch:
            return spans(self._corpus(self.text.test, loaded, Path(scratch)), loaded.vocabulary, config)

    def _passkeys(self, config: LanguageConfig, loaded: TextGenerator) -> PasskeyText:
        """Before anything is measured, because a vocabulary or a length may not be fit for it."""
        passkeys = PasskeyText(loaded.vocabulary, self.text.passkey_digits)
        if passkeys.shortest > min(config.lengths):
            raise ValueError(
                f"a pass key and its question take {passkeys.shortest} tokens, and evaluation.lengths begin at "
                f"{min(config.lengths)}: take longer ones, or passkey_samples = 0"
            )
        passkeys.draw(torch.Generator(), "test", config.candidates)  # an error where there are too few numbers
        return passkeys


def _windows(corpus: DocumentCorpus, loaded: TextGenerator, length: int, tokens: int) -> list[Row]:
    """Pieces of single documents of at most `length` places, spread evenly over the text, with about so many tokens."""
    starts = [
        (number, start, min(length, places - start))
        for number, places in enumerate((corpus.lengths + 1).tolist())
        for start in range(0, places, length)
        if places - start > 1
    ]
    whole = sum(size for _, _, size in starts)
    count = max(1, min(len(starts), len(starts) * tokens // max(1, whole)))
    chosen = [starts[len(starts) * number // count] for number in range(count)]
    return [Places(corpus, loaded.vocabulary, np.array([number])).row(start, size) for number, start, size in chosen]


def _spread(places: Places, length: int, count: int) -> Tensor:
    """(count, length) places, spread evenly over a text."""
    starts = [(len(places) - length) * number // max(1, count - 1) for number in range(count)]
    return torch.stack([torch.from_numpy(places.row(start, length).inputs) for start in starts])
