"""`tamis bench train`: tokens per second of the training loop, with each kind of attention.

The loop is the product's own, with everything that a run has: batches by tokens made ready in another thread, mixed
precision, dropout, clipping, Adam.  Only the text is made up: sentences of lengths as in news, with random subwords.

Dense attention has several implementations; each runs in the same loop, called directly, and the fastest is the one to
compare with.  Flash attention takes no mask: it is given batches as if they had no padding, which is wrong, and as fast
as it could be with sequences packed end to end.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tamis.bench.timing import machine, save
from tamis.data.batching import Batch, Updates, split_batch
from tamis.experiments.translation import SITES
from tamis.mechanisms import Mechanism
from tamis.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tamis.nn.attention import Attention
from tamis.training.distributed import Process
from tamis.training.journal import Display, read_journal
from tamis.training.objective import Measured, Objective
from tamis.training.protocol import Update
from tamis.training.settings import TrainingConfig
from tamis.training.trainer import Trainer

WATCHED = 8  # steps
PAIRS, VOCABULARY = 20_000, 32_000
ARMS: dict[str, Any] = {
    "1.5-entmax": {"name": "entmax", "alpha": 1.5},
    "alpha-entmax": "entmax",
    "ReLA": "rela",
}
DENSE = {  # torch, left to choose, takes cuDNN's here
    "flash, padding not masked": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


class Dense(Mechanism):
    """Softmax by one implementation of torch, with nothing around it."""

    def __init__(self, backend: SDPBackend | None) -> None:
        super().__init__()
        self.backend = backend

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, hidden: Tensor | None = None, **options: Any
    ) -> Tensor:
        mask = None if self.backend is SDPBackend.FLASH_ATTENTION else options.get("attn_mask")
        chosen = nullcontext() if self.backend is None else sdpa_kernel(self.backend)
        causal = options["is_causal"] and query.shape[2] > 1  # torch would let a single query see the first key alone
        with chosen:
            return F.scaled_dot_product_attention(query, key, value, mask, options["dropout_p"], causal)


class MadeUpText:
    """A `Task` of random sentences: log-normal lengths around 27 subwords, as news have."""

    def __init__(self, config: TrainingConfig, vocabulary: int, pairs: int) -> None:
        draw = np.random.Generator(np.random.PCG64(0))
        self.source = np.clip(draw.lognormal(3.2, 0.5, pairs), 2, 200).astype(np.int64)
        self.target = np.clip(self.source * draw.lognormal(0.0, 0.15, pairs), 2, 200).astype(np.int64)
        self.config, self.vocabulary = config, vocabulary
        self.updates = Updates(self.source, self.target, config.batch_tokens)
        self.objective = Objective(config, 0)

    def update(self, indices: np.ndarray, process: Process) -> Update:
        parts = split_batch(indices, self.updates.sizes, self.config.device_tokens, process.rank, process.world)
        return Update(int(self.target[indices].sum()), [self._batch(part) for part in parts])

    def loss(self, model: Callable[..., Tensor], part: Batch) -> Tensor:
        return self.objective(model(part.source, part.target), part.labels)

    def validation(self, process: Process) -> Iterator[Batch]:
        yield self._batch(np.arange(8))

    def measure(self, model: Callable[..., Tensor], part: Batch) -> Measured:
        return self.objective.measure(model(part.source, part.target), part.labels)

    def describe(self, part: Batch) -> str:
        return f"{tuple(part.source.shape)} and {tuple(part.target.shape)} tokens"

    def fingerprint(self) -> str:
        return "made up"

    def _batch(self, indices: np.ndarray) -> Batch:
        source, labels = self._side(self.source[indices], indices[0]), self._side(self.target[indices], indices[0])
        return Batch(source, labels.roll(1, 1), labels, indices.tolist(), int(self.target[indices].sum()))

    def _side(self, lengths: np.ndarray, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(int(seed))
        tokens = torch.randint(4, self.vocabulary, (len(lengths), int(lengths.max())), generator=generator)
        return tokens * (torch.arange(tokens.shape[1]) < torch.from_numpy(lengths)[:, None])


def run(
    output: Path | None,
    *,
    steps: int = 240,
    batch_tokens: int = 25_000,
    cuda_graphs: bool = True,
    size: dict[str, Any] | None = None,
    vocabulary: int = VOCABULARY,
    device: str | None = None,
) -> None:
    """`size` are settings of Seq2SeqConfig; the papers' base model by default.

    The first half of the steps compiles kernels, captures graphs and lets memory grow; the second is measured.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    precision = "bf16" if place.type == "cuda" else "fp32"
    config = TrainingConfig(
        steps=steps,
        batch_tokens=batch_tokens,
        precision=precision,
        cuda_graphs=cuda_graphs,
        log_every=10,
        checkpoint_every=steps,
        warmup=4000,
    )
    dense = DENSE if place.type == "cuda" else {"torch's choice": None}
    arms = {f"softmax, {name}": Dense(backend) for name, backend in dense.items()} | ARMS
    rows = [_row(name, arm, config, place, size or {}, vocabulary) for name, arm in arms.items()]
    fastest = max(row["tokens_per_second"] or 0.0 for row in rows if row["arm"].startswith("softmax"))
    table = Table(title=f"training, {batch_tokens:,} tokens a step, {precision}, on {place.type}")
    for column in (
        "attention",
        "target tokens/s",
        "over the fastest softmax",
        "waiting for data",
        "GPU idle",
        "GPU ms",
    ):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for row in rows:
        row["over_softmax"] = row["tokens_per_second"] / fastest if row["tokens_per_second"] else None
        shown = [("tokens_per_second", ",.0f"), ("over_softmax", ".2f"), ("data_wait", ".1%")]
        shown += [("gpu_idle", ".1%"), ("gpu_ms", ".1f")]
        values = [format(row[key], form) if row.get(key) is not None else row.get("why", "-") for key, form in shown]
        table.add_row(row["arm"], *values)
    Console(width=120).print(table)
    if output is not None:
        settings = {"batch_tokens": batch_tokens, "steps": steps, "size": size, "vocabulary": vocabulary}
        settings["cuda_graphs"] = cuda_graphs
        kind = place.type + ("-graphs" if cuda_graphs and place.type == "cuda" else "")
        save(output / f"train-{kind}.json", {"machine": machine(), "settings": settings, "rows": rows})


def _row(
    name: str,
    arm: Any,
    config: TrainingConfig,
    device: torch.device,
    size: dict[str, Any],
    vocabulary: int,
) -> dict[str, Any]:
    torch.manual_seed(0)
    mechanism: Any = "softmax" if isinstance(arm, Dense) else arm
    model = Seq2Seq(Seq2SeqConfig(vocab_size=vocabulary, **size, **dict.fromkeys(SITES, mechanism)))
    if isinstance(arm, Dense):
        for module in model.modules():
            if isinstance(module, Attention):
                module.mechanism = arm
    task = MadeUpText(config, vocabulary, PAIRS)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Watched(model, task, config, Path(scratch), Process(0, 1, device), display=Display(quiet=True))
        try:
            trainer.run()
        except RuntimeError as error:  # an implementation that cannot take this
            return {"arm": name, "tokens_per_second": None, "data_wait": None, "why": str(error).splitlines()[0][:60]}
        records = [record for record in read_journal(Path(scratch) / "metrics.jsonl") if "loss" in record]
    records = [record for record in records if config.steps // 2 <= record["step"] <= config.steps - 2 * WATCHED]
    waits = [record["data_wait"] for record in records[1:]]
    return {
        "arm": name,
        "tokens_per_second": (records[-1]["tokens"] - records[0]["tokens"])
        / (records[-1]["seconds"] - records[0]["seconds"]),
        "data_wait": sum(waits) / len(waits),
        **trainer.gpu(),
        "parameters": model.num_parameters(),
    }


class Watched(Trainer):
    """Looks at the GPU in a few steps shortly before the end."""

    profile = None

    def _update(self, *arguments: Any) -> None:
        left = self.config.steps - self.state.step
        if self.process.device.type == "cuda" and left == WATCHED + 2:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profile.start()
        super()._update(*arguments)
        if self.profile is not None and left == 3:
            self.profile.stop()

    def gpu(self) -> dict[str, float | None]:
        """Milliseconds of a step in which the GPU works, and the share of time in which it does not."""
        if self.profile is None:
            return {"gpu_ms": None, "gpu_idle": None}
        with tempfile.TemporaryDirectory() as scratch:
            self.profile.export_chrome_trace(f"{scratch}/trace.json")
            events = json.loads(Path(f"{scratch}/trace.json").read_text())["traceEvents"]
        kinds = ("kernel", "gpu_memcpy", "gpu_memset")
        spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in kinds)
        busy, end = 0.0, spans[0][0]
        for start, stop in spans:
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return {"gpu_ms": busy / 1e3 / WATCHED, "gpu_idle": 1.0 - busy / (end - spans[0][0])}
