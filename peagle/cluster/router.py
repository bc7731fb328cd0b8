"""A router of Ray Serve that sends a request to the replica with its prompt's prefix (see affinity.py).

Serve makes one in each process that calls the replicas. Its interface for routers (`ray.serve.request_router`) is
public but alpha. Ray's own prefix router is private.
"""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from peagle.cluster import affinity
from peagle.engine.request import Request


class PrefixRouter(FIFOMixin, RequestRouter):
    """Choose the replica that `Affinity` prefers, else the one with the fewest requests.

    FIFOMixin, as in Ray's own routers: without it Ray looks up a waiting call by its HTTP request, so that one of two
    calls of a request (n = 2, several prompts) waits forever. With it, calls that wait at the same time may get each
    other's replica, which only recomputes prompts.
    """

    def initialize_state(self, deployment: str = "", **_: Any) -> None:
        self.affinity = affinity.Affinity[ReplicaID]()
        affinity.ROUTERS[deployment] = self  # by its module: Serve copies this one into each process, with its globals

    def preferred(self, prompt_ids: Sequence[int]) -> ReplicaID | None:
        """See peagle.cluster.affinity.Router."""
        lengths = self.replica_queue_len_cache
        num_open = {replica_id: lengths.get(replica_id) or 0 for replica_id in [*self.curr_replicas]}
        return self.affinity.prefer(prompt_ids, num_open) if num_open else None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas. Serve takes the least loaded live replica of the first rank that has any."""
        if pending_request is None or not (prompt_ids := _prompt(pending_request)):
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # after all ranks were tried
        preferred = self.preferred(prompt_ids)
        first = [replica for replica in candidate_replicas if replica.replica_id == preferred]
        return [first, candidate_replicas] if first else [candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        del result
        if prompt_ids := _prompt(pending_request):
            self.affinity.note(prompt_ids, replica_id)


def _prompt(pending: PendingRequest) -> tuple[int, ...]:
    """Return the prompt of a call to a replica's `prefill` or `decode`."""
    request = pending.args[0] if pending.args else None
    return request.prompt_ids if isinstance(request, Request) else ()
