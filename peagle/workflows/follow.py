"""Follow process 0: load this process's ranks of the same models, then run its messages."""

from typing import Any

from peagle.engine.remote import Follower
from peagle.loading import load
from peagle.measure.logprobs import top_2_margin
from peagle.ops import interrupt, native
from peagle.ops.errors import InputError
from peagle.pair import Pair
from peagle.processes import Team


def follow(team: Team) -> int:
    """Run the messages of process 0; return the exit code. Raises InputError as `load` does."""
    pair: Pair | None = None
    follower: Follower | None = None
    while "end" not in (message := _next(team)):
        if "load" in message:
            _check_kernels(message["kernels"])
            pair = load(**_arguments(message["load"]))
            follower = Follower(pair.engines.models.of, pair.engines.models.lookup)
        elif "margin" in message:
            assert pair is not None
            prompt_ids, output_ids, capacity = message["margin"]
            top_2_margin(pair.plain_target, prompt_ids, output_ids, capacity)
        else:
            assert follower is not None
            follower.run(message)
    if follower is not None:
        follower.settle()
    return 0


def _next(team: Team) -> dict[str, Any]:
    with interrupt.waiting():
        return team.receive()


def _check_kernels(leaders: str | None) -> None:
    """Raise InputError for other kernels, and so other bits, than process 0's."""
    if (ours := native.status()[0]) != leaders:
        raise InputError(
            f"its kernels are {ours or native.XLA}, those of process 0 {leaders or native.XLA}; expected the same: set "
            f"{native.VARIABLE} to kernels that all machines have"
        )


def _arguments(sent: dict[str, Any]) -> dict[str, Any]:
    layers = sent["aux_layer_ids"]
    return {**sent, "aux_layer_ids": None if layers is None else tuple(layers)}
