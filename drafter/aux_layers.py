"""Which of the target's layers a drafter reads, and how a config.json names them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from peagle.base.errors import InputError
from peagle.base.settings import brief, mapping

# where a config.json names aux layers: objects in it, and keys
NESTED, EAGLE_CONFIG, DFLASH_CONFIG = "transformer_layer_config", "eagle_config", "dflash_config"
AUX_LAYER_IDS, TARGET_LAYER_IDS = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"


def check_aux_layer_ids(ids: Sequence[int], num_aux_layers: int, who: str, field: str | None = None) -> None:
    """Raise InputError for aux layers that a drafter cannot read. who: where the ids come from; field: of the error."""
    if len(ids) != num_aux_layers:
        raise InputError(
            f"{who} names {len(ids)} aux layers {list(ids)}, and the drafter reads {num_aux_layers}; expected one id "
            "for each",
            field,
        )
    if len(set(ids)) < len(ids):
        raise InputError(
            f"{who} names the outputs of layers {list(ids)}, one of them twice; expected each layer once, since other "
            "servers read each once: train it on distinct layers",
            field,
        )
    if any(layer < 0 for layer in ids):
        raise InputError(f"{who} names the outputs of layers {list(ids)}; expected 0 or more each", field)


@dataclasses.dataclass(frozen=True)
class NamedAuxLayers:
    """Aux layers as one key of a config.json names them.

    The key decides the meaning of an id. In `eagle_config` id i is the OUTPUT of layer i, as SpecForge and SGLang write
    and read it (vLLM ignores that key); in `dflash_config` it is the output in all projects. At the top, or in a
    speculators drafter's geometry, id i is the INPUT of layer i, which is the output of layer i - 1, as vLLM reads it.
    Example: inputs [2, 12, 21] are outputs (1, 11, 20).
    """

    key: str
    ids: tuple[int, ...]
    are_outputs: bool

    @property
    def outputs(self) -> tuple[int, ...]:
        """The target's 0-based layers, by output. Raises InputError if an id names no layer's output."""
        first = self.written((0,))[0]
        if any(layer < first for layer in self.ids):
            hint = "" if self.are_outputs else " (id i is layer i's input, and that of layer 0 is no layer's output)"
            raise InputError(
                f"{self.key} is {list(self.ids)}; expected {first} or more each{hint}: write the ids it was trained "
                "with, or give its outputs with --aux-layer-ids"
            )
        return tuple(layer - first for layer in self.ids)

    def written(self, outputs: Sequence[int]) -> list[int]:
        """Return the ids that mean these outputs under this key."""
        return [layer if self.are_outputs else layer + 1 for layer in outputs]

    @property
    def certain(self) -> bool:
        """Whether all projects write and read the key's ids alike."""
        return self.key.startswith(DFLASH_CONFIG)

    @property
    def meaning(self) -> str:
        """How the ids are read, and why, for messages."""
        if self.certain:
            return "outputs, as DFlash's authors and vLLM read them there"
        if self.are_outputs:
            return "outputs, as SpecForge and SGLang write them there"
        return "inputs, each the output of the layer before, as vLLM reads them there"


TOP_AUX_LAYERS = NamedAuxLayers(AUX_LAYER_IDS, (), are_outputs=False)  # the key to write if a config.json has none


def named_aux_layers(config: Mapping[str, Any]) -> list[NamedAuxLayers]:
    """List the keys of a config.json that name aux layers; the first is used.

    Raises InputError if the ids are not a list of numbers.
    """
    places = (
        ("", AUX_LAYER_IDS, False),
        (NESTED, AUX_LAYER_IDS, False),
        (EAGLE_CONFIG, AUX_LAYER_IDS, True),
        (DFLASH_CONFIG, TARGET_LAYER_IDS, True),
    )
    named = []
    for place, name, are_outputs in places:
        key = f"{place}.{name}" if place else name
        ids = (mapping(config, place) if place else config).get(name) or ()
        if not isinstance(ids, list | tuple) or not all(type(layer) is int for layer in ids):
            raise InputError(f"{key} is {brief(ids)}; expected a list of layers, as [2, 12, 21]")
        if ids:
            named.append(NamedAuxLayers(key, tuple(ids), are_outputs))
    return named


def default_dflash_layers(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Return the aux layers, by output, of a DFlash drafter of num_layers whose config.json names none.

    Example: 5 layers over a target of 36 read 1, 9, 17, 25, 33.
    """
    if num_layers == 1:
        return (num_target_layers // 2,)
    last = num_target_layers - 4
    return tuple(round(1 + place * last / (num_layers - 1)) for place in range(num_layers))
