import sys

from peagle.ops.native.build import main

sys.exit(main())
