"""The mixture-of-experts op in the native kernels, and the layout they read."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from peagle.ops import native
from peagle.ops.collectives import LocalExperts
from peagle.ops.expert_matmul.weights import NativeExperts
from peagle.ops.linear.packed import ROWS, PackedMatrix, num_panels
from peagle.ops.norm import Norm


def routed(
    x: Float[Array, "T D"],
    norm: Norm,
    router: PackedMatrix,
    router_bias: Float[Array, " E"],
    experts: NativeExperts,
    top_k: int,
    limit: float,
    positions: jax.Array | None = None,
    *,
    local: LocalExperts | None = None,
    residual: bool = True,
    dtype: DTypeLike | None = None,
) -> Float[Array, "T D"]:
    """See `expert_block`; without `residual` x is not added. local, dtype: as in `expert_mlp`.

    Each selected expert is read once for all its rows. A row's experts are added in ascending order, so its bits do not
    depend on other rows.
    """
    out: jax.Array = native.call(
        "experts",
        jax.ShapeDtypeStruct(x.shape, x.dtype if dtype is None else dtype),
        x,
        native.optional(norm.weight),
        router.data,
        native.optional(router_bias),
        experts.gate_up.data,
        native.optional(experts.gate_up.scales, jnp.uint8),
        experts.gate_up_bias,
        experts.down.data,
        native.optional(experts.down.scales, jnp.uint8),
        experts.down_bias,
        native.optional(positions, jnp.int32),
        native.optional(None if local is None else local.first, jnp.int32),
        num_experts=np.int64(router.outputs),
        top_k=np.int64(top_k),
        residual=np.bool_(residual),
        hidden=np.int64(experts.hidden),
        limit=np.float32(limit),
        epsilon=np.float32(norm.epsilon),
    )
    return out


def to_panels(interleaved: np.ndarray) -> np.ndarray:
    """Reorder rows gate, up, gate, up, ... to whole panels: 16 gates, their 16 ups, and so on.

    [E, 2F, *rest] becomes [E, 2 * 16 * ceil(F/16), *rest].
    """
    lead, rest = interleaved.shape[:1], interleaved.shape[2:]
    hidden = interleaved.shape[1] // 2
    padded = np.zeros((*lead, num_panels(hidden) * ROWS, 2, *rest), interleaved.dtype)
    padded[:, :hidden] = interleaved.reshape(*lead, hidden, 2, *rest)
    return padded.reshape(*lead, -1, ROWS, 2, *rest).swapaxes(2, 3).reshape(*lead, -1, *rest)
