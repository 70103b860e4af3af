"""From dense to sparse: a softmax language model of Hugging Face becomes adaptively sparse by continued training.

    python examples/dense_to_sparse.py                      # a minute on a CPU
    python examples/dense_to_sparse.py --size gpu           # a larger model, on a GPU where there is one

A small Llama is trained from scratch on sentence pairs of the embedded corpus ("the man reads => der Mann liest"), so
that it has something to look for.  It is then switched to sparse attention, and measured

    - right after the switch, to several alphas and mechanisms: what to expect without any training;
    - after some more training with learned alphas, with more or less pressure towards sparsity, beside the dense model
      trained for as long.

Nothing is downloaded.  The figures go to the screen and to a JSON file.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import tamis.hf
from tamis.analysis import AttentionMetrics, capture, learned_alphas
from tamis.bench.timing import machine, save
from tamis.data.grammar import generate

ARROW, END = "=>", "\n"

SIZES: dict[str, dict[str, int | float]] = {
    "cpu": {
        "layers": 2,
        "width": 64,
        "heads": 4,
        "length": 48,
        "batch": 16,
        "pairs": 6000,
        "steps": 400,
        "more": 120,
        "lr": 5e-3,
        "alpha_lr": 0.1,
    },
    "gpu": {
        "layers": 8,
        "width": 512,
        "heads": 8,
        "length": 256,
        "batch": 64,
        "pairs": 100_000,
        "steps": 2000,
        "more": 800,
        "lr": 1e-3,
        "alpha_lr": 0.03,
    },
}
SWITCHES: dict[str, dict[str, Any]] = {f"alpha {alpha:g}": {"alpha": alpha} for alpha in (1.05, 1.1, 1.25, 1.5, 2.0)}
SWITCHES |= {"asentmax": {"mechanism": "asentmax"}, "rela": {"mechanism": "rela"}}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    result = {
        "settings": {name: value for name, value in vars(options).items() if name != "output"},
        "machine": {**machine(), "transformers": transformers.__version__},
        "runs": [run(options, seed) for seed in options.seeds],
    }
    if options.output is not None:
        save(options.output, result)
    return result


def run(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """All measurements of one seed."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    text = Text(options, seed)
    model = build(options, text.vocabulary_size)
    print(f"seed {seed}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {options.device}")
    train(model, text, options, options.steps, [{"params": list(model.parameters()), "lr": options.lr}])
    found = {
        "seed": seed,
        "before": evaluate(model, text, options),
        "switched_without_training": switch_alone(model, text, options),
        "continued": {
            "dense": continue_training(model, text, options, None),
            **{f"pressure {p:g}": continue_training(model, text, options, p) for p in options.pressures},
        },
        "seconds": round(time.perf_counter() - began, 1),
    }
    show(found)
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="cpu")
    for name, value in SIZES["cpu"].items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value))
    parser.add_argument("--start", type=float, default=1.05, help="where alphas start")
    parser.add_argument(
        "--pressures", type=float, nargs="+", default=[0.0, 0.02, 0.1], help="of the mean distance of alphas from 2"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args(arguments)
    for name, value in SIZES[options.size].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


class Text:
    """Sentence pairs, end to end, cut into blocks of one length."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        counts = {"train": options.pairs, "valid": min(1000, options.pairs)}
        words = {split: pairs(count, split) for split, count in counts.items()}
        numbers = {word: number for number, word in enumerate(sorted(set(words["train"]) | set(words["valid"])))}
        self.vocabulary_size = len(numbers)
        self.train, self.valid = (
            torch.tensor([numbers[word] for word in words[split]], device=options.device) for split in words
        )
        self.length, self.batch, self.seed = options.length, options.batch, seed

    def draw(self, generator: torch.Generator) -> Tensor:
        """A batch of blocks from anywhere in the training text, (batch, length)."""
        starts = torch.randint(len(self.train) - self.length, (self.batch, 1), generator=generator)
        return self.train[starts.to(self.train.device) + torch.arange(self.length, device=self.train.device)]

    def held_out(self) -> tuple[Tensor, ...]:
        blocks = self.valid[: len(self.valid) // self.length * self.length].view(-1, self.length)
        return blocks.split(self.batch)


def pairs(count: int, split: str) -> list[str]:
    return [word for pair in generate(count, split) for word in (*pair.source, ARROW, *pair.target, END)]


def build(options: argparse.Namespace, vocabulary_size: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=max(1, options.heads // 2),
        max_position_embeddings=options.length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(options.device)


def train(
    model: PreTrainedModel,
    text: Text,
    options: argparse.Namespace,
    steps: int,
    groups: list[dict[str, Any]],
    pressure: float = 0.0,
) -> None:
    """Adam with a short warm-up and a linear descent; every call sees the same batches."""
    optimiser = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98), fused=options.device == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / 30, 1.0) * (1.0 - 0.9 * step / steps)
    )
    generator = torch.Generator().manual_seed(text.seed)
    model.train()
    for _ in range(steps):
        ids = text.draw(generator)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if pressure:
            loss = loss + pressure * tamis.hf.sparsity_pressure(model)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def evaluate(model: PreTrainedModel, text: Text, options: argparse.Namespace) -> float:
    """Cross-entropy per token of held-out text."""
    total, count = 0.0, 0
    for ids in text.held_out():
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        total, count = total + loss.item() * len(ids), count + len(ids)
    return total / count


@torch.no_grad()
def densities(model: PreTrainedModel, text: Text) -> dict[str, list[float]]:
    """The share of visible keys that each head gives a weight, by site."""
    metrics = AttentionMetrics()
    with capture(model, metrics):
        model(input_ids=text.held_out()[0], use_cache=False)
    return {site: list(found.density) for site, found in metrics.results().items()}


def switch_alone(model: PreTrainedModel, text: Text, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Loss and density of a softmax model whose mechanism is changed, with no training at all."""
    found = {}
    for name, mechanism in SWITCHES.items():
        tamis.hf.sparsify(model, **mechanism)
        found[name] = {"loss": evaluate(model, text, options), "density": mean(densities(model, text))}
    tamis.hf.densify(model)
    return found


def continue_training(
    model: PreTrainedModel, text: Text, options: argparse.Namespace, pressure: float | None
) -> dict[str, Any]:
    """Some more training: dense if `pressure` is None, else with learned alphas."""
    model = copy.deepcopy(model)
    groups = [{"params": list(model.parameters()), "lr": options.lr / 2}]
    if pressure is not None:
        tamis.hf.sparsify(model, "entmax", start=options.start)
        groups = tamis.hf.parameter_groups(model, options.lr / 2, options.alpha_lr)
    at_switch = evaluate(model, text, options)
    train(model, text, options, options.more, groups, pressure or 0.0)
    found: dict[str, Any] = {"at_switch": at_switch, "after": evaluate(model, text, options), "density": 1.0}
    if pressure is not None:
        by_site = densities(model, text)
        found |= {"density": mean(by_site), "densities": by_site, "alphas": learned_alphas(model)}
    return found


def mean(by_site: dict[str, list[float]]) -> float:
    values = [value for heads in by_site.values() for value in heads]
    return sum(values) / len(values)


def show(found: dict[str, Any]) -> None:
    print("  switched without training")
    print(f"    softmax     loss {found['before']:.4f}  density 1.000")
    for name, switched in found["switched_without_training"].items():
        print(f"    {name:10}  loss {switched['loss']:.4f}  density {switched['density']:.3f}")
    print("  continued: loss before, at the switch, after")
    for name, arm in found["continued"].items():
        losses = f"{found['before']:.4f} -> {arm['at_switch']:.4f} -> {arm['after']:.4f}"
        print(f"    {name:14}  {losses}  density {arm['density']:.3f}  {alphas_in_words(arm)}")
    print(f"  {found['seconds']} s")


def alphas_in_words(arm: dict[str, Any]) -> str:
    alphas = [alpha for heads in arm.get("alphas", {}).values() for alpha in heads]
    return f"alphas {min(alphas):.2f} to {max(alphas):.2f}" if alphas else ""


if __name__ == "__main__":
    main()
