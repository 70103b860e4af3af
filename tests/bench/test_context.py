import json

import pytest
import torch

from tamis.bench import context
from tamis.models import CausalLMConfig
from tamis.nn.modes import evaluating

SMALL = {"vocab_size": 50, "embed_dim": 32, "num_heads": 2, "ffn_dim": 32, "num_layers": 1}


def test_it_writes_what_it_prints(tmp_path, capsys):
    context.run(tmp_path, length=64, new=3, repeats=1, size=SMALL, device="cpu")
    record = json.loads((tmp_path / "context-cpu.json").read_text())
    assert record["machine"]["cpu"]
    assert record["settings"]["length"] == 64
    assert [row["arm"] for row in record["rows"]] == list(context.ARMS)
    assert all(row[phase]["seconds"] > 0.0 for row in record["rows"] for phase in ("step", "prefill", "decode"))
    dense, softmax, *sparse = (row["density"] for row in record["rows"])
    assert dense is None
    assert all(0.0 < density < softmax for density in sparse)
    assert "ASEntmax, NAPE" in capsys.readouterr().out


def test_the_dense_peer_is_the_model_with_softmax():
    """Also one token at a time behind a cache, where torch aligns a causal mask otherwise."""
    config = CausalLMConfig(**SMALL, **context.ARMS[context.FLASH])
    peer, own = (context._built(name, config, torch.device("cpu")) for name in (context.FLASH, "softmax"))
    tokens = torch.arange(20)[None]
    with evaluating(peer), evaluating(own):
        cache = peer.new_cache()
        parts = [
            peer(tokens[:, :18], cache=cache),
            peer(tokens[:, 18:19], cache=cache),
            peer(tokens[:, 19:], cache=cache),
        ]
        torch.testing.assert_close(torch.cat(parts, 1), own(tokens), rtol=1e-4, atol=1e-5)


def test_a_phase_without_enough_memory_is_said():
    def call():
        raise torch.OutOfMemoryError

    cost = context._cost(torch.device("cpu"), 1, call)
    assert cost == {"seconds": None, "bytes": None}
    row = {"step": cost, "prefill": cost, "decode": cost, "density": None}
    assert context._cells(row) == ["out of memory", "-"] * 3 + ["all"]


def test_bad_arguments():
    with pytest.raises(ValueError, match="length"):
        context.run(None, length=0)
