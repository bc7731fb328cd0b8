"""Read sizes in bytes as people write them."""

import re
from typing import Literal, TypeAlias

from peagle.base.errors import InputError

PrefixCacheSize: TypeAlias = int | Literal["on", "off"]  # bytes; on: `peagle.Pair.engine_config` chooses them
SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(i?)B?", re.IGNORECASE | re.ASCII)


def parse_size(typed: str, option: str) -> int:
    """Read bytes from a number with a unit: 2GB is 2e9, 1.5GiB is 1.5 * 2**30. Raises InputError for anything else."""
    match = SIZE.fullmatch(typed.strip())
    if match is None:
        raise InputError(f"{option} is {typed!r}; expected a size, as 512MB or 2GB, or 0")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
