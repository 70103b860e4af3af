import pytest
import torch

from tamis.bench import rows, transforms


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z.softmax(-1)

    @staticmethod
    def backward(ctx, grad):
        raise TypeError("at 48:33:\n  ^\nExpected dtype ['fp32'] but got bf16")


def test_a_peer_that_fails_on_the_cpu_is_recorded(monkeypatch):
    monkeypatch.setattr(rows, "PEER_SHAPE", (4, 8))
    monkeypatch.setattr(rows, "peer", lambda alpha: FailsBackward.apply)
    forward, both = (rows.time_case(rows.Case((4, 8), 1.0, 1.5, kind), 2) for kind in ("forward", "forward+backward"))
    assert forward["entmax"]["min_ms"] > 0.0
    assert "unsupported" not in forward
    assert both["unsupported"] == {"entmax": "Expected dtype ['fp32'] but got bf16"}
    assert "entmax" not in both
    assert both["tamis"]["min_ms"] > 0.0
    rows.show("v4", [forward, both], {"1.5": 1.0})


def test_a_peer_that_fails_on_the_gpu_is_recorded_in_its_pass(monkeypatch, capsys):
    """The one that is exact is timed, in both passes; `event_times` is all that needs a GPU."""

    def times(call, repeats):
        call()
        return {"median_us": 1.0, "spread_us": 0.0}

    def entmax(z):
        return transforms.functional.entmax(z, 1.5)

    class Fails(FailsBackward):
        @staticmethod
        def forward(ctx, z):
            return entmax(z)

    monkeypatch.setattr(transforms, "event_times", times)
    monkeypatch.setattr(transforms, "peer", lambda alpha: entmax)
    monkeypatch.setattr(transforms, "_adasplash", lambda alpha: Fails.apply)
    label = {"shape": (4, 8), "dtype": "torch.float32", "scale": 1.0, "alpha": 1.5}
    measured = {"tamis": times(lambda: None, 1), "softmax": times(lambda: None, 1), "over_softmax": 1.0}
    measured_rows = [label | measured | {"pass": name, "errors": {}} for name in ("forward", "forward+backward")]
    measured_rows.append(label | {"pass": "weights", "unsupported": {"tamis": "off by 1: not timed"}})
    transforms._add_peers(measured_rows, torch.randn(4, 8), 2)
    assert all(row["entmax"]["median_us"] == 1.0 for row in measured_rows[:2])
    assert measured_rows[0]["adasplash"]["median_us"] == 1.0
    assert "adasplash" not in measured_rows[1]
    assert measured_rows[1]["unsupported"] == {"adasplash": "Expected dtype ['fp32'] but got bf16"}
    transforms._print_gpu(measured_rows)
    assert "but got bf16" in capsys.readouterr().out


def test_a_peer_that_is_not_exact_is_not_timed(monkeypatch):
    monkeypatch.setattr(transforms, "peer", lambda alpha: rows.softmax)
    monkeypatch.setattr(transforms, "_adasplash", lambda alpha: None)
    row = {"pass": "forward", "scale": 1.0, "alpha": 1.5, "errors": {}}
    transforms._add_peers([row], torch.randn(4, 8), 2)
    assert row["errors"]["entmax"] > 1e-3
    assert "entmax" not in row


def test_an_unknown_device_is_an_error():
    with pytest.raises(ValueError, match="cpu or cuda, got tpu"):
        transforms.run(None, repeats=1, threads=1, device="tpu")
