"""The page at / in a real browser, by keyboard alone: Chromium, driven by playwright, if both are installed."""

import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from peagle.text.tokenizer import Tokenizer
from tests.support.pairs import toy_pair
from tests.support.running import PATIENCE_S, Gate, Running, eventually, running
from tests.support.servers import service_of

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    """One server for all tests, whose answers have the length they are asked for."""
    service = service_of(toy_pair(tokenizer, ()))
    with running(service) as served:
        yield served
    service.loop.close()


class Visit:
    """A page that is open, with what went wrong in it and where it sent requests."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.errors, self.addresses = page, list[str](), list[str]()
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.addresses.append(request.url))
        page.goto(url)

    def text(self, name: str) -> str:
        text: str = self.page.locator(f"#{name}").inner_text()
        return text

    def ends(self, pattern: str) -> None:
        """Wait until the state's line matches."""
        state = self.page.locator("#state")
        sync_api.expect(state).to_have_text(re.compile(f"^({pattern})$"), timeout=1000 * PATIENCE_S)

    def ask(self, text: str, most: int) -> None:
        """Type a message and send it, without a mouse."""
        self.page.locator("#most").fill(str(most))
        self.page.locator("#prompt").fill(text)
        self.page.keyboard.press("Enter")


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    contexts = []

    def open_page(url: str, width: int = 1400, scheme: str = "light") -> Visit:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        return Visit(contexts[-1].new_page(), url)

    yield open_page
    for context in contexts:
        context.close()


def test_a_message_is_answered_in_colours(server: Running, visit: Callable[..., Visit]) -> None:
    tab = visit(server.url)
    tab.ask("ab", 12)
    tab.ends("finish: length")
    spans = tab.page.locator(".assistant span")
    assert spans.count() == 12
    assert tab.text("count") == "12"
    assert spans.first.get_attribute("class") == "prefill"
    assert float(tab.text("length")) >= 1
    drafted, verified, accepted = map(int, tab.text("drafts").split(", "))
    coloured = sum("accepted" in span.get_attribute("title") for span in spans.all())
    assert drafted >= verified >= accepted >= coloured > 0  # the last step's are cut at the limit
    assert tab.page.evaluate("document.activeElement.id") == "prompt"  # ready for the next message
    assert tab.errors == []
    assert {address.startswith(server.url) for address in tab.addresses} == {True}


def test_escape_stops_an_answer_and_frees_its_slot(server: Running, visit: Callable[..., Visit]) -> None:
    gate, loop = Gate(server.service), server.service.loop
    gate.close()  # the answer has no other end
    tab = visit(server.url)
    tab.ask("ab", 200)
    eventually(lambda: gate.added)
    tab.page.keyboard.press("Escape")
    tab.ends("stopped")
    eventually(lambda: gate.aborted)
    gate.open()
    eventually(lambda: loop.num_open == 0)
    assert tab.errors == []


def test_a_refusal_is_shown_where_the_answer_would_be(server: Running, visit: Callable[..., Visit]) -> None:
    tab = visit(server.url)
    tab.ask("ab " * 400, 5)
    tab.ends(".*tokens.*")
    assert tab.page.locator(".assistant").count() == 0
    assert tab.page.locator("#prompt").input_value().startswith("ab")  # the message is not lost
