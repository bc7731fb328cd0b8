"""Take pictures of a page, as people see it: 1400 and 500 pixels wide, light and dark.

    python -m scripts.screenshots PAGE OUT

PAGE is an HTML file or an address, such as that of `peagle serve`. Needs playwright (`pip install playwright`) and
Chromium (`apt-get install chromium`). OUT gets light_1400.png, dark_500.png and so on.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTHS, SCHEMES = (1400, 500), ("light", "dark")


def chromium() -> str | None:
    """Find Chromium; None if it is not installed."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pictures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", metavar="PAGE")
    parser.add_argument("out", type=Path, metavar="OUT")
    options = parser.parse_args(arguments)
    executable = chromium()
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        parser.error("playwright is not installed; pip install playwright")
    if executable is None:
        parser.error("no Chromium is installed; apt-get install chromium")
    address = options.page if "://" in options.page else Path(options.page).resolve(strict=True).as_uri()
    options.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for scheme in SCHEMES:
            for width in WIDTHS:
                page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                page.goto(address)
                path = options.out / f"{scheme}_{width}.png"
                page.screenshot(path=path, full_page=True)
                print(path)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
