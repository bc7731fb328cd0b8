"""Cut a drafter over ranks: its head by vocabulary. The rest is on every rank.

The head is most of what a drafter reads in a pass. Its layers are few and narrow: cutting them would save few bytes,
for two sums over ranks per layer.
"""

import dataclasses

from jax.sharding import Mesh

from drafter.params import DrafterParams
from peagle.ops.linear import SplitMatrix, split_outputs


def split(params: DrafterParams, mesh: Mesh) -> DrafterParams:
    """Copy the parameters to the devices of a mesh, the head cut over them."""
    if isinstance(params.lm_head, SplitMatrix):
        return params
    return dataclasses.replace(params, lm_head=split_outputs(params.lm_head, mesh))
