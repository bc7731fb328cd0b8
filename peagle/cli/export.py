"""`peagle export`: convert a drafter to another layout, bit for bit, with a model card."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from peagle.base.flag import OUTPUT, Flag
from peagle.cli.command import Takes
from peagle.config import LoadConfig


@dataclass(frozen=True, kw_only=True)
class Export:
    """Convert a drafter for vLLM or speculators.

    Writes the same weights bit for bit, and a model card.

    [bold]Examples[/bold]

      the demo drafter   [cyan]peagle export demo --out OUT[/cyan]
      for vLLM
        [cyan]peagle export DIR --out OUT --verifier openai/gpt-oss-20b[/cyan]
      for speculators
        [cyan]peagle export DIR --out OUT --dialect speculators --verifier NAME[/cyan]
    """

    drafter: Annotated[str, Flag(names=("DRAFTER",))]
    """Drafter checkpoint, in any layout; or demo."""
    out: Annotated[str, Flag(OUTPUT, "DIR")]
    """Output directory; it must not exist yet."""
    dialect: Annotated[Literal["vllm", "speculators"], Flag(OUTPUT, "LAYOUT")] = "vllm"
    """Layout to write: vllm or speculators."""
    verifier: Annotated[str | None, Flag(OUTPUT, "NAME|DIR")] = None
    """Target, as named in the exported config; required for speculators. A directory also supplies what the drafter
    lacks: positions, embedding, head."""
    load: Annotated[LoadConfig, Takes("aux_layer_ids")] = LoadConfig()

    def run(self) -> int:
        """Write the drafter to --out, and print which servers refuse it. Return the exit code."""
        from peagle.cli.display import Display
        from peagle.loading.checkpoints import resolve
        from peagle.workflows.export import export

        source, out = resolve(self.drafter, "drafter"), Path(self.out)
        display = Display()
        with display.stage(f"exporting {self.drafter}"):
            exported = export(source, out, self.dialect, self.verifier, self.load.aux_layer_ids)
        lines = [f"drafter      {out} | {self.dialect} | read back bit for bit"]
        if exported.config.aux_layer_ids != exported.stored.aux_layer_ids:
            lines.append(
                "aux layers   sorted, together with the weights that read them: vLLM feeds them in layer order"
            )
        if exported.verifier is not None:
            files = "config.json and README.md" if self.dialect == "speculators" else "README.md"
            is_path = Path(exported.verifier).is_absolute()
            hint = "; other machines need a name: --verifier OWNER/NAME" if is_path else ""
            lines.append(f"verifier     {exported.verifier}, in {files}{hint}")
        lines += [f"refused      by {who}: {why}" for who, why in exported.refused.items()]
        display.summary(lines)
        return 0
