"""Against recorded weights, inputs and logits of the public speculators package (scripts/golden/drafter.py)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from drafter import model, reference
from drafter.load import load_drafter, to_tensors
from drafter.propose import PEagle
from drafter.train.forward import forward_chains, rows_of
from peagle.ops.messages import DrafterInput
from tests.support.drafters import logits_of, prefill, propose

GOLDEN = Path(__file__).parent.parent / "golden" / "drafter_speculators"
MODELS = ("plain", "variant")
EAGLE3_MODELS = ("eagle3", "eagle3_variant")

chains = jax.jit(forward_chains, static_argnames=("config", "counts"))
logits_of_rows = jax.jit(model.head, static_argnames="config")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("which", ["train", "step"])
def test_training_at_once_gives_their_logits(name: str, which: str) -> None:
    """Their rows as chains: of several documents, drawn at random; and of one anchor, as in a step."""
    params, config = load_drafter(GOLDEN / name)
    golden = np.load(GOLDEN / name / "golden.npz")
    places = {
        (int(anchor), int(depth)): place
        for place, (anchor, depth) in enumerate(zip(golden[f"{which}_anchor"], golden[f"{which}_depth"], strict=True))
    }
    width = sum(depth == 0 for _, depth in places)
    lengths = np.array([sum(anchor == one for one, _ in places) for anchor in range(width)])
    anchors = np.argsort(-lengths, kind="stable")[: (lengths > 1).sum()].astype(np.int32)
    counts = tuple(int((lengths > depth).sum()) for depth in range(1, lengths.max()))
    rows = [golden[f"{which}_{array}"][:width] for array in ("token_ids", "aux_hidden", "documents")]
    arrays = (*rows, np.arange(width, dtype=np.int32), anchors)
    x = chains(params, config, *(jnp.asarray(array[None]) for array in arrays), counts=counts)
    logits = np.asarray(logits_of_rows(params, config, x))[0]
    anchor, depth = (np.asarray(values)[0].tolist() for values in rows_of(jnp.asarray(anchors[None]), counts, width))
    expected = golden[f"{which}_logits"][[places[row] for row in zip(anchor, depth, strict=True)]]
    assert len(logits) == len(places)
    assert max(depth) > 2
    assert rows[2].max() == (1 if which == "train" else 0)
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_cached_step_and_the_reference_give_their_logits(name: str) -> None:
    """Their `step` pass has a context of 9 rows and 4 mask slots: K = 5. Here prefill writes 6 of the rows."""
    params, config = load_drafter(GOLDEN / name)
    golden = np.load(GOLDEN / name / "golden.npz")
    num_drafts, context, prefilled = 5, 9, 6
    # their row p holds their token p; a text's row p holds token p + 1
    token_ids = np.concatenate([[0], golden["step_token_ids"][:context]]).astype(np.int32)
    aux_hidden, expected = golden["step_aux_hidden"][:context], golden["step_logits"][context - 1 :]

    peagle = PEagle(params, config, with_logits=True)
    state = peagle.init_state(1, 32, num_drafts)
    prompt, aux = jnp.asarray(token_ids[None, : prefilled + 1]), jnp.asarray(aux_hidden[None, : prefilled + 1])
    state = prefill(peagle, state, prompt, jnp.asarray([prefilled + 1]), aux)
    num = context - prefilled
    room = ((0, 0), (0, num_drafts + 1 - num))
    fresh = DrafterInput(
        token_ids=jnp.asarray(np.pad(token_ids[None, prefilled + 1 :], room)),
        aux_hidden=jnp.asarray(np.pad(aux_hidden[None, prefilled:], (*room, (0, 0)))),
        num=jnp.asarray([num]),
        first_position=jnp.asarray([prefilled]),
    )
    draft, _ = propose(peagle, state, fresh, num_drafts=num_drafts)
    tensors = load_file(GOLDEN / name / "model.safetensors")
    target_ids = np.arange(config.draft_vocab_size) + tensors.get("d2t", 0)
    np.testing.assert_allclose(logits_of(draft)[0][:, target_ids], expected, atol=1e-4)
    assert draft.token_ids[0].tolist() == target_ids[expected.argmax(-1)].tolist()
    theirs = reference.draft_logits(tensors, config, token_ids.tolist(), aux_hidden, num_drafts)
    np.testing.assert_allclose(theirs, expected, atol=1e-4)


@pytest.mark.parametrize("name", EAGLE3_MODELS)
def test_training_in_turn_gives_their_logits(name: str) -> None:
    """Their training-time test: every row is an anchor, at every depth. Leaves out rows whose token they pad."""
    params, config = load_drafter(GOLDEN / name)
    golden = np.load(GOLDEN / name / "golden.npz")
    depths, rows = golden["logits"].shape[:2]
    anchors = np.arange(rows, dtype=np.int32)
    arrays = (golden["token_ids"], golden["aux_hidden"], golden["documents"] + 1, anchors, anchors)
    x = chains(params, config, *(jnp.asarray(array[None]) for array in arrays), counts=(rows,) * (depths - 1))
    logits = np.asarray(logits_of_rows(params, config, x))[0].reshape(depths, rows, -1)
    for depth in range(depths):
        np.testing.assert_allclose(logits[depth, : rows - depth], golden["logits"][depth, : rows - depth], atol=1e-4)


@pytest.mark.parametrize("name", [*MODELS, *EAGLE3_MODELS])
def test_their_checkpoint_saves_to_the_same_tensors(name: str) -> None:
    params, config = load_drafter(GOLDEN / name)
    theirs, ours = load_file(GOLDEN / name / "model.safetensors"), to_tensors(params, config, "speculators")
    assert set(theirs) == set(ours)
    for tensor, value in theirs.items():
        assert value.dtype == ours[tensor].dtype
        np.testing.assert_array_equal(value, ours[tensor], err_msg=tensor)
