"""Compiles the native kernels while the package is built; without a compiler the package is pure Python."""

import importlib.util
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "peagle" / "ops" / "native"


class CustomBuildHook(BuildHookInterface):
    """The wheel holds the kernels that this machine runs, of every instruction set if asked for, or none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        spec = importlib.util.spec_from_file_location("native_build", NATIVE / "build.py")
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        try:
            made = [*native.build(every=native.wants_all()), *native.build_launcher()]
        except native.BuildError as error:
            print(f"peagle: no native kernels, XLA's own code will run instead: {error}", file=sys.stderr)
            return
        build_data["artifacts"] += [str(path.relative_to(Path(__file__).parent)) for path in made]
        build_data["pure_python"] = False
        # libraries that ctypes opens: of this system, and of any Python
        build_data["tag"] = f"py3-none-{re.sub('[-.]', '_', sysconfig.get_platform())}"
