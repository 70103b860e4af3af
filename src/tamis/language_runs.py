"""The stages of a language model, from a recipe to its results.  The run folder is what one hands on to the next.

    name = "novels"
    [text]        documents, and the length of a row  tamis.data.prepare.TextConfig
    [vocabulary]  SentencePiece                       tamis.data.prepare.VocabularyConfig
    [model]       sizes, mechanism and positions      tamis.models.CausalLMConfig
    [training]    the loop                            tamis.training.settings.TrainingConfig
    [decoding]    drawing                             tamis.decoding.DecodingConfig
    [evaluation]  at which lengths                    tamis.evaluation.language.LanguageConfig
    [arms.rope]   what an arm has different

data/NAME/      vocabulary, indexed documents                     prepare_language
runs/NAME/      config.toml, metrics.jsonl, checkpoints/, model/  train_language
    evaluation.json                                               evaluate_language
    dispersion.json                                               language_dispersion
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tamis.analysis.capture import capture
from tamis.analysis.metrics import AttentionMetrics
from tamis.config import as_toml, build_sections, check_name, flat_settings, read_tables
from tamis.data.documents import DocumentCorpus, build_documents, read_documents
from tamis.data.packing import Row
from tamis.data.passkey import PasskeyText
from tamis.data.prepare import PreparedText, TextConfig, VocabularyConfig, prepare_text
from tamis.decoding.generator import TextGenerator, check_method
from tamis.decoding.settings import DecodingConfig
from tamis.evaluation.dispersion import DispersionConfig, write_dispersion
from tamis.evaluation.language import LanguageConfig, score_passkeys, score_perplexity, spans
from tamis.files import write_json
from tamis.mechanisms.registry import read_mechanism
from tamis.models.causal_lm import CausalLM, CausalLMConfig
from tamis.models.pretrained import PretrainedModel
from tamis.nn.modes import evaluating
from tamis.report.drawing import check_format
from tamis.report.lengths import draw_language
from tamis.runs import EVALUATION, OBSERVED_TOKENS, density_record
from tamis.settings import Config, strings
from tamis.training.distributed import Process
from tamis.training.guards import memory_explained
from tamis.training.journal import Display, Record
from tamis.training.language import LanguageTask
from tamis.training.session import RECIPE, Save, leader_first, train_in
from tamis.training.settings import TrainingConfig
from tamis.training.trainer import Trainer

DEFAULTS: dict[str, dict[str, Any]] = {
    "training": {"optimizer": "adamw", "betas": (0.9, 0.95), "schedule": "cosine", "label_smoothing": 0.0},
    "decoding": {"method": "sample"},
}
"""Where language models differ from translation, and recipes need not say so."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LanguageRecipe(Config):
    """The sections of a recipe, each checked by its own class."""

    name: str
    text: TextConfig
    description: str = ""
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    model: dict[str, Any] = field(default_factory=dict)
    """Settings of CausalLMConfig but for vocab_size, which the vocabulary decides."""
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(**DEFAULTS["training"]))
    decoding: DecodingConfig = field(default_factory=lambda: DecodingConfig(**DEFAULTS["decoding"]))
    evaluation: LanguageConfig = field(default_factory=LanguageConfig)

    def __post_init__(self) -> None:
        strings(self, "name", "description")
        check_name(self.name)
        if "vocab_size" in self.model:
            raise ValueError("[model] vocab_size follows from the vocabulary and cannot be set")
        if self.training.monitor != "loss":
            raise ValueError(f"text has no {self.training.monitor} to monitor: training.monitor is 'loss'")
        check_method(self.decoding)
        model = self.model_config()
        known = model.position_limit()
        if known is not None and known < self.text.length:
            raise ValueError(
                f"model.max_length = {known} learned positions are fewer than text.length = {self.text.length} tokens"
            )

    def model_config(self, vocab_size: int = 1) -> CausalLMConfig:
        return CausalLMConfig.from_dict({**self.model, "vocab_size": vocab_size})

    def to_toml(self) -> str:
        """As a file that `read_language_recipe` reads back."""
        return as_toml(self)

    def settings(self) -> dict[str, Any]:
        return flat_settings(self, self.model_config(), "evaluation")

    @property
    def output_alpha(self) -> float:
        """Of the output layer."""
        return self.training.loss_alpha if self.training.loss == "entmax" else 1.0


def is_language(path: Path) -> bool:
    """Whether a file is the recipe of a language model, or a folder a run of one."""
    path = path / RECIPE if path.is_dir() else path
    return path.is_file() and "text" in read_tables(path)


def read_language_recipe(path: str | Path, overrides: Sequence[str] = (), arm: str | None = None) -> LanguageRecipe:
    """Read a TOML file, with one of its arms and then the overrides."""
    tables = read_tables(path, overrides, () if arm is None else (arm,))
    kinds: dict[str, type[Config]] = {
        "text": TextConfig,
        "vocabulary": VocabularyConfig,
        "training": TrainingConfig,
        "decoding": DecodingConfig,
        "evaluation": LanguageConfig,
    }
    try:
        if "data" in tables:
            raise ValueError(
                "a recipe has a [text] section, for a language model, or [data], for translation; not both"
            )
        return LanguageRecipe.from_dict(build_sections(tables, kinds, DEFAULTS))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def prepare_language(recipe: LanguageRecipe, say: Say = print) -> PreparedText:
    """The vocabulary and the indexed documents of a recipe, built now or earlier."""
    return prepare_text(recipe.text, recipe.vocabulary, Path(recipe.text.folder or f"data/{recipe.name}"), say)


def train_language(
    recipe: LanguageRecipe, folder: Path, device: str | None = None, display: Display | None = None
) -> Path:
    """Train, from where an earlier call was interrupted if one was; returns the folder of the model."""

    def build(own: Process, display: Display) -> tuple[Trainer, Save]:
        prepared = leader_first(own, display, lambda say: prepare_language(recipe, say))
        torch.manual_seed(recipe.training.seed)
        config = recipe.model_config(len(prepared.vocabulary))
        with memory_explained("the weights of the model", "the sizes under [model]"):
            model = CausalLM(config)
        task = LanguageTask(prepared, recipe.text, recipe.training)
        places = f"{len(task.train):,} documents, {task.updates.places:,} tokens"
        display.say(f"{folder}: {model.num_parameters():,} parameters, {places}, on {own.device}")
        observe = partial(_density, task=task, device=own.device)
        trainer = Trainer(model, task, recipe.training, folder, own, display=display, observe=observe)

        def save(model_folder: Path) -> None:
            final = CausalLM(config)
            final.load_state_dict(trainer.final_weights(), strict=False)
            decoding = recipe.decoding
            if decoding.alpha == 1.0:
                decoding = replace(decoding, alpha=recipe.output_alpha)
            TextGenerator(final, prepared.vocabulary, decoding).save(model_folder)

        return trainer, save

    return train_in(folder, recipe, read_language_recipe, build, device, display)


def _density(model: PretrainedModel, task: LanguageTask, device: torch.device) -> Record:
    """Of every head, on rows that stand for the validation set."""
    metrics = AttentionMetrics()
    with evaluating(model), capture(model, metrics):
        for part in task.sample(OBSERVED_TOKENS):
            task.measure(model, part.to(device))
    return density_record(metrics)


def evaluate_language(
    folder: Path, device: str | None = None, say: Say = print, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Perplexity and pass keys of a run at the lengths of its recipe; writes evaluation.json as it goes.

    `settings` change those of LanguageConfig.
    """
    recipe = read_language_recipe(folder / RECIPE)
    config = LanguageConfig.from_dict({**recipe.evaluation.to_dict(), **(settings or {})})
    loaded = TextGenerator.load(folder, device)
    passkeys = _passkeys(recipe, config, loaded) if config.passkey_samples else None
    result: dict[str, Any] = {
        "name": recipe.name,
        "mechanism": read_mechanism(loaded.model.config.mechanism)[0],
        "position": loaded.model.config.describe_position(),
        "trained_length": recipe.text.length,
        "training": {"steps": recipe.training.steps, "seed": recipe.training.seed},
        "evaluation": config.to_dict(),
        "device": str(loaded.device),
        "perplexity": [],
        "passkeys": [],
    }

    def write() -> None:
        write_json(folder / EVALUATION, result, indent=1)

    autocast = torch.autocast(loaded.device.type, torch.bfloat16, enabled=recipe.training.precision == "bf16")
    pieces = _pieces(folder, recipe, config, loaded)
    longest = max(config.lengths)
    with autocast:
        for length in config.lengths:
            # Windows as long as the pieces cannot slide.
            for mode in ("full", "sliding") if config.stride and length < longest else ("full",):
                found = score_perplexity(loaded.model, pieces, length, mode, config, recipe.output_alpha)
                say(found.describe())
                result["perplexity"].append(found.to_dict())
                write()
        for length in config.lengths if passkeys is not None else ():
            assert passkeys is not None
            row = [
                score_passkeys(loaded.model, passkeys, length, depth, config, recipe.output_alpha)
                for depth in config.passkey_depths
            ]
            shown = "  ".join(f"{score.accuracy:.0%} at {score.depth:g}" for score in row)
            say(f"{length:>7} tokens, passkey  {shown}")
            result["passkeys"] += [score.to_dict() for score in row]
            write()
    return result


def plot_language(
    folders: Sequence[Path] | Mapping[str, Path], output: Path, suffix: str = "pdf", dpi: int = 150
) -> list[Path]:
    """Draw evaluated runs against length, those of one mechanism and kind of positions averaged unless they have names;
    returns the files."""
    check_format(suffix, dpi)
    listed = list(folders.items()) if isinstance(folders, Mapping) else [("", folder) for folder in folders]
    found: dict[str, list[Any]] = {}
    for name, folder in listed:
        if not (folder / EVALUATION).is_file():
            raise FileNotFoundError(f"{folder} holds no {EVALUATION}: run `tamis evaluate {folder}` first")
        result = json.loads((folder / EVALUATION).read_text(encoding="utf-8"))
        found.setdefault(name or f"{result['mechanism']}, {result['position']}", []).append(result)
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"lengths.{suffix}"
    draw_language(found, path, dpi)
    return [path]


def language_dispersion(
    folder: Path, device: str | None = None, say: Say = print, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """How the heads of a run spread on test texts of the lengths of its recipe; writes dispersion.json."""
    recipe = read_language_recipe(folder / RECIPE)
    config = DispersionConfig.from_dict({**DispersionConfig().to_dict(), **(settings or {})})
    lengths = config.lengths or recipe.evaluation.lengths
    loaded = TextGenerator.load(folder, device)
    longest = max(lengths)
    wanted = replace(recipe.evaluation, lengths=(longest,), tokens=config.samples * longest)
    pieces = [torch.from_numpy(piece.inputs) for piece in _pieces(folder, recipe, wanted, loaded)]

    def texts(length: int) -> Tensor:
        return torch.stack(pieces)[:, :length]

    return write_dispersion(folder, recipe.name, "text", loaded.model, lengths, texts, config, say)


def _pieces(folder: Path, recipe: LanguageRecipe, config: LanguageConfig, loaded: TextGenerator) -> list[Row]:
    """Test texts as long as the greatest length."""
    if recipe.text.test is None:
        raise ValueError(f"{folder / RECIPE} names no [text] test to evaluate on")
    with tempfile.TemporaryDirectory() as scratch:
        documents = read_documents(recipe.text.test, recipe.text.documents, recipe.text.key)
        build_documents(documents, scratch, "test", loaded.vocabulary)
        return spans(DocumentCorpus.open(scratch, "test"), loaded.vocabulary, config)


def _passkeys(recipe: LanguageRecipe, config: LanguageConfig, loaded: TextGenerator) -> PasskeyText:
    """Before anything is measured, because a vocabulary or a length may not be fit for it."""
    passkeys = PasskeyText(loaded.vocabulary, recipe.text.passkey_digits)
    if passkeys.shortest > min(config.lengths):
        raise ValueError(
            f"a pass key and its question take {passkeys.shortest} tokens, and evaluation.lengths begin at "
            f"{min(config.lengths)}: take longer ones, or passkey_samples = 0"
        )
    passkeys.draw(torch.Generator(), "test", config.candidates)  # an error where there are too few numbers
    return passkeys
