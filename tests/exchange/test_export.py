"""Exported graphs compute what the model does: ONNX Runtime, AOTInductor, torch.export and transformers."""

import copy
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from tamis.decoding import TextGenerator, Translator
from tamis.exchange import export
from tamis.exchange.export import check_graph, export_run, load_onnx, load_pt2
from tamis.exchange.graphs import export_program, graphs_of, steps_of
from tamis.models import CausalLM, CausalLMConfig, Seq2Seq, Seq2SeqConfig

SIZES = {"embed_dim": 16, "num_heads": 2, "ffn_dim": 24}
WIDTH = 12
MODELS = {
    "entmax, sinusoidal": {
        "encoder_mechanism": "entmax",
        "decoder_mechanism": "sparsemax",
        "cross_mechanism": "entmax15",
    },
    "rela, rope": {"encoder_mechanism": "rela", "decoder_mechanism": "softmax", "position": "rope"},
    "softpick, learned": {"encoder_mechanism": "softpick", "cross_mechanism": "softpick", "position": "learned"},
}
LANGUAGE = {
    "asentmax, nape": {},
    "softmax, alibi": {"mechanism": "softmax", "position": "alibi"},
    "ssmax, none": {"mechanism": "ssmax", "position": "none", "num_kv_heads": 1},
    "near softmax": {"mechanism": {"name": "entmax", "start": 1.05}, "position": "learned"},
}


def built(kind, config):
    torch.manual_seed(0)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.normal_(0.0, 0.4)
    return model.eval()


def language_model(**changes):
    return built(CausalLM, CausalLMConfig(vocab_size=100, num_layers=1, **SIZES, **changes))


def translation_model(**changes):
    sizes = {"vocab_size": 110, "source_vocab_size": 100, "encoder_layers": 1, "decoder_layers": 1}
    return built(Seq2Seq, Seq2SeqConfig(**sizes, **SIZES, **changes))


def saved(folder, model, vocabularies):
    source, target = vocabularies
    if isinstance(model, Seq2Seq):
        Translator(model, source, target).save(folder)
    else:
        TextGenerator(model, source).save(folder)
    return folder


def check_programs(model):
    exact = graphs_of(copy.deepcopy(model).double(), WIDTH, fixed=False)
    for graph, own in zip(graphs_of(model, WIDTH), exact, strict=True):
        program = export_program(graph)
        assert not any("tamis" in str(node.target) for node in program.graph.nodes)  # nothing that needs our code
        check_graph(lambda inputs, program=program: program.module()(*inputs), graph, own)


def test_a_program():
    check_programs(language_model())


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE)
def test_programs_of_language_models(name):
    check_programs(language_model(**LANGUAGE[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_programs_of_translation_models(name):
    check_programs(translation_model(**MODELS[name]))


def test_onnx_of_a_language_model(vocabularies, tmp_path):
    """Checked by the command itself, then in a process that has none of our code."""
    pytest.importorskip("onnxruntime", reason="ONNX needs onnxruntime")
    model = language_model(mechanism={"name": "entmax", "alpha": 1.5}, position="rope")
    said = []
    output = export_run(saved(tmp_path / "ours", model, vocabularies), tmp_path / "onnx", "onnx", WIDTH, said.append)
    about = json.loads((output / "export.json").read_text())["graphs"]["model"]
    assert about["inputs"] == {"tokens": ["batch", "length"]}
    assert about["error"] <= 1e-5
    assert f"{about['solver_steps']} steps of the solver" in said[0]
    ids = [[5, 7, 9, 4], [3, 3, 8, 1]]
    text = "import sys, json, numpy, onnxruntime; s = onnxruntime.InferenceSession(sys.argv[1]); "
    text += "print(json.dumps(s.run(None, {'tokens': numpy.array(json.loads(sys.argv[2]))})[0].tolist()))"
    arguments = [sys.executable, "-I", "-c", text, str(output / "model.onnx"), json.dumps(ids)]
    found = json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(found), model(torch.tensor(ids)), rtol=0.0, atol=1e-5)
    export_run(tmp_path / "ours", tmp_path / "onnx", "hf", WIDTH, said.append)  # what we wrote may be replaced


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_onnx_of_translation_models(name, vocabularies, tmp_path):
    pytest.importorskip("onnxruntime", reason="ONNX needs onnxruntime")
    model = translation_model(**MODELS[name])
    output = export_run(
        saved(tmp_path / "ours", model, vocabularies), tmp_path / "onnx", "onnx", WIDTH, lambda text: None
    )
    encoder, decoder = load_onnx(output / "encoder.onnx"), load_onnx(output / "decoder.onnx")
    source, mask = torch.randint(4, 100, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
    memory, target = encoder((source, mask)), torch.full((2, 1), 1)
    for _ in range(6):  # greedy search, as docs have it
        target = torch.cat([target, decoder((target, memory, mask))[:, -1:].argmax(-1)], 1)
    with torch.no_grad():
        expected = model(source, target, mask).argmax(-1)
    assert torch.equal(target[:, 1:], expected[:, :-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE)
def test_onnx_of_language_models(name, vocabularies, tmp_path):
    pytest.importorskip("onnxruntime", reason="ONNX needs onnxruntime")
    folder = saved(tmp_path / "ours", language_model(**LANGUAGE[name]), vocabularies)
    export_run(folder, tmp_path / "onnx", "onnx", WIDTH, lambda text: None)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_aotinductor(vocabularies, tmp_path):
    model = language_model(mechanism={"name": "entmax", "alpha": 1.5})
    output = export_run(
        saved(tmp_path / "ours", model, vocabularies), tmp_path / "pt2", "pt2", WIDTH, lambda text: None
    )
    run = load_pt2(output / "model.pt2")
    ids = torch.randint(100, (3, 9))
    with torch.no_grad():
        torch.testing.assert_close(run((ids,)), model(ids), rtol=0.0, atol=1e-5)
    text = "import sys, torch; from torch._inductor import aoti_load_package as load; "
    text += (
        "x = torch.arange(12).view(2, 6); y = load(sys.argv[1])(x); y = y[0] if isinstance(y, (tuple, list)) else y; "
    )
    text += "assert 'tamis' not in sys.modules; torch.save(y, sys.argv[2])"
    arguments = [sys.executable, "-c", text, str(output / "model.pt2"), str(tmp_path / "y.pt")]
    subprocess.run(arguments, check=True, env={**os.environ, "PYTHONPATH": ""})
    found = torch.load(tmp_path / "y.pt", weights_only=True)
    with torch.no_grad():
        torch.testing.assert_close(found, model(torch.arange(12).view(2, 6)), rtol=0.0, atol=1e-5)


def test_export_to_transformers(vocabularies, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = translation_model()
    output = export_run(saved(tmp_path / "ours", model, vocabularies), tmp_path / "hf", "hf", say=lambda text: None)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(output)
    source, target = torch.randint(4, 100, (2, 7)), torch.randint(4, 110, (2, 5))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=source, decoder_input_ids=target).logits, model(source, target))


def test_what_is_far_from_the_model_is_not_left_there(vocabularies, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime", reason="ONNX needs onnxruntime")
    monkeypatch.setattr(export, "_write_onnx", lambda graph, file: file.write_bytes(b""))
    monkeypatch.setattr(export, "load_onnx", lambda file: lambda inputs: torch.zeros(*inputs[0].shape, 100))
    folder = saved(tmp_path / "ours", language_model(), vocabularies)
    with pytest.raises(RuntimeError, match="from the model where 1e-05 is allowed"):
        export_run(folder, tmp_path / "onnx", "onnx", WIDTH, lambda text: None)
    assert not (tmp_path / "onnx").exists()


def test_steps_are_those_of_the_widest_and_of_the_largest_alpha():
    model = translation_model(encoder_mechanism="entmax15", decoder_mechanism="softmax", cross_mechanism="sparsemax")
    encoder, decoder = graphs_of(model, 128)
    assert (steps_of(encoder), steps_of(decoder)) == (11, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"to": "onxx"}, "did you mean 'onnx'"), ({"to": "onnx", "max_length": 1}, "at least 2, got 1")],
)
def test_options(options, message, vocabularies, tmp_path):
    folder = saved(tmp_path / "ours", language_model(), vocabularies)
    with pytest.raises(ValueError, match=message):
        export_run(folder, tmp_path / "out", **options)


def test_more_tokens_than_positions(vocabularies, tmp_path):
    pytest.importorskip("onnxruntime", reason="ONNX needs onnxruntime")
    folder = saved(tmp_path / "ours", language_model(position="learned", max_length=8), vocabularies)
    with pytest.raises(ValueError, match="8 positions, fewer than max_length = 12"):
        export_run(folder, tmp_path / "out", "onnx", WIDTH)


def test_what_is_there_is_not_written_over(vocabularies, tmp_path):
    folder = saved(tmp_path / "ours", language_model(), vocabularies)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="nothing that `tamis export` wrote"):
        export_run(folder, tmp_path / "out", "hf")
    with pytest.raises(FileNotFoundError):
        export_run(tmp_path / "none", tmp_path / "new", "hf")
