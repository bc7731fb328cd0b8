"""Cut a drafter over ranks: its head by vocabulary. The rest is on every rank.

The head is most of what a drafter reads in a pass. Its layers are few and narrow: beside the two sums over ranks that
each of them would take, the bytes that they save are little.
"""

import dataclasses

from jax.sharding import Mesh

from drafter.params import DrafterParams
from peagle.ops.linear import SplitMatrix, split_outputs


def split(params: DrafterParams, mesh: Mesh) -> DrafterParams:
    """Cut what is cut over the devices of a mesh, and put it there."""
    if isinstance(params.lm_head, SplitMatrix):
        return params
    return dataclasses.replace(params, lm_head=split_outputs(params.lm_head, mesh))
