"""Read and write sizes in bytes as people do."""

import re

from peagle.base.errors import InputError

SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(i?)B?", re.IGNORECASE | re.ASCII)
_UNITS = ((10**9, "GB", 2), (10**6, "MB", 1), (10**3, "kB", 1))  # with decimal places


def parse_size(typed: str, option: str) -> int:
    """Read bytes from a number with a unit: 2GB is 2e9, 1.5GiB is 1.5 * 2**30. Raises InputError for anything else."""
    match = SIZE.fullmatch(typed.strip())
    if match is None:
        raise InputError(f"{option} is {typed!r}; expected a size, as 512MB or 2GB, or 0")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def format_size(size: int, at_least: bool = False) -> str:
    """Format bytes with a decimal unit: 999 bytes, 1.0 kB, 2.3 MB, 19.00 GB.

    at_least: round up, so that memory of the printed size is enough.
    """
    if size < 1e3:
        return "1 byte" if size == 1 else f"{size} bytes"
    unit, name, places = next(row for row in _UNITS if size >= row[0])
    if at_least:
        step = unit // 10**places
        size = -(-size // step) * step
    return f"{size / unit:,.{places}f} {name}"
