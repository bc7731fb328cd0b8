"""Work for process 0: load this process's ranks of the models, and run the verbs of its engines."""

from peagle.base import interrupt
from peagle.base.errors import InputError
from peagle.engine.devices.remote import Worker
from peagle.loading.load import load
from peagle.measure.logprobs import top_2_margin
from peagle.ops import native
from peagle.pair import Pair
from peagle.parallel.processes import Team


def work(team: Team) -> int:
    """Run process 0's messages until it ends; return the exit code. Raises InputError as `load` does."""
    pair: Pair | None = None
    worker: Worker | None = None
    while True:
        with interrupt.waiting():
            message = team.receive()
        if "end" in message:
            break
        if "load" in message:
            _check_kernels(message["kernels"])
            arguments = message["load"]
            if arguments["aux_layer_ids"] is not None:  # JSON has made it a list
                arguments["aux_layer_ids"] = tuple(arguments["aux_layer_ids"])
            pair = load(**arguments)
            worker = Worker(pair.models, pair.lookup)
        elif "margin" in message:
            assert pair is not None
            prompt_ids, output_ids, capacity = message["margin"]
            top_2_margin(pair.plain_target, prompt_ids, output_ids, capacity)
        else:
            assert worker is not None
            worker.run(message)
    if worker is not None:
        worker.settle()
    return 0


def _check_kernels(expected: str | None) -> None:
    """Raise InputError for other kernels than process 0's, which round differently."""
    if (ours := native.status()[0]) != expected:
        raise InputError(
            f"its kernels are {ours or native.XLA}, those of process 0 {expected or native.XLA}; expected the same: "
            f"set {native.VARIABLE} to kernels that all machines have"
        )
