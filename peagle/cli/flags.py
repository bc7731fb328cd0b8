"""Options that several commands share. A docstring below a field replaces the help."""

from peagle.ops.errors import InputError
from peagle.ops.flag import OUTPUT, PROMPT, SERVER, Flag

PROMPT_FILE = Flag(PROMPT, "FILE", ("--prompt-file", "--prompts"))
STRICT = Flag(PROMPT, help="Fail on a row of a prompt file that cannot be used, instead of skipping it with a note.")
SPECIAL_TOKENS = Flag(PROMPT, help="In a raw prompt, encode the spelling of a special token as that token.")
JSON = Flag(
    OUTPUT, "FILE|-", help="Write all results as one JSON object; -: to standard output, and nothing else there."
)
QUIET = Flag(
    OUTPUT, names=("--quiet", "-q"), help="Hide progress, notes and summary. Warnings and errors are still printed."
)
HOST = Flag(SERVER, "ADDRESS", help="Address to listen on; 0.0.0.0 also accepts other machines.")
API_KEY_FILE = Flag(SERVER, "FILE", help="File of accepted API keys, one per line. Default: no key is required.")


def refuse_strict(strict: bool) -> None:
    """Raise InputError for --strict without a prompt file."""
    if strict:
        raise InputError("--strict is about the rows of a file; give --prompt-file, too, or leave it out")
