"""The engine's programs as XLA compiles them for an H100."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import gpu_programs
from scripts.gpu_programs import Program, program_of

pytestmark = pytest.mark.compile

COMPILER = Path(sys.prefix) / "gpu_compiler"
SPLIT = """\
000: kCommandBuffer [source       | next=003 (1)]
    001: kCopy         [source       | next=002 (1)] kCopy
    002: kCustomKernel [prev=001 (1) | sink        ] loop_add_fusion_7 grid: [1, 1, 1]
003: kWhile         [prev=000 (1) | next=008 (1)]
condition:
    No thunks.  body:
    000: kCommandBuffer [source       | next=006 (1)]
        004: kCustomCall   [source       | sink        ] kCustomCall
        005: kWhile        [source       | sink        ]
    006: kConditional  [prev=005 (1) | sink        ]
      false_branch:
        007: kCustomKernel [source | sink] loop_or_fusion grid: [1, 1, 1]
008: kCustomCall    [prev=003 (1) | sink        ] kCustomCall
"""


def test_operations_that_the_host_waits_for_are_counted() -> None:
    """Loops and branches within a graph are the GPU's own."""
    assert program_of("steps_7", SPLIT) == Program("steps_7", graphs=2, operations=5, waits=2, one_graph=False)
    first, *_ = SPLIT.split("003:")
    assert str(program_of("steps_0", first)) == "steps_0: one graph; 2 operations"


def test_bad_options_are_refused_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for options, says in (
        ((), "has no jax_plugins; install the packages there as --help says"),
        (("--shape", "S"), "--shape is 'S'; expected 20b or 120b"),
        (("--drafter", "MTP"), "--drafter is 'MTP'; expected one of P-EAGLE, EAGLE-3, DFlash"),
        (("--slots", "0"), "--slots is 0; expected 1 or more"),
        (("-k", "3,5"), "-k is '3,5'; expected one K, or auto"),
    ):
        assert gpu_programs.main(["--compiler", str(tmp_path), *options]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.skipif(not COMPILER.is_dir(), reason=f"{COMPILER} is not installed; scripts/test.sh installs it")
def test_every_program_is_one_graph_on_an_h100() -> None:
    """No branch of a step, a prompt or a first token makes the host wait, drafts or not, greedy or sampled."""
    command = [sys.executable, "-m", "scripts.gpu_programs", "--compiler", str(COMPILER), "--slots", "2"]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    programs = [line.split(";")[0] for line in done.stdout.splitlines()]
    names = ("chunk", "first_token", "steps_0", "steps_0_sampled", "steps_7", "steps_7_sampled")
    assert sorted(programs) == [f"{name}: one graph" for name in names], done.stderr[-2000:]
    assert done.returncode == 0
