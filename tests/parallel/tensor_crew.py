"""Processes that share the weights of a model, and what they compute differently from one process.

``torchrun --nproc-per-node 2 tensor_crew.py FOLDER`` writes relative errors by case, the largest of both processes, and
what bad input is answered with; with 4, two pairs of processes share sequences, or have batches of their own, as well.
"""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tamis
from tamis.mechanisms import EntmaxAttention, LearnedAlpha, Mechanism, build_mechanism
from tamis.models import CausalLM, CausalLMConfig, Seq2Seq, Seq2SeqConfig
from tamis.nn import Attention, MultiheadAttention
from tamis.nn.layers import FeedForward, TransformerLayer
from tamis.parallel import ContextParallel, tensor_parallel
from tamis.positions import build_position

SIZES = {"vocab_size": 50, "embed_dim": 32, "num_heads": 4, "ffn_dim": 64, "num_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "asentmax, nape": {"mechanism": "asentmax", "position": "nape"},
    "asentmax per head": {"mechanism": {"name": "asentmax", "per_head": True}, "position": "alibi"},
    "entmax, rope, groups": {"mechanism": "entmax", "position": "rope", "num_kv_heads": 2},
    "rela-g, alibi": {"mechanism": "rela", "position": "alibi"},
    "rela-layernorm, learned": {
        "mechanism": {"name": "rela", "variant": "layernorm"},
        "position": "learned",
        "tie_embeddings": False,
    },
    "ssmax, sinusoidal, biases": {
        "mechanism": "ssmax",
        "position": "sinusoidal",
        "norm": "layernorm",
        "bias": True,
        "output_bias": True,
    },
    "softpick, odd vocabulary": {"mechanism": "softpick", "position": "none", "vocab_size": 51},
}


class Warm(Mechanism):
    """One's own: a temperature for all heads and an offset for each."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.own = nn.Parameter(torch.linspace(0.5, 1.5, num_heads))

    def rule(self, inputs: Any) -> tamis.Rule:
        return tamis.Entmax(1.5)

    def query_scale(self, inputs: Any) -> torch.Tensor:
        return (self.temperature * self.own)[None, :, None]

    def split_heads(self, heads: Any) -> None:
        heads.split(self, "own")


MECHANISMS: dict[str, Callable[[], Mechanism]] = {
    "entmax": lambda: EntmaxAttention(4),
    "entmax, shared": lambda: EntmaxAttention(4, LearnedAlpha((1, 1, 1))),
    "entmax, given": lambda: EntmaxAttention(4, torch.tensor([1.1, 1.3, 1.6, 2.0])),
    "entmax, by batch": lambda: EntmaxAttention(4, nn.Parameter(torch.linspace(1.1, 1.9, 4).view(1, 4, 1, 1))),
    "rela-i": lambda: build_mechanism({"name": "rela", "variant": "i"}, 32, 4),
    "asentmax": lambda: build_mechanism("asentmax", 32, 4),
    "own": lambda: Warm(4),
}


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    one = one.full_tensor() if isinstance(one, DTensor) else one
    return ((one - other).abs().max() / other.abs().max().clamp(min=1e-30)).item()


def largest(own: nn.Module, whole: nn.Module, of: Callable[[torch.Tensor], Any]) -> float:
    """Of the differences between parameters.  Biases of keys have gradients of nothing but rounding."""
    pairs = zip(own.named_parameters(), whole.named_parameters(), strict=True)
    return max(difference(of(x), of(y)) for (_, x), (name, y) in pairs if not name.endswith("k_proj.bias"))


def gradients(own: nn.Module, whole: nn.Module) -> float:
    return largest(own, whole, lambda parameter: parameter.grad)


def divided(whole: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return tensor_parallel(copy.deepcopy(whole), mesh)


def language_model(mesh: DeviceMesh, settings: dict[str, Any]) -> dict[str, float]:
    """Logits, gradients, and the weights after a clipped step of AdamW."""
    torch.manual_seed(0)
    whole = CausalLM(CausalLMConfig(**(SIZES | settings))).double()
    own = divided(whole, mesh)
    tokens = torch.randint(50, (2, 13))
    factor = torch.randn(2, 13, whole.config.vocab_size, dtype=torch.float64)
    found = {}
    logits, expected = own(tokens), whole(tokens)
    found["logits"] = difference(logits.detach(), expected.detach())
    for out in (logits, expected):
        (out * factor).sum().backward()
    found["gradients"] = gradients(own, whole)
    for model in (own, whole):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3).step()
    return found | {"stepped": largest(own, whole, torch.Tensor.detach)}


def translation_model(mesh: DeviceMesh) -> dict[str, float]:
    """Encoder, decoder and cross-attention of padded sentences, with embeddings of their own."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "source_vocab_size": 40, "embed_dim": 32, "num_heads": 4, "ffn_dim": 32}
    layers = {"encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0, "attention_dropout": 0.0}
    whole = Seq2Seq(Seq2SeqConfig(**sizes, **layers, position="rope", encoder_mechanism="rela")).double()
    own = divided(whole, mesh)
    source, target = torch.randint(1, 40, (2, 9)), torch.randint(1, 50, (2, 7))
    source[1, 5:] = 0
    factor = torch.randn(2, 7, 50, dtype=torch.float64)
    logits, expected = own(source, target), whole(source, target)
    for out in (logits, expected):
        (out * factor).sum().backward()
    return {"logits": difference(logits.detach(), expected.detach()), "gradients": gradients(own, whole)}


def layer(mesh: DeviceMesh, make: Callable[[], Mechanism], dtype: torch.dtype) -> dict[str, float]:
    """A layer of one's own: output, and gradients of its weights and input."""
    torch.manual_seed(0)
    attention = Attention(32, 4, mechanism=make(), position=build_position("nape", 32, 4), num_kv_heads=2)
    whole = TransformerLayer(attention, FeedForward(32, 64, "swiglu")).to(dtype)
    own = divided(whole, mesh)
    x = torch.randn(2, 11, 32, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    factor = torch.randn(2, 11, 32, dtype=dtype)
    outs = [model(given, is_causal=True) for model, given in zip((own, whole), inputs, strict=True)]
    for out in outs:
        (out * factor).sum().backward()
    found = {"output": difference(*(out.detach() for out in outs)), "gradients": gradients(own, whole)}
    return found | {"input": difference(inputs[0].grad, inputs[1].grad)}


def tied(mesh: DeviceMesh) -> dict[str, float]:
    """A weight that two modules share, which are held whole."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 8), FeedForward(8, 16), nn.Linear(8, 8)).double()
    whole[2].weight = whole[0].weight
    own = divided(whole, mesh)
    x = torch.randn(3, 8, dtype=torch.float64)
    for model in (own, whole):
        model(x).square().sum().backward()
    return {"gradients": gradients(own, whole), "divided": float(own[2].weight is not own[0].weight)}


def decoded(mesh: DeviceMesh) -> dict[str, float]:
    """Token by token with a cache, against all at once."""
    torch.manual_seed(0)
    whole = CausalLM(CausalLMConfig(**SIZES)).double().eval()
    own = divided(whole, mesh)
    tokens = torch.randint(50, (2, 6))
    with torch.no_grad():
        cache = own.new_cache()
        steps = [own(tokens[:, k : k + 1], cache=cache) for k in range(6)]
        return {"logits": difference(torch.cat(steps, 1), whole(tokens))}


def dropped(mesh: DeviceMesh) -> dict[str, float]:
    """With dropout, all processes go on with the same activations, and heads drop weights of their own."""
    torch.manual_seed(0)
    attention = Attention(32, 4, mechanism=EntmaxAttention(4, 1.5), dropout=0.5)
    own = tensor_parallel(TransformerLayer(attention, FeedForward(32, 64, dropout=0.5), dropout=0.5), mesh)
    seen: list[torch.Tensor] = []
    for module in (own.self_attention.out_proj, own.feed_forward.down):
        module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]), prepend=True)
    with torch.no_grad():  # alike in all processes and heads before anything is dropped
        for part in ("q_proj", "k_proj", "v_proj"):
            getattr(own.self_attention, part).weight.fill_(0.1)
            getattr(own.self_attention, part).bias.fill_(0.1)
        own.feed_forward.up.weight.fill_(0.1)
    out = own(torch.ones(2, 11, 32)).detach()
    parts = [[torch.empty_like(x) for _ in range(2)] for x in seen]
    for x, part in zip(seen, parts, strict=True):
        dist.all_gather(part, x.detach().contiguous(), group=mesh.get_group("tensor"))
    both = [torch.empty_like(out) for _ in range(2)]
    dist.all_gather(both, out, group=mesh.get_group("tensor"))
    return {"outputs": difference(*both), "same": float(sum(torch.equal(*part) for part in parts))}


def saved(mesh: DeviceMesh, folder: Path) -> dict[str, float]:
    """As one, and in shards, for one process to read."""
    torch.manual_seed(0)
    whole = CausalLM(CausalLMConfig(**SIZES)).double()
    own = divided(whole, mesh)
    state = get_model_state_dict(own, options=StateDictOptions(full_state_dict=True))
    dcp.save({"model": get_model_state_dict(own)}, checkpoint_id=folder / "shards")
    if dist.get_rank() == 0:
        plain = CausalLM(whole.config).double()
        plain.load_state_dict(state)
        plain.save_pretrained(folder / "model")
    other = whole.state_dict()
    return {"whole": max(difference(state[name], other[name]) for name in state) if dist.get_rank() == 0 else 0.0}


def data_as_well(mesh: DeviceMesh) -> dict[str, float]:
    """FSDP2 over the other dimension: each pair has rows of its own."""
    torch.manual_seed(0)
    whole = CausalLM(CausalLMConfig(**SIZES)).double()
    own = divided(whole, mesh)
    for module in own.layers:
        fully_shard(module, mesh=mesh["data"])
    fully_shard(own, mesh=mesh["data"])
    tokens = torch.randint(50, (4, 13))
    factor = torch.randn(4, 13, 50, dtype=torch.float64)
    rank = mesh.get_local_rank("data")
    (2 * own(tokens[rank::2]) * factor[rank::2]).sum().backward()
    (whole(tokens) * factor).sum().backward()
    return {"gradients": gradients(own, whole)}


def context_as_well(mesh: DeviceMesh, way: str) -> dict[str, float]:
    """Each pair has some tokens of the sequence."""
    torch.manual_seed(0)
    whole = CausalLM(CausalLMConfig(**SIZES)).double()
    own = divided(whole, mesh)
    tokens = torch.randint(50, (2, 16))
    factor = torch.randn(2, 16, 50, dtype=torch.float64)
    with ContextParallel(mesh, way, dim="data") as context:
        (own(context.take(tokens)) * context.take(factor)).sum().backward()
    context.sum_gradients(own)
    (whole(tokens) * factor).sum().backward()
    return {"gradients": gradients(own, whole)}


def refused(mesh: DeviceMesh) -> dict[str, str]:
    class Silent(Warm):
        split_heads = Mechanism.split_heads

    tied = nn.Sequential(FeedForward(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].up.weight
    attempts = {
        "heads": lambda: tensor_parallel(Attention(30, 3), mesh),
        "key heads": lambda: tensor_parallel(CausalLM(CausalLMConfig(**SIZES, num_kv_heads=1)), mesh),
        "channels": lambda: tensor_parallel(FeedForward(8, 9), mesh),
        "multihead": lambda: tensor_parallel(nn.Sequential(MultiheadAttention(8, 2)), mesh),
        "mechanism": lambda: tensor_parallel(Attention(32, 4, mechanism=Silent(4)), mesh),
        "tied": lambda: tensor_parallel(tied, mesh),
        "twice": lambda: tensor_parallel(tensor_parallel(FeedForward(8, 8), mesh), mesh),
        "dimension": lambda: tensor_parallel(FeedForward(8, 8), mesh, dim="rows"),
        "mesh": lambda: tensor_parallel(FeedForward(8, 8), None),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except (ValueError, TypeError, NotImplementedError) as error:
            found[name] = str(error)
    return found


def checks(mesh: DeviceMesh, folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    if dist.get_world_size() == 4:
        yield "fsdp", partial(data_as_well, mesh)
        for way in ("heads", "keys"):
            yield f"context, {way}", partial(context_as_well, mesh, way)
        return
    for name, settings in MODELS.items():
        yield f"model, {name}", partial(language_model, mesh, settings)
    yield "model, translation", partial(translation_model, mesh)
    for name, make in MECHANISMS.items():
        yield f"layer, {name}, float64", partial(layer, mesh, make, torch.float64)
        if "shared" not in name:  # one number that terms of both signs nearly cancel in
            yield f"layer, {name}, float32", partial(layer, mesh, make, torch.float32)
    yield "tied", partial(tied, mesh)
    yield "decoded", partial(decoded, mesh)
    yield "dropped", partial(dropped, mesh)
    yield "saved", partial(saved, mesh, folder)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    found: dict[str, dict[str, float]] = {}
    for name, check in checks(mesh, folder):
        errors = check()
        values = torch.tensor(list(errors.values()), dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        found[name] = dict(zip(errors, values.tolist(), strict=True))
    said = refused(mesh)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found, indent=1))
        (folder / "said.json").write_text(json.dumps(said, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
