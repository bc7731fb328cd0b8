"""Every public drafter of GPT-OSS, as a tiny file in its layout: it loads and decodes losslessly, or is refused."""

import dataclasses
import re
from pathlib import Path

import pytest

from drafter.dialects import open_drafter, parse_config
from peagle.base.errors import InputError, InputWarning
from peagle.config import Drafts
from peagle.loading.fit import check_fit
from peagle.loading.load import load, with_drafter
from peagle.pair import Pair
from tests.support.public_drafters import DRAFTERS, LAYERS, VOCAB, PublicDrafter, write_target

LOADABLE = [drafter for drafter in DRAFTERS if drafter.refused is None]
REFUSED = [drafter for drafter in DRAFTERS if drafter.refused is not None]
PROMPT = [(7 * place + 3) % VOCAB for place in range(70)]
NEW, K = 24, 3
Plain = dict[str, tuple[Pair, tuple[int, ...]]]  # a target, and what it emits by itself
# nested ids that do not begin with 1
DOUBTFUL = "ignore:.*(are read as|counts layer inputs).*:peagle.base.errors.InputWarning"


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {size: write_target(root / size, size) for size in LAYERS}


@pytest.fixture(scope="module")
def plain(targets: dict[str, Path]) -> Plain:
    pairs = {size: load(directory, None) for size, directory in targets.items()}
    return {size: (pair, generate(pair, 0)) for size, pair in pairs.items()}


def generate(pair: Pair, k: int) -> tuple[int, ...]:
    return pair.generate(PROMPT, max_new_tokens=NEW, num_speculative_tokens=k, ignore_eos=True).output_ids


@pytest.mark.filterwarnings(DOUBTFUL)
@pytest.mark.parametrize("drafter", LOADABLE, ids=lambda drafter: drafter.name)
def test_it_loads_and_reads_the_layers_that_vllm_feeds_it(
    targets: dict[str, Path], plain: Plain, tmp_path: Path, drafter: PublicDrafter
) -> None:
    directory, target = drafter.write(tmp_path), targets[drafter.target]
    assert parse_config(open_drafter(directory)).kind == drafter.kind
    assert check_fit(target, directory).outputs == drafter.outputs
    loaded = with_drafter(plain[drafter.target][0], target, directory)
    assert getattr(loaded.target, "aux_layer_ids", None) == drafter.outputs


# one of the layouts that make a program of the same form, since each compiles for a second or more
DECODED = ("amazon/GPT-OSS-20B-P-EAGLE", "RedHatAI/gpt-oss-20b-speculator.eagle3-qwen3", "SpecDrift-5")
DECODED += ("nvidia/gpt-oss-120b-Eagle3-v3", "nebius/EAGLE3-gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash")


@pytest.mark.filterwarnings(DOUBTFUL)
@pytest.mark.parametrize(
    "drafter",
    [pytest.param(one, id=one.name, marks=() if one.name in DECODED else pytest.mark.slow) for one in LOADABLE],
)
def test_it_decodes_losslessly(targets: dict[str, Path], plain: Plain, tmp_path: Path, drafter: PublicDrafter) -> None:
    pair, expected = plain[drafter.target]
    assert len(set(expected)) > 5
    assert generate(with_drafter(pair, targets[drafter.target], drafter.write(tmp_path)), K) == expected


@pytest.mark.parametrize("drafter", REFUSED, ids=lambda drafter: drafter.name)
def test_it_is_refused_by_name(targets: dict[str, Path], tmp_path: Path, drafter: PublicDrafter) -> None:
    with pytest.raises(InputError, match=rf"\A.*{re.escape(drafter.refused or '')}.*\Z"):
        load(targets[drafter.target], drafter.write(tmp_path))


def test_ids_that_could_be_meant_otherwise_are_a_warning(targets: dict[str, Path], tmp_path: Path) -> None:
    (v3,) = (drafter for drafter in DRAFTERS if drafter.name.endswith("-v3"))
    warning = check_fit(targets["120b"], v3.write(tmp_path)).warning
    assert warning is not None
    assert "counts layer inputs ([24, 30, 36] of 36 layers)" in warning
    with pytest.warns(InputWarning, match="counts layer inputs"):
        load(targets["120b"], tmp_path)


def test_a_dflash_drafter_of_another_target_is_refused(targets: dict[str, Path], tmp_path: Path) -> None:
    small, large = (drafter.write(tmp_path / drafter.target) for drafter in DRAFTERS if drafter.kind == "DFlash")
    with pytest.raises(InputError, match="num_target_layers 24, the target's is 36"):
        check_fit(targets["120b"], small)
    with pytest.raises(InputError, match="num_target_layers 36, the target's is 24"):
        check_fit(targets["20b"], large)


def test_a_block_has_no_more_drafts_than_rows(targets: dict[str, Path], plain: Plain, tmp_path: Path) -> None:
    """The whole block decodes; one draft more is refused in one line, before weights are read if K is known then."""
    (small,) = (drafter for drafter in DRAFTERS if drafter.name == "z-lab/gpt-oss-20b-DFlash")
    pair, expected = plain["20b"]
    check_fit(targets["20b"], small.write(tmp_path), None, [1, 7])
    with pytest.raises(InputError, match=r"K is 8; expected at most 7, since a block of .* has 8 rows"):
        check_fit(targets["20b"], tmp_path, None, [1, 8])
    drafting = with_drafter(pair, targets["20b"], tmp_path)
    assert generate(drafting, 7) == expected
    with pytest.raises(InputError, match=r"K is 8; expected at most 7, since a block of the drafter has 8 rows"):
        drafting.stream(PROMPT, num_speculative_tokens=8)
    tiny = dataclasses.replace(small, config={**small.config, "block_size": 3}).write(tmp_path / "tiny")
    assert with_drafter(pair, targets["20b"], tiny).drafts("auto") == Drafts(2, True)
