"""A Seq2Seq with softmax as a model of CTranslate2, translated by a process of its own.

CTranslate2 is fastest where its threads never sleep (OMP_WAIT_POLICY=active), on a machine of their own; where anything
else runs, its int8 is several times as fast with one thread as with two that wait for each other.  Both are timed.
Threads that never sleep spin between calls too: each way has a process of its own, held still while others are timed.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tamis.models.seq2seq import Seq2Seq

PEER = "ctranslate2"
PRECISIONS = {"fp32": "float32", "int8": "int8"}
"""What it computes in, by our names for it."""
WAYS = ("", " one thread")
"""How it is run, by the end of a call's name: with the threads of the others, or one."""


def version() -> str | None:
    """That of the installed package, or None."""
    try:
        return str(importlib.import_module(PEER).__version__)
    except ModuleNotFoundError:
        return None


def export(model: Seq2Seq, folder: Path, *, bos_id: int, eos_id: int) -> None:
    """Write the weights as CTranslate2 reads them; the name of token 7 is "7"."""
    specs: Any = importlib.import_module(f"{PEER}.specs")
    config = model.config
    if config.norm != "layernorm" or config.activation != "relu" or config.arrangement == "both":
        raise ValueError("CTranslate2 has LayerNorm before or after sublayers and ReLU between layers")
    spec = specs.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers), config.num_heads, pre_norm=config.arrangement == "pre"
    )
    table = model.embedding.weight
    source = table if model.source_embedding is None else model.source_embedding.weight
    stacks = (
        (spec.encoder, model.encoder, spec.encoder.embeddings[0], source, model.encoder_norm),
        (spec.decoder, model.decoder, spec.decoder.embeddings, table, model.decoder_norm),
    )
    for own, layers, embedding, weights, norm in stacks:
        own.scale_embeddings = math.sqrt(config.embed_dim)
        embedding.weight = _array(weights)
        own.position_encodings.encodings = _positions(model)
        if isinstance(norm, nn.LayerNorm):
            _norm(own.layer_norm, norm)
        for layer_spec, layer in zip(own.layer, layers, strict=True):
            _layer(layer_spec, layer)
    spec.decoder.projection.weight = _array(table if model.output is None else model.output.weight)
    names = [str(token) for token in range(config.vocab_size)]
    spec.register_source_vocabulary([str(token) for token in range(source.shape[0])])
    spec.register_target_vocabulary(names)
    spec.config.bos_token = spec.config.decoder_start_token = names[bos_id]
    spec.config.eos_token, spec.config.unk_token = names[eos_id], names[config.pad_id]
    spec.validate()
    spec.optimize()
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


class Process:
    """CTranslate2 with a model, in a process of its own, which stands still between calls; to be closed."""

    def __init__(self, folder: Path, precision: str, threads: int) -> None:
        command = [sys.executable, "-m", __name__, str(folder), PRECISIONS[precision], str(threads)]
        environment = {**os.environ, "OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ask({})

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.communicate()

    def translate(self, sources: list[list[int]], beam: int, length: int) -> tuple[float, list[list[int]]]:
        """Milliseconds, and translations of exactly so many tokens."""
        return self._ask({"sources": sources, "beam": beam, "length": length})

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        self._process.send_signal(signal.SIGSTOP)
        if not answer:
            raise RuntimeError("CTranslate2 has ended")
        return json.loads(answer)


def serve(folder: str, compute_type: str, threads: int) -> None:
    """Answer each line of standard input with a line."""
    package: Any = importlib.import_module(PEER)
    translator = package.Translator(
        folder, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
    )
    for line in sys.stdin:
        request = json.loads(line)
        answer: tuple[float, list[list[int]]] = (0.0, [])
        if request:
            sources = [[str(token) for token in row] for row in request["sources"]]
            length = request["length"]
            start = time.perf_counter()
            found = translator.translate_batch(
                sources,
                beam_size=request["beam"],
                length_penalty=0.0,
                max_decoding_length=length,
                min_decoding_length=length,
            )
            ms = (time.perf_counter() - start) * 1e3
            answer = (ms, [[int(token) for token in best.hypotheses[0]] for best in found])
        print(json.dumps(answer), flush=True)


def _array(weights: Tensor) -> Any:
    return weights.detach().float().contiguous().numpy()


def _positions(model: Seq2Seq) -> Any:
    limit, width = 1024, model.config.embed_dim
    table = model.decoder_position.embed(torch.zeros(1, limit, width), torch.arange(limit)[None])[0]
    return _array(table)


def _norm(spec: Any, norm: nn.LayerNorm) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _linear(spec: Any, *parts: nn.Linear) -> None:
    """Side by side, where there are several."""
    spec.weight = _array(torch.cat([part.weight for part in parts]))
    if parts[0].bias is not None:
        spec.bias = _array(torch.cat([part.bias for part in parts]))


def _layer(spec: Any, layer: Any) -> None:
    own, feed = layer.self_attention, layer.feed_forward
    _linear(spec.self_attention.linear[0], own.q_proj, own.k_proj, own.v_proj)
    _linear(spec.self_attention.linear[1], own.out_proj)
    _norm(spec.self_attention.layer_norm, layer.self_residual.norm)
    if layer.cross_attention is not None:
        cross = layer.cross_attention
        for part, modules in zip(
            spec.attention.linear, ([cross.q_proj], [cross.k_proj, cross.v_proj], [cross.out_proj]), strict=True
        ):
            _linear(part, *modules)
        _norm(spec.attention.layer_norm, layer.cross_residual.norm)
    _linear(spec.ffn.linear_0, feed.up)
    _linear(spec.ffn.linear_1, feed.down)
    _norm(spec.ffn.layer_norm, layer.feed_residual.norm)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
