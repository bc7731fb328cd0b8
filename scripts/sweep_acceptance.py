"""`peagle sweep`, as a script: acceptance length and speed over K.

python scripts/sweep_acceptance.py --out RUN -k 1-8,auto --render both --temperature 0,1
python scripts/sweep_acceptance.py --out RUN -k 3 --draft-vocab full,1024,512
python scripts/sweep_acceptance.py --out RUN -k 3,5 --drafter demo,runs/eagle3,ngram
"""

import sys

from peagle.cli import main

if __name__ == "__main__":
    sys.exit(main(["sweep", *sys.argv[1:]]))
