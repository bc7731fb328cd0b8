"""Sizes as people write them."""

import pytest

from peagle.base.errors import InputError
from peagle.base.sizes import parse_size


@pytest.mark.parametrize(
    ("typed", "size"),
    [
        ("0", 0),
        ("512MB", 512_000_000),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 << 29),
        ("64k", 64_000),
        (" 3 TB ", 3 * 10**12),
    ],
)
def test_a_number_with_a_unit_is_bytes(typed: str, size: int) -> None:
    assert parse_size(typed, "--x") == size


@pytest.mark.parametrize("typed", ["", "-1", "2XB", "GB", "1e9", "nan", "2 GB x", "२GB"])
def test_anything_else_is_refused(typed: str) -> None:
    with pytest.raises(InputError, match=r"--x is .*; expected a size, as 512MB or 2GB, or 0"):
        parse_size(typed, "--x")
