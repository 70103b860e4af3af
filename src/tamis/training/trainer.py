"""The training loop: small, exact to resume, the same for one process and for many."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tamis.data.batching import Position, Prefetcher
from tamis.mechanisms import Mechanism
from tamis.models.pretrained import CONFIG, PretrainedModel
from tamis.nn.layers import TransformerLayer
from tamis.training import distributed, guards
from tamis.training.checkpoint import CheckpointError, Checkpoints, average
from tamis.training.distributed import Process
from tamis.training.environment import differences, environment
from tamis.training.graphs import GraphedBackward
from tamis.training.guards import TrainingError
from tamis.training.journal import Display, Record
from tamis.training.optim import MovingAverage, build_optimizers, learning_rate, step
from tamis.training.protocol import Task, Update
from tamis.training.recorder import Recorder, StepNumbers
from tamis.training.settings import TrainingConfig
from tamis.training.start import start_from
from tamis.training.state import State, stream_seed


class Trainer:
    """Trains `model` on `task` in `folder`, from the last good checkpoint there if there is one.

    Args:
        observe: finds further numbers for the record of a validation, such as densities, in the leading process; what
            `config.monitor` names besides the loss is among them as valid_NAME, and higher is better.
        settings: all those of the run, for loggers; by default those of the loop.
    """

    def __init__(
        self,
        model: PretrainedModel,
        task: Task,
        config: TrainingConfig,
        folder: Path,
        process: Process,
        *,
        display: Display | None = None,
        observe: Callable[[PretrainedModel], Record] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.task, self.config, self.folder, self.process = task, config, folder, process
        self.display = Display(quiet=not process.leads) if display is None else display
        self.observe, self.settings = observe, config.to_dict() if settings is None else settings
        if config.monitor != "loss" and observe is None:
            raise ValueError(f"training.monitor is {config.monitor!r}, and nothing observes it")
        self.checkpoints = Checkpoints(folder / "checkpoints")
        if config.start is not None and not self._has_checkpoint():
            new = start_from(model, Path(config.start))
            self.display.say(f"starting from {config.start}" + (f", but for {len(new)} new weights" if new else ""))
        self.kind = type(model)  # sharding gives the model another class
        self.model = model.to(process.device).train()
        if config.compile:
            self._compile_layers()
        self.context = distributed.context_of(config, process)
        self.group = process.group_of(config.context_parallel)
        self.spread = distributed.spread(self.model, config, process)
        self.graphs = self._graphs() if config.cuda_graphs else None
        self.optimizers = build_optimizers(self.model, config)
        self.ema = MovingAverage(self.model, config.ema) if config.ema else None
        self.state = State()
        self.interruption = guards.Interruption()
        self._noted: str | None = None

    def run(self, begin: Callable[[], None] = lambda: None) -> State:
        """Train to the end, or until patience runs out; returns where it ended.  `begin` is called if there is a way
        to go."""
        self.checkpoints.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(guards.deterministic(self.config.deterministic))
            if self.config.compile:  # lengths have kernels of their own, and those of source and target combine
                stack.enter_context(torch._dynamo.config.patch(recompile_limit=64))
            self._resume()
            self.recorder = stack.enter_context(
                Recorder(self.state, self.config, self.folder, self.display, self.process.leads, self.settings)
            )
            self._check_journal()
            if self.process.world == 1:  # several processes would stop at different steps
                stack.enter_context(self.interruption.watched())
            if not self._done():
                begin()
                self._loop()
        return self.state

    def final_weights(self) -> dict[str, Tensor]:
        """To export: the mean of the last checkpoints, or the best one; of the moving average where one is kept."""
        if self.state.best_value is None:
            raise TrainingError(f"no validation in {self.folder} had a finite loss: there is no model to export")
        good = [step for step in self._regular() if self._is_good(step)]
        if not good:
            raise TrainingError(f"no checkpoint in {self.checkpoints.folder} can be used: there is no model to export")
        steps = good[-self.config.average :]
        if self.config.average == 1 and self.state.best_step in good:
            steps = [self.state.best_step]
        table = "ema" if self.ema is not None else "model"
        return average([self.checkpoints.path(step) / f"{table}.safetensors" for step in steps])

    def _regular(self) -> list[int]:
        """Steps of the checkpoints that every undisturbed run has; one that a ctrl-C left is not among them."""
        every, last = self.config.checkpoint_every, self.state.step
        return [step for step in self.checkpoints.steps() if step % every == 0 or step == self.config.steps == last]

    def _is_good(self, step: int) -> bool:
        try:
            self.checkpoints.verify(step)
        except CheckpointError as error:
            self.display.say(f"{error}; it is not exported")
            return False
        return True

    def _loop(self) -> None:
        with Prefetcher(self._stream(self.state.position)) as prefetcher:
            stream = iter(prefetcher)
            while not self._done():
                asked = time.monotonic()
                position, update = next(stream)
                self.recorder.wait(time.monotonic() - asked)
                self._update(update, position)
                if self.state.step % self.config.checkpoint_every == 0 or self.state.step == self.config.steps:
                    self._validate()
                    self._save()
                elif self.interruption.asked:
                    self.recorder.settle()
                    self._save()
                if self.interruption.asked and not self._done():
                    raise TrainingError(f"stopped after step {self.state.step}; the same command goes on from there")

    def _done(self) -> bool:
        patience = self.config.patience
        return self.state.step >= self.config.steps or (patience is not None and self.state.stale >= patience)

    def _stream(self, position: Position) -> Iterator[tuple[Position, Update]]:
        """Updates from a position on, made ready ahead of their time in another thread."""
        pin = self.process.device.type == "cuda"
        for after, indices in self.task.updates.iterate(position):
            update = self.task.update(indices, self.group)
            yield after, Update(update.tokens, [part.pin() if pin else part for part in update.parts])

    def _update(self, update: Update, position: Position) -> None:
        number, (tokens, parts) = self.state.step + 1, update
        torch.manual_seed(stream_seed(self.config.seed, number, self.process.rank))
        self.model.zero_grad(set_to_none=self.graphs is None)  # a graph adds to tensors that stay
        total = torch.zeros((), device=self.process.device)
        backward = self._backward if self.graphs is None else self.graphs
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            explained = guards.memory_explained(f"a batch of {self.task.describe(part)}", "training.device_tokens")
            with distributed.part_of_update(self.spread, last), explained:
                # The exchange between processes takes means; wanted is the sum over all of them, per label.
                total += backward(part, self.process.world / tokens)
        norm, total = self._clip(), self.process.total(total)
        wrong = (~(norm + total).isfinite()).float()
        lr = learning_rate(self.config, number, getattr(self.model.config, "embed_dim", 1))
        step(self.optimizers, lr, wrong)
        if self.ema is not None:
            self.ema.update(number)
        self.state.step, self.state.position = number, position
        values = torch.stack([total, norm, wrong])
        alphas = self._alphas() if number % self.config.log_every == 0 else {}
        self.recorder.add(StepNumbers(number, position.epoch, tokens, lr, values, alphas))

    def _backward(self, part: Any, factor: float | Tensor) -> Tensor:
        """Add the gradients of a part's loss times a factor; returns the loss."""
        part = part.to(self.process.device, non_blocking=True)
        with distributed.sharing(self.context, part) as own:
            with self._autocast():
                loss = self.task.loss(self.spread, own)
            (loss * factor).backward()
        return loss.detach()

    def _compile_layers(self) -> None:
        """One by one: layers alike share what is compiled, so that it takes no longer for many than for one."""
        for module in self.model.modules():
            if isinstance(module, TransformerLayer):
                module.compile(dynamic=True)

    def _graphs(self) -> GraphedBackward | None:
        if self.process.world > 1:
            raise TrainingError(f"training.cuda_graphs is for one process, and there are {self.process.world}")
        if self.process.device.type != "cuda":
            return None
        return GraphedBackward(self._backward, self.model.parameters(), self.process.device)

    def _autocast(self) -> torch.autocast:
        # A weight that is cast once and kept would not be cast anew when a graph is replayed.
        return torch.autocast(
            self.process.device.type,
            torch.bfloat16,
            enabled=self.config.precision == "bf16",
            cache_enabled=not self.config.cuda_graphs,
        )

    def _clip(self) -> Tensor:
        """The norm of the gradient before it was clipped."""
        return distributed.gathered(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip or math.inf))

    @torch.no_grad()
    def _alphas(self) -> dict[str, Tensor]:
        """Every learned alpha, by the name of its attention layer."""
        asked = {
            name.removesuffix(".mechanism"): module.learned_alphas()
            for name, module in self.model.named_modules()
            if isinstance(module, Mechanism)
        }
        found = {name: alphas for name, alphas in asked.items() if alphas is not None}
        return distributed.whole(found)

    def _validate(self) -> None:
        self.recorder.settle()
        began = time.monotonic()
        record: Record = {"step": self.state.step}
        with self._averaged():
            sums = torch.zeros(3, dtype=torch.float64, device=self.process.device)
            with torch.no_grad(), self._autocast():
                for part in self.task.validation(self.group):
                    part = part.to(self.process.device, non_blocking=True)
                    with distributed.sharing(self.context, part) as own:
                        sums += torch.stack(self.task.measure(self.spread, own))
            loss, correct, tokens = self.process.total(sums).tolist()
            record["valid_loss"] = loss / max(tokens, 1.0)
            if self.config.loss == "cross-entropy":
                record["valid_perplexity"] = math.exp(min(record["valid_loss"], 100.0))
            record["valid_accuracy"] = correct / max(tokens, 1.0)
            model = self._whole_model()
            # What looks into layers or decodes would have them compiled anew.
            with torch.compiler.set_stance("force_eager") if self.config.compile else nullcontext():
                if self.observe is not None and self.process.leads:
                    record |= self.observe(model)
        monitor = self.config.monitor
        value = record["valid_loss"] if monitor == "loss" or not self.process.leads else -record[f"valid_{monitor}"]
        record["best"] = self.state.judge(self.process.agree(value))
        self.recorder.validated(record)
        self.recorder.pause(time.monotonic() - began)

    def _whole_model(self) -> PretrainedModel:
        """A model that one process can run by itself."""
        if not distributed.is_sharded(self.model):
            return self.model
        saved = distributed.whole(distributed.weights(self.model))
        copy = self.kind(self.model.config)
        distributed.restore(distributed.weights(copy), saved)
        return copy.to(self.process.device).eval()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """The model in eval mode, with the moving average as its weights where there is one."""
        self.model.eval()
        if self.ema is not None:
            self.ema.swap()
        try:
            yield
        finally:
            if self.ema is not None:
                self.ema.swap()
            self.model.train()

    def _tables(self) -> dict[str, dict[str, Tensor]]:
        """All tensors of the run, themselves, by the file they are saved in."""
        tables = {"model": distributed.weights(self.model)}
        if self.ema is not None:
            averages = self.ema.named()
            tables["ema"] = {name: averages.get(name, tensor) for name, tensor in tables["model"].items()}
        return tables

    def _save(self) -> None:
        tables = {name: distributed.whole(tensors) for name, tensors in self._tables().items()}
        tables["optimizer"] = distributed.whole(distributed.optimizer_tensors(self.model, self.optimizers))
        if self.process.leads:
            self.checkpoints.save(
                self.state.step,
                tables,
                {CONFIG: self.model.described()},
                {
                    "training": self.state.to_dict(),
                    "settings": self.config.to_dict(),
                    "data": self.task.fingerprint(),
                    "environment": environment(self.group),
                    "journal": self.recorder.journal.digest() if self.recorder.journal is not None else None,
                },
            )
            self._prune()
        self.process.wait()

    def _prune(self) -> None:
        """Keep the newest, two at least in case one is torn, the best, and where the run is."""
        kept = {*self._regular()[-max(2, self.config.keep) :], self.state.best_step, self.state.step}
        self.checkpoints.remove(step for step in self.checkpoints.steps() if step not in kept)

    def _has_checkpoint(self) -> bool:
        return any(not isinstance(found, CheckpointError) for _, found in self.checkpoints.latest())

    def _resume(self) -> None:
        """Take up the newest good checkpoint, if there is one; what is newer goes, as the run will come there again."""
        number, found = self.process.agree(self._find() if self.process.leads else None)
        if number is None:
            return
        if found["data"] != self.task.fingerprint():
            raise TrainingError(f"{self.folder} was trained on other data or another vocabulary: use another folder")
        if number > self.config.steps:
            raise TrainingError(f"{self.folder} has {number} steps already, and training.steps is {self.config.steps}")
        for name, tensors in self._tables().items():
            distributed.restore(tensors, self.checkpoints.load(number, name))
        distributed.restore_optimizers(self.model, self.optimizers, self.checkpoints.load(number, "optimizer"))
        self.state = State.from_dict(found["training"])
        self.process.wait()
        if self.process.leads:
            self.checkpoints.remove(step for step in self.checkpoints.steps() if step > number)
            self._prune()  # a process that was killed before it could has left more
        self._noted = found.get("journal")
        if self._done():
            limit = "steps" if number >= self.config.steps else "patience"
            self.display.say(
                f"{self.folder} is finished, at step {number} of {self.config.steps}: raise training.{limit} to go on, "
                "or take another folder to begin anew"
            )
            return
        self.display.say(f"going on from step {number} in {self.folder}")
        if changed := differences(found.get("environment", {}), environment(self.group)):
            self.display.say(f"not to the bit, because this is not where it ran before: {changed}")

    def _check_journal(self) -> None:
        """Say so if the records of the steps before are not those that were written."""
        journal = self.recorder.journal
        if journal is not None and self._noted is not None and journal.digest() != self._noted:
            self.display.say(
                f"{journal.path} is not as it was written up to step {self.state.step}: lines were changed or lost; "
                "the weights are not affected"
            )

    def _find(self) -> tuple[int | None, dict[str, Any]]:
        """The step and the plain values of the newest checkpoint that is as it was written."""
        torn = False
        for number, found in self.checkpoints.latest():
            if not isinstance(found, CheckpointError):
                return number, found
            self.display.say(f"{found}; trying the checkpoint before it")
            torn = True
        if torn:
            self.display.say(f"no checkpoint in {self.checkpoints.folder} can be used: starting anew")
        return None, {}
