import sys

from peagle.ops.native.build import main

sys.exit(main(sys.argv[1:]))
