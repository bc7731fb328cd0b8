"""`peagle check`: the self-checks of this machine."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Check:
    """Test this machine's kernels and lossless decoding.

    Compares the kernels with references, and speculative decoding with plain
    decoding. Exit code 1 if anything differs.

    [bold]Examples[/bold]

      this machine    [cyan]peagle check[/cyan]
    """

    def run(self) -> int:
        """Print every finding and the verdict. Return the exit code: 1 if a check fails."""
        from peagle.cli.display import Display
        from peagle.cli.output import show_lines
        from peagle.ops.kernels import describe_kernels
        from peagle.workflows.check import check, verdict

        display, checks, findings = Display(), check(), []
        while True:
            with display.stage("checking"):
                finding = next(checks, None)
            if finding is None:
                break
            findings.append(finding)
            show_lines([f"{'ok' if finding.ok else 'WRONG':<6} {finding.name}: {finding.found}"], indent=7)
        right, line = verdict(findings)
        show_lines([f"\n{line}"], style="bold" if right else "bold red")
        show_lines([f"Kernels here: {describe_kernels()}."])
        return 0 if right else 1
