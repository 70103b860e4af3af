"""What a training run is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tamis.parallel.context import WAYS
from tamis.settings import (
    LARGEST_SEED,
    Config,
    Spec,
    at_least,
    booleans,
    choose,
    numbers,
    optional_at_least,
    optional_strings,
    shares,
    strings,
)
from tamis.training.schedules import read_schedules

SMALLEST_EPS = 1e-30  # what is much smaller is 0 in fp32, and a gradient of 0 then a step of NaN
SCHEDULES = ("inverse-sqrt", "noam", "cosine", "constant")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Config):
    """The loop, from the size of a batch to when it ends."""

    steps: int = 10_000
    """Updates of the weights."""
    batch_tokens: int = 4096
    """Tokens of one update, over all processes and all accumulated parts: padded tokens of the longer side."""
    device_tokens: int | None = None
    """The most that one process puts through the model at once; an update beyond that is accumulated in parts."""
    seed: int = 1
    """Seed of the weights at the start, the order of the data and dropout."""
    start: str | None = None
    """A run, a checkpoint or a saved model of the same sizes and vocabulary, with any mechanism: training starts from
    its weights, with a new optimiser."""

    optimizer: str = "adam"
    """"adam", "adamw", or "muon" for the matrices inside of layers, with AdamW for all else."""
    lr: float = 1e-3
    """The highest rate of the schedule; for "noam" the factor before d^-0.5 min(step^-0.5, step warmup^-1.5)."""
    muon_lr: float = 0.02
    """What stands in the place of `lr` for those matrices.  Unlike it, it is about the same for every width."""
    schedule: str = "inverse-sqrt"
    """"inverse-sqrt" or "noam" (after the warm-up the rate falls with the root of the step), "cosine" or "constant"."""
    warmup: int = 1000
    """Steps of linear growth."""
    betas: tuple[float, float] = (0.9, 0.98)
    """Decay of Adam's averages of gradients and of their squares."""
    eps: float = 1e-9
    """What Adam adds to the root that it divides by."""
    weight_decay: float = 0.0
    """Decay of matrices and embeddings; biases, norms, alphas, gains and gates never decay."""
    mechanism_lr: float = 4.0
    """Rate of alphas, gains, gates and whatever else a mechanism learns, as a multiple of everybody's."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 leaves it as it is."""
    schedules: tuple[Mapping[str, Any], ...] = ()
    """What else moves: { name = "alpha", end = 4000 } from 1, or `start`, to the alpha of [model], { name = "slope",
    end = 600 } from leaky to rectified for ReLA, { name = "pressure", target = 0.02 } on learned alphas.  In a straight
    line between the steps `begin` and `end`; pressure begins after the warm-up by default."""

    loss: str = "cross-entropy"
    """Or "entmax": the output layer becomes sparse too."""
    loss_alpha: float = 1.5
    """Alpha of the entmax loss."""
    label_smoothing: float = 0.1
    """Share of the probability that is spread over all tokens."""
    precision: str = "fp32"
    """Or "bf16": autocast."""
    compile: bool = False
    """Have torch.compile fuse what lies between products and attention.  Goes together with `cuda_graphs`."""
    cuda_graphs: bool = False
    """On one GPU: capture the passes of each shape of batch and replay them, for models that the host cannot keep up
    with.  Batches are padded to fewer shapes."""
    deterministic: bool = False
    """On a GPU: resume bit-exactly, at some cost.  A CPU always does."""
    parallel: str = "ddp"
    """Under torchrun: "ddp", or "fsdp" to shard weights, gradients and optimiser too."""
    context_parallel: int = 1
    """Under torchrun: processes that share each sequence, each holding some of its tokens; 2 of 8 processes leave 4
    that have rows of their own."""
    context: str = "auto"
    """How those attend to each other's tokens: "heads", "keys", or "auto" for the one that sends less."""

    checkpoint_every: int = 1000
    """Steps from one validation and checkpoint to the next."""
    keep: int = 5
    """Checkpoints that stay, besides the best."""
    monitor: str = "loss"
    """What makes a checkpoint the best: "loss", or in translation "bleu" (beam search over the validation set)."""
    patience: int | None = None
    """Validations without a better one until training ends; None: never."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, which is then validated and exported; 0: none."""
    average: int = 1
    """Export the mean of the last so many checkpoints; 1 exports the best one."""
    log_every: int = 50
    """Steps from one record to the next."""
    tensorboard: bool = False
    """Write records for TensorBoard too: short for loggers = ["tensorboard"]."""
    loggers: tuple[Spec, ...] = ()
    """Further places for records: "tensorboard", "wandb", "mlflow", or tables with a name and settings:
    { name = "wandb", project = "sieve" }."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", _betas(self.betas))
        object.__setattr__(self, "loggers", _specs(self.loggers))
        at_least(
            self, 1, "steps", "batch_tokens", "checkpoint_every", "keep", "average", "log_every", "context_parallel"
        )
        at_least(self, 0, "warmup")
        at_least(self, 0, "seed", largest=LARGEST_SEED)
        optional_at_least(self, 1, "device_tokens", "patience")
        optional_strings(self, "start")
        strings(self, "monitor")
        shares(self, "label_smoothing", "ema")
        booleans(self, "compile", "cuda_graphs", "deterministic", "tensorboard")
        numbers(self, "lr", "muon_lr", "eps", above=0.0)
        numbers(self, "weight_decay", "mechanism_lr", "clip", "loss_alpha")
        choose("optimizer", self.optimizer, ("adam", "adamw", "muon"))
        choose("schedule", self.schedule, SCHEDULES)
        choose("loss", self.loss, ("cross-entropy", "entmax"))
        choose("precision", self.precision, ("fp32", "bf16"))
        choose("parallel", self.parallel, ("ddp", "fsdp"))
        choose("context", self.context, WAYS)
        read_schedules(self.schedules, self.steps, self.warmup)
        object.__setattr__(self, "schedules", tuple(self.schedules))  # which TOML has not
        if not 1.0 <= self.loss_alpha <= 2.0:
            raise ValueError(f"loss_alpha must lie in [1, 2], got {self.loss_alpha}")
        if self.eps < SMALLEST_EPS:
            raise ValueError(f"eps must be at least {SMALLEST_EPS:g}, got {self.eps}")
        if self.average > self.keep:
            raise ValueError(f"average = {self.average} needs as many checkpoints, but keep = {self.keep}")

    @property
    def output_alpha(self) -> float:
        """Of the output layer, which the loss decides."""
        return self.loss_alpha if self.loss == "entmax" else 1.0


def _specs(loggers: object) -> tuple[Spec, ...]:
    """As a tuple, which TOML has not."""
    if isinstance(loggers, list | tuple) and all(isinstance(spec, str | dict) for spec in loggers):
        return tuple(loggers)
    raise ValueError(f"loggers must be a list of names and of tables with names, got {loggers!r}")


def _betas(betas: object) -> tuple[float, float]:
    """As a tuple, which TOML has not."""
    if isinstance(betas, list | tuple) and len(betas) == 2:
        first, second = betas
        known = all(isinstance(beta, int | float) and not isinstance(beta, bool) for beta in betas)
        if known and 0.0 <= first < 1.0 and 0.0 <= second < 1.0:
            return first, second
    raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r}")
