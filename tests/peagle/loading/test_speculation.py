"""What a drafter's folder says about drafting."""

from pathlib import Path

import pytest

from peagle.base.errors import InputError
from peagle.loading.speculation import SPECULATION_FILE, read_auto_drafts, read_window


def test_what_the_file_says_is_read(tmp_path: Path) -> None:
    assert (read_auto_drafts(tmp_path), read_window(tmp_path)) == (None, None)
    (tmp_path / SPECULATION_FILE).write_text('{"num_speculative_tokens": 4, "drafter_window": 64}')
    assert (read_auto_drafts(tmp_path), read_window(tmp_path)) == (4, 64)
    (tmp_path / SPECULATION_FILE).write_text('{"drafter_window": "off"}')
    assert (read_auto_drafts(tmp_path), read_window(tmp_path)) == (None, "off")


@pytest.mark.parametrize("value", ["0", "-3", '"on"', "true", "1.5", "[1]"])
def test_other_values_are_refused(tmp_path: Path, value: str) -> None:
    for key, read in (("num_speculative_tokens", read_auto_drafts), ("drafter_window", read_window)):
        (tmp_path / SPECULATION_FILE).write_text(f'{{"{key}": {value}}}')
        with pytest.raises(InputError, match=f"{key} .*; expected"):
            read(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / SPECULATION_FILE).write_text(text)
    for read in (read_auto_drafts, read_window):
        with pytest.raises(InputError, match="is no JSON object; correct it"):
            read(tmp_path)
