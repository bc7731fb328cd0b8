"""Write files whole or not at all, in caches and outputs that processes share."""

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

from peagle.base.errors import InputError
from peagle.base.sizes import format_size

_TEMPORARY = ".peagle-", ".tmp"  # around a few letters, because the file's own name may have the greatest length
# control characters, line breaks, lone surrogates (a file's name may hold bytes that are not UTF-8), noncharacters
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name, then rename it to `path`, with the permissions of a new file.

    Calls `write` with the path of an empty temporary file. If it fails, `path` stays unchanged. Several processes may
    write the same file at the same time.
    """
    descriptor, name = tempfile.mkstemp(_TEMPORARY[1], _TEMPORARY[0], path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o666 & ~umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes_whole(path: Path, content: bytes) -> None:
    """Write a file as `write_whole` does."""
    write_whole(path, lambda temporary: temporary.write_bytes(content))


def write_text_whole(path: Path, text: str) -> None:
    """Write a text as `write_whole` does, in UTF-8. Lone surrogates become escapes, so no text fails."""
    write_bytes_whole(path, encoded(text))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an OSError of the block as an InputError that names `path` instead of a temporary file."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {reason_of(error)}; expected {expected(error)}") from None


def reason_of(error: Exception) -> str:
    """Return an error's reason in one line, without an OSError's number and file name."""
    return " ".join((getattr(error, "strerror", None) or str(error)).split())


def expected(error: OSError) -> str:
    """Describe what an error in writing needs, for a message."""
    if error.errno == errno.ENOSPC:
        return "room for it: free some, or name a place elsewhere"
    return "a place that can be written to"


def free_bytes(out: Path) -> int:
    """Return the room of the file system that an output, which need not exist yet, will be on."""
    out = out.resolve()
    return shutil.disk_usage(next(path for path in (out, *out.parents) if path.exists())).free


def expect_room(out: Path, num_bytes: int, what: str) -> None:
    """Raise InputError if an output takes more room than there is, before the work for it. what: it takes the room."""
    if num_bytes > (free := free_bytes(out)):
        raise InputError(
            f"{what} takes {format_size(num_bytes)} in {out}, which has room for {format_size(free)}; free some, or "
            "name a place elsewhere"
        )


def encoded(text: str) -> bytes:
    """Encode any text in UTF-8; a lone surrogate becomes its escape."""
    return text.encode("utf-8", errors="backslashreplace")


def printable(text: str) -> str:
    """Escape unprintable characters as Python does, so that the text fits into a line, a table or a picture."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def cache_directory(name: str) -> Path:
    """Return the folder `name` of this package in the user's cache directory."""
    return platformdirs.user_cache_path("peagle", appauthor=False) / name


def write_cached(path: Path, content: bytes) -> bool:
    """Write `content` to `path` in a cache; return whether it succeeded."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_whole(path, content)
    except OSError:
        return False
    return True


def trim_folder(folder: Path, most_bytes: int) -> None:
    """Remove the oldest files in a folder, down to `most_bytes`; keep subfolders.

    Other processes may write and remove files at the same time.
    """
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            files.append((path.stat(), path))
    files = [(status, path) for status, path in files if stat.S_ISREG(status.st_mode)]
    size = 0
    for status, path in sorted(files, key=lambda file: file[0].st_mtime, reverse=True):
        size += status.st_size
        if size > most_bytes:
            path.unlink(missing_ok=True)


def holds_files(folder: Path) -> bool:
    """Check whether a folder holds anything besides temporary files that a killed `write_whole` left."""
    prefix, suffix = _TEMPORARY
    return not all(path.name.startswith(prefix) and path.name.endswith(suffix) for path in folder.iterdir())


def umask() -> int:
    """Return the process's umask."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock an output, a file or a folder, against other runs, by a lock file beside it.

    Makes the parent folders. Raises InputError if another run has the lock, or if the output cannot be written.
    """
    import filelock  # a slow import, not needed for help

    lock = filelock.FileLock(out.with_name(f"{out.name}.lock"), blocking=False)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        if not Path(lock.lock_file).exists():  # the file system refuses new files, by an error that filelock retries
            raise InputError(f"{out} cannot be written; expected a place that can be written to") from None
        raise InputError(f"{out} is being written by another run; wait for its end, or name another place") from None
    except OSError as error:
        message = f"{out} cannot be written: {reason_of(error)}; expected a place that can be written to"
        raise InputError(message) from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # before another run can lock it
        lock.release()


def expect_new(out: Path) -> None:
    """Raise InputError if the path exists, so that no result is overwritten."""
    if out.exists():
        raise InputError(f"{out} exists; expected a new folder, so that no result is overwritten")
