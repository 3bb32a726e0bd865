"""The page in a real browser on a real server with the real model.

Screenshots of what is tested go to out/ (not kept by git), to be looked at.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from service.access.keys import hash_key, key_entry
from tests.browser import CHROMIUM, OUT, chromium
from tests.e2e.conftest import Server, serve

SHAPES = [(1280, 900, "light"), (1280, 900, "dark"), (390, 844, "light"), (390, 844, "dark")]
TENANT, OPERATOR = "key-of-a-tenant", "key-of-an-operator"
QUESTION = "What makes a river flow to the sea?"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page on which nothing goes wrong unless a test takes it from `wrong`."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page.set_default_timeout(60_000)
    yield page
    page.close()


def complaints(page: Page) -> list[str]:
    """What the browser says from now on, warnings included."""
    said: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            said.append(f"{message.text} ({message.location})")

    page.on("console", note)
    page.on("pageerror", lambda error: said.append(str(error)))
    return said


def ask(page: Page, text: str = QUESTION) -> str:
    """Ask, wait for the answer's end, and give the words about the cache."""
    turns = page.locator(".turn")
    number = turns.count()
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")
    words = turns.nth(number).locator(".words")
    words.wait_for()
    assert turns.nth(number).locator(".answer").inner_text().strip()
    return words.inner_text()


def picture(page: Page, name: str) -> None:
    """The whole page in every shape, which it must fit."""
    for width, height, scheme in SHAPES:
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=OUT / f"{name}-{width}-{scheme}.png", full_page=True)


def cached_tokens(words: str) -> int:
    return int(words.split(" of ")[0].replace(",", ""))


def test_the_page_streams_shows_the_cache_and_draws_the_tree(page: Page, server: Server) -> None:
    said = complaints(page)
    page.goto(f"{server.url}/dashboard")
    expect(page.locator("#state-text")).to_have_text("idle")
    ask(page)
    page.get_by_role("button", name="New conversation").click()
    assert cached_tokens(ask(page)) >= 64

    page.get_by_text("Show the prompt").click()
    expect(page.locator("mark")).to_contain_text("You are a helpful assistant")

    expect(page.locator("#fig-running")).to_have_text("0")
    expect(page.locator("#fig-itl")).to_contain_text("ms")
    expect(page.locator("#roofline circle.phase").first).to_be_visible()
    branch = page.locator("path.branch").first
    branch.wait_for()
    branch.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#node-text")).not_to_be_empty()
    picture(page, "dashboard")
    assert said == []


def test_what_was_evicted_to_disk_is_drawn_where_it_hangs(page: Page) -> None:
    """More prompts than the device has room for; one of them ends in a lease, all begin alike."""
    said = complaints(page)
    with serve("--kv-memory", "32MiB", "--cache-disk", "256MiB") as server:
        for number in range(6):
            text = " ".join(f"{number * word} pebbles." for word in range(90))
            body = {"model": "default", "input": text, "max_output_tokens": 2}
            options = {"prompt_cache_options": {"ttl": "30m"}} if number == 5 else {}
            answer = server.http.post("/v1/responses", json={**body, **options})
            assert answer.status_code == 200, answer.text
        page.goto(f"{server.url}/dashboard")
        expect(page.locator("path.disk").first).to_be_visible()
        expect(page.locator("#legend-disk")).to_be_visible()
        expect(page.locator("#tree-note")).to_contain_text("on disk")
        page.locator("path.branch").first.focus()
        page.keyboard.press("Enter")
        expect(page.locator("#node-facts")).to_contain_text("on disk from here")
        picture(page, "tiers")
        assert said == []


def test_a_new_conversation_ends_the_old_one_and_nothing_of_it_is_left(
    page: Page, server: Server
) -> None:
    page.goto(f"{server.url}/dashboard")
    page.get_by_label("Your message").fill("Write a long story about a boat, with many chapters.")
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).not_to_be_empty()
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    ask(page, "What is a weir?")
    page.get_by_text("Show the prompt").click()
    expect(page.locator(".prompt")).to_contain_text("What is a weir?")
    assert "boat" not in page.locator(".prompt").inner_text()
    expect(page.locator("#fig-running")).to_have_text("0")


def test_everything_is_reached_by_keyboard_in_the_order_it_is_seen(
    page: Page, server: Server
) -> None:
    page.goto(f"{server.url}/dashboard")
    expect(page.locator("#state-text")).not_to_have_text("connecting")
    named = []
    for _ in range(7):
        page.keyboard.press("Tab")
        named.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        shadow = "getComputedStyle(document.activeElement).boxShadow"
        assert page.evaluate(outline) != "none" or page.evaluate(shadow) != "none", named
    assert named == ["A", "key-open", "ask-new", "talk", "SUMMARY", "text", "send"]


def test_the_page_comes_back_by_itself_when_the_server_does(page: Page) -> None:
    with serve() as first:
        page.goto(f"{first.url}/dashboard")
        expect(page.locator("#state-text")).to_have_text("idle")
        ask(page)
        port = int(first.url.rsplit(":", 1)[1])
    expect(page.locator("#state-text")).to_have_text("reconnecting")
    with serve(port=port):
        expect(page.locator("#state-text")).to_have_text("idle")
        ask(page, "And where does it end?")


def test_the_page_goes_on_with_the_next_engine(page: Page) -> None:
    with serve() as server:
        page.goto(f"{server.url}/dashboard")
        ask(page)
        expect(page.locator("path.branch").first).to_be_visible()
        pid = server.process.pid
        engine, *_ = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(engine), signal.SIGKILL)
        expect(page.locator("#tree-empty")).to_be_visible()
        expect(page.locator("#state-text")).to_have_text("idle")
        ask(page, "And where does it begin?")
        expect(page.locator("path.branch").first).to_be_visible()


def test_with_keys_nothing_is_shown_without_an_admin_key(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    entries = [(TENANT, "a", False), (OPERATOR, "operators", True)]
    path.write_text("".join(key_entry(hash_key(key), t, admin) for key, t, admin in entries))

    def use(key: str) -> None:
        page.get_by_role("button", name="API key").click()
        page.get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")

    with serve("--keys", str(path)) as server:
        page.goto(f"{server.url}/dashboard")
        expect(page.locator("#state-text")).to_have_text("needs a key")
        expect(page.locator("section.live:visible")).to_have_count(0)
        use("no-such-key")
        expect(page.locator("#state-text")).to_have_text("wrong key")
        expect(page.locator("#banner-text")).to_contain_text("does not know this key")
        use(TENANT)
        expect(page.locator("#state-text")).to_have_text("playground only")
        ask(page)
        expect(page.locator("section.live:visible")).to_have_count(0)
        use(OPERATOR)
        expect(page.locator("#state-text")).to_have_text("idle")
        expect(page.locator("path.branch").first).to_be_visible()
        assert "key" not in page.url
