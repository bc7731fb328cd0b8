"""Sizes as people write and read them."""

import pytest

from peagle.base.errors import InputError
from peagle.base.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("typed", "size"),
    [("0", 0), ("512MB", 512_000_000), ("1.5GiB", 3 << 29), ("64k", 64_000), (" 3 TB ", 3 * 10**12)],
)
def test_a_number_with_a_unit_is_bytes(typed: str, size: int) -> None:
    assert parse_size(typed, "--x") == size


@pytest.mark.parametrize("typed", ["", "-1", "2XB", "GB", "1e9", "nan", "2 GB x", "२GB"])
def test_anything_else_is_refused(typed: str) -> None:
    with pytest.raises(InputError, match=r"--x is .*; expected a size, as 512MB or 2GB, or 0"):
        parse_size(typed, "--x")


def test_a_size_is_never_shown_as_zero_of_a_larger_unit() -> None:
    shown = {1: "1 byte", 999: "999 bytes", 1000: "1.0 kB", 2_345_678: "2.3 MB", 98_305_980_000_000: "98,305.98 GB"}
    assert {size: format_size(size) for size in shown} == shown


def test_a_size_that_is_expected_is_not_rounded_down() -> None:
    """Or the message would name a size that is refused again."""
    shown = {999: "999 bytes", 1000: "1.0 kB", 1001: "1.1 kB", 12_340_000: "12.4 MB", 1_234_567_890: "1.24 GB"}
    assert {size: format_size(size, at_least=True) for size in shown} == shown
