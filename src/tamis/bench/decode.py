"""`tamis bench decode`: beam search on the CPU, beside `MarianMTModel.generate` of Hugging Face transformers.

The two have the same weights: Marian's are copied into a `Seq2Seq`, so the results can be compared before anything is
timed.  Marian's sinusoidal positions hold all sines before all cosines, ours take turns; that is a permutation of
channels, which the copy applies throughout.  Two loads:

    equal   every source has 25 tokens, and every translation is made to have 25: the same work for both
    mixed   sources of 5 to 45 tokens, 25 on average, and translations as long as their source, as in text
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from tamis.bench.timing import alternate, machine, save
from tamis.decoding.search import Hypothesis, beam_search
from tamis.decoding.settings import DecodingConfig
from tamis.models.seq2seq import Seq2Seq, Seq2SeqConfig

VOCABULARY, BATCH, BEAM, LENGTH = 8000, 32, 5, 25
PAD, BOS, EOS = 0, 1, 2
PEER = "transformers"
MECHANISMS = ("softmax", "entmax", "entmax15", "rela")
LOADS = ("equal", "mixed")


class Size(NamedTuple):
    layers: int
    embed_dim: int
    ffn_dim: int
    heads: int = 8


SIZES = {"base": Size(6, 512, 2048), "small": Size(4, 256, 1024)}


def run(output: Path | None, *, repeats: int, threads: int) -> None:
    torch.set_num_threads(threads)
    rows = [_case(name, load, repeats) for name in SIZES for load in LOADS]
    title = f"sentences/s on CPU, {threads} threads, fp32, beam {BEAM}, batch {BATCH}, vocabulary {VOCABULARY}"
    table = Table(title=title)
    for column in ("model", "load", PEER, *MECHANISMS, f"softmax over {PEER}"):
        table.add_column(column, justify="right")
    for row in rows:
        speeds = [
            f"{row['sentences_per_s'][name]:.1f}" if name in row["times"] else "-" for name in (PEER, *MECHANISMS)
        ]
        ratio = f"{row['over_peer']['softmax']:.2f}x" if "over_peer" in row else "-"
        table.add_row(row["model"], row["load"], *speeds, ratio)
    Console(width=110).print(table)
    if output is not None:
        settings = {"batch": BATCH, "beam": BEAM, "vocabulary": VOCABULARY, "mean_length": LENGTH}
        save(output / "decode-cpu.json", {"benchmark": "decode", "machine": machine(), **settings, "rows": rows})


def _case(name: str, load: str, repeats: int) -> dict[str, Any]:
    source = sources(load)
    models = {mechanism: build(SIZES[name], mechanism) for mechanism in MECHANISMS}
    calls: dict[str, Callable[[], object]] = {}
    row: dict[str, Any] = {"model": name, "load": load}
    marian = build_marian(SIZES[name])
    if marian is not None:
        copy_marian(marian, models["softmax"])
        calls[PEER] = lambda: generate(marian, source)
        row |= {"peer": f"{PEER} {importlib.import_module(PEER).__version__}", **check(marian, models["softmax"])}
    for mechanism, model in models.items():
        calls[mechanism] = lambda model=model: search(model, source)  # type: ignore[misc]
    row["times"] = alternate(calls, repeats)
    row["sentences_per_s"] = {call: BATCH / (time["min_ms"] / 1e3) for call, time in row["times"].items()}
    if marian is not None:
        peer = row["times"][PEER]
        row["over_peer"] = {call: peer["min_ms"] / row["times"][call]["min_ms"] for call in models}
        row["over_peer_by_median"] = {call: peer["median_ms"] / row["times"][call]["median_ms"] for call in models}
    return row


def sources(load: str) -> Tensor:
    """(BATCH, Ls), padded; the end is a token as any other here."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(-20, 20, BATCH).round().long() if load == "mixed" else torch.zeros(BATCH, dtype=torch.long)
    lengths = LENGTH + spread[torch.randperm(BATCH, generator=generator)]
    tokens = torch.randint(3, VOCABULARY, (BATCH, int(lengths.max())), generator=generator)
    return torch.where(torch.arange(tokens.shape[1]) < lengths[:, None], tokens, PAD)


def search(model: Seq2Seq, source: Tensor) -> list[list[Hypothesis]]:
    """Translations that are as long as their source: nothing may end before, and the limit is there."""
    longest = source.shape[1]
    config = DecodingConfig(beam=BEAM, max_length=longest, min_length=longest + 1, max_ratio=1.0, max_extra=0)
    return beam_search(model, source, bos_id=BOS, eos_id=EOS, config=config)


def generate(marian: Any, source: Tensor, **options: Any) -> Any:
    """The same by transformers: the end is forbidden before, and where lengths differ forced as the last token."""
    lengths = (source != PAD).sum(1)
    longest = int(lengths.max()) + 1  # the begin counts
    if bool((lengths != lengths[0]).any()):
        options["logits_processor"] = [_ForcedEnd(lengths.repeat_interleave(BEAM))]
    else:
        options["min_length"] = longest
    with torch.inference_mode():
        return marian.generate(
            source, attention_mask=source != PAD, num_beams=BEAM, max_length=longest, do_sample=False, **options
        )


class _ForcedEnd:
    """A logits processor: row i ends with its token number lengths[i], and not before."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = (self.lengths <= input_ids.shape[1]).unsqueeze(1)
        is_end = torch.arange(scores.shape[1]) == EOS
        return scores.masked_fill(last != is_end, -math.inf)


def check(marian: Any, model: Seq2Seq) -> dict[str, float]:
    """Refuse to time what is not right: on equal lengths both must find translations of the same score."""
    source = sources("equal")
    theirs = generate(marian, source, return_dict_in_generate=True, output_scores=True)
    ours = [found[0] for found in search(model, source)]
    scores = torch.tensor([best.score for best in ours]) / LENGTH
    error = (scores - theirs.sequences_scores).abs().max().item()
    if not error <= 1e-4:
        raise RuntimeError(f"the mean log-probabilities of the best translations differ by {error:g}: not timed")
    same = [best.tokens == tokens[1:] for best, tokens in zip(ours, theirs.sequences.tolist(), strict=True)]
    return {"score_error": error, "same_translations": sum(same) / BATCH}


def build(size: Size, mechanism: str) -> Seq2Seq:
    torch.manual_seed(0)
    config = Seq2SeqConfig(
        vocab_size=VOCABULARY,
        embed_dim=size.embed_dim,
        num_heads=size.heads,
        ffn_dim=size.ffn_dim,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_mechanism=mechanism,
        decoder_mechanism=mechanism,
        cross_mechanism=mechanism,
        arrangement="post",
        pad_id=PAD,
    )
    return Seq2Seq(config).eval()


def build_marian(size: Size) -> Any:
    """None where transformers is not installed."""
    try:
        transformers: Any = importlib.import_module(PEER)
    except ModuleNotFoundError:
        return None
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=VOCABULARY,
        d_model=size.embed_dim,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=size.ffn_dim,
        decoder_ffn_dim=size.ffn_dim,
        activation_function="relu",
        scale_embedding=True,
        init_std=size.embed_dim**-0.5,
        pad_token_id=PAD,
        decoder_start_token_id=BOS,
        eos_token_id=EOS,
        forced_eos_token_id=None,
    )
    return transformers.MarianMTModel(config).eval()


@torch.no_grad()
def copy_marian(marian: Any, model: Seq2Seq) -> None:
    """Give a post-norm softmax model Marian's weights, its channels in our order."""
    width = model.config.embed_dim
    channels = torch.arange(width).view(2, -1).T.flatten()  # sine and cosine in turn
    model.embedding.weight.copy_(marian.model.shared.weight[:, channels])

    def reads(ours: nn.Linear, theirs: nn.Linear) -> None:
        ours.weight.copy_(theirs.weight[:, channels])
        ours.bias.copy_(theirs.bias)

    def writes(ours: Any, theirs: Any) -> None:  # a norm too
        ours.weight.copy_(theirs.weight[channels])
        ours.bias.copy_(theirs.bias[channels])

    def attends(ours: Any, theirs: Any) -> None:
        for name in ("q_proj", "k_proj", "v_proj"):
            reads(getattr(ours, name), getattr(theirs, name))
        writes(ours.out_proj, theirs.out_proj)

    stacks = ((model.encoder, marian.model.encoder.layers), (model.decoder, marian.model.decoder.layers))
    for ours, theirs in ((a, b) for stack in stacks for a, b in zip(*stack, strict=True)):
        layer: Any = ours
        attends(layer.self_attention, theirs.self_attn)
        writes(layer.self_residual.norm, theirs.self_attn_layer_norm)
        if layer.cross_attention is not None:
            attends(layer.cross_attention, theirs.encoder_attn)
            writes(layer.cross_residual.norm, theirs.encoder_attn_layer_norm)
        reads(layer.feed_forward.up, theirs.fc1)
        writes(layer.feed_forward.down, theirs.fc2)
        writes(layer.feed_residual.norm, theirs.final_layer_norm)
