"""Random calls of every public function, backend and dtype, against oracles in fp64 that share nothing with them.

Inputs are numbers that the narrow dtype of a call holds exactly, so both sides begin with the same ones.  Attention is
compared with the naive oracle of tests/attention, gradients by autograd through it; transforms and losses with
bisection and sorting, their gradients with differences of those.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tamis
from attention.cases import oracle, oracle_scores, oracle_weights, pair_positions, visible_pairs
from hostile.children import run
from hostile.harness import Part, WrongError
from native.random_calls import RULES, Drawn, draw
from oracles import entmax_by_bisection
from transforms.test_losses import entmax_definition, normmax_definition
from transforms.test_relatives import budgetmax_oracle, normmax_oracle

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("native", "blocked", "dense", "auto", "reference")
SHORT = (1, 2, 3, 5, 8, 9, 13, 17)
PROBLEMS = 60
"""In a trial."""
EDGE = 1e-5
"""Where a score is so close to the edge of the support, rounding may put it on either side, and its slope jumps."""


def allowed(dtype: torch.dtype, gradient: bool = False) -> float:
    """The relative error that a result in this dtype may have: that of its own rounding, of solving in fp32 or fp64."""
    own = 4.0 * torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
    solved = 1e-9 if dtype == torch.float64 else 1e-5
    return own + solved * (100.0 if gradient else 1.0)


def compare(what: str, got: Tensor, want: Tensor, error: float, size: float | None = None) -> None:
    """Raise unless the norms agree; `size` is that of what is added up, where that may cancel.

    Where autograd makes no number of an oracle, as of powers of 0 close to alpha = 1, there is nothing to compare with.
    """
    if got.shape != want.shape:
        raise WrongError(f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    finite = want.isfinite()
    if not bool(got[finite].isfinite().all()):
        raise WrongError(f"{what}: not finite where the oracle is")
    off = (got.double() - want.double())[finite].norm().item()
    size = want.double()[finite].norm().item() if size is None else size
    if not off <= error * (size + math.sqrt(want.numel())):
        raise WrongError(f"{what}: off by {off:.3g} of {size:.3g}, allowed {error:.3g}")


class Calls(Part):
    name = "calls"
    share = 4.0

    def trial(self, chance: random.Random, folder: Path, counts: Counter[str]) -> None:
        seed = chance.randrange(2**31)

        def work() -> None:
            done: Counter[str] = Counter()
            for number in range(PROBLEMS):
                own = random.Random(seed + number)
                problem = own.choice(KINDS)
                try:
                    problem(own, done)
                except WrongError as wrong:
                    print(f"{problem.__name__}, seed {seed + number}: {wrong}")
                    raise SystemExit(3) from None
            for name, count in done.items():
                print(f"{name}\t{count}")

        outcome = run(work, folder)
        if outcome.code == 3:
            raise WrongError(outcome.out.strip())
        outcome.check(0, what="random calls")
        for line in outcome.out.splitlines():
            name, _, count = line.partition("\t")
            counts[name] += int(count)


# ---------------------------------------------------------------------------------------------------------------
# Attention


def drawn_call(chance: random.Random, dtype: torch.dtype) -> Drawn:
    """A call whose numbers this dtype holds."""
    found = draw(chance.randrange(2**31), SHORT, (*RULES, "gelu", "identity", "sigmoid"))
    rounded = {
        name: x.to(dtype).double() if name in ("query", "key", "value") else x.float().double()
        for name, x in found.inputs.items()
    }
    return replace(found, inputs=rounded)


def for_oracle(drawn: Drawn, leaves: dict[str, Tensor]) -> dict[str, Any]:
    """The options of a call, as the oracle has them."""
    options = dict(drawn.options)
    if "slopes" in leaves:
        options["alibi_slopes"] = leaves["slopes"]
    if drawn.rule in ("entmax", "learned", "per query"):
        return {**options, "alpha": leaves.get("alpha", drawn.numbers["alpha"])}
    per_count = bool(drawn.numbers["per_count"])
    return {**options, "activation": drawn.rule, "bias": drawn.numbers["bias"], "divide_by_count": per_count}


def backends_of(chance: random.Random, drawn: Drawn, dtype: torch.dtype) -> list[str]:
    """Those that take the call."""
    inputs = [drawn.inputs[name].to(dtype) for name in ("query", "key", "value")]
    given = drawn.given(drawn.inputs)
    obstacles = tamis.attention_backends(*inputs, **given).obstacles
    return [name for name in BACKENDS if obstacles.get(name) is None]


def at_edge(drawn: Drawn, options: dict[str, Any]) -> bool:
    """Whether a score lies where the slope of weights jumps."""
    if "alpha" not in options:
        return drawn.rule in ("relu", "leaky_relu") and near_zero(drawn, options)
    alpha = torch.as_tensor(options["alpha"]).double()
    if bool((alpha < 1.6).all()):
        return False  # slopes are steep there, and do not jump
    weights = oracle_weights(drawn.inputs["query"], drawn.inputs["key"], **options)
    power = torch.as_tensor(alpha - 1.0)
    power = power[None, :, None, None] if power.ndim == 1 else power
    bases = weights.pow(power.expand(*weights.shape[:3], 1))
    closest = bases[weights > 0.0].min().item() if bool((weights > 0.0).any()) else 1.0
    return closest < 100 * EDGE or hidden_at_edge(drawn, options, weights, bases, power)


def hidden_at_edge(drawn: Drawn, options: dict[str, Any], weights: Tensor, bases: Tensor, power: Tensor) -> bool:
    """Whether a score without a weight would have one if it were a little larger."""
    rest = {name: value for name, value in options.items() if name not in ("alpha", "enable_gqa", "scale")}
    query, key = drawn.inputs["query"], drawn.inputs["key"]
    seen = visible_pairs((*query.shape[:3], key.shape[2]), **rest)
    scores = power * oracle_scores(query, key, seen, options.get("scale"), **rest)
    tau = torch.where(weights > 0.0, scores - bases, -math.inf).amax(-1, keepdim=True)
    return bool((((scores - tau).abs() < 100 * EDGE) & seen & (weights == 0.0)).any())


def near_zero(drawn: Drawn, options: dict[str, Any]) -> bool:
    rest = {name: value for name, value in options.items() if name not in KNOWN_TO_RULES}
    query, key = drawn.inputs["query"], drawn.inputs["key"]
    seen = visible_pairs((*query.shape[:3], key.shape[2]), **rest)
    scores = oracle_scores(query, key, seen, options.get("scale"), **rest) + options["bias"]
    return bool((seen & (scores.abs() < EDGE)).any())


KNOWN_TO_RULES = ("activation", "bias", "divide_by_count", "enable_gqa", "scale")


def attention(chance: random.Random, done: Counter[str]) -> None:
    """The output and every gradient."""
    narrow = chance.choice(DTYPES)
    drawn = drawn_call(chance, narrow)
    leaves = {name: x.clone().requires_grad_() for name, x in drawn.inputs.items()}
    options = for_oracle(drawn, leaves)
    want = oracle(leaves["query"], leaves["key"], leaves["value"], **options)
    probe = torch.randn(want.shape, generator=torch.Generator().manual_seed(0)).to(narrow).double()
    gradients = torch.autograd.grad(want, list(leaves.values()), probe)
    plain = for_oracle(drawn, drawn.inputs)
    edge = at_edge(drawn, plain)
    sizes = summed(drawn, plain, probe)
    for dtype in {narrow, torch.float64}:
        for backend in backends_of(chance, drawn, dtype):
            what = f"{backend} {drawn.rule} {str(dtype).removeprefix('torch.')}"
            got = drawn.run(dtype, probe, backend=backend)
            compare(f"{what} out", got[0], want.detach(), allowed(dtype), sizes["out"])
            for name, ours, exact in zip(drawn.inputs, got[1:], gradients, strict=True):
                if not edge:
                    compare(f"{what} d{name}", ours, exact, allowed(dtype, True), sizes.get(name))
            done["calls of attention"] += 1
            done["calls at an edge, without gradients"] += edge


def named(chance: random.Random, done: Counter[str]) -> None:
    """The functions that have a rule in their name, and the rules that no such function has."""
    narrow = chance.choice(DTYPES)
    drawn = drawn_call(chance, narrow)
    query, key, value = (drawn.inputs[name] for name in ("query", "key", "value"))
    structure = {name: option for name, option in drawn.given(drawn.inputs).items() if name != "rule"}
    weighted = {"alpha": chance.choice((1.0, 1.3, 1.5, 2.0))}
    activation = {"activation": chance.choice(("relu", "sigmoid", "gelu")), "bias": 0.25, "divide_by_count": True}
    name, own = chance.choice(
        (("entmax_attention", weighted), ("softmax_attention", {}), ("relu_attention", activation), ("softpick", {}))
    )
    if name == "softpick":
        function, own_oracle = partial(tamis.attention, rule=tamis.Softpick()), None
    else:
        function, own_oracle = getattr(tamis, name), own or {"alpha": 1.0}
    if own_oracle is None:
        weights = softpick_oracle(drawn, structure)
    else:
        weights = oracle_weights(query, key, **structure, **own_oracle)
    value_of_all = value.repeat_interleave(query.shape[1] // key.shape[1], 1)
    given = {name: x.float() if name == "alibi_slopes" else x for name, x in structure.items()}
    got = function(*(x.to(narrow) for x in (query, key, value)), **given, **own)
    size = (weights.abs() @ value_of_all.abs()).norm().item()
    # Relative to scores: what fp32 rounds there, exponentials turn into as much of their weights.
    compare(f"{name} {narrow}", got, weights @ value_of_all, 10.0 * allowed(narrow), size)
    done["calls of attention"] += 1


def softpick_oracle(drawn: Drawn, structure: dict[str, Any]) -> Tensor:
    """relu(e^x - 1) / sum |e^x - 1| over the keys that are seen."""
    query, key = drawn.inputs["query"], drawn.inputs["key"]
    rest = {name: option for name, option in structure.items() if name not in KNOWN_TO_RULES}
    seen = visible_pairs((*query.shape[:3], key.shape[2]), **rest)
    x = torch.where(seen, oracle_scores(query, key, seen, structure.get("scale"), **rest), 0.0)
    top = x.amax(-1, keepdim=True).clamp(min=0.0)
    raised = x.exp() - 1.0
    return raised.clamp(min=0.0) / (raised.abs().sum(-1, keepdim=True) + tamis.Softpick().eps * top.exp())


def summed(drawn: Drawn, options: dict[str, Any], probe: Tensor) -> dict[str, float]:
    """The sizes of what is added up to the output and the gradients: rounding is relative to these."""
    query, key, value = (drawn.inputs[name] for name in ("query", "key", "value"))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = oracle_weights(drawn.inputs["query"], drawn.inputs["key"], **options).abs()
    slopes = probe.abs() @ value.abs().mT  # of weights
    most = slopes.norm().item() * max(1.0, abs(options.get("scale") or query.shape[3] ** -0.5))
    return {
        "out": (weights @ value.abs()).norm().item(),
        "query": most * key.norm().item(),
        "key": most * query.norm().item(),
        "value": (weights.mT @ probe.abs()).norm().item(),
        "alpha": most * 10.0,
        "slopes": most * (query.shape[2] + key.shape[2]),
    }


def weights(chance: random.Random, done: Counter[str]) -> None:
    """Weights, dense and sparse, scores, counts and statistics."""
    narrow = chance.choice(DTYPES)
    drawn = drawn_call(chance, narrow)
    query, key = drawn.inputs["query"], drawn.inputs["key"]
    options = for_oracle(drawn, drawn.inputs)
    want = oracle_weights(query, key, **options)
    rest = {name: value for name, value in options.items() if name not in (*KNOWN_TO_RULES, "alpha")}
    seen = visible_pairs(tuple(want.shape), **rest)
    wide = torch.float64 if narrow == torch.float64 else torch.float32
    inputs = [drawn.inputs[name].to(narrow) for name in ("query", "key", "value")]
    given = drawn.given({name: x.to(wide) for name, x in drawn.inputs.items()})
    error = allowed(wide)
    # Those that are 0 in one and nearly 0 in the other lie at the edge.
    compare("attention_weights", tamis.attention_weights(*inputs, **given), want, error)
    done["calls of weights"] += 1
    rule = given.pop("rule")
    scores, visible = tamis.attention_scores(*inputs[:2], **given)
    if not torch.equal(visible, seen):
        raise WrongError("attention_scores: other keys are visible")
    compare(
        "attention_scores",
        torch.where(seen, scores, 0.0),
        oracle_scores(query, key, seen, options.get("scale"), **rest),
        error,
    )
    without_scale = {name: value for name, value in given.items() if name != "scale"}
    counts = tamis.visible_counts(*inputs[:2], **without_scale)
    if not torch.equal(counts.expand(seen.shape[:3]).long(), seen.sum(-1)):
        raise WrongError("visible_counts: other counts")
    done["calls of weights"] += 2
    for backend in backends_of(chance, drawn, narrow):
        sparse = tamis.sparse_attention_weights(*inputs, rule=rule, backend=backend, **given).to_dense()
        compare(f"{backend} sparse_attention_weights", sparse, want, max(error, allowed(sparse.dtype)))
        ours = tamis.attention_statistics(*inputs, rule=rule, backend=backend, **given)
        out, beside = tamis.attention_with_statistics(*inputs, rule=rule, backend=backend, **given)
        value = drawn.inputs["value"].repeat_interleave(query.shape[1] // key.shape[1], 1)
        compare(
            f"{backend} attention_with_statistics",
            out,
            want @ value,
            allowed(narrow),
            (want.abs() @ value.abs()).norm().item(),
        )
        for found in (ours, beside):
            statistics(f"{backend} statistics", found, want, seen, rest)
        done["calls of weights"] += 3


def statistics(what: str, found: tamis.Statistics, want: Tensor, seen: Tensor, options: dict[str, Any]) -> None:
    """What is known of weights, computed head by head from the oracle's."""
    position = pair_positions(tuple(want.shape), **options)
    batch, heads, queries, keys = want.shape
    gaps = [
        [[abs(math.dist(position(b, i, j)[:1], position(b, i, j)[1:])) for j in range(keys)] for i in range(queries)]
        for b in range(batch)
    ]
    distances = torch.tensor(gaps, dtype=torch.float64).reshape(batch, queries, keys)
    for head in range(heads):
        p, visible = want[:, head].abs(), seen[:, head]
        rows, alive = visible.any(-1), (p > 0.0).any(-1)
        if bool(((p > 0.0) & (p < 1e-4)).any()) or int(alive.sum()) == 0:
            continue  # too close to the edge to be counted alike
        share = p / torch.where(alive, p.sum(-1), 1.0)[..., None]
        exact = {
            "support_size": (p > 0.0).sum() / rows.sum(),
            "zero_share": (visible & (p == 0.0)).sum() / visible.sum(),
            "null_share": (rows & ~alive).sum() / rows.sum(),
            "entropy": -torch.special.xlogy(share, share).sum() / alive.sum(),
            "mean_distance": (share * distances).sum() / alive.sum(),
        }
        for name, value in exact.items():
            got = getattr(found, name)[head].item()
            if abs(got - value.item()) > 1e-3 * (1.0 + abs(value.item())):
                raise WrongError(f"{what}: {name} of head {head} is {got:.5g}, expected {value.item():.5g}")


def paged(chance: random.Random, done: Counter[str]) -> None:
    """Attention to a cache in pages, a sequence at a time by the oracle."""
    narrow = chance.choice(DTYPES)
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    batch, key_heads, groups, page = (
        chance.choice((1, 2, 3)),
        chance.choice((1, 2)),
        chance.choice((1, 2)),
        chance.choice((1, 3, 16)),
    )
    queries, dim, value_dim = chance.choice((1, 1, 2, 4)), chance.choice((1, 4, 9)), chance.choice((1, 6))
    lengths = [chance.randint(0, 20) for _ in range(batch)]
    count = max(1, -(-max(lengths) // page))
    pages = batch * count + 1

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(narrow)

    query = randn(batch, key_heads * groups, queries, dim)
    pools = randn(pages, page, key_heads, dim), randn(pages, page, key_heads, value_dim)
    table = torch.randperm(pages, generator=generator)[: batch * count].view(batch, count)
    alpha = chance.choice((1.0, 1.2, 1.5, 2.0))
    options: dict[str, Any] = {"is_causal": True}
    if chance.random() < 0.4:
        options["alibi_slopes"] = torch.rand(key_heads * groups, generator=generator)
    if chance.random() < 0.3:
        options["window"] = chance.choice((0, 4, (7, None)))
    found = tamis.paged_attention(query, *pools, table, torch.tensor(lengths), rule=tamis.Entmax(alpha), **options)
    for row, length in enumerate(lengths):
        place = torch.arange(length)
        where = (table[row, place // page], place % page)
        key, value = (pool.double()[where].transpose(0, 1)[None] for pool in pools)
        if length == 0:
            want = torch.zeros(1, *found.shape[1:], dtype=torch.float64)
        else:
            want = oracle(query[row : row + 1].double(), key, value, alpha=alpha, **options)
        size = value.norm().item() * math.sqrt(queries * key_heads * groups)
        compare(f"paged_attention {narrow}", found[row : row + 1], want, allowed(narrow), size)
    done["calls of paged attention"] += 1


# ---------------------------------------------------------------------------------------------------------------
# Rows, losses and distributions


def slope(function: Callable[[float], Tensor], probe: Tensor) -> float | None:
    """d <function(t), probe> / dt at 0 by differences; None where it jumps, which both sides together do not show."""
    step = 1e-5
    before, here, after = ((function(t) * probe).sum().item() for t in (-step, 0.0, step))
    left, right = (here - before) / step, (after - here) / step
    return (left + right) / 2.0 if abs(left - right) <= 1e-3 * (1.0 + abs(left)) else None


def alike(what: str, got: float, want: float | None, error: float, size: float) -> None:
    """Raise unless a directional derivative is what differences say."""
    if want is not None and not abs(got - want) <= (error + 3e-5) * (1.0 + abs(want) + size):
        raise WrongError(f"{what}: slope {got:.6g}, expected {want:.6g}")


def scores_of(chance: random.Random, dtype: torch.dtype) -> Tensor:
    """(rows, n) of many shapes: spread out, close together, with ties, with large offsets."""
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    rows, n = chance.choice((1, 2, 5)), chance.choice((1, 2, 3, 7, 16, 33, 100))
    z = torch.randn(rows, n, generator=generator) * chance.choice((0.01, 0.5, 1.0, 3.0, 10.0))
    if chance.random() < 0.2:
        z = z + chance.choice((-30.0, 8.0, 100.0))
    return z.to(dtype)


def oracle_of(function: str, z: Tensor, parameter: float) -> Tensor:
    if function == "budgetmax":
        return torch.stack([budgetmax_oracle(row, parameter) for row in z])
    if function == "normmax":
        return normmax_oracle(z, parameter)
    return z.softmax(-1) if parameter == 1.0 else entmax_by_bisection(z, parameter)


def rows(chance: random.Random, done: Counter[str]) -> None:
    """Transforms and the threshold: values, and slopes in the scores and the parameter."""
    dtype = chance.choice(DTYPES)
    z = scores_of(chance, dtype)
    function = chance.choice(("entmax", "entmax", "entmax15", "sparsemax", "normmax", "budgetmax"))
    parameter = {
        "entmax": lambda: chance.choice((1.0, 1.05, 1.3, 1.5, 1.9, 2.0, 2.4, chance.uniform(1.01, 2.4))),
        "entmax15": lambda: 1.5,
        "sparsemax": lambda: 2.0,
        "normmax": lambda: chance.choice((1.3, 2.0, 5.0, chance.uniform(1.2, 6.0))),
        "budgetmax": lambda: chance.uniform(0.1, z.shape[1] * 0.95),
    }[function]()
    exact, wide = z.double(), torch.float64 if dtype == torch.float64 else torch.float32
    want = oracle_of(function, exact, parameter)
    learned = function in ("entmax", "normmax", "budgetmax") and parameter != 1.0
    options = (
        {"backend": chance.choice(("auto", "reference"))} if function in ("entmax", "sparsemax", "entmax15") else {}
    )
    leaf = z.clone().requires_grad_()
    given = torch.tensor(parameter, dtype=torch.float64).to(wide).requires_grad_() if learned else None
    if given is not None:
        want = oracle_of(function, exact, float(given.detach().double()))
    dim = chance.choice((-1, 0))
    call = getattr(tamis, function)
    arguments = [leaf if dim == -1 else leaf.T] + (
        [given] if learned else [parameter] if function in ("entmax", "normmax", "budgetmax") else []
    )
    got = call(*arguments, dim=dim, **options)
    got = got if dim == -1 else got.T
    what = f"{function} {parameter:.4g} {str(dtype).removeprefix('torch.')} {tuple(z.shape)}"
    compare(what, got, want, allowed(dtype))
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    probe, way = (torch.randn(z.shape, generator=generator).to(dtype).double() for _ in range(2))
    value = float(given.detach().double()) if given is not None else parameter
    expected = slope(lambda t: oracle_of(function, exact + t * way, value), probe)
    gradients = torch.autograd.grad(got, [leaf, *([given] if given is not None else [])], probe.to(got.dtype))
    size = probe.norm().item() * way.norm().item()
    alike(f"{what} in its scores", (gradients[0].double() * way).sum().item(), expected, allowed(dtype, True), size)
    if given is not None and value + 1e-5 < 2.5:
        expected = slope(lambda t: oracle_of(function, exact, value + t), probe)
        alike(
            f"{what} in its parameter", gradients[1].item(), expected, allowed(dtype, True), 3.0 * probe.norm().item()
        )
    done["calls of transforms"] += 1
    if function == "entmax" and parameter > 1.0:
        tau, _ = tamis.entmax_threshold(z, parameter)
        power = parameter - 1.0
        again = (power * exact - tau.double()).clamp(min=0.0).pow(1.0 / power)
        size = (1.0 + z.double().abs().max().item()) * math.sqrt(z.numel()) / power
        compare(f"{what}: threshold", again, oracle_of("entmax", exact, parameter), allowed(wide), size)
        done["calls of transforms"] += 1


def losses(chance: random.Random, done: Counter[str]) -> None:
    """The Fenchel-Young losses by their definition, and their slopes."""
    dtype = chance.choice(DTYPES)
    z = scores_of(chance, dtype)
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    target = torch.randint(z.shape[1], (z.shape[0],), generator=generator)
    alpha = chance.choice((1.1, 1.5, 2.0, chance.uniform(1.05, 2.3)))
    function = chance.choice(("entmax_loss", "sparsemax_loss", "normmax_loss"))
    alpha = 2.0 if function == "sparsemax_loss" else max(alpha, 1.3) if function == "normmax_loss" else alpha
    definition = normmax_definition if function == "normmax_loss" else entmax_definition
    hot = torch.nn.functional.one_hot(target, z.shape[1]).double()
    leaf = z.clone().requires_grad_()
    more = {} if function == "sparsemax_loss" else {"alpha": alpha}
    got = getattr(tamis, function)(leaf, target, reduction="none", **more)
    want = definition(z.double(), hot, alpha)
    what = f"{function} {alpha:.4g} {str(dtype).removeprefix('torch.')} {tuple(z.shape)}"
    compare(what, got, want, allowed(dtype), z.double().norm().item())
    way = torch.randn(z.shape, generator=generator).double()
    [gradient] = torch.autograd.grad(got.sum(), [leaf])
    expected = slope(lambda t: definition(z.double() + t * way, hot, alpha), torch.ones(z.shape[0]))
    alike(what, (gradient.double() * way).sum().item(), expected, allowed(dtype, True), way.norm().item())
    done["calls of losses"] += 1


def distributions(chance: random.Random, done: Counter[str]) -> None:
    """EntmaxCategorical: probabilities, logarithms, entropy and what can be drawn."""
    dtype = chance.choice((torch.float64, torch.float32))
    z = scores_of(chance, dtype)
    alpha = chance.choice((1.2, 1.5, 2.0, chance.uniform(1.1, 2.3)))
    found = tamis.distributions.EntmaxCategorical(z, alpha)
    want = entmax_by_bisection(z.double(), alpha)
    compare("EntmaxCategorical.probs", found.probs, want, allowed(dtype))
    compare(
        "EntmaxCategorical.entropy", found.entropy(), -torch.special.xlogy(want, want).sum(-1), 10.0 * allowed(dtype)
    )
    drawn = found.sample((16,))
    if (
        bool((want.expand(16, *want.shape).gather(-1, drawn[..., None]) < -1.0).any())
        or not found.support_mask.expand(16, *want.shape).gather(-1, drawn[..., None]).all()
    ):
        raise WrongError("EntmaxCategorical.sample: drew what cannot happen")
    logs = found.log_prob(drawn[0])
    clear = want.gather(-1, drawn[0][..., None])[..., 0] > 1e-2
    compare(
        "EntmaxCategorical.log_prob",
        logs[clear],
        want.gather(-1, drawn[0][..., None])[..., 0][clear].log(),
        100.0 * allowed(dtype),
    )
    done["calls of distributions"] += 4


KINDS: Sequence[Callable[[random.Random, Counter[str]], None]] = (
    attention, attention, attention, attention, named, weights, paged, rows, rows, losses, distributions,
)  # fmt: skip
