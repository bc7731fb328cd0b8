"""Print what the 20b and the 120b take on each device of several meshes, and a bound on the time of a pass.

    python -m scripts.plan [--device B200] [--slots 8] [--context 8192]

Paper only: weights as published, MXFP4 and bfloat16; each pass reads its weights once and waits for its collectives.
"""

import argparse

from peagle.parallel import MeshShape
from peagle.workflows.plan import device_named, pass_s, rank_bytes, rank_cache_bytes
from peagle.workflows.random_checkpoint import SIZES

MESHES = [*map(MeshShape, (1, 2, 4, 8)), MeshShape(1, 2), MeshShape(1, 4), MeshShape(1, 8), MeshShape(2, 4)]
ROWS = (1, 4, 8)  # plain decoding, and verifying 3 or 7 drafts


def table(device_name: str, slots: int, positions: int) -> list[str]:
    """Return the table's lines, in Markdown."""
    device = device_named(device_name)
    lines = [
        f"| model | mesh | weights GB | caches GB | fits {device.name} | zeros GB | everywhere GB | "
        + " | ".join(f"{rows} row{'s' * (rows > 1)} ms" for rows in ROWS)
        + " |",
        "|---|---|---:|---:|---|---:|---:|" + "---:|" * len(ROWS),
    ]
    for size in ("20b", "120b"):
        config = SIZES[size]
        for shape in MESHES:
            of_ranks = rank_bytes(config, True, shape)
            first, last = of_ranks[0], of_ranks[-1]
            caches = rank_cache_bytes(config, shape, slots, positions, max(ROWS) - 1)
            fits = "yes" if first.total + caches <= device.memory_bytes else "no"
            times = [sum(pass_s(config, True, shape, device, rows)) * 1e3 for rows in ROWS]
            figures = [f"{first.total / 1e9:.2f}", f"{caches / 1e9:.2f}", fits]
            figures += [
                f"{last.padding / 1e9:.2f}",
                f"{first.replicated / 1e9:.2f}",
                *(f"{each:.2f}" for each in times),
            ]
            lines.append(f"| {size} | {shape} | {' | '.join(figures)} |")
    return lines


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    options = parser.parse_args()
    print("\n".join(table(options.device, options.slots, options.context)))


if __name__ == "__main__":
    main()
