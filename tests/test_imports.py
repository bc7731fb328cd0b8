"""Who may import whom (`ROOMS`); a <- b: b may import a.

base <- ops <- target, drafter
ops <- protocols <- config <- engine, drafters, text <- answers <- pair <- loading <- measure <- workflows <- cli
in the engine: auto <- request, resolved <- memory, step <- host <- devices
protocols <- parallel <- loading
measure <- serve <- cluster <- cli; serve loads no checkpoints
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("peagle", "target", "drafter")
OURS = (*PACKAGES, "scripts", "tests", "results")
ROOTS = ("peagle.cli", "peagle.__main__")  # where everything is put together
_OPS = ("peagle.base", "peagle.ops")
_BENEATH = (*_OPS, "peagle.protocols")
_AUTO = "peagle.engine.auto"
_SHARED = ("peagle.engine.grammar", "peagle.engine.json_schema", "peagle.engine.request", "peagle.engine.resolved")
_FLOOR = (*_BENEATH, "peagle.config", _AUTO, *_SHARED)
_HOST = (*_FLOOR, "peagle.engine.memory", "peagle.engine.step")
_ANSWERS = (*_BENEATH, "peagle.config", "peagle.engine", "peagle.text")
_PAIR = (*_ANSWERS, "peagle.answers", "peagle.drafters", "peagle.pair")
_MODELS = ("target", "drafter")
_LOADING = (*_PAIR, "peagle.parallel", "peagle.loading")
# what each room may import of ours beside itself; training is for workflows and commands alone
ROOMS: dict[str, tuple[str, ...]] = {
    "peagle.base": (),
    "peagle.ops": _OPS,
    "target": _OPS,
    "drafter": _OPS,
    "peagle.protocols": _OPS,
    "peagle.config": _BENEATH,
    _AUTO: _BENEATH,
    **dict.fromkeys(_SHARED, _FLOOR),
    "peagle.engine.memory": _FLOOR,
    "peagle.engine.step": _FLOOR,
    "peagle.engine.host": _HOST,
    "peagle.engine.devices": (*_HOST, "peagle.engine.host"),
    "peagle.engine.naive": (*_FLOOR, "peagle.engine.step"),
    "peagle.drafters": _BENEATH,
    "peagle.text": _BENEATH,
    "peagle.answers": _ANSWERS,
    "peagle.pair": _PAIR,
    "peagle.parallel": _BENEATH,
    "peagle.loading": (*_LOADING, *_MODELS),
    "peagle.measure": _LOADING,
    "peagle.serve": (*_PAIR, "peagle.measure"),
    "peagle.cluster": (*_LOADING, "peagle.measure", "peagle.serve"),
    "peagle.workflows": (*_LOADING, "peagle.measure", *_MODELS),
}
# torch and transformers' models are oracles of the tests; pickle runs code
ORACLE = "peagle.workflows.hf_reference"  # but for this file, which compares with them on demand
NEVER = ("torch", "pickle", "cloudpickle", "dill", "joblib")


def module_name(path: Path) -> str:
    """peagle/ops/norm.py -> peagle.ops.norm; peagle/ops/__init__.py -> peagle.ops."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Every module that the source imports, inside functions too, by statement or by import_module of a literal."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def allowed(importer: str, name: str) -> bool:
    """Whether one of our modules may import a name."""
    if is_in(name, *NEVER):
        return importer == ORACLE and is_in(name, "torch")
    if is_in(name, "drafter.train"):  # training is never part of inference
        return is_in(importer, "drafter.train", "peagle.workflows", *ROOTS)
    if not is_in(name, *OURS):
        return True
    if is_in(importer, *ROOTS):
        return is_in(name, *PACKAGES)
    for room, others in ROOMS.items():
        if is_in(importer, room):
            return is_in(name, room, *others) or name == "peagle"
    return importer == "peagle" and is_in(name, "peagle") and not is_in(name, *ROOTS)


def violations(path: Path, source: str) -> list[str]:
    importer = module_name(path)
    names = imported(source, importer, path.name == "__init__.py")
    return [f"{importer} imports {name}" for name in names if not allowed(importer, name)]


def sources() -> list[Path]:
    return sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_every_file_keeps_the_order() -> None:
    assert len(sources()) > 20
    found = [line for path in sources() for line in violations(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


# one line for each way to import, and for each rule beside `ROOMS`
@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("peagle/ops/norm.py", "import target.config"),
        ("peagle/ops/norm.py", "from peagle import protocols"),
        ("peagle/ops/norm.py", "from ..engine.request import Request"),
        ("target/model.py", "def f():\n    from peagle.engine.request import Request"),
        ("drafter/model.py", "from .train import loop"),
        ("peagle/engine/host/engine.py", "import importlib\nimportlib.import_module('drafter.model')"),
        ("peagle/engine/host/engine.py", "from peagle.cli import main"),
        ("peagle/engine/step/step.py", "from peagle.engine.memory.pages import PagePool"),
        ("peagle/loading/load.py", "from drafter.train.shards import read_shard"),
        ("peagle/__init__.py", "from target.model import GptOss"),
        ("peagle/cli.py", "import tests.conftest"),
        ("peagle/cluster/fleet.py", "import pickle"),
        ("target/load.py", "import torch.nn"),
    ],
)
def test_forbidden_import_is_reported(path: str, source: str) -> None:
    assert violations(Path(path), source)


def test_a_script_that_is_run_as_a_file_needs_nothing_but_the_packages() -> None:
    """`python scripts/NAME.py` finds what is installed; the repository's root, and so `scripts`, is not on its path."""
    as_files = [
        path for path in (ROOT / "scripts").glob("*.py") if f"python scripts/{path.name}" in path.read_text("utf-8")
    ]
    assert ROOT / "scripts" / "sweep_acceptance.py" in as_files
    for path in as_files:
        names = imported(path.read_text("utf-8"), f"scripts.{path.stem}", is_package=False)
        assert not [name for name in names if name.split(".")[0] in ("scripts", "tests")], path.name
