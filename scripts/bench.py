"""List the benchmarks, or run one: python -m scripts.bench [SCENARIO [--help]].

A scenario is a file in scripts/scenarios. Its docstring is its help, `add_options(parser)` adds its options,
`run(options, typed)` measures and returns the exit code. scripts.runs has what they share; auto.py is a short one.
"""

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.runs import in_one_line, new_parser

SCENARIOS = Path(__file__).with_name("scenarios")


def scenarios() -> dict[str, str]:
    """Map the modules of scripts/scenarios to the first lines of their docstrings."""
    paths = [path for path in sorted(SCENARIOS.glob("*.py")) if "_" not in path.stem]
    docstrings = {path.stem: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in paths}
    return {name: (docstring or "").partition("\n")[0] for name, docstring in docstrings.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenario that comes first; without one, list them."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if not typed or typed[0] in ("-h", "--help"):
        print("usage: python -m scripts.bench SCENARIO [--help]\n")
        print("\n".join(f"{name:<8} {line}" for name, line in scenarios().items()))
        return 0
    name, *words = typed
    if name not in scenarios():
        print(f"bench: error: {name} is no scenario; expected one of {', '.join(scenarios())}", file=sys.stderr)
        return 2
    scenario = importlib.import_module(f"scripts.scenarios.{name}")
    parser = new_parser(scenario.__doc__)
    parser.prog = f"python -m scripts.bench {name}"
    scenario.add_options(parser)
    options = parser.parse_intermixed_args(words)
    return in_one_line(f"bench {name}", lambda: scenario.run(options, typed))


if __name__ == "__main__":
    sys.exit(main())
