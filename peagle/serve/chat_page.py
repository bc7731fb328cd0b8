"""The page at /: a chat that colours each token by its origin. It loads nothing from other servers."""

import base64
import hashlib
import importlib.resources
import re

PAGE = importlib.resources.files("peagle.serve").joinpath("chat_page.html").read_text("utf-8")


def policy(page: str) -> str:
    """Return the Content-Security-Policy: the page's own script and style, and requests to its server only."""

    def hashed(tag: str) -> str:
        (source,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return "'sha256-" + base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode() + "'"

    return (
        f"default-src 'none'; connect-src 'self'; script-src {hashed('script')}; style-src {hashed('style')}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


HEADERS = {
    "Content-Security-Policy": policy(PAGE),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
