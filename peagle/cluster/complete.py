"""Complete a fleet's config without loading weights, so that all replicas decode alike. Does not import Ray."""

import dataclasses

from peagle.cluster.config import FleetConfig
from peagle.config import AUTO, Drafts
from peagle.loading.checkpoints import DEMO, DEMO_DRAFTERS, auto_drafts, drafter_path, or_demo, resolve
from peagle.loading.fit import check_fit, chosen_window
from peagle.loading.load import without_weights
from peagle.pair import Pair

DEFAULT_CONTEXT = 4096  # positions, or the model's limit; the memory of replicas is not known here


def completed(config: FleetConfig) -> FleetConfig:
    """Return the config with absolute paths, K, context and prefix cache set.

    Raises InputError for models that do not fit, and for an engine that no replica can run.
    """
    load, engine, (target, drafter) = config.load, config.engine, _models(config)
    context, k = engine.context, engine.num_speculative_tokens
    target_directory, drafter_directory = resolve(target, "target"), drafter_path(target, drafter)
    pair = pair_without_weights(config)
    chosen_window(drafter_directory, load.drafter_window)  # raises for a window that the drafter cannot have
    if drafter_directory is not None:
        most = Drafts.parse(k).num_drafts
        check_fit(target_directory, drafter_directory, load.aux_layer_ids, [most] if most else [])
    engine = dataclasses.replace(
        engine,
        num_speculative_tokens=AUTO if k is None else k,
        context=min(DEFAULT_CONTEXT, pair.max_positions) if context is None else pair.room(context),
        prefix_cache="on" if engine.prefix_cache is None else engine.prefix_cache,
    )
    config = dataclasses.replace(config, engine=engine)
    for prefill_only in (False, True):  # raises for an engine that no replica can run
        pair.resolve(config.engine_of(prefill_only), prefix_cache="off")
    load = dataclasses.replace(
        load,  # absolute paths: replicas run in directories of their own
        target=target if target == DEMO else str(target_directory.resolve()),
        drafter=drafter if drafter_directory is None or drafter in DEMO_DRAFTERS else str(drafter_directory.resolve()),
    )
    return dataclasses.replace(config, load=load)


def pair_without_weights(config: FleetConfig) -> Pair:
    """Make the pair of a fleet's replicas without weights. It can make requests and resolve an engine's config."""
    target, drafter = _models(config)
    most = auto_drafts(drafter_path(target, drafter))
    return dataclasses.replace(without_weights(target), auto_drafts=most)


def _models(config: FleetConfig) -> tuple[str, str | None]:
    """Return (target, drafter) as options name them. Plain decoding has no drafter."""
    target = or_demo(config.load.target)
    return target, None if config.engine.num_speculative_tokens == 0 else or_demo(config.load.drafter)
