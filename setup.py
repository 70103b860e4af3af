"""Builds the C++ kernels: one library for each instruction set, or none where there is no compiler.

They are plain libraries that know nothing of Python, loaded by src/tamis/native/library.py; so one wheel serves all
versions of Python.
"""

import os
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/tamis/native/cpp")
# Each with flags of its own and nothing shared, or code for one processor might run on another.
BUILDS = {"v4": "-march=x86-64-v4", "v3": "-march=x86-64-v3", "baseline": "-march=x86-64"}
FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wno-psabi", "-Wno-maybe-uninitialized"),
    # Nothing here reads errno or traps; infinities, NaN and the order of sums keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
]


def extension(name, *flags):
    return Extension(
        f"tamis.native.libtamis_{name}",
        sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
        depends=sorted(str(path) for path in SOURCES.glob("*.h")),
        extra_compile_args=[*FLAGS, *flags],
        language="c++",
        optional=True,
    )


def extensions():
    if sys.platform == "win32":  # the sources are for GCC and clang
        return []
    if platform.machine() in ("x86_64", "AMD64"):
        return [extension(name, flag) for name, flag in BUILDS.items()]
    return [extension("generic")]


class BuildLibraries(build_ext):
    def get_ext_filename(self, name):
        return os.path.join(*name.split(".")) + ".so"

    def build_extension(self, ext):
        # The same sources, other flags: objects must not be taken for those of another build.
        shared, self.build_temp = self.build_temp, os.path.join(self.build_temp, ext.name)
        try:
            super().build_extension(ext)
        finally:
            self.build_temp = shared


class AnyPython(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildLibraries, "bdist_wheel": AnyPython})
