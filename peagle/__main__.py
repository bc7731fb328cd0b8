"""Run the command line: `python -m peagle` equals `peagle`."""

from peagle.cli import main

raise SystemExit(main())
