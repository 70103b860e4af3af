"""The command line, as a user calls it."""

import json
import subprocess
import sys

import pytest

import tamis
from tamis.bench import transforms as bench


def run(*arguments, cwd=None):
    command = [sys.executable, "-c", "from tamis.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)


def test_demo_trains_draws_and_prints(tmp_path):
    result = run("demo", "--quick", "--output", "shown", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "0.6329" in result.stdout
    for name in ("softmax", "alpha-entmax", "ReLA"):
        assert result.stdout.count(name) >= 5  # a heading, a row of the table, three sentences
    for picture in ("entmax-family.png", "quick/attention.png"):
        path = tmp_path / "shown" / picture
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 20_000


def test_version():
    assert run("version").stdout.strip() == tamis.__version__


def test_unknown_command_is_an_error():
    result = run("sieve")
    assert result.returncode != 0
    assert "sieve" in result.stderr


def test_bench_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SHAPES", ((32, 64),))
    monkeypatch.setattr(bench, "_memory_factor", lambda alpha: 1.0)
    bench.run(tmp_path, repeats=2, threads=2)
    record = json.loads((tmp_path / "transforms-cpu.json").read_text())
    assert record["machine"]["cpu"]
    assert {row["pass"] for row in record["rows"]} == {"forward", "forward+backward"}
    assert all(row["mass_error"] <= 1e-5 for row in record["rows"])
    assert "over softmax" in capsys.readouterr().out


def test_attention_bench_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    from tamis.bench import attention

    for name, value in {"BATCH": 2, "LENGTHS": (8,), "LONG": 64}.items():
        monkeypatch.setattr(attention, name, value)
    attention.run(tmp_path, repeats=2, threads=2)
    record = json.loads((tmp_path / "attention-cpu.json").read_text())
    assert [(row["length"], row["causal"]) for row in record["rows"]] == [(8, False), (8, True)]
    assert record["long"]["length"] == 64
    assert "64 x 64" in capsys.readouterr().out


def test_bench_refuses_to_time_wrong_weights():
    import torch

    with pytest.raises(RuntimeError, match="not timed"):
        bench._check(lambda z: z.softmax(-1) * 1.01, torch.randn(4, 8), 1.5)
