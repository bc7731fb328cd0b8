"""The trainer's view of the target: from whole packed rows to logits and aux_hidden."""

import flax.struct
import jax
from jaxtyping import Array, Float, Int

from target import model
from target.config import TargetConfig
from target.packed_attention import attend_packed
from target.params import TargetParams


@flax.struct.dataclass
class Teacher:
    """A target whose parameters are plain arrays (loaded without an implementation), and its aux layers by output."""

    params: TargetParams
    config: TargetConfig = flax.struct.field(pytree_node=False)
    aux_layer_ids: tuple[int, ...] = flax.struct.field(pytree_node=False)

    def __call__(
        self, token_ids: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T V"], Float[Array, "B T A"]]:
        """Compute (logits, aux_hidden) of every token, each segment by itself. No gradient flows into the target."""
        output = model.forward(
            self.params,
            self.config,
            token_ids,
            positions,
            attend=attend_packed(self.params, self.config, segment_ids),
            aux_layer_ids=self.aux_layer_ids,
        )
        logits, aux_hidden = jax.lax.stop_gradient(output)
        return logits, aux_hidden
