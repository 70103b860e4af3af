"""`tamis export`: a run as files that run without our code, each checked by running it.

    onnx    graphs for ONNX Runtime and its like
    pt2     graphs compiled by AOTInductor for this kind of machine, for C++ or Python with torch alone
    hf      a folder for transformers (:mod:`tamis.hf.models`)

A graph computes; it does not search.  Beside the graphs lie the vocabulary and `export.json`, which says what they take
and give; greedy search over them is a few lines (docs/models-that-travel.md).
"""

from __future__ import annotations

import copy
import importlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tamis.data.vocabulary import load_vocabularies, save_vocabularies
from tamis.exchange.graphs import Graph, export_program, graphs_of, steps_of
from tamis.files import replace_folder, write_json
from tamis.models.loading import load_model, model_folder
from tamis.settings import choose

FORMATS = ("onnx", "pt2", "hf")
DESCRIPTION = "export.json"
CLOSE = 1e-5
"""How far a graph may be from the model, relative to the largest number that it gives, or absolute below 1."""
CHECKED = (
    {"batch": 1, "length": 1, "source_length": 1, "target_length": 1},
    {"batch": 2, "length": 7, "source_length": 9, "target_length": 1},
    {"batch": 3, "length": 10, "source_length": 6, "target_length": 11},
)
"""Sizes that every graph is run at after it was written, and once at its greatest width."""

Run = Callable[[Sequence[Tensor]], Tensor]
Say = Callable[[str], None]


def export_run(path: Path, output: Path, to: str, max_length: int = 128, say: Say = print) -> Path:
    """Write a run or a model folder in another format; `output` holds all of it, checked, or is left as it was.

    Args:
        max_length: the longest text that a graph takes, in tokens with their end; more take more steps of the solver.
    """
    choose("--to", to, FORMATS)
    if max_length < 2:
        raise ValueError(f"max_length must be at least 2, got {max_length}")
    folder = model_folder(path)
    if output.exists() and (not output.is_dir() or (any(output.iterdir()) and not _is_ours(output))):
        raise ValueError(f"{output} is there already, and is nothing that `tamis export` wrote: name another --output")
    _check_installed(to)
    replace_folder(output, lambda draft: _write(folder, draft, to, max_length, say))
    say(f"written: {output}")
    return output


def _is_ours(output: Path) -> bool:
    return (output / DESCRIPTION).is_file() or (output / "tamis_model.py").is_file()


def _check_installed(to: str) -> None:
    for package in {"onnx": ("onnx", "onnxscript", "onnxruntime"), "hf": ("transformers",)}.get(to, ()):
        try:
            importlib.import_module(package)
        except ImportError as error:
            extra = "export" if to == "onnx" else "hf"
            raise ImportError(f"export to {to} needs {package}: pip install 'tamis[{extra}]'") from error
    if to == "pt2" and shutil.which("g++") is None and shutil.which("clang++") is None:
        raise RuntimeError(
            "export to pt2 compiles the model, and there is no C++ compiler here: install g++ or clang++"
        )


def _write(folder: Path, draft: Path, to: str, max_length: int, say: Say) -> None:
    draft.mkdir(parents=True)
    if to == "hf":
        _write_transformers(folder, draft)
        return
    model = load_model(folder).eval()
    vocabularies = load_vocabularies(folder)
    write, load = {"onnx": (_write_onnx, load_onnx), "pt2": (_write_pt2, load_pt2)}[to]
    described = {}
    exact = graphs_of(copy.deepcopy(model).double(), max_length, fixed=False)
    for graph, own in zip(graphs_of(model, max_length), exact, strict=True):
        file = draft / f"{graph.name}.{to}"
        write(graph, file)
        error = check_graph(load(file), graph, own)
        say(f"{file.name}: {steps_of(graph)} steps of the solver, within {error:.1e} of the model")
        described[graph.name] = {
            "file": file.name,
            "inputs": {name: list(own.values()) for name, own in zip(graph.inputs, graph.dims, strict=True)},
            "output": graph.output,
            "solver_steps": steps_of(graph),
            "error": error,
        }
    save_vocabularies(draft, *vocabularies)
    specials = {"source": vocabularies[0].specials, "target": vocabularies[1].specials}
    about = {"model": type(model).__name__, "max_length": max_length, "specials": specials, "graphs": described}
    write_json(draft / DESCRIPTION, about, indent=1)


def check_graph(run: Run, graph: Graph, model: Graph) -> float:
    """How far what was written is from the model at most, at several sizes; an error if that is too far.

    In two parts, as fp32 adds up in another order in each: the graph from the model, both in fp64, and what was written
    from the graph, both in fp32.  `model` is the model's own graph in fp64.
    """
    exact = copy.deepcopy(graph.module).double()
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    widest = dict.fromkeys(graph.sizes(), graph.width) | {"batch": 2}
    for sizes in (*CHECKED, widest):
        inputs = graph.example({name: min(size, graph.width) for name, size in sizes.items()}, generator)
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        with torch.no_grad():
            expected, solved, own = model.module(*wide), exact(*wide), graph.module(*inputs)
        largest = max(1.0, expected.abs().max().item())
        parts = (solved - expected).abs().max().item(), (run(inputs) - own).abs().max().item()
        error = max(parts) / largest
        if not error <= CLOSE:
            raise RuntimeError(
                f"{graph.name} was written, but is {error:.1e} from the model where {CLOSE:g} is allowed"
            )
        worst = max(worst, error)
    return worst


def _write_onnx(graph: Graph, file: Path) -> None:
    program = torch.onnx.export(
        export_program(graph),
        input_names=list(graph.inputs),
        output_names=[graph.output],
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(str(file))


def load_onnx(file: Path) -> Run:
    """What ONNX Runtime computes with a graph, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(inputs: Sequence[Tensor]) -> Tensor:
        fed = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, fed)[0])

    return run


def _write_pt2(graph: Graph, file: Path) -> None:
    import torch._inductor

    torch._inductor.aoti_compile_and_package(export_program(graph), package_path=str(file))


def load_pt2(file: Path) -> Run:
    """What AOTInductor's own code computes with a graph."""
    import torch._inductor

    compiled: Any = torch._inductor.aoti_load_package(str(file))

    def run(inputs: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            found = compiled(*inputs)
        return found[0] if isinstance(found, tuple | list) else found

    return run


def _write_transformers(folder: Path, draft: Path) -> None:
    import tamis.hf

    model, tokenizer = tamis.hf.to_transformers(folder)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
