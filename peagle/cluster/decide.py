"""Complete a fleet's config without weights, so that all replicas decode alike. Nothing of Ray in here."""

import dataclasses

from peagle.checkpoints import DEMO, DEMO_DRAFTERS, drafter_path, or_demo, resolve, speculation_of
from peagle.cluster.config import FleetConfig
from peagle.config import AUTO, named_drafts
from peagle.fit import check_fit, chosen_window
from peagle.loading import without_weights
from peagle.pair import Pair

DEFAULT_CONTEXT = 4096  # positions, if the model has as many: the memory of replicas is unknown here


def decided(config: FleetConfig) -> FleetConfig:
    """Return a config with absolute paths, K, context and prefix cache.

    Raises InputError for models that do not fit, and for an engine that no replica can run.
    """
    load, engine, (target, drafter) = config.load, config.engine, _models(config)
    context, k = engine.context, engine.num_speculative_tokens
    directory, beside = resolve(target, "target"), drafter_path(target, drafter)
    pair = pair_of(config)
    chosen_window(beside, load.drafter_window)
    if beside is not None:
        named = named_drafts(k)
        check_fit(directory, beside, load.aux_layer_ids, [] if named is None else [named])
    engine = dataclasses.replace(
        engine,
        num_speculative_tokens=AUTO if k is None else k,
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


def pair_of(config: FleetConfig) -> Pair:
    """Make the pair of a fleet's replicas without its weights: it makes requests, and decides what an engine needs."""
    target, drafter = _models(config)
    speculation = speculation_of(drafter, drafter_path(target, drafter))
    return dataclasses.replace(without_weights(target), speculation=speculation)


def _models(config: FleetConfig) -> tuple[str, str | None]:
    """Return (the target, the drafter) as options name them; plain decoding has no drafter."""
    target = or_demo(config.load.target)
    return target, None if config.engine.num_speculative_tokens == 0 else or_demo(config.load.drafter)
