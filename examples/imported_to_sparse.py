"""A model of transformers, imported and made sparse: what the switch costs, and what training takes back.

    python examples/imported_to_sparse.py --text book.txt

A small GPT-2 with a byte-level tokenizer is trained on a text by transformers' own code and saved by it, in place of a
real one.  `tamis import-hf` makes it ours.  Measured are the loss of theirs and of ours on held-out text, that of ours
switched to sparse attention without any training, and that of three runs which begin with it (`training.start`): dense,
with learned alphas, and with a fixed one.  Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor

from tamis.analysis import AttentionMetrics, capture, learned_alphas
from tamis.bench.timing import machine, save
from tamis.data.text import read_lines
from tamis.decoding import TextGenerator
from tamis.exchange.importing import import_folder
from tamis.language_runs import read_language_recipe, train_language
from tamis.models import CausalLM, CausalLMConfig
from tamis.nn.modes import evaluating
from tamis.training.start import start_from

END = "<|endoftext|>"
ALPHAS = (1.05, 1.1, 1.25, 1.5, 2.0)
ARMS: dict[str, dict[str, Any] | str] = {
    "dense": "softmax",
    "learned alphas": {"name": "entmax", "start": 1.05},
    "alpha 1.5": {"name": "entmax", "alpha": 1.5},
}


def train_theirs(folder: Path, lines: list[str], options: argparse.Namespace) -> transformers.GPT2LMHeadModel:
    """A GPT-2 of transformers with its tokenizer, trained and saved without any of our code."""
    folder.mkdir(parents=True)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(lines, vocab_size=options.pieces, special_tokens=[END], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = {"n_embd": options.width, "n_head": options.heads, "n_layer": options.layers, "n_positions": options.length}
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=tokenizer.get_vocab_size(), **sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    # The ends of lines are no tokens in our documents, so they are none here.
    ids = torch.tensor([number for line in lines for number in tokenizer.encode(line).ids])
    optimiser = torch.optim.AdamW(model.parameters(), options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, options.lr, total_steps=options.steps)
    for _ in range(options.steps):
        begin = torch.randint(len(ids) - options.length, (options.batch,))
        batch = torch.stack([ids[place : place + options.length] for place in begin.tolist()])
        optimiser.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimiser.step()
        schedule.step()
    model.eval().save_pretrained(folder)
    return model


def loss_of(logits: Tensor, rows: Tensor) -> float:
    """Cross-entropy per token of rows, the first of each given."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()


def measured(model: CausalLM, rows: Tensor) -> dict[str, Any]:
    """The loss of a model of ours, and the share of keys that have a weight."""
    metrics = AttentionMetrics()
    with evaluating(model), capture(model, metrics):
        loss = loss_of(model(rows), rows)
    alphas = [alpha for heads in learned_alphas(model).values() for alpha in heads]
    found: dict[str, Any] = {"loss": loss, "density": metrics.summary()["all"]["density"]}
    return {**found, "alphas": [min(alphas), max(alphas)]} if alphas else found


def switched(folder: Path, config: CausalLMConfig, alpha: float) -> CausalLM:
    """The imported weights with another alpha."""
    mechanism = {"name": "entmax", "alpha": alpha}
    model = CausalLM(CausalLMConfig.from_dict({**config.to_dict(), "mechanism": mechanism}))
    start_from(model, folder)
    return model


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = _options(arguments)
    lines = [line for line in read_lines(options.text) if line.strip()]
    cut = int(0.9 * len(lines))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        theirs = train_theirs(root / "theirs", lines[:cut], options)
        for name, part in (("train", lines[:cut]), ("valid", lines[cut:])):
            (root / f"{name}.txt").write_text("\n".join(part) + "\n", encoding="utf-8")
        folder = import_folder(root / "theirs", root / "imported")
        ours = TextGenerator.load(folder, "cpu")
        ids = torch.tensor([number for line in lines[cut:] for number in ours.vocabulary.encode(line)])
        rows = ids[: options.rows * options.length].view(-1, options.length)
        with torch.no_grad():
            logits = theirs(rows).logits
            difference = (logits - ours.model(rows)).abs().max().item()
        result: dict[str, Any] = {"theirs": loss_of(logits, rows), "largest_difference_of_logits": difference}
        result["imported"] = measured(ours.model, rows)
        result["switched"] = {
            f"alpha {alpha:g}": measured(switched(folder, ours.model.config, alpha), rows) for alpha in ALPHAS
        }
        result["trained"] = {}
        for arm, mechanism in ARMS.items():
            settings = {
                "text.train": f"{root}/train.txt",
                "text.valid": f"{root}/valid.txt",
                "text.folder": f"{root}/d",
            }
            settings |= {
                "training.steps": options.more,
                "training.warmup": options.more // 10,
                "training.lr": options.more_lr,
            }
            settings |= {
                "training.batch_tokens": options.batch * options.length,
                "training.checkpoint_every": options.more,
            }
            settings |= {"training.mechanism_lr": 30.0}
            overrides = [f"{key}={value}" for key, value in settings.items()]
            overrides.append(f"model.mechanism={_toml(mechanism)}")
            recipe = read_language_recipe(folder / "recipe.toml", overrides)
            run = train_language(recipe, root / arm.replace(" ", "-"), "cpu")
            result["trained"][arm] = measured(TextGenerator.load(run, "cpu").model, rows)
    record = {"settings": {**vars(options), "text": Path(options.text).name}, "machine": machine(), **result}
    record["settings"].pop("output")
    for name, found in [("imported", result["imported"]), *result["switched"].items(), *result["trained"].items()]:
        print(f"{name:<16} loss {found['loss']:.3f}  keys with a weight {found['density']:.1%}")
    if options.output is not None:
        save(Path(options.output), record)
    return record


def _toml(mechanism: dict[str, Any] | str) -> str:
    if isinstance(mechanism, str):
        return f'"{mechanism}"'
    items = [f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in mechanism.items()]
    return "{ " + ", ".join(items) + " }"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a file of text, also .gz or .xz")
    parser.add_argument("--output", help="a file for the figures, as JSON")
    for name, value in (
        ("pieces", 512), ("width", 64), ("heads", 4), ("layers", 2), ("length", 64), ("batch", 16), ("steps", 1500),
        ("more", 400), ("rows", 100),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--more-lr", type=float, default=1e-3)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
