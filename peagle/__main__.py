"""`python -m peagle`: the same as `peagle`."""

from peagle.cli import main

raise SystemExit(main())
