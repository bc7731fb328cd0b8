"""The target as a drafter's trainer sees it: whole packed rows in, what it says and its taps out."""

import flax.struct
import jax
from jaxtyping import Array, Float, Int

from target import model
from target.config import TargetConfig
from target.packed_attention import attend_packed
from target.params import TargetParams


@flax.struct.dataclass
class Teacher:
    """Parameters as arrays (loaded with native=False); aux_layer_ids are the outputs that the drafter reads."""

    params: TargetParams
    config: TargetConfig = flax.struct.field(pytree_node=False)
    aux_layer_ids: tuple[int, ...] = flax.struct.field(pytree_node=False)

    def __call__(
        self, token_ids: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T V"], Float[Array, "B T A"]]:
        """(logits, aux_hidden) of every token; segments do not see one another. No gradient flows into it."""
        found = model.forward(
            self.params,
            self.config,
            token_ids,
            positions,
            attend=attend_packed(self.config, segment_ids),
            aux_layer_ids=self.aux_layer_ids,
        )
        logits, aux_hidden = jax.lax.stop_gradient(found)
        return logits, aux_hidden
