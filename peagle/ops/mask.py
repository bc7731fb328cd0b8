"""Make attention masks from positions."""

from jaxtyping import Array, Bool, Int


def causal_mask(
    query_positions: Int[Array, "B T"], key_positions: Int[Array, "B S"], window: int | None = None
) -> Bool[Array, "B T S"]:
    """Allow a key at position s for a query at position p: 0 <= s <= p, and s > p - window if there is a window.

    A negative key position marks an empty entry.
    """
    query, key = query_positions[:, :, None], key_positions[:, None, :]
    visible = (key >= 0) & (key <= query)
    return visible if window is None else visible & (key > query - window)
