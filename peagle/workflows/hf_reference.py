"""Compare a target, and the tokens that the engine emitted, with the GPT-OSS of transformers, if torch is installed.

No other module of the packages may import torch.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from peagle.base import interrupt
from peagle.base.memory import available_memory_bytes
from peagle.base.sizes import format_size
from target.load import inspect_target

CLOSE = 2e-2  # the largest difference of a token that counts as equal, in standard deviations of an output
DTYPE: Final = "float32"  # of both sides: bfloat16 routes some tokens to other experts, whose outputs are far off
INDENT = " " * 13  # of lines below a label


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of a target along a text of n tokens."""

    layers: np.ndarray  # [n, L, D]
    norm: np.ndarray  # [n, D], of the final norm
    logits: np.ndarray  # [m, V], of the last m tokens


@dataclasses.dataclass(frozen=True)
class EmittedText:
    """A prompt with the engine's greedy answer: the last m - 1 tokens."""

    token_ids: np.ndarray  # [n] int32
    ours: Outputs


@dataclasses.dataclass(frozen=True)
class OtherToken:
    """A token of the engine that is not the reference's likeliest one there."""

    text: int
    position: int  # in the text
    engine: int  # token id
    reference: int  # token id
    behind: float  # its logit below the reference's largest one, in standard deviations of the logits

    @property
    def ties(self) -> bool:
        """Whether rounding of both logits, by as much as counts as equal, may change their order."""
        return self.behind <= 2 * CLOSE


@dataclasses.dataclass(frozen=True)
class TargetParity:
    """Differences from the reference: of the layers in turn, of the final norm, of the logits, and of the tokens."""

    reference: str | None  # None: not compared
    why_not: str | None
    outputs: tuple[str, ...] = ()
    difference: tuple[float, ...] = ()  # by output, in its standard deviations: of the token that differs most
    num_tokens: int = 0  # that the engine emitted
    num_ties: int = 0  # tokens among these whose logit is as large as the reference's largest one, up to rounding
    wrong_tokens: tuple[OtherToken, ...] = ()

    @property
    def first_wrong(self) -> int | None:
        """The index of the first output that differs from the reference's; those after it depend on it."""
        return next((place for place, most in enumerate(self.difference) if not most <= CLOSE), None)

    @property
    def fine(self) -> bool:
        return self.first_wrong is None and not self.wrong_tokens

    @property
    def lines(self) -> Iterator[str]:
        """Describe the comparison."""
        wrong = self.first_wrong
        if self.reference is None:
            yield f"target       not compared: {self.why_not}"
        elif wrong is None:
            yield (
                f"target       the same as {self.reference} in {len(self.outputs) - 2} layers, the final norm and the "
                f"logits: differences up to {max(self.difference):.1e} of an output's spread"
            )
        else:
            yield (
                f"target       DIFFERENT from {self.reference} from {self.outputs[wrong]} on: "
                f"{self.difference[wrong]:.1e} of its spread; expected {CLOSE:g} at most"
            )
        if self.reference is not None:
            yield from self._lines_of_tokens()

    def _lines_of_tokens(self) -> Iterator[str]:
        if not self.wrong_tokens:
            ties = f", {self.num_ties} of them by a tie" if self.num_ties else ""
            yield f"{INDENT}the engine's {self.num_tokens} tokens are {self.reference}' greedy ones{ties}"
            return
        first = self.wrong_tokens[0]
        yield (
            f"{INDENT}{len(self.wrong_tokens)} of the engine's {self.num_tokens} tokens are NOT {self.reference}' "
            f"greedy ones, first in text {first.text}, position {first.position}: token {first.engine}, expected "
            f"{first.reference}, whose logit is {first.behind:.2f} of the spread larger"
        )


def compare_target(
    directory: Path, texts: Iterable[EmittedText], progress: Callable[[int], None] = lambda _: None
) -> TargetParity:
    """Run transformers' model along texts of a target in DTYPE. progress: called with the number of texts done."""
    if importlib.util.find_spec("torch") is None:
        return TargetParity(None, "transformers' model needs torch, which is not installed; pip install torch")
    needed = 4 * inspect_target(directory).num_parameters
    if needed > available_memory_bytes():
        return TargetParity(None, f"transformers' model takes {format_size(needed)} in float32, more than is available")
    try:
        model = _load(directory)
    except Exception as error:  # transformers raises many kinds
        return TargetParity(None, f"transformers cannot read it: {' '.join(str(error).split())[:200]}")
    figures: list[dict[str, float]] = []
    wrong: list[OtherToken] = []
    num_tokens = num_ties = 0
    for number, text in enumerate(texts):
        interrupt.check()
        theirs = _outputs(model, text.token_ids, len(text.ours.logits))
        off = differences(text.ours, theirs)
        figures.append({name: float(by_token.max()) for name, by_token in off.items()})
        others = [*other_tokens(number, text.token_ids, theirs.logits)]
        wrong += (token for token in others if not token.ties)
        num_ties += sum(token.ties for token in others)
        num_tokens += len(theirs.logits) - 1
        progress(number + 1)
    names = tuple(figures[0])
    difference = tuple(max(figure[name] for figure in figures) for name in names)
    return TargetParity("transformers", None, names, difference, num_tokens, num_ties, tuple(wrong))


def differences(ours: Outputs, theirs: Outputs) -> dict[str, np.ndarray]:
    """Compute by output the differences of all tokens: root mean squares, in standard deviations of the output."""
    pairs = {f"layer {layer}": (ours.layers[:, layer], rows) for layer, rows in enumerate(theirs.layers.swapaxes(0, 1))}
    pairs |= {"the final norm": (ours.norm, theirs.norm), "the logits": (ours.logits, theirs.logits)}
    return {name: np.sqrt(np.mean((mine - other) ** 2, axis=-1)) / other.std() for name, (mine, other) in pairs.items()}


def other_tokens(number: int, token_ids: np.ndarray, logits: np.ndarray) -> Iterator[OtherToken]:
    """Yield the emitted tokens that are not the likeliest by the reference's logits [m, V]."""
    start, spread = len(token_ids) - len(logits) + 1, float(logits.std())
    for row, emitted in enumerate(token_ids[start:].tolist()):
        if emitted != (likeliest := int(logits[row].argmax())):
            behind = float(logits[row, likeliest] - logits[row, emitted]) / spread
            yield OtherToken(number, start + row, emitted, likeliest, behind)


def _load(directory: Path) -> Any:
    """Load transformers' model in float32."""
    import torch
    import transformers
    from transformers.utils import logging

    hf: Any = transformers  # its names are made at run time
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    eager: Any = {"attn_implementation": "eager", "experts_implementation": "eager"}
    is_quantised = "quantization_config" in (directory / "config.json").read_text(encoding="utf-8")
    quantised = hf.Mxfp4Config(dequantize=True) if is_quantised else None
    return hf.GptOssForCausalLM.from_pretrained(
        directory, dtype=torch.float32, quantization_config=quantised, local_files_only=True, **eager
    ).eval()


def _outputs(model: Any, token_ids: Sequence[int] | np.ndarray, num_logits: int) -> Outputs:
    """Run transformers' model along a text. Its own last hidden state is that after the final norm."""
    import torch

    around_norm: list[Any] = []
    hook = model.model.norm.register_forward_hook(lambda _, rows, normed: around_norm.extend((rows[0], normed)))
    ids = torch.from_numpy(np.asarray(token_ids, np.int64)[None])
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=False, logits_to_keep=num_logits)
    hook.remove()
    last, normed = around_norm
    layers = np.stack([state[0].float().numpy() for state in (*out.hidden_states[1:-1], last)], axis=1)
    return Outputs(layers, normed[0].float().numpy(), out.logits[0].float().numpy())
