"""Installing builds the kernels where there is a C++ compiler, and works where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import tamis
from tamis.native import library

pytestmark = pytest.mark.slow

ROOT = Path(tamis.__file__).parents[2]
WITHOUT_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
BUILT = {f"tamis/native/libtamis_{name}.so" for name in library._built()}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the sources, as a clone has them."""
    if not (ROOT / "pyproject.toml").is_file() or not BUILT:
        pytest.skip("needs the repository and a C++ compiler")
    copy = tmp_path / "project"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    return copy


def pip(*arguments: str | Path, environment: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    found = subprocess.run(command, env=os.environ | (environment or {}), capture_output=True, text=True)
    assert found.returncode == 0, found.stderr + found.stdout


def wheel(source: Path, folder: Path, environment: dict[str, str] | None = None) -> Path:
    """A wheel built in isolation."""
    pip("wheel", "--no-deps", "--wheel-dir", folder, source, environment=environment)
    (built,) = folder.glob("*.whl")
    return built


def libraries_in(file: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(file).namelist() if name.endswith(".so")}


def result_of(path: Path, **environment: str) -> str:
    """What entmax gives with the package at this path, and the build that was loaded."""
    code = (
        "import tamis, torch; print(tamis.native.status().loaded, tamis.entmax15(torch.tensor([1.0, 0, -2])).tolist())"
    )
    clean = {name: value for name, value in os.environ.items() if name != library.VARIABLE}
    clean |= {"PYTHONPATH": str(path)} | environment
    return subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True, cwd=path
    ).stdout


def test_wheels_with_and_without_a_compiler(project: Path, tmp_path: Path):
    with_kernels = wheel(project, tmp_path / "with")
    assert libraries_in(with_kernels) == BUILT
    assert "-py3-none-" in with_kernels.name
    shutil.rmtree(project / "build")
    plain = wheel(project, tmp_path / "without", WITHOUT_COMPILER)
    assert libraries_in(plain) == set()
    for file, loaded in ((with_kernels, library.status().loaded), (plain, None)):
        target = tmp_path / f"installed_{loaded}"
        pip("install", "--no-deps", "--target", target, file)
        name, weights = result_of(target).split(" ", 1)
        assert name == str(loaded or "None")
        assert weights.startswith("[0.83")


def test_a_wheel_from_the_source_distribution(project: Path, tmp_path: Path):
    code = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, check=True)
    (archive,) = (project / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {Path(name).name for name in packed.getnames()}
    assert {path.name for path in (ROOT / "src/tamis/native/cpp").iterdir()} <= names
    assert not any(name.endswith(".so") for name in names)
    assert libraries_in(wheel(archive, tmp_path / "wheel")) == BUILT


def test_installed_from_the_sources_and_editable(project: Path, tmp_path: Path):
    pip("install", "--no-deps", "--target", tmp_path / "installed", project)
    assert result_of(tmp_path / "installed", TAMIS_NATIVE="require").startswith(str(library.status().loaded))
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", environment], check=True)
    for options, loaded in (({}, True), (WITHOUT_COMPILER, False)):
        for left in (project / "src/tamis/native").glob("*.so"):
            left.unlink()
        shutil.rmtree(project / "build", ignore_errors=True)
        command = [environment / "bin/python", "-m", "pip", "install", "--no-deps", "--editable", project]
        found = subprocess.run(command, env=os.environ | options, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
        built = {f"tamis/native/{path.name}" for path in (project / "src/tamis/native").glob("*.so")}
        assert built == (BUILT if loaded else set())
