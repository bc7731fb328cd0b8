"""Files that are whole or not there."""

import contextlib
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from peagle.ops.errors import InputError

_TEMPORARY = ".{}.tmp"
# control characters, line breaks, lone surrogates (a file's name may hold bytes that are no UTF-8) and no characters
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")


def write_whole(path: Path, write: Callable[[Path], object], *, shared: bool = False) -> None:
    """What `write` makes at the path it is given is at `path`, with the permissions of any new file. Where it cannot be
    written, `path` is what it was before. `shared`: other processes may be writing it, too."""
    temporary = path.with_name(_TEMPORARY.format(f"{path.name}.{os.getpid()}" if shared else path.name))
    try:
        write(temporary)
        temporary.chmod(0o666 & ~umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_whole(path: Path, text: str) -> None:
    """Write a text as `write_whole` does, in UTF-8. No text fails: what UTF-8 has not is there as its escape."""
    write_whole(path, lambda temporary: temporary.write_bytes(encoded(text)))


def encoded(text: str) -> bytes:
    """Encode any text in UTF-8, a lone surrogate as its escape."""
    return text.encode("utf-8", errors="backslashreplace")


def printable(text: str) -> str:
    """Make a text fit for a line, a table and a picture: what cannot stand there is escaped, as in Python."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cache_directory(name: str) -> Path:
    """peagle/`name` in the user's cache directory (XDG_CACHE_HOME, which counts where it is absolute)."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "peagle" / name


def keep(path: Path, content: bytes) -> bool:
    """Whether `content` could be kept at `path`, in a cache that many processes use."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda temporary: temporary.write_bytes(content), shared=True)
    except OSError:
        return False
    return True


def trim(folder: Path, most_bytes: int) -> None:
    """The files in `folder`, of which other processes may be writing and removing some, are those written last, of so
    many bytes at most. Folders in it stay."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat(), path))
    found = [(seen, path) for seen, path in found if stat.S_ISREG(seen.st_mode)]
    size = 0
    for seen, path in sorted(found, key=lambda each: each[0].st_mtime, reverse=True):
        size += seen.st_size
        if size > most_bytes:
            path.unlink(missing_ok=True)


def holds_files(folder: Path) -> bool:
    """Whether there is anything in it but what write_whole leaves behind where it is killed."""
    prefix, suffix = _TEMPORARY.split("{}")
    ours = (path.name.startswith(prefix) and path.name.endswith(suffix) for path in folder.iterdir())
    return not all(ours)


def umask() -> int:
    """What new files are not allowed."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def expect_new(out: Path) -> None:
    """Raises InputError where there is something already: no result is overwritten."""
    if out.exists():
        raise InputError(f"{out} exists; expected a new folder, so that no result is overwritten")
