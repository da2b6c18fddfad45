"""Build the compiled core of collectives.kernels where a compiler is at hand; metadata: setup.cfg.

The core is called through ctypes: a wheel that holds it fits every Python 3 of its platform. Where
it cannot be built the installation goes on without it, and NumPy takes its place.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
core = SimpleNamespace(**runpy.run_path(str(ROOT / "collectives/kernels/host/library.py")))


class build_core(build_ext):
    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            self.warn(f"the C++ core is left out, NumPy takes its place ({error})")
            self.extensions = self.distribution.ext_modules = []

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(core.LIBRARY.suffix))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class tagged_wheel(bdist_wheel):
    def run(self) -> None:
        self.run_command("build_ext")
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", "any" if self.root_is_pure else super().get_tag()[2])


def relative(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


setup(
    ext_modules=[
        Extension(
            "collectives.kernels.host.core",
            sources=relative(core.sources()),
            depends=relative(core.headers()),
            define_macros=[("GTOPK_SOURCES", f'"{core.fingerprint()}"')],
            extra_compile_args=core.COMPILE_ARGUMENTS,
            extra_link_args=core.LINK_ARGUMENTS,
            language="c++",
        )
    ],
    cmdclass={"build_ext": build_core, "bdist_wheel": tagged_wheel},
)
