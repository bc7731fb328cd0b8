"""Complete a fleet's config without weights, so that all replicas decode alike. Nothing of Ray in here."""

import dataclasses
from pathlib import Path

from peagle.checkpoints import DEMO, DEMO_DRAFTERS, drafter_path, or_demo, resolve, speculation_of
from peagle.cluster.config import FleetConfig
from peagle.fit import check_fit, chosen_window
from peagle.loading import without_weights

MOST_DRAFTS = 3  # the default K: replicas do not adapt, and more drafts pay only if nearly all are accepted
DEFAULT_CONTEXT = 4096  # positions, if the model has as many: the memory of replicas is unknown here


def decided(config: FleetConfig) -> FleetConfig:
    """Return a config with absolute paths, K, context and prefix cache.

    Raises InputError for models that do not fit, and for an engine that no replica can run.
    """
    load, engine = config.load, config.engine
    target, k = or_demo(load.target), engine.num_speculative_tokens
    drafter = None if k == 0 else or_demo(load.drafter)
    directory, beside = resolve(target, "target"), drafter_path(target, drafter)
    pair = without_weights(target)
    chosen_window(beside, load.drafter_window)
    if beside is not None:
        check_fit(directory, beside, load.aux_layer_ids, [k] if isinstance(k, int) else [])
    context = engine.context
    engine = dataclasses.replace(
        engine,
        num_speculative_tokens=_drafts(drafter, beside) if k is None else k,
        context=min(DEFAULT_CONTEXT, pair.max_positions) if context is None else pair.room(context),
        prefix_cache="on" if engine.prefix_cache is None else engine.prefix_cache,
    )
    pair.resolve(engine, prefix_cache="off")  # raises for an engine that no replica can run
    load = dataclasses.replace(
        load,  # replicas run in directories of their own
        target=target if target == DEMO else str(directory.resolve()),
        drafter=drafter if beside is None or drafter in DEMO_DRAFTERS else str(beside.resolve()),
    )
    return dataclasses.replace(config, load=load, engine=engine)


def _drafts(drafter: str | None, directory: Path | None) -> int:
    return min(speculation_of(drafter, directory).num_drafts, MOST_DRAFTS)
