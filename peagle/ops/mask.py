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


def group_causal_mask(anchor: Int[Array, "B T"], depth: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Allow the key rows (anchor', depth') of each query row (anchor, depth) in a P-EAGLE pass without a cache.

    From arXiv 2602.01469, figure 3:

        depth' == 0 and anchor' <= anchor       the true context up to and including the anchor
        anchor' == anchor and depth' <= depth   the mask slots of the same anchor, up to the row itself

    Example with two context rows and two mask slots for each. x: the query (down) attends to the key (across):

                 (0,0) (1,0) (0,1) (1,1) (0,2) (1,2)
          (0,0)    x     .     .     .     .     .
          (1,0)    x     x     .     .     .     .
          (0,1)    x     .     x     .     .     .
          (1,1)    x     x     .     x     .     .
          (0,2)    x     .     x     .     x     .
          (1,2)    x     x     .     x     .     x

    A row of negative anchor is padding: masked out as a query and as a key. At inference only the last anchor has mask
    slots, so the mask is plain causal order over position = anchor + depth.
    """
    query_anchor, key_anchor = anchor[:, :, None], anchor[:, None, :]
    query_depth, key_depth = depth[:, :, None], depth[:, None, :]
    context = (key_depth == 0) & (key_anchor <= query_anchor)
    own_chain = (key_anchor == query_anchor) & (key_depth <= query_depth)
    return (context | own_chain) & (key_anchor >= 0) & (query_anchor >= 0)
