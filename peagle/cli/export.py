"""`peagle export`: a drafter in another dialect, bit for bit, with a model card."""

from pathlib import Path

from peagle.cli.display import Display
from peagle.cli.settings.export import ExportSettings
from peagle.cli.settings.shared import parse_layers
from peagle.loading import resolve
from peagle.workflows.export import export


def export_command(settings: ExportSettings) -> int:
    """Write the drafter to --out, and name who cannot load it. Return the exit code.

    Raises InputError as peagle.workflows.export.export does.
    """
    source, out = resolve(settings.drafter, "drafter"), Path(settings.out)
    found = export(source, out, settings.dialect, settings.verifier, parse_layers(settings.aux_layer_ids))
    lines = [f"drafter      {out} | {settings.dialect} | read back bit for bit"]
    if found.config.aux_layer_ids != found.stored.aux_layer_ids:
        lines.append("aux layers   sorted, with the weights that read them: vLLM takes them in the order of the layers")
    if found.verifier is not None:
        place = "config.json and README.md" if settings.dialect == "speculators" else "README.md"
        here = Path(found.verifier).is_absolute()
        others = "; other machines need a name: --verifier OWNER/NAME" if here else ""
        lines.append(f"verifier     {found.verifier}, in {place}{others}")
    lines += [f"refused      by {who}: {why}" for who, why in found.refused.items()]
    Display(text=False, quiet=settings.quiet, total=1, streaming=False).summary(lines)
    return 0
