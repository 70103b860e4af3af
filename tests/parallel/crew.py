"""Four processes that share sequences, and what their attention differs by from that of one process.

``torchrun --nproc-per-node 4 crew.py FOLDER fast`` writes relative errors by case, and what bad input is answered with;
tests read them.  Each process computes the whole by itself too, and the largest error of all processes counts.  One
start for all cases, because starting four processes takes longer than any of them.
"""

import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import tamis
from tamis.attention.call import Dropout, Part, check_call
from tamis.attention.rules import bind
from tamis.functional.backends import choose
from tamis.models import CausalLM, CausalLMConfig, Seq2Seq, Seq2SeqConfig
from tamis.parallel import ContextParallel, exchange, sharded_attention, sharded_counts
from tamis.training import Process, TrainingConfig
from tamis.training.distributed import context_of
from training import tiny_language

HEADS, LENGTH, WIDTH = 4, 48, 8


@dataclass
class Case:
    """One call: its rule and structure, from whole tensors."""

    rule: Any = "entmax"
    options: dict[str, Any] = field(default_factory=dict)
    local: tuple[str, ...] = ()
    """Options of which each process has its part: name of the option, along its last dimension."""
    key_heads: int = HEADS
    keys: int = LENGTH
    dropout: float = 0.0
    batch: int = 2


def packed(*starts: int) -> torch.Tensor:
    return torch.tensor([0, *starts, LENGTH])


SLOPES = torch.tensor([0.5, 0.25, 0.0, 0.0], dtype=torch.float64)
SPLIT = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.3
BIAS = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
SHUFFLED = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(5))
CASES = {
    "entmax": Case(),
    "entmax causal": Case(options={"is_causal": True}),
    "entmax per query": Case("rows", {"is_causal": True}),
    "entmax with slopes": Case(options={"is_causal": True, "alibi_slopes": SLOPES}),
    "entmax with slopes, full": Case(options={"alibi_slopes": SLOPES}),
    "entmax packed": Case(options={"is_causal": True, "cu_seqlens_q": packed(5, 6, 17, 30, 30)}, batch=1),
    "entmax packed, full": Case(options={"alibi_slopes": SLOPES, "cu_seqlens_q": packed(5, 6, 17, 30, 30)}, batch=1),
    "entmax packed, short": Case(options={"is_causal": True, "cu_seqlens_q": torch.tensor([0, 7, 31])}, batch=1),
    "entmax packed, two": Case(
        options={"is_causal": True, "cu_seqlens_q": packed(9, 20), "cu_seqlens_k": packed(4, 31)}, batch=1
    ),
    "entmax of groups": Case(options={"is_causal": True, "enable_gqa": True}, key_heads=2),
    "entmax of one key head": Case(options={"is_causal": True, "enable_gqa": True}, key_heads=1),
    "entmax in a window": Case(options={"window": (5, 3)}),
    "entmax in a causal window": Case(options={"window": 7, "is_causal": True}),
    "entmax of other keys": Case(options={"is_causal": True}, keys=64),
    "entmax masked keys": Case(options={"attn_mask": SPLIT[:, None, None]}, local=("attn_mask",)),
    "entmax masked keys of all": Case(options={"attn_mask": SPLIT[:, None, None], "is_causal": True}),
    "entmax biased": Case(options={"attn_mask": BIAS, "is_causal": True}),
    "entmax key lengths": Case(options={"key_lengths": torch.tensor([11, 40]), "is_causal": True}),
    "entmax positions": Case(
        options={"is_causal": True, "query_positions": SHUFFLED, "key_positions": SHUFFLED, "alibi_slopes": SLOPES},
        local=("query_positions", "key_positions"),
    ),
    "softmax": Case(tamis.Softmax()),
    "softmax causal": Case(tamis.Softmax(), {"is_causal": True}),
    "relu": Case(tamis.Activation()),
    "relu causal by count": Case(tamis.Activation(per_count=True), {"is_causal": True}),
    "softpick causal": Case(tamis.Softpick(), {"is_causal": True}),
    "entmax with dropout": Case(options={"is_causal": True}, dropout=0.3),
    "relu with dropout, packed": Case(
        tamis.Activation(), {"is_causal": True, "cu_seqlens_q": packed(5, 17)}, dropout=0.3, batch=1
    ),
    "softmax with dropout": Case(tamis.Softmax(), dropout=0.3),
}


def tensors(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What has a gradient."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "query": (case.batch, HEADS, LENGTH, WIDTH),
        "key": (case.batch, case.key_heads, case.keys, WIDTH),
        "value": (case.batch, case.key_heads, case.keys, WIDTH + 2),
    }
    made = {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
    if case.rule == "entmax":
        made["alpha"] = torch.tensor([1.05, 1.4, 1.5, 1.9], dtype=torch.float64)
    if case.rule == "rows":
        made["alpha"] = 1.1 + 0.8 * torch.rand(case.batch, 1, LENGTH, 1, generator=draw, dtype=torch.float64)
    for name in ("alibi_slopes", "attn_mask"):
        if (x := case.options.get(name)) is not None and x.is_floating_point():
            made[name] = x.clone()
    return {name: x.to(dtype).requires_grad_() for name, x in made.items()}


def call(case: Case, made: dict[str, torch.Tensor], options: dict[str, Any], **own: Any) -> torch.Tensor:
    """Attention of these tensors."""
    rule = tamis.Entmax(made["alpha"]) if "alpha" in made else case.rule
    options = options | {name: made[name] for name in ("alibi_slopes", "attn_mask") if name in made}
    return tamis.attention(made["query"], made["key"], made["value"], rule=rule, **options, **own)


def reference(case: Case, made: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
    """The whole call in this process; with dropout, as one part that is all of it."""
    if not case.dropout:
        return call(case, made, case.options)
    rule = tamis.Entmax(made["alpha"]) if "alpha" in made else case.rule
    checked = check_call(made["query"], made["key"], made["value"], **case.options)
    whole = type(checked)(**vars(checked) | {"dropout": Dropout(case.dropout, None, Part(seed))})
    bound = bind(rule, whole)
    return choose("attend", whole, bound, "auto").attend(whole, bound)


def compare(case: Case, context: ContextParallel, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of this process's output and gradients."""
    whole, own = tensors(case, dtype), tensors(case, dtype)
    options = dict(case.options)
    for name in case.local:
        options[name] = context.take(options[name], -1)
    shares = dict(own)
    for name in ("query", "key", "value"):
        shares[name] = context.take(own[name], 2)
    for name, dim in (("alpha", 2), ("attn_mask", 2)):
        if name in own and own[name].ndim == 4:
            shares[name] = context.take(own[name], dim)
    options = {name: x for name, x in options.items() if name not in own}
    torch.manual_seed(7)
    with context:
        out = call(case, shares, options, dropout_p=case.dropout)
        torch.manual_seed(7)
        seed = int(torch.randint(2**62, ()).item())
        factor = torch.randn(case.batch, HEADS, LENGTH, WIDTH + 2, generator=torch.Generator().manual_seed(1))
        (out * context.take(factor.to(dtype), 2)).sum().backward()
    expected = reference(case, whole, seed)
    (expected * factor.to(dtype)).sum().backward()
    found = {"output": difference(context.join(out.detach(), 2), expected.detach())}
    for name, x in own.items():
        grad = torch.zeros_like(x) if x.grad is None else x.grad
        found[name] = difference(context.exchange.total(grad), whole[name].grad)
    return found


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max().clamp(min=1e-30)).item()


def by_hand(name: str, context: ContextParallel) -> dict[str, float]:
    """Numbers that differ, in bits, from calls in one process of these queries and the keys that they need."""
    case = CASES[name]
    causal = case.options.get("is_causal", False)
    whole, own = tensors(case, torch.float32), tensors(case, torch.float32)
    with context:
        shares = own | {name: context.take(own[name], 2) for name in ("query", "key", "value")}
        out = call(case, shares, case.options)
        out.sum().backward()
    outputs = []
    for _, place in context.layout.chunks(out.shape[2]):
        keys = slice(0, place.stop if causal else None)
        part = {"query": whole["query"][:, :, place]} | {n: whole[n][:, :, keys] for n in ("key", "value")}
        outputs.append(call(case, whole | part, {"is_causal": causal}))
    expected = torch.cat(outputs, 2)
    expected.sum().backward()
    return {
        "output": float((out != expected).sum()),
        "query": float((own["query"].grad != whole["query"].grad).sum()),
        "alpha": float((own["alpha"].grad != whole["alpha"].grad).sum()),
    }


def not_kept(context: ContextParallel) -> dict[str, float]:
    """Memory of gathered keys and values that is still there while the graph waits for its backward pass."""
    gathered: list[StorageWeakRef] = []

    def noted(*arguments: Any) -> tuple[torch.Tensor, ...]:
        tensors = exchange.whole(*arguments)
        gathered.extend(StorageWeakRef(x.untyped_storage()) for x in tensors)
        return tensors

    made = tensors(CASES["relu"], torch.float32)
    shares = [context.take(made[name], 2) for name in ("query", "key", "value")]
    with context, mock.patch("tamis.parallel.context.whole", noted):
        out = tamis.relu_attention(*shares)
    alive = sum(not storage.expired() for storage in gathered)
    out.sum().backward()
    return {"memory": float(alive), "unseen": float(len(gathered) != 2)}


def sharded(mesh: DeviceMesh, dtype: torch.dtype, budget: int) -> dict[str, float]:
    """A cache in unequal shards on all processes, one of them in two parts."""
    made = tensors(CASES["entmax"], dtype)
    query, key, value = (made[name].detach() for name in ("query", "key", "value"))
    rank, size = mesh.get_local_rank("context"), mesh["context"].size()
    ends = [0, *(LENGTH * (n + 1) // size - 3 for n in range(size - 1)), LENGTH]
    own = slice(ends[rank], ends[rank + 1])
    shards = [[x[:, :, own]] if rank else list(x[:, :, own].split(5, 2)) for x in (key, value)]
    found = {}
    for name, rule in (("entmax", tamis.Entmax(made["alpha"].detach())), ("relu", tamis.Activation(per_count=True)),
                       ("softmax", tamis.Softmax()), ("softpick", tamis.Softpick())):  # fmt: skip
        last = query[:, :, -2:]
        out = sharded_attention(last, *shards, is_causal=True, rule=rule, mesh=mesh, budget=budget)
        found[name] = difference(out, tamis.attention(last, key, value, is_causal=True, rule=rule, backend="dense"))
    counts = sharded_counts(query[:, :, -2:], shards[0], is_causal=True, mesh=mesh)
    found["counts"] = float((counts != torch.tensor([LENGTH - 1, LENGTH])).sum())
    return found


MODELS: dict[str, dict[str, Any]] = {
    "asentmax, nape": {"mechanism": "asentmax", "position": "nape"},
    "entmax, rope": {"mechanism": "entmax", "position": "rope", "num_kv_heads": 2},
    "rela, learned": {"mechanism": "rela", "position": {"name": "learned", "max_length": 45}},
    "ssmax, sinusoidal": {"mechanism": "ssmax", "position": "sinusoidal"},
    "entmax, alibi": {"mechanism": {"name": "entmax", "alpha": 1.5}, "position": "alibi"},
}


def language_model(name: str, mesh: DeviceMesh, way: str, how: str) -> dict[str, float]:
    """Logits and gradients of a model, of 45 tokens: no length that divides; `how` is plain, packed or padded."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "embed_dim": 32, "num_heads": 4, "ffn_dim": 32, "num_layers": 2}
    own = CausalLM(CausalLMConfig(**(sizes | MODELS[name]))).double()
    whole = copy.deepcopy(own)
    tokens = torch.randint(50, (1 if how == "packed" else 2, 45))
    factor = torch.randn(*tokens.shape, 50, dtype=torch.float64)
    arguments: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 9, 10, 31, 45])} if how == "packed" else {}
    shared = dict(arguments)
    context = ContextParallel(mesh, way, length=45)
    if how == "padded":
        arguments["mask"] = torch.arange(45) >= torch.tensor([[0], [13]])
        shared["mask"] = context.take(arguments["mask"])
        factor = factor * arguments["mask"].unsqueeze(-1)
    with context:
        logits = own(context.take(tokens), **shared)
        (logits * context.take(factor)).sum().backward()
    context.sum_gradients(own)
    expected = whole(tokens, **arguments)
    (expected * factor).sum().backward()
    seen = factor != 0.0
    found = {"logits": difference(context.join(logits.detach()) * seen, expected.detach() * seen)}
    return found | {"gradients": largest_difference(own, whole)}


def largest_difference(own: torch.nn.Module, whole: torch.nn.Module) -> float:
    """Of gradients.  Those of biases of keys are nothing but rounding: they shift all scores of a row alike."""
    pairs = [(one.grad, other.grad) for one, other in zip(own.parameters(), whole.parameters(), strict=True)]
    return max(difference(*pair) for pair in pairs if pair[1].abs().max() > 1e-12)


def translation_model(mesh: DeviceMesh, way: str) -> dict[str, float]:
    """Encoder, decoder and cross-attention, of sources and targets that are padded."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "embed_dim": 32, "num_heads": 4, "ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 1}
    mechanisms = dict.fromkeys(("encoder_mechanism", "decoder_mechanism", "cross_mechanism"), "asentmax")
    own = Seq2Seq(
        Seq2SeqConfig(**sizes, **mechanisms, position="rope", pad_id=0, dropout=0.0, attention_dropout=0.0)
    ).double()
    whole = copy.deepcopy(own)
    source, target = torch.randint(1, 50, (2, 21)), torch.randint(1, 50, (2, 14))
    source[1, 15:] = 0
    factor = torch.randn(2, 14, 50, dtype=torch.float64)
    context = ContextParallel(mesh, way)
    with context:
        logits = own(context.take(source), context.take(target))
        (logits * context.take(factor)).sum().backward()
    context.sum_gradients(own)
    expected = whole(source, target)
    (expected * factor).sum().backward()
    found = {"logits": difference(context.join(logits.detach())[:, :14], expected.detach())}
    return found | {"gradients": largest_difference(own, whole)}


def recomputed(context: ContextParallel) -> dict[str, float]:
    """Activation checkpointing, with dropout: what is computed anew drops the same."""
    from torch.utils.checkpoint import checkpoint

    results = []
    for anew in (False, True):
        made = tensors(CASES["entmax"], torch.float64)
        shares = [context.take(made[name], 2) for name in ("query", "key", "value")]
        torch.manual_seed(7)

        def attend(*x: torch.Tensor) -> torch.Tensor:
            return tamis.entmax_attention(*x, None, 0.4, True)

        with context:
            out = checkpoint(attend, *shares, use_reentrant=False) if anew else attend(*shares)
            out.square().sum().backward()
        results.append([made[name].grad for name in ("query", "key", "value")])
    return {name: difference(*pair) for name, *pair in zip(("query", "key", "value"), *results, strict=True)}


def refused(mesh: DeviceMesh) -> dict[str, str]:
    """What bad input is answered with, in every process."""
    context = ContextParallel(mesh, "heads")
    query, odd = torch.randn(1, 4, 6, 8), torch.randn(1, 4, 5, 8)
    one = torch.randn(1, 1, 6, 8)
    attempts = {
        "heads": lambda: tamis.attention(query, one, one, enable_gqa=True),
        "odd": lambda: tamis.attention(odd, odd, odd),
        "weights": lambda: tamis.attention_weights(query, query),
        "statistics": lambda: tamis.attention_statistics(query, query),
        "mask": lambda: tamis.attention(query, query, query, torch.ones(6, 6, dtype=torch.bool)),
        "positions": lambda: tamis.attention(query, query, query, query_positions=torch.arange(24)),
        "nested": lambda: context.__enter__(),
    }
    found = {}
    with context:
        for name, attempt in attempts.items():
            try:
                attempt()
            except (ValueError, RuntimeError) as error:
                found[name] = str(error)
    for name, make in {
        "dimension": lambda: ContextParallel(mesh, dim="rows"),
        "mesh": lambda: ContextParallel("cpu"),
        "way": lambda: ContextParallel(mesh, "ring"),
        "length": lambda: ContextParallel(mesh, length=8).take(torch.ones(1, 9)),
        "recipes": lambda: Process(0, 4, torch.device("cpu")).alike({"training.lr": 1 + (dist.get_rank() == 2)}),
        "processes": lambda: context_of(TrainingConfig(context_parallel=3), Process(0, 4, torch.device("cpu"))),
    }.items():
        try:
            make()
        except (ValueError, TypeError, RuntimeError) as error:
            found[name] = str(error)
    return found


def checks(four: DeviceMesh, two: DeviceMesh, slow: bool) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """By name; the fast ones are those that differ most from each other."""
    for mesh, size in ((four, 4), (two, 2)):
        for dtype in (torch.float32, torch.float64):
            kind = str(dtype).removeprefix("torch.")
            for (name, case), way in itertools.product(CASES.items(), ("heads", "keys")):
                if (slow or (size == 4) == (dtype == torch.float32)) and (way == "keys" or case.key_heads % size == 0):
                    context = ContextParallel(mesh, way)
                    yield f"{name}, {way}, {size}, {kind}", partial(compare, case, context, dtype)
            for budget in (1, 1024):
                yield f"shards, {size}, budget {budget}, {kind}", partial(sharded, mesh, dtype, budget)
        for name, way, how in itertools.product(MODELS, ("heads", "keys", "auto"), ("plain", "packed", "padded")):
            fits = way != "heads" or MODELS[name].get("num_kv_heads", 4) % size == 0
            first = (name, how) == ("asentmax, nape", "packed") or (name, how, way) == (
                "rela, learned",
                "plain",
                "auto",
            )
            if fits and (slow or (first and size == 4)):
                yield f"model, {name}, {way}, {how}, {size}", partial(language_model, name, mesh, way, how)
        if slow or size == 2:
            for way in ("heads", "keys"):
                yield f"translation, {way}, {size}", partial(translation_model, mesh, way)
                yield f"recomputed, {way}, {size}", partial(recomputed, ContextParallel(mesh, way))
            for name in ("entmax", "entmax causal"):
                yield f"by hand, {name}, {size}", partial(by_hand, name, ContextParallel(mesh, "keys"))
            yield f"not kept, {size}", partial(not_kept, ContextParallel(mesh, "keys"))


def main(folder: Path, slow: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    four = init_device_mesh("cpu", (4,), mesh_dim_names=("context",))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    found: dict[str, dict[str, float]] = {}
    for name, check in checks(four, two, slow):
        errors = check()
        values = torch.tensor(list(errors.values()), dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        found[name] = dict(zip(errors, values.tolist(), strict=True))
    said = refused(four)
    for parallel, way in (("ddp", "auto"), ("fsdp", "keys")) if slow else (("ddp", "auto"),):
        own = Process(dist.get_rank(), 4, torch.device("cpu"))
        shared = {"context_parallel": 2, "context": way, "parallel": parallel}
        tiny_language.trainer(folder / "text", folder / parallel, own, **LANGUAGE, **shared).run()
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found, indent=1))
        (folder / "said.json").write_text(json.dumps(said, indent=1))
    dist.destroy_process_group()


LANGUAGE: dict[str, Any] = {
    "steps": 50,
    "checkpoint_every": 25,
    "batch_tokens": 75,  # three rows, for two pairs of processes
    "architecture": {"mechanism": "asentmax", "position": "nape"},
}

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "slow")
