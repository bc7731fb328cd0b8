"""The engine's programs as XLA compiles them for TPUs, and what the script counts in them."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from scripts import tpu_programs
from scripts.tpu.traffic import Traffic, traffic

PROGRAM = """\
HloModule jit__steps_0, is_scheduled=true

%fused (p: bf16[1024,1024], i: s32[]) -> bf16[8,1024] {
  %p = bf16[1024,1024]{1,0} parameter(0)
  ROOT %g = bf16[8,1024]{1,0} gather(%p, %i)
}

%condition (c: (s32[])) -> pred[] {
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%c, %four), direction=LT
}

%body (b: (s32[])) -> (s32[]) {
  %x = f32[256]{0} parameter(0)
  %y = f32[256]{0} add(%x, %x)
}

%flag (c: (pred[])) -> pred[] {
  ROOT %left = pred[] parameter(0)
}

%turn (t: (s32[])) -> (s32[]) {
  %z = f32[512]{0} parameter(0)
  %w = f32[512]{0} add(%z, %z)
}

ENTRY %main (a: bf16[1024,1024]) -> bf16[8,1024] {
  %a = bf16[1024,1024]{1,0} parameter(0)
  %near = (bf16[1024,1024]{1,0:S(1)}, bf16[1024,1024]{1,0}, u32[]) copy-start(%a)
  %there = bf16[1024,1024]{1,0:S(1)} copy-done(%near)
  %again = bf16[1024,1024]{0,1} copy(%a)
  %bits = u16[1024,1024]{1,0} bitcast-convert(%a)
  %loop = (s32[]) while(%n), condition=%condition, body=%body
  %other = (s32[]) while(%n), condition=%flag, body=%turn, metadata={op_name="jit(_steps_7)/plain/while"}
  %either = (s32[]) conditional(%n, %a, %a), branch_computations={%turn, %body}
  %sent = (f32[4]{0}, u32[], token[]) send(%x, %token)
  %kernel = f32[8,128]{1,0:S(1)} custom-call(%a), custom_call_target="tpu_custom_call", cost={"bytes_accessed":"5000"}
  ROOT %rows = bf16[8,1024]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused
}
"""


def test_what_moves_to_and_from_hbm_is_counted() -> None:
    """A prefetch once, a copy or another type twice, a loop as often as it turns, a gather by its rows, a
    kernel as it declares.

    Of two branches the one that moves most, and no loop of another path.
    """
    matrix, rows, turn = 2 * 1024 * 1024, 2 * 8 * 1024, 3 * 2048
    sent = 4 * 4 + 4
    expected = matrix + 2 * 2 * matrix + 4 * 3 * 1024 + turn + sent + 5000 + rows + matrix
    assert traffic(PROGRAM, ["plain"]) == Traffic(expected, matrix, host_transfers=1)
    assert traffic(PROGRAM).hbm_bytes == expected + turn


def test_bad_options_are_refused_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for options, says in (
        (("--chip", "v6e,v4"), "--chip is 'v6e,v4'; 'v4' is none of v5e, v6e, 7x"),
        (("--programs", "steps_9"), "--programs is 'steps_9'; 'steps_9' is none of chunk, first_token, steps_0"),
    ):
        assert tpu_programs.main(options) == 2
        assert says in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install '.[tpu]'")
def test_the_programs_of_a_prompt_and_of_steps_compile_within_the_limits() -> None:
    """On a v6e: plain steps near the limit in bytes; chunks, too, without copies, temporaries or the host."""
    command = [sys.executable, "-m", "scripts.tpu_programs", "--chip", "v6e", "--programs", "chunk,steps_0"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    figure = re.compile(r"(shape|devices|slots|program|times the limit|temporary, MB) ([\w.]+)")
    rows = [dict(figure.findall(line)) for line in done.stdout.splitlines()]
    programs = [(row["shape"], row["devices"], row["slots"], row["program"]) for row in rows]
    plain = [("20b", "1", slots, "steps_0") for slots in ("1", "8")]
    assert programs == [("20b", "1", "1", "chunk"), *plain, ("120b", "8", "1", "chunk")], done.stderr[-2000:]
    assert all(float(row["temporary, MB"]) <= 64 for row in rows)
    for row, most in zip(rows[1:3], (1.06, 1.1), strict=True):
        assert float(row["times the limit"]) <= most
    assert done.returncode == 0
