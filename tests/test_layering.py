"""Packages import only those before them, and heavy libraries stay where they belong."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tamis

SOURCE = Path(tamis.__file__).parent

# Lowest first; a package may import its own level's siblings only if listed before it.
LAYERS = [
    "version",
    "precision",
    "files",
    "settings",
    "native",
    "transforms",
    "attention",
    "kernels",
    "functional",
    "distributions",
    "positions",
    "mechanisms",
    "nn",
    "models",
    "data",
    "analysis",
    "hf",
    "decoding",
    "evaluation",
    "training",
    "report",
    "config",
    "runs",
    "task_runs",
    "language_runs",
    "bench",
    "demo",
    "cli",
    "__main__",
]
ALLOWED_THIRD_PARTY = {
    "attention": {"torch", "scipy"},  # only to hand weights over to it
    "kernels": {"torch", "triton"},
    "models": {"torch", "safetensors"},
    "data": {"torch", "numpy", "sentencepiece"},
    "report": {"torch", "numpy", "matplotlib", "starlette", "transformers", "uvicorn"},
    "analysis": {"torch", "numpy"},
    "hf": {"torch", "safetensors", "transformers"},
    "evaluation": {"torch", "numpy", "sacrebleu"},
    "training": {"torch", "numpy", "safetensors", "rich"},
    "bench": {"torch", "numpy", "rich", "matplotlib", "entmax", "adasplash", "transformers"},
    "demo": {"torch", "rich", "matplotlib"},
    "cli": {"typer"},
}


def modules():
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            if node.module == "tamis":
                yield from (f"tamis.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path):
    package = package_of(path)
    assert package in LAYERS, f"{package} is not in the layering: add it where it belongs"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "tamis":
            target = parts[1]
            assert target == package or LAYERS.index(target) < LAYERS.index(package), f"{package} imports {target}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_core_depends_on_torch_alone(path):
    import sys

    allowed = ALLOWED_THIRD_PARTY.get(package_of(path), {"torch"})
    for name in imports(path):
        root = name.split(".")[0]
        if root != "tamis" and root not in sys.stdlib_module_names:
            assert root in allowed, f"{path.name} imports {root}"


def test_the_chain_in_the_docs_is_this_one():
    text = (Path(__file__).parent.parent / "docs" / "design.md").read_text()
    chain = text.split("**Who may import whom.**")[1].split("```")[1]
    assert chain.replace("->", " ").split() == LAYERS


KERNELS = {
    ".".join(("tamis", *path.relative_to(SOURCE).with_suffix("").parts)): path
    for path in sorted((SOURCE / "kernels").rglob("*.py"))
    if path.stem != "__init__"
}


def names_from(path: Path):
    """Modules, and what is imported from each, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


def test_modules_of_kernels_form_no_cycle():
    """Imports within functions count: what is only put off is a cycle all the same."""
    graph = {
        module: {name for origin, name in names_from(path) for name in (origin, f"{origin}.{name}") if name in KERNELS}
        for module, path in KERNELS.items()
    }
    assert list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("module", KERNELS)
def test_kernels_import_nothing_private(module):
    assert [name for _, name in names_from(KERNELS[module]) if name.startswith("_")] == []
