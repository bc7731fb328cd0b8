"""Run a benchmark: python -m scripts.bench SCENARIO --help says what it measures and takes."""

import importlib
import pkgutil
import sys
from collections.abc import Sequence

import scripts.scenarios


def names() -> list[str]:
    """List the scenarios: the modules of scripts/scenarios that have a main."""
    return [module.name for module in pkgutil.iter_modules(scripts.scenarios.__path__) if "_" not in module.name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenario that comes first."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if not typed or typed[0] not in names():
        print(f"bench: error: expected a scenario: {', '.join(names())}", file=sys.stderr)
        return 2
    code: int = importlib.import_module(f"scripts.scenarios.{typed[0]}").main(typed[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
