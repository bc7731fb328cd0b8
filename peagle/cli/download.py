"""`peagle download`: fetch checkpoints from the Hugging Face Hub. No other command uses the network."""

from dataclasses import dataclass
from typing import Annotated

from peagle.base.errors import InputError
from peagle.base.flag import Flag


@dataclass(frozen=True, kw_only=True)
class Download:
    """Download checkpoints from the Hugging Face Hub.

    Fetches safetensors weights, configurations and tokenizers into the Hub's local
    cache: no code. All commands then take the checkpoints by name. After an
    interruption the same command downloads the rest.

    [bold]Examples[/bold]

      a target and its drafter, 14 GB
        [cyan]peagle download openai/gpt-oss-20b amazon/GPT-OSS-20B-P-EAGLE[/cyan]
    """

    names: Annotated[tuple[str, ...], Flag(names=("OWNER/NAME",))]
    """Checkpoints on the Hub."""

    def run(self) -> int:
        """Download the files that the cache lacks. Raises InputError for a checkpoint that cannot be fetched."""
        from peagle.base.sizes import format_size
        from peagle.cli.display import Display
        from peagle.loading.hub import cache, fetch, is_name, remaining

        if others := [name for name in self.names if not is_name(name)]:
            raise InputError(f"{others[0]} is no name on the Hub; expected OWNER/NAME, such as openai/gpt-oss-20b")
        display, kept = Display(), f"complete files stay in {cache()}; the same command downloads the rest"
        for name in dict.fromkeys(self.names):
            with display.stage(f"looking up {name}"):
                missing = remaining(name)
            if not missing.num_files:
                display.note(f"{name} is in {cache()} already")
                continue
            files = f"{missing.num_files} file{'s' * (missing.num_files > 1)}"
            display.note(f"downloading {name} into {cache()}: {files}, {format_size(missing.num_bytes)}")
            with display.on_interrupt(lambda: kept), display.stage(f"downloading {name}") as progress:
                fetch(missing, progress)
        return 0
