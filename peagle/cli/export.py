"""`peagle export`: convert a drafter to another layout, bit for bit, with a model card."""

from pathlib import Path

from peagle.cli.display import Display
from peagle.cli.settings.export import ExportSettings
from peagle.cli.settings.shared import parse_layers
from peagle.loading import resolve
from peagle.workflows.export import export


def export_command(settings: ExportSettings) -> int:
    """Write the drafter to --out, and print which packages refuse it. Return the exit code.

    Raises InputError as peagle.workflows.export.export does.
    """
    source, out = resolve(settings.drafter, "drafter"), Path(settings.out)
    display = Display(text=False, quiet=settings.quiet, total=1, streaming=False)
    with display.stage(f"exporting {settings.drafter}"):
        found = export(source, out, settings.dialect, settings.verifier, parse_layers(settings.aux_layer_ids))
    lines = [f"drafter      {out} | {settings.dialect} | read back bit for bit"]
    if found.config.aux_layer_ids != found.stored.aux_layer_ids:
        lines.append("aux layers   sorted, together with the weights that read them: vLLM feeds them in layer order")
    if found.verifier is not None:
        place = "config.json and README.md" if settings.dialect == "speculators" else "README.md"
        here = Path(found.verifier).is_absolute()
        others = "; other machines need a name: --verifier OWNER/NAME" if here else ""
        lines.append(f"verifier     {found.verifier}, in {place}{others}")
    lines += [f"refused      by {who}: {why}" for who, why in found.refused.items()]
    display.summary(lines)
    return 0
