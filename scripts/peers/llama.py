"""llama.cpp's side of a comparison: a build of the driver, files for it, and the options of its own speculation."""

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from peagle.base.errors import InputError
from peagle.loading.checkpoints import DEMO, DEMO_DFLASH, DEMO_EAGLE3, resolve
from scripts.peers.remote import Child
from scripts.runs import last_line

CONVERTER = Path(__file__).with_name("llama_cpp") / "convert.py"
DRAFTERS = {"eagle3": DEMO_EAGLE3, "dflash": DEMO_DFLASH}  # the demo's, by llama.cpp's names of their kinds


@dataclass(frozen=True)
class Build:
    """A build folder of llama_cpp/CMakeLists.txt."""

    driver: Path
    sources: Path

    @classmethod
    def find(cls, folder: Path) -> "Build":
        """Raise InputError if the driver is not built there."""
        cache = folder / "CMakeCache.txt"
        sources = re.search(r"^LLAMA_CPP:PATH=(.+)$", cache.read_text() if cache.exists() else "", re.MULTILINE)
        if sources is None or not (folder / "driver").exists():
            raise InputError(f"--llama-cpp {folder} has no driver; expected a folder built as --help says")
        return cls(folder.resolve() / "driver", Path(sources[1]))

    def start(self, target: Path, context: int, num_threads: int, options: tuple[str, ...] = ()) -> Child:
        """Load a GGUF file, and what the options name, in a process of its own. Raises InputError."""
        sizes = {"-c": context, "-b": context, "-t": num_threads}
        command = [str(self.driver), "-m", str(target), *(word for pair in sizes.items() for word in map(str, pair))]
        return Child("llama.cpp", [*command, *options])

    def write_demo(self, folder: Path) -> Path:
        """Write the demo's target and drafters as GGUF files; return the target's."""
        target = resolve(DEMO, "target")
        for kind, drafter in DRAFTERS.items():
            convert(self.sources, resolve(drafter, "drafter"), folder / f"{kind}.gguf", "--target-model-dir", target)
        return convert(self.sources, target, folder / "target.gguf")


def convert(sources: Path, checkpoint: Path, out: Path, *options: str | Path) -> Path:
    """Write a checkpoint as a GGUF file by llama.cpp's converter, MXFP4 experts bit for bit. Raises InputError."""
    command = [sys.executable, CONVERTER, sources, checkpoint, *options, "--outtype", "bf16", "--outfile", out]
    with tempfile.TemporaryFile() as log:
        if subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
            raise InputError(f"llama.cpp's converter fails on {checkpoint.name}: {last_line(log)}")
    return out


def with_drafter(kind: str, k: int, folder: Path) -> tuple[str, ...]:
    """Name the options that draft with a drafter of `write_demo`."""
    return ("-md", str(folder / f"{kind}.gguf"), "--spec-type", f"draft-{kind}", "--spec-draft-n-max", str(k))


def with_ngrams(looked_up: int, k: int) -> tuple[str, ...]:
    """Name the options that draft what followed the last `looked_up` tokens before."""
    size = "--spec-ngram-simple-size"
    return ("--spec-type", "ngram-simple", f"{size}-n", str(looked_up), f"{size}-m", str(k))
