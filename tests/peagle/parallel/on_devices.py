"""Models over eight fake devices of one CPU. test_mesh.py runs this file in a process of its own."""

import dataclasses
import functools
import itertools
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drafter.config import DrafterConfig
from drafter.load import save_drafter
from drafter.params import DrafterParams
from drafter.propose import DFlash, PEagle, drafter_of
from drafter.train.folder import LOG, read_log, steps_done
from drafter.train.step import ROWS, devices_for
from peagle.base.errors import InputError, InputWarning
from peagle.config import SamplingParams
from peagle.drafters.ngram import NGram
from peagle.engine.devices.replicas import Replicas
from peagle.engine.host.engine import Engine
from peagle.engine.host.handoff import parse
from peagle.engine.request import Request, StepRecord
from peagle.engine.resolved import ResolvedConfig
from peagle.loading.load import drafter_over, load, load_over
from peagle.ops import native
from peagle.ops.attention import PAGE_SIZE, PagedCache
from peagle.ops.expert_matmul import PackedExperts, TiledExperts
from peagle.ops.linear import PackedMatrix, SplitMatrix, arrange, split_outputs, to_mxfp4
from peagle.ops.messages import DrafterInput
from peagle.pair import Pair
from peagle.parallel.mesh import MeshShape, Sharded, make_meshes, replicate, shard
from peagle.protocols import Explains, Target
from peagle.workflows.random_checkpoint import geometry, random_tensors
from scripts.gpu.mesh import loud
from target import load as target_load
from target import shard as target_shard
from target.load import load_target, save_target, write_target
from target.model import GptOss
from tests.ops.conftest import hopper, libraries  # noqa: F401
from tests.peagle.engine.test_interleaving import decoded_alone, interleave
from tests.support.compiling import AS_FOR_USERS
from tests.support.drafters import random_params
from tests.support.models import ask
from tests.support.pairs import Directories
from tests.support.toys import CONFIG as TINY
from tests.support.toys import check_state, decode, drafter_config, follow, tiny_target
from tests.support.trainers import RECIPE, initial, trainer
from tests.target.test_shard import CONFIG

AUX = (0, 1)
TP2, TP4, TP8, EP2, EP4, BOTH = (
    MeshShape(2),
    MeshShape(4),
    MeshShape(8),
    MeshShape(1, 2),
    MeshShape(1, 4),
    MeshShape(2, 2),
)
Kernels: TypeAlias = Literal["native", "xla"]
ON: tuple[Kernels, ...] = ("xla", "native") if native.available() else ("xla",)
STORED = {"packed": (True, "packed"), "expanded": (True, "expanded"), "float32": (False, "auto")}
FAST = ON[-1]  # what XLA makes of a whole engine takes long to compile
CASES = [  # by default each kind of mesh, with each kind of kernels
    *itertools.product((TP4, EP4, BOTH), ["packed"], [FAST]),
    (EP4, "packed", "xla"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            *itertools.product((TP2, TP8, EP2), ["packed"], [FAST]),
            *[(TP4, "expanded", FAST), (TP4, "float32", FAST), (BOTH, "expanded", "xla"), (TP8, "float32", "xla")],
        )
    ),
]
DRAFTER = drafter_config(CONFIG, aux_layer_ids=AUX)
BLOCK = drafter_config(CONFIG, hidden_size=CONFIG.hidden_size, aux_layer_ids=AUX, block_size=6, qk_norm=True)


def test_there_are_eight_devices() -> None:
    assert jax.device_count() == 8


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at: Path = tmp_path_factory.mktemp("devices")
    for mxfp4 in (True, False):
        write_target(at / str(mxfp4), CONFIG, loud(random_tensors(CONFIG, mxfp4, 1)), mxfp4=mxfp4)
    return at


@functools.cache
def whole(root: Path, stored: str, kernels: Kernels) -> GptOss:
    mxfp4, experts = STORED[stored]
    loaded = load_target(root / str(mxfp4), experts=experts, implementation=kernels)
    return GptOss(loaded.params, loaded.config, AUX)


@functools.cache
def over(root: Path, shape: MeshShape, stored: str, kernels: Kernels, in_order: bool = True) -> Sharded:
    mxfp4, experts = STORED[stored]
    target, _ = load_over(
        root / str(mxfp4), shape, in_order=in_order, experts=experts, implementation=kernels, aux_layer_ids=AUX
    )
    return target


LENGTH = 152
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, LENGTH)).astype(np.int32)
PASSES = (
    *((begin, begin + 16) for begin in range(0, 144, 16)),
    *((144, 145), (145, 146), (136, LENGTH)),  # the last one after a rollback of ten
)


def begin(target: Target) -> PagedCache:
    """Make caches of two rows; the pages of the window of 11 positions repeat."""
    cache = jax.jit(lambda: target.init_cache(2, LENGTH, 16))()
    assert cache.tables[1].shape[1] * PAGE_SIZE < LENGTH
    return cache


EXTEND = {kind: jax.jit(kind.extend) for kind in (GptOss, Sharded)}


def walk(target: Target, passes: tuple[tuple[int, int], ...] = PASSES) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return (logits, aux_hidden) of each pass."""
    cache, logits, aux_hidden = begin(target), [], []
    for start, end in passes:
        positions = np.tile(np.arange(start, end, dtype=np.int32), (2, 1))
        out, cache = EXTEND[type(target)](target, TOKENS[:, start:end], positions, cache)
        logits.append(np.asarray(out.logits))
        aux_hidden.append(np.asarray(out.aux_hidden))
    return logits, aux_hidden


@functools.cache
def expected(root: Path, stored: str, kernels: Kernels) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return walk(whole(root, stored, kernels))


def check_parity(root: Path, target: Target, shape: MeshShape, stored: str, kernels: Kernels) -> None:
    """Assert that a target over a mesh is cut, and computes the whole model's logits and aux_hidden."""
    check_shapes(target, shape)
    for mine, reference in zip(walk(target), expected(root, stored, kernels), strict=True):
        for sharded, whole in zip(mine, reference, strict=True):
            assert np.abs(sharded - whole).max() <= 1e-5 * whole.std()


def check_shapes(target: Target, shape: MeshShape) -> None:
    """Assert that each device holds a rank's part, and no more, of weights and caches."""
    assert isinstance(target, Sharded)
    assert target.ranks == shape.ranks > 1
    assert isinstance(target.parts, GptOss)
    heads, kv_heads = 8 // shape.ranks, max(2 // shape.ranks, 1)
    width = -(-5 // shape.tp) * 32 if target.parts.config.expert_width % 32 == 0 else -(-160 // shape.tp)
    for leaf in jax.tree.leaves(target):
        assert len(leaf.sharding.device_set) == shape.ranks
        assert leaf.addressable_shards[0].data.shape == (1, *leaf.shape[1:])
    layer = target.parts.params.layers[0]
    assert layer.attention.sinks.shape == (shape.ranks, heads)
    assert layer.attention.qkv_bias.shape == (shape.ranks, (heads + 2 * kv_heads) * 12)
    out, lm_head, experts = layer.attention.out, target.parts.params.lm_head, layer.moe.experts
    vocab = -(-101 // shape.ranks)
    if isinstance(out, PackedMatrix):
        assert (out.inputs, lm_head.outputs, experts.hidden) == (heads * 12, vocab, width)
    else:
        assert out.shape == (shape.ranks, heads * 12, 96)
        assert lm_head.shape == (shape.ranks, 96, vocab)
        if hasattr(experts, "down_blocks"):
            assert experts.down_blocks.shape == (shape.ranks, 4 // shape.ep, 96, width // 32, 16)
    cache = jax.jit(lambda: target.init_cache(2, 40, 8))()
    for pages in cache.pages:
        assert pages.key.addressable_shards[0].data.shape[2:] == (kv_heads * 12,)


@pytest.mark.parametrize(("shape", "stored", "kernels"), CASES, ids=str)
def test_logits_are_the_whole_models(root: Path, shape: MeshShape, stored: str, kernels: Kernels) -> None:
    check_parity(root, over(root, shape, stored, kernels), shape, stored, kernels)


def test_an_all_reduce_gives_the_same_to_rounding(root: Path) -> None:
    target = over(root, TP4, "packed", FAST, in_order=False)
    check_parity(root, target, TP4, "packed", FAST)
    assert compiled_text(target).count(" all-reduce(") == 2 * CONFIG.num_layers


@pytest.mark.skipif("native" not in ON, reason="no native kernels")
@pytest.mark.parametrize("shape", [pytest.param(TP4, marks=pytest.mark.slow), BOTH], ids=str)
def test_verifying_equals_decoding_bit_for_bit(root: Path, shape: MeshShape) -> None:
    target = over(root, shape, "packed", "native")
    extend = jax.jit(Sharded.extend, compiler_options=AS_FOR_USERS)
    rows: list[list[np.ndarray]] = []
    for width in (4, 1):
        cache, logits = jax.jit(lambda: target.init_cache(2, 40, 8))(), []
        for start in range(0, 32, width):
            positions = np.tile(np.arange(start, start + width, dtype=np.int32), (2, 1))
            out, cache = extend(target, TOKENS[:, start : start + width], positions, cache)
            logits.append(np.asarray(out.logits))
        rows.append(logits)
    np.testing.assert_array_equal(*(np.concatenate(passes, axis=1) for passes in rows))


COLLECTIVE = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)[-a-z]*\("


def compiled_text(target: Target) -> str:
    """Compile a pass of one token, of which there is a copy if the target has been walked."""
    positions = np.zeros((2, 1), np.int32)
    text: str = EXTEND[type(target)].lower(target, TOKENS[:, :1], positions, begin(target)).compile().as_text()
    return text


@pytest.mark.parametrize(("shape", "kernels"), [(EP4, "xla"), *((TP4, kernels) for kernels in ON[1:])], ids=str)
def test_two_collectives_a_layer_and_one_at_the_head(root: Path, shape: MeshShape, kernels: Kernels) -> None:
    text = compiled_text(over(root, shape, "packed", kernels))
    collectives = re.findall(COLLECTIVE, text)
    assert collectives == ["all-gather"] * (2 * CONFIG.num_layers + 1)
    if kernels == "native":
        calls = [line for line in text.splitlines() if "custom-call(" in line and "peagle_" in line]
        assert len(calls) == 4 * CONFIG.num_layers + 2  # qkv, attention, out, experts; RoPE's tables, the head
        attention = [line for line in calls if "peagle_decode_attention" in line]
        assert all(re.search(rf"f32\[\d+,{PAGE_SIZE},1,12\]", line) for line in attention)  # one kv head each


# The kernels for Hopper GPUs


PACKED: Any = {"dtype": jnp.bfloat16, "experts": "packed"}


@pytest.fixture(scope="module")
def of_hopper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a target of one layer, whose experts are those kernels'."""
    directory: Path = tmp_path_factory.mktemp("hopper")
    config = geometry(hidden=2880, layers=1, heads=(2, 2), head_dim=16, vocab=37, experts=(8, 4), expert_width=2880)
    write_target(directory, config, loud(random_tensors(config, True, 1)), mxfp4=True)
    return directory


@pytest.mark.usefixtures("hopper")
def test_each_device_computes_its_experts_in_the_kernels_for_hopper_gpus(of_hopper: Path) -> None:
    """Through the tests' driver: the whole model's logits, and one call for each layer if compiled for GPUs."""
    loaded = load_target(of_hopper, **PACKED)
    target, over = load_over(of_hopper, EP2, **PACKED)
    whole, experts = GptOss(loaded.params, loaded.config), over.params.layers[0].moe.experts
    assert isinstance(experts, TiledExperts)
    assert experts.gate_up.addressable_shards[0].data.shape[:2] == (1, 4)
    tokens, positions, logits = np.array([[3, 29]]), np.array([[0, 1]]), []
    for model in (whole, target):
        extend, cache = EXTEND[type(model)], jax.jit(lambda model=model: model.init_cache(1, 8, 2))()
        logits.append(np.asarray(extend(model, tokens, positions, cache)[0].logits, np.float32))
    np.testing.assert_allclose(logits[1], logits[0], atol=2**-6 * logits[0].std())
    lowered = extend.trace(target, tokens, positions, cache).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("custom_call @peagle_cuda_expert_block(") == 1


@pytest.mark.usefixtures("hopper")
def test_a_cut_that_the_kernels_for_hopper_gpus_do_not_take_is_said(of_hopper: Path) -> None:
    with pytest.warns(InputWarning, match=r"tp=2 leaves each device 1,440 of an expert's 2,880 columns.* ep in place"):
        _, over = load_over(of_hopper, TP2, **PACKED)
    assert isinstance(over.params.layers[0].moe.experts, PackedExperts)


# The engine


K = 3
PROMPTS = [
    tuple(np.random.default_rng(s).integers(0, CONFIG.vocab_size, n).tolist()) for s, n in ((0, 5), (1, 19), (2, 9))
]
# the sampled one is there from first to last, so that one program runs them all
REQUESTS = [
    Request(PROMPTS[0], 50, SamplingParams(temperature=0.9, seed=7)),
    *(Request(prompt, 9) for prompt in PROMPTS),
]
PLAIN = ResolvedConfig(slots=1, context=256, prefill_chunk=64)


def run(
    target: Target, drafter: object, k: int = K, requests: Sequence[Request] = REQUESTS
) -> tuple[list[list[int]], list[list[StepRecord]]]:
    config = ResolvedConfig(num_speculative_tokens=k, slots=2, context=64, prefill_chunk=8)
    engine = Engine(target, drafter, config)
    answers = decode(engine, requests)
    check_state(engine.executor.state, config.context)
    if isinstance(target, Sharded):
        layers = engine.executor.state.target_cache.pages
        assert all(len(pages.key.sharding.device_set) == target.ranks for pages in layers)
        local = layers[0].key.addressable_shards[0].data.shape[2]
        assert local * target.ranks == layers[0].key.shape[2]
    return answers


@pytest.mark.parametrize(
    ("shape", "config"),
    [(BOTH, DRAFTER), *(pytest.param(TP4, config, marks=pytest.mark.slow) for config in (DRAFTER, BLOCK))],
    ids=["P-EAGLE", "P-EAGLE", "DFlash"],
)
def test_the_engine_emits_the_same_with_the_same_acceptance(
    root: Path, shape: MeshShape, config: DrafterConfig
) -> None:
    """With a real drafter, whose head is cut, too, and requests that enter and leave slots; one is sampled."""
    drafter = drafter_of(random_params(config), config)
    target = over(root, shape, "packed", FAST)
    expected = run(whole(root, "packed", FAST), drafter)
    assert run(target, drafter_over(drafter, target.mesh)) == expected


@pytest.mark.parametrize("kernels", ON)
def test_a_drafters_head_is_cut_by_vocabulary_and_gathered_once(kernels: Kernels) -> None:
    """Whose outputs four devices do not share evenly; no other leaf is cut, and no other collective runs."""
    inputs = DRAFTER.hidden_size
    rows = np.random.default_rng(5).normal(size=(101, inputs)).astype(np.float32)
    params = random_params(DRAFTER).replace(lm_head=arrange(rows, np.float32, kernels))
    drafter, (mesh,) = PEagle(params, DRAFTER, with_logits=True), make_meshes(TP4)
    split = drafter_over(drafter, mesh)
    assert isinstance(split, PEagle)
    head = split.params.lm_head
    assert isinstance(head, SplitMatrix)
    (leaf,) = jax.tree.leaves(head)
    assert leaf.addressable_shards[1].data.shape == ((1, 2, inputs, 16) if kernels == "native" else (1, inputs, 26))
    cut = [leaf for leaf in jax.tree.leaves(split) if not leaf.sharding.is_fully_replicated]
    assert len(cut) == 1
    rng = np.random.default_rng(6)
    inputs = DrafterInput(
        jnp.asarray(rng.integers(0, 101, (2, K + 1)), jnp.int32),
        jnp.asarray(rng.normal(size=(2, K + 1, DRAFTER.aux_width)), jnp.float32),
        jnp.asarray([0, 0], jnp.int32),
        jnp.asarray([2, 4], jnp.int32),
    )
    results = []
    for model in (drafter, split):
        propose = jax.jit(lambda model: model.propose(model.init_state(2, 40, 8), inputs, jnp.asarray([K, 1]), K)[0])
        program = propose.lower(model).compile()
        results.append((program(model), re.findall(COLLECTIVE, program.as_text())))
    (alone, none), (together, one) = results
    assert (none, one) == ([], ["all-gather"])
    np.testing.assert_array_equal(alone.token_ids, together.token_ids)
    np.testing.assert_allclose(alone.logits, together.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_any_interleaving_gives_each_request_what_it_gets_alone(tmp_path: Path) -> None:
    """Over three devices; alone it is decoded by the whole target. Grammars and known prompts are among them."""
    params = tiny_target().params
    save_target(tmp_path / "tiny", params, TINY, dtype=np.float32, mxfp4=False)
    target, _ = load_over(tmp_path / "tiny", MeshShape(3), implementation=FAST)
    loaded = load_target(tmp_path / "tiny", implementation=FAST)
    happened = interleave([target], decoded_alone(GptOss(loaded.params, loaded.config)), 10, 1, NGram(), 0)
    assert min(happened[name] for name in ("slot reused", "aborted in flight", "cannot draft", "beside a grammar")) > 0


@pytest.mark.filterwarnings("ignore:.*no stop token")
def test_replicas_on_devices_of_their_own_answer_as_one_engine(root: Path) -> None:
    pair = load(root / "True", "ngram", mesh="dp=2,tp=2", kernels=FAST)
    assert pair.loaded.mesh == "4 devices, dp=2,tp=2,ep=1"
    config = pair.engine_config(K, slots=2, context=64, prefill_chunk=8)  # a slot of each: half as many programs
    engine = pair.engine(config)
    assert isinstance(engine, Replicas)
    answers = decode(engine, REQUESTS)
    one_slot = dataclasses.replace(config, slots=1)
    assert answers == decode(Engine(whole(root, "packed", FAST), NGram(), one_slot), REQUESTS)
    used = [
        {device.id for leaf in jax.tree.leaves(one.executor.state) for device in leaf.devices()}
        for one in engine.engines
    ]
    assert used == [{0, 1}, {2, 3}]
    held = [{device.id for leaf in jax.tree.leaves(one.target) for device in leaf.devices()} for one in engine.engines]
    assert held == used


def test_memory_is_counted_by_device(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are cut, all else is on each device; devices of a CPU share one memory."""
    target, drafter = over(root, TP4, "packed", FAST), PEagle(random_params(DRAFTER), DRAFTER)
    engine = Engine(target, replicate(drafter, target.mesh), ResolvedConfig(K, slots=2, context=64, prefill_chunk=8))
    engine.start()
    shards = [shard for leaf in jax.tree.leaves(engine.executor.state) for shard in leaf.addressable_shards]
    assert sum(engine.memory_bytes()[:2]) == sum(shard.data.nbytes for shard in shards)
    logits = 2 * (K + 1) * CONFIG.vocab_size * 4
    assert engine.memory_bytes()[2] == 4 * logits
    first = target.mesh.devices.flat[0]
    alone = Engine(whole(root, "packed", FAST), drafter, engine.config)
    on_cpu = alone.memory_bytes()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    held = sum(shard.data.nbytes for shard in shards if shard.device == first)
    assert (sum(engine.memory_bytes()[:2]), engine.memory_bytes()[2]) == (held, logits)
    assert alone.memory_bytes() == on_cpu


def test_a_rank_that_cannot_be_loaded_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may have minutes to go; its error is what is raised, whatever the order of the ranks."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    reading, ended = threading.Event(), []

    def load_rank(rank: int, go_on: Callable[[], None]) -> jax.Array:
        if rank == 1:
            assert reading.wait(60)
            raise InputError("a tensor is corrupt")
        reading.set()
        try:
            while True:
                go_on()
        finally:
            ended.append(rank)

    with pytest.raises(InputError, match="a tensor is corrupt"):
        shard(load_rank, make_meshes(TP2)[0])
    assert ended == [0]


def test_the_layout_of_experts_is_the_same_on_all_ranks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although less memory is free at each, and "auto" goes by that."""
    free = iter((1 << 40, *[0] * 20))
    monkeypatch.setattr(target_load, "available_memory_bytes", lambda: next(free))
    target, loaded = load_over(root / "True", TP2, experts="auto", implementation="xla")
    assert loaded.experts == "fused"
    check_shapes(target, TP2)


def test_a_prefix_is_found_again(root: Path) -> None:
    prompt = np.random.default_rng(9).integers(0, CONFIG.vocab_size, 140).tolist()
    warm = Engine(over(root, TP4, "packed", FAST), None, dataclasses.replace(PLAIN, prefix_cache=1 << 20))
    (first, _), (again, num_cached) = (ask(warm, prompt, 6) for _ in range(2))
    assert num_cached > 0
    assert first == again == ask(Engine(whole(root, "packed", FAST), None, PLAIN), prompt, 6)[0]


def test_a_sequence_goes_on_over_other_devices(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From ranks that share kv heads to the whole target, and to other such ranks; and back. A head travels once.

    The ranks of the other mesh hold their head twice, as on TPUs.
    """
    with monkeypatch.context() as patched:
        patched.setattr(target_shard, "lane_copies", lambda *_: 2)
        twice, _ = load_over(root / "True", TP4, experts="packed", implementation=FAST)
    assert (twice.kv_copies, twice.init_pages([1, 1])[0].key.shape[2]) == (4, 8 * CONFIG.head_dim)
    targets = [over(root, TP8, "packed", FAST), twice, whole(root, "packed", FAST)]
    request = Request((PROMPTS[1] * 8)[:140], 12)
    expected = decode(Engine(targets[-1], None, PLAIN), [request])[0][0]
    receivers = [Engine(target, None, PLAIN) for target in targets[1:]]
    sizes = set()
    for target in targets:
        sender = Engine(target, None, dataclasses.replace(PLAIN, prefill_only=True))
        handle = sender.add(request)
        first = [token for chunk in follow(sender, handle) for token in chunk.token_ids]
        assert handle.hand_off is not None
        message = parse(handle.hand_off.data.tobytes())
        sizes.add(len(message.data))
        for receiver in receivers:
            chunks = follow(receiver, receiver.add(request, hand_off=message))
            assert first + [token for chunk in chunks for token in chunk.token_ids] == expected
    assert len(sizes) == 1


def test_output_that_is_not_finite_is_named(root: Path) -> None:
    target = over(root, TP2, "float32", "xla")
    assert isinstance(target, Explains)
    assert target.first_not_finite([1, 2, 3]) is None
    layers = target.parts.params.layers
    spoilt = layers[1].replace(moe=layers[1].moe.replace(norm=layers[1].moe.norm * jnp.float32(jnp.inf)))
    params = target.parts.params.replace(layers=(layers[0], spoilt))
    broken = target.replace(parts=target.parts.replace(params=params))
    assert broken.first_not_finite([1, 2, 3]) == "layer 1 of 0..1, at position 0 (token 1)"


def test_a_pair_is_loaded_over_a_mesh(directories: Directories, pair: Pair) -> None:
    """Its drafter is on every device of both replicas."""
    reports: list[tuple[int, int]] = []
    meshed = load(
        directories.target, directories.drafter, mesh="dp=2,tp=2", progress=lambda *done: reports.append(done)
    )
    assert meshed.loaded.mesh == "4 devices, dp=2,tp=2,ep=1"
    assert isinstance(meshed.target, Sharded)
    assert reports[-1][0] == reports[-1][1]
    (other,) = meshed.replicas
    for one, devices in ((meshed, {0, 1}), (other, {2, 3})):
        for model in (one.target, one.drafter):
            assert {device.id for leaf in jax.tree.leaves(model) for device in leaf.devices()} == devices
    prompt = "def clamp(value, low, high):"
    expected, answer = (one.generate(prompt, max_new_tokens=16, num_speculative_tokens=3) for one in (pair, other))
    assert (answer.output_ids, answer.acceptance_length) == (expected.output_ids, expected.acceptance_length)


@pytest.mark.filterwarnings("ignore:.*no stop token")
@pytest.mark.parametrize("kernels", ON)
def test_a_drafter_may_share_the_ends(root: Path, kernels: Kernels, tmp_path: Path) -> None:
    """No rank holds the target's embedding and head whole, which a DFlash drafter takes."""
    save_drafter(tmp_path, random_params(BLOCK), BLOCK)
    pair = load(root / "False", tmp_path, mesh="tp=4", kernels=kernels)
    reference = whole(root, "float32", kernels).params
    assert isinstance(pair.drafter, DFlash)
    assert isinstance(pair.target, Sharded)
    np.testing.assert_array_equal(pair.drafter.params.embedding, reference.embedding)
    head = to_mxfp4(reference.lm_head) if isinstance(reference.lm_head, PackedMatrix) else reference.lm_head
    heads = (pair.drafter.params.lm_head, split_outputs(head, pair.target.mesh))
    for leaf, expected_leaf in zip(*map(jax.tree.leaves, heads), strict=True):
        np.testing.assert_array_equal(leaf, expected_leaf)


# The check for machines with several GPUs


# Training


def test_a_training_over_devices_learns_the_same_and_goes_on_over_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices for four steps, then one: the checkpoint loads there."""
    assert (devices_for(4).size, devices_for(12).size) == (4, 6)
    assert devices_for(8).size == jax.device_count() == 8

    def run(out: str, devices: int, steps: int) -> DrafterParams:
        mesh, done = jax.sharding.Mesh(np.asarray(jax.devices()[:devices]), (ROWS,)), itertools.count()
        monkeypatch.setattr("drafter.train.trainer.devices_for", lambda _: mesh)
        recipe = dataclasses.replace(RECIPE, rows=4)
        training = trainer(tmp_path / out, recipe, steps=8, should_stop=lambda: next(done) >= steps)
        assert {leaf.sharding.num_devices for leaf in jax.tree.leaves(training.begin(initial()))} == {devices}
        return training.run(initial())

    run("parts", 2, 4)
    assert steps_done(tmp_path / "parts") == 4
    parts, expected = run("parts", 1, 8), run("whole", 1, 8)
    for leaf, expected_leaf in zip(jax.tree.leaves(parts), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-3, atol=1e-5)
    losses = [[line["loss"] for line in read_log(tmp_path / out / LOG)] for out in ("parts", "whole")]
    np.testing.assert_allclose(*losses, rtol=1e-4)
