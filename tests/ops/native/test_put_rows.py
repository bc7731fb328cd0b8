"""Rows written from places of their own, natively and by XLA, against a loop over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle.ops import native
from peagle.ops.put_rows import put_rows
from tests.ops.native.cases import results_of

pytestmark = pytest.mark.usefixtures("kernels")
NO_MATRICES = True

ROOM, ROWS = 7, 3
START = np.asarray([0, 2, 4, 5, 6, 3, 7, 0], np.int32)
COUNT = np.asarray([3, 1, 3, 3, 2, 0, 3, 9], np.int32)  # some reach beyond the end, one is none, one is beyond the rows


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32, jnp.bfloat16])
def test_rows_lie_where_a_loop_writes_them(
    shape: tuple[int, ...], dtype: jnp.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = len(START)
    into = np.arange(slots * ROOM * max(int(np.prod(shape)), 1)).reshape(slots, ROOM, *shape) % 250
    rows = -1 - np.arange(slots * ROWS * max(int(np.prod(shape)), 1)).reshape(slots, ROWS, *shape) % 250
    expected = into.copy()
    for slot, (start, count) in enumerate(zip(START, COUNT, strict=True)):
        for row in range(min(count, ROWS, ROOM - start)):
            expected[slot, start + row] = rows[slot, row]
    operands = jnp.asarray(into, dtype), jnp.asarray(rows, dtype), jnp.asarray(START), jnp.asarray(COUNT)
    for _ in ("compiled", "XLA"):
        written = results_of(put_rows, [operands])[0]
        np.testing.assert_array_equal(np.asarray(written, np.float64), expected)
        np.testing.assert_array_equal(np.asarray(operands[0], np.float64), into)  # what a caller holds stays
        monkeypatch.setattr(native, "available", lambda: False)


def test_operands_that_do_not_fit_are_refused() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"put_rows: into"):
        native.call(
            "put_rows",
            jax.ShapeDtypeStruct((2, 3), jnp.int32),
            jnp.zeros((2, 3), jnp.int32),
            jnp.zeros((2, 1), jnp.float32),
            jnp.zeros((2,), jnp.int32),
            jnp.zeros((2,), jnp.int32),
            in_place={0: 0},
        )
