"""The kernels access no memory beyond their buffers: their tests again under AddressSanitizer, in their own process.

And the sanitizer works: it reports every planted read of one element before or after a product's operand. Nothing is
jitted there: every operand is a buffer of its own without slack, whereas in a compiled program they lie side by side.
"""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from peagle.ops import native
from peagle.ops.native import build
from tests.ops.conftest import WITHOUT_TILES, emulate_tiles

pytestmark = pytest.mark.compile

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
NAMES = ("linear", "experts", "operands", "rope", "likeliest", "draw", "put_rows")
TESTS = [str(HERE / f"test_{name}.py") for name in NAMES]
TESTS.append(str(HERE.parent / "test_paged_attention.py"))
ESSENTIAL = ("any_number", "bias_norm", "inactive")  # awkward shapes; inactive rows; every operand present
EXACT = "tests.ops.native.exact_buffers"
RECOVER = "-fsanitize-recover=address"

# reads are planted in a product, which has operands of every kind: rows, weights that JAX does not allocate, a result
SOURCE, FUNCTION = "linear.cc", "void RunLinear(const Linear& op, Parallel& parallel) {"
OPERANDS = {  # elements by operand
    "Bytes(op.x)": "op.rows * op.weight.inputs * (op.weight.bfloat16_rows ? 2 : 4)",
    "op.norm.weight": "op.weight.inputs",
    "Bytes(op.weight.panels)": "Panels(op.weight.outputs) * PanelBytes(op.weight)",
    "op.weight.scales": "Panels(op.weight.outputs) * kPanelRows * op.weight.inputs / 32",
    "op.bias": "op.weight.outputs",
    "Bytes(op.residual)": "op.rows * op.weight.outputs * (op.bfloat16_out ? 2 : 4)",
    "op.positions": "op.rows",
    "Bytes(op.out)": "op.rows * op.weight.outputs * (op.bfloat16_out ? 2 : 4)",
}
# once, since a report takes time
READ = """
#define PEAGLE_READ(array, at)                                  \\
  if (static bool done = false; array != nullptr && !done) {    \\
    done = true;                                                \\
    [[maybe_unused]] volatile auto value = (array)[at];         \\
  }
static const char* Bytes(const void* data) { return static_cast<const char*>(data); }
"""


def preload() -> str:
    """List libraries to load first: the sanitizer, and the C++ library whose exceptions it wraps."""
    try:
        compiler = build.compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    paths = []
    for name in ("libasan.so", "libstdc++.so"):
        done = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        paths.append(Path(done.stdout.strip()))
    if platform.system() != "Linux" or not all(path.is_absolute() for path in paths):
        pytest.skip(f"{compiler} has no AddressSanitizer")
    return " ".join(str(path.resolve()) for path in paths)


def sanitized_tests(libraries: Path, reports: Path, which: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the tests on these libraries; return (the run, the sanitizer's reports)."""
    environment = os.environ | {
        "LD_PRELOAD": preload(),
        # report equal places again: else it ends after 25; keep no stacks of allocations, of which Python makes many
        "ASAN_OPTIONS": (
            f"detect_leaks=0:halt_on_error=0:suppress_equal_pcs=0:malloc_context_size=1:log_path={reports / 'report'}"
        ),
        "JAX_DISABLE_JIT": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        native.DIRECTORY: str(libraries),
    }
    environment.pop(native.VARIABLE, None)
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", EXACT, "-k", which]
    command = [sys.executable, "-m", "pytest", *options, *TESTS]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    whole = "".join(path.read_text() for path in reports.iterdir())
    return done, re.split(r"^=+\n(?===\d+==ERROR)", whole, flags=re.MULTILINE)[1:]


def build_sanitized(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Assert that an access beyond a buffer is reported without ending the process."""
    preload()
    monkeypatch.setattr(build, "SANITIZE", (*build.SANITIZE, RECOVER))
    directory.mkdir()
    for path in build.build(directory, sanitize=True):
        assert b"__asan_report" in path.read_bytes()


def plant(sources: Path) -> dict[int, str]:
    """Plant reads one element before and one after each operand in `sources`; return them by line of SOURCE."""
    path = sources / SOURCE
    text = path.read_text()
    assert text.count(FUNCTION) == 1
    reads = [f"  PEAGLE_READ({operand}, {at})  // planted" for operand, end in OPERANDS.items() for at in ("-1", end)]
    text = text.replace(FUNCTION, "\n".join([FUNCTION, *reads]))
    text = text.replace("\nnamespace peagle {\n", f"{READ}\nnamespace peagle {{\n", 1)
    path.write_text(text)
    lines = enumerate(text.splitlines(), start=1)
    return {number: line.strip() for number, line in lines if line.endswith("// planted")}


def best() -> str:
    """Return the widest set of this machine."""
    for isa in build.instruction_sets():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(native.VARIABLE, isa)
            native.status.cache_clear()
            try:
                native.status()
            except native.InputError:
                continue
            finally:
                native.status.cache_clear()
            return isa
    pytest.skip("the native kernels are for CPUs")


@pytest.mark.slow
def test_only_planted_reads_are_out_of_bounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The machine's widest set: every planted read is found, on both sides of every operand, and nothing else."""
    isa = best()
    sources, libraries, reports = (tmp_path / name for name in ("sources", "libraries", "reports"))
    sources.mkdir()
    reports.mkdir()
    for path in [*build.HERE.glob("*.h"), *build.HERE.glob("*.cc")]:
        (sources / path.name).write_text(path.read_text())
    planted = plant(sources)
    portable, flags = build.library("portable"), build.instruction_sets()[isa]
    monkeypatch.setattr(build, "HERE", sources)
    monkeypatch.setattr(build, "instruction_sets", lambda: {isa: flags})
    build_sanitized(monkeypatch, libraries)
    if isa != "portable":
        build.library("portable", libraries).symlink_to(portable)  # it finds the machine's widest set
    done, errors = sanitized_tests(libraries, reports, f"test_linear and {isa} and ({' or '.join(ESSENTIAL)})")
    reported = set()
    for error in errors:
        at = re.search(r"(\w+\.(?:cc|h)):(\d+)", error)
        assert at, error
        line = int(at[2])
        assert (at[1], line in planted) == (SOURCE, True), error
        assert "heap-buffer-overflow" in error
        reported.add(line)
    assert not [planted[line] for line in planted if line not in reported], done.stdout[-2000:]
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.slow
def test_no_set_goes_out_of_bounds_in_any_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    libraries, reports = tmp_path / "libraries", tmp_path / "reports"
    reports.mkdir()
    build_sanitized(monkeypatch, libraries)
    if best() == WITHOUT_TILES:
        emulate_tiles(libraries, *build.SANITIZE)
    done, errors = sanitized_tests(libraries, reports, "not [xla and not [cuda")
    assert not errors, errors[0]
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
