"""The command line, as a user calls it."""

import json
import resource
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import tamis
from tamis.bench import rows as bench
from tamis.cli import app, runs, tasks
from tamis.data.vocabulary import Vocabulary
from tamis.decoding import DecodingConfig, Translator
from tamis.demo.translation import RECIPE
from tamis.models import Seq2Seq, Seq2SeqConfig
from tamis.native import product

SENTENCES = ["a red dog runs", "she reads", "it rains again and again"]


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
    assert "report.html" in result.stdout
    assert (tmp_path / "shown" / "quick" / "report.html").read_text().startswith("<!doctype html>")


def test_version():
    for name in ("version", "--version"):
        assert run(name).stdout.strip() == tamis.__version__


def test_help_does_not_wait_for_torch():
    """Under half a second of computing, of which torch would take more."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = run("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    for name in (
        "prepare",
        "train",
        "evaluate",
        "analyze",
        "report",
        "settings",
        "tasks",
        "bench",
        "--install-completion",
    ):
        assert name in found.stdout
    assert after.ru_utime - before.ru_utime < 0.5
    code = "import sys; from tamis.cli import app; print([n for n in ('torch', 'numpy', 'rich') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_help_shows_sections_in_brackets():
    found = called("train", "--help").output
    for text in ("[data] section", "[text]", "[task]", "--arm", "--set", "--plugin"):
        assert text in found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_complete(shell, monkeypatch):
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: (shell, shell))
    found = called("--show-completion")
    assert found.exit_code == 0
    assert "_TAMIS_COMPLETE" in found.output.upper() or "COMPLETE" in found.output


def test_commands_for_tasks_are_the_ones_for_all():
    commands = {info.name: info.callback for info in tasks.group.registered_commands}
    assert commands["train"] is runs.train
    assert commands["evaluate"] is runs.evaluate


def test_unknown_command_is_an_error():
    result = run("sieve")
    assert result.returncode != 0
    assert "sieve" in result.stderr


def test_bench_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    kinds = ("forward", "forward+backward", "learned alpha", "loss")
    monkeypatch.setattr(bench, "CASES", tuple(bench.Case((32, 64), 1.0, 1.5, kind, 2.0) for kind in kinds))
    monkeypatch.setattr(bench, "PEER_SHAPE", (32, 64))
    monkeypatch.setattr(bench, "_memory_factor", lambda alpha: 1.0)
    for build in ("one", "another"):
        bench.measure(tmp_path, build, repeats=2)
    record = json.loads((tmp_path / "transforms-cpu.json").read_text())
    assert record["machine"]["cpu"]
    assert list(record["builds"]) == ["one", "another"]
    rows = record["builds"]["one"]["rows"]
    assert [row["kind"] for row in rows] == list(kinds)
    assert all(row["mass_error"] <= 1e-5 for row in rows[:3])
    assert all(row["tamis"]["min_ms"] > 0.0 and row["floor"]["min_ms"] > 0.0 for row in rows)
    assert "over dense" in capsys.readouterr().out


def test_bench_times_each_build_that_runs_here(monkeypatch, capsys):
    called = []

    def run(command, env, **options):
        called.append(env["TAMIS_NATIVE"])
        return subprocess.CompletedProcess(command, env["TAMIS_NATIVE"] == "v4", stderr="this CPU lacks what v4 needs")

    monkeypatch.delenv("TAMIS_NATIVE", raising=False)
    monkeypatch.setattr(bench.library, "status", lambda: bench.library.Status("v3", "", ("v4", "v3")))
    monkeypatch.setattr(bench.subprocess, "run", run)
    bench.run(None, repeats=2, threads=torch.get_num_threads())
    assert called == ["v4", "v3"]
    assert capsys.readouterr().out == "v4: this CPU lacks what v4 needs\n"


def test_benchmarks_of_kernels_are_run_one_at_a_time():
    result = run("bench", "kernels", "--relu", "--norm")
    assert result.returncode != 0
    assert "give one of them" in result.stderr


def test_attention_bench_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    from tamis.bench import attention
    from tamis.native import status

    small = {
        "CASES": (attention.Case(2, 8, ("alpha 1.5", "relu")), attention.Case(2, 9, causal=True, head_dim=5)),
        "LENGTHS": (8, 16),
        "ALIBI": (2, 16, 32),
        "DECODING": (2, 40, 1.0),
        "MEMORY": 64,
    }
    for name, value in small.items():
        monkeypatch.setattr(attention, name, value)
    attention.run(tmp_path, repeats=1, threads=1)
    (path,) = tmp_path.glob("attention-cpu-*.json")
    record = json.loads(path.read_text())
    assert [(row["length"], list(row["over_sdpa"])) for row in record["rows"]] == [
        (8, ["alpha 1.5", "relu"]),
        (9, ["alpha 1.5", "learned"]),
    ]
    assert record["native"] == status().loaded
    assert record["machine"]["cpu"]
    assert path.with_suffix(".png").stat().st_size > 10000
    printed = capsys.readouterr().out
    assert "32 as at 16" in printed
    assert "one query, 2 heads, 40 keys" in printed


def test_bench_refuses_to_time_wrong_weights():
    import torch

    with pytest.raises(RuntimeError, match="not timed"):
        bench.check(lambda z: z.softmax(-1) * 1.01, torch.randn(4, 8), 1.5)


# ---------------------------------------------------------------------------------------------------------------
# Translating


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model that has learned nothing."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = Vocabulary.train(SENTENCES * 3, 40, kind="bpe")
    torch.manual_seed(0)
    sizes = {"embed_dim": 16, "num_heads": 2, "ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 1}
    config = Seq2SeqConfig(vocab_size=len(vocabulary), pad_id=vocabulary.pad_id, **sizes)
    Translator(Seq2Seq(config), vocabulary, decoding=DecodingConfig(beam=7, max_length=5)).save(folder)
    return folder


def called(*arguments, text=b""):
    return CliRunner().invoke(app, list(map(str, arguments)), input=text)


@pytest.mark.skipif(product.obstacle() is not None, reason=str(product.obstacle()))
def test_translate_in_int8(model):
    found = called("translate", model, "--int8", text=b"she reads\n")
    assert found.exit_code == 0, found.output
    assert found.stdout.count("\n") == 1


def test_standard_input_is_read_as_files_are(model, tmp_path):
    text = "\ufeffshe reads\r\na red\u2028dog\rruns\n\nit rains".encode()
    (tmp_path / "text").write_bytes(text)
    found = called("translate", model, "--device", "cpu", text=text)
    assert found.exit_code == 0, found.output
    assert found.stdout.count("\n") == 4
    assert found.stdout == called("translate", model, tmp_path / "text", "--device", "cpu").stdout
    wrong = called("translate", model, "--device", "cpu", text=b"she reads\na \xff dog\n")
    assert wrong.exit_code == 1
    assert "error: standard input, line 2: invalid UTF-8" in wrong.output


def test_translations_are_written_as_utf8(model, tmp_path):
    found = called("translate", model, "--device", "cpu", "--output", tmp_path / "out", text=b"she reads\n")
    assert found.exit_code == 0, found.output
    assert (tmp_path / "out").read_bytes().decode("utf-8").endswith("\n")


@pytest.mark.parametrize("setting", ["progress=1", "self=2", "device=cpu", "say=3", "sentences=x", "decoding.beam=3"])
def test_only_settings_of_decoding_can_be_set(model, setting):
    found = called("translate", model, "--device", "cpu", "--set", setting)
    assert found.exit_code == 1
    assert f"error: DecodingConfig has no setting '{setting.partition('=')[0].partition('.')[0]}'" in found.output


def test_settings_are_those_of_the_model_but_for_what_is_set(model):
    found = called("translate", model, "--device", "cpu", "--set", "n_best=6", text=b"she reads\n")
    assert found.exit_code == 0, found.output
    assert found.stdout.count("\n") == 6  # of the model's 7 beams, not the default 5


@pytest.mark.parametrize("name", ["translate", "train"])
def test_a_device_that_is_not_here(model, name):
    found = called(name, model if name == "translate" else RECIPE, "--device", "foo")
    assert found.exit_code == 1
    assert "error: device must be one that is here: cpu" in found.output


def test_who_has_read_enough_is_no_error(model):
    """Both after many lines and when the only flush is that at the end."""
    for arguments in (("translate", str(model), "--device", "cpu"), ("version",)):
        command = [sys.executable, "-c", "from tamis.cli import main; main()", *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, **pipes)
        process.stdout.close()
        process.stdin.write(b"she reads\n" * 10)
        process.stdin.close()
        assert (process.stderr.read(), process.wait(timeout=120)) == (b"", 0)
        process.stderr.close()


@pytest.mark.parametrize(
    ("systems", "message"),
    [
        (("a=R1", "a=R2"), "each system has a name of its own, got 'a' twice"),
        (("a=R,R",), "each run counts once in a system, got one twice in 'a=R,R'"),
        (("a=R,./x/../R",), "each run counts once"),
        (("=R",), "a system is NAME=RUN[,RUN...], got '=R'"),
        (("a=",), "a system is NAME=RUN[,RUN...], got 'a='"),
        (("a=R,",), "a system is NAME=RUN[,RUN...]"),
        (("R",), "a system is NAME=RUN[,RUN...]"),
    ],
)
def test_systems_that_cannot_be_compared(systems, message):
    found = called("compare", *systems)
    assert found.exit_code == 1
    assert message in found.output


def test_prepare_reports_once(tmp_path):
    (tmp_path / "r.toml").write_text(
        "name = 'r'\n[data]\ntrain = 'grammar:train:100'\nvalid = 'grammar:valid:9'\n[vocabulary]\nsize = 150\n"
        "kind = 'bpe'\n"
    )
    for built in (True, False):
        found = called("prepare", tmp_path / "r.toml", "--set", f"data.folder={json.dumps(str(tmp_path / 'data'))}")
        assert found.exit_code == 0, found.output
        assert ("learning a vocabulary" in found.stdout) == built
        for report in ("train: 100 of 100 pairs kept", "valid: 9 of 9 pairs kept"):
            assert found.stdout.count(report) == 1
