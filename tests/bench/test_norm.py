import pytest
import torch

from tamis.bench import norm

pytest.importorskip("triton")


def run_once(call):
    call()
    return 1.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs compiled")
def test_all_are_timed_and_ours_are_right(monkeypatch, capsys):
    """Without a GPU: `graph_time` is all that needs one."""
    monkeypatch.setattr(norm, "graph_time", run_once)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    row = norm.row(40, 32, device="cpu")
    assert set(row["times"]) == {"tamis", "plain", "compiled", "rms_norm"}
    assert all(times == {"forward_us": 1.0, "both_us": 1.0} for times in row["times"].values())
    assert max(row["errors"].values()) < norm.TOLERANCE
    norm._print([row])
    assert "1 (0.40x)" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs compiled")
def test_what_is_wrong_is_refused(monkeypatch):
    monkeypatch.setattr(norm.ops, "rela_norm", lambda z, gain, gate, epsilon, plain: 1.5 * plain(z, gain, gate))
    with pytest.raises(RuntimeError, match=r"y is off by 0\.[45]"):
        norm.row(8, 32, device="cpu")
