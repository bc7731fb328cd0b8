"""Choose and load the target and the drafter of a command; name options without effect."""

from peagle.cli.command import changed_options
from peagle.cli.display import Display
from peagle.cli.output import say
from peagle.cli.processes import load_in_all
from peagle.config import EngineConfig, LoadConfig, NumDrafts, SamplingParams
from peagle.engine.resolved import shared_slots
from peagle.loading.checkpoints import DEMO, DEMO_DRAFTERS, drafter_path, or_demo, resolve
from peagle.pair import Pair
from peagle.parallel.mesh import parse_mesh
from peagle.text.prompts import Rendering
from peagle.text.tokenizer import Tokenizer


def chosen_models(load: LoadConfig, k: NumDrafts) -> tuple[str, str | None]:
    """Return (target, drafter), drafter None if K is 0. Raises InputError, without loading, for a missing one."""
    target = or_demo(load.target)
    if k == 0 and load.drafter is not None:
        say("warning", "--drafter: no effect with -k 0, plain decoding")
    drafter = None if k == 0 else or_demo(load.drafter)
    resolve(target, "target")
    drafter_path(target, drafter)
    return target, drafter


def chosen_context(pair: Pair, engine: EngineConfig) -> int:
    """Return the context of a request: as typed, or the model's limit, or less if the memory holds less."""
    if engine.context is not None:
        return pair.room(engine.context)
    k = pair.drafts(engine.num_speculative_tokens).num_drafts
    return pair.default_context(k, engine.slots, engine.kv_memory)


def check_slots(slots: int, mesh: str | None) -> None:
    """Raise InputError, without loading, if the replicas of a mesh cannot share the slots evenly."""
    shared_slots(slots, 1 if mesh is None else parse_mesh(mesh).dp)


def slots_for(count: int, most: int, mesh: str | None) -> int:
    """Return the slots for so many conversations, at most `most`: replicas have the same number."""
    replicas = 1 if mesh is None else parse_mesh(mesh).dp
    return min(most, -(-count // replicas) * replicas)


def load_pair(target: str, drafter: str | None, load: LoadConfig, display: Display) -> Pair:
    """Load the target and the drafter, with progress; note which of the target's layers the drafter reads."""
    options = {"target": target, "drafter": drafter, **load.arguments}
    with display.stage(f"loading {'the demo pair' if target == DEMO else target}") as progress:
        pair = load_in_all(options, progress)
    if pair.loaded.mesh is not None:
        display.note(f"target sharded over {pair.loaded.mesh}")
    if pair.loaded.aux_layers is not None and drafter not in DEMO_DRAFTERS:
        display.note(f"the drafter reads the target's {pair.loaded.aux_layers}")
    return pair


def unused_sampling(sampling: SamplingParams) -> list[str]:
    """Return a warning about sampling options without effect at temperature 0, if any."""
    if not sampling.greedy:
        return []
    unused = {"top_k", "top_p", "min_p", "seed"}
    options = ", ".join(option.names[0] for option in changed_options(sampling) if option.name in unused)
    return [f"{options}: no effect at temperature 0, where the likeliest token is taken"] if options else []


def unused_rendering(rendering: Rendering, tokenizer: Tokenizer | None, target: str) -> list[str]:
    """Return a warning about options that the rendered prompts do not show, if any."""
    options = [] if tokenizer is None else rendering.without_effect(tokenizer)
    where = "raw prompts do" if rendering.raw else f"the chat template of {target} does"
    return [f"{', '.join(options)}: no effect, since {where} not show it"] if options else []
