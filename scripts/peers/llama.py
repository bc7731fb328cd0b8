"""llama.cpp in a comparison: a build of the driver, files for it, and the options of its own speculation."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.base.errors import InputError
from peagle.measure.provenance import num_threads
from scripts.peers.remote import Child
from scripts.runs import last_line, turns

CONVERTER = Path(__file__).with_name("llama_cpp") / "convert.py"
NGRAM = "ngram"
DFLASH_K = 7  # its block; for a smaller K llama.cpp runs a shorter one, for which the drafter was not trained
LOOKED_UP = 3  # tokens, of n-grams; llama.cpp's default is 12, with 48 drafts
TRIALS, TRIED_PROMPTS, TRIED_TOKENS = 3, 6, 64  # of a number of threads


class LlamaCpp(Child):
    """The driver, with the answers of worker.Engine."""

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Call the driver, which counts passes: of one request, its steps."""
        answer = super().call(do, **arguments)
        return {**answer, "steps": answer["passes"]}

    def seconds(self, prompts: Sequence[Sequence[int]]) -> float:
        """Time the decoding of prompts."""
        tried = {"num_tokens": TRIED_TOKENS, "stop_token_ids": []}
        return sum(self.call("decode", prompts=[prompt], **tried)["decode_s"] for prompt in prompts)


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

    def start(
        self, target: Path, context: int, prompts: Sequence[Sequence[int]], drafting: Sequence[str] = ()
    ) -> LlamaCpp:
        """Load a GGUF file on all processors and on one; keep what decodes faster. Raises InputError."""
        command = [self.driver, "-m", target, "-c", context, "-b", context, *drafting]
        counts = sorted({1, num_threads() or 1})
        children = [LlamaCpp("llama.cpp", [*map(str, command), "-t", str(count)]) for count in counts]
        seconds: dict[LlamaCpp, list[float]] = {child: [] for child in children}
        for _, child in turns(children, TRIALS if len(children) > 1 else 0):
            seconds[child].append(child.seconds(prompts[:TRIED_PROMPTS]))
        best, *others = sorted(children, key=lambda child: min(seconds[child]))
        for child in others:
            child.close()
        features = ", ".join(re.findall(r"(\w+) = 1", best.described["computes"]))
        best.described["computes"] = f"{best.described['threads']} threads; {features}"
        return best

    def converted(self, checkpoint: Path, out: Path, *options: str | Path) -> Path:
        """Write a GGUF file, unless it is there."""
        return out if out.exists() else convert(self.sources, checkpoint, out, *options)

    def drafting(self, target: Path, drafter: str, directory: str, k: int, out: Path) -> tuple[str, ...]:
        """Name the options that draft with a drafter: NGRAM, or of a kind of llama.cpp's, whose file is `out`."""
        if drafter == NGRAM:
            size = "--spec-ngram-simple-size"
            return ("--spec-type", "ngram-simple", f"{size}-n", str(LOOKED_UP), f"{size}-m", str(k))
        file = self.converted(Path(directory), out, "--target-model-dir", target)
        return ("-md", str(file), "--spec-type", f"draft-{drafter}", "--spec-draft-n-max", str(k))


def convert(sources: Path, checkpoint: Path, out: Path, *options: str | Path) -> Path:
    """Write a checkpoint as a GGUF file by llama.cpp's converter, MXFP4 experts bit for bit. Raises InputError."""
    command = [sys.executable, CONVERTER, sources, checkpoint, *options, "--outtype", "bf16", "--outfile", out]
    with tempfile.TemporaryFile() as log:
        if subprocess.run(command, stdout=log, stderr=log, check=False).returncode:
            raise InputError(f"llama.cpp's converter fails on {checkpoint.name}: {last_line(log)}")
    return out
