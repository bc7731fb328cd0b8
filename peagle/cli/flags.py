"""Options that several commands share."""

from peagle.base.flag import OUTPUT, PROMPT, SERVER, Flag

PROMPT_FILE = Flag(PROMPT, "FILE", ("--prompt-file",))
JSON = Flag(OUTPUT, "FILE|-", help="Write all results as one JSON object; -: to standard output, alone.")
QUIET = Flag(OUTPUT, names=("--quiet", "-q"), help="Hide progress, notes and summary, but not warnings.")
HOST = Flag(SERVER, "ADDRESS", help="Address to listen on; 0.0.0.0 also accepts other machines.")
API_KEY_FILE = Flag(SERVER, "FILE", help="File of accepted API keys, one per line. Default: no key is required.")
