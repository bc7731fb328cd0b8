"""`peagle check`: the self-checks of this machine."""

from rich.console import Console

from peagle.ops.kernels import in_words
from peagle.workflows.check import check, verdict


def check_command() -> int:
    """Print what every check finds, and a verdict of two lines. Returns the exit code: 1 if something is wrong."""
    console, findings = Console(highlight=False, soft_wrap=True), []
    for finding in check():
        findings.append(finding)
        console.print(f"{'ok' if finding.ok else 'WRONG':<6} {finding.name}: {finding.found}", markup=False)
    right, line = verdict(findings)
    console.print(f"\n{line}", style="bold" if right else "bold red", markup=False)
    console.print(f"Computes here: {in_words()}.", markup=False)
    return 0 if right else 1
