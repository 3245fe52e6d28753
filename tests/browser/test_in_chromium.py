"""The page as its reader sees it, in Chromium. `make test-page` runs it and makes the screenshots.

Skipped without Playwright or without Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.programs import (
    INGRESS,
    ROOT,
    ServerProcess,
    environment,
    free_port,
    process,
    write_module,
)
from tests.servers import PATIENCE_S, get, wait_until

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.timeout(180),
]
PICTURES = ROOT / "docs" / "observing"
WAIT_MS = PATIENCE_S * 1e3

APP = """
import asyncio
import time
from pathlib import Path

import ingress as serve
from fastapi import FastAPI

api = FastAPI()

def until(name):
    while not Path(name).exists():
        time.sleep(0.01)

@serve.deployment(num_replicas=2, lanes={"db": 1})
class Model:
    async def __call__(self, number):
        await asyncio.sleep(0.002 * number)
        return number

    @serve.method(lane="db")
    def query(self):
        until("go")

    def train(self):
        return 1

@serve.deployment(isolation="process")
class Scorer:
    async def __call__(self):
        while not Path("go").exists():
            await asyncio.sleep(0.01)

@serve.deployment
@serve.ingress(api)
class Shop:
    def __init__(self, model, scorer):
        self.model, self.scorer = model, scorer

    @api.get("/items/{number}")
    async def item(self, number: int):
        return await self.model.remote(number)

    @api.get("/orders")
    async def orders(self):
        return await self.model.query.remote()

    @api.get("/score")
    async def score(self):
        return await self.scorer.remote()

    @api.get("/report")
    def report(self):
        until("go")

    @api.get("/export")
    async def export(self):
        until("go-block")

    @api.get("/checkout")
    async def checkout(self):
        raise ValueError("<script>window.hacked = 1</script> no stock")

    @api.get("/<img src=x onerror=hacked=1>")
    async def hostile(self):
        raise KeyError("<b>bold</b>")

app = Shop.bind(Model.bind(), Scorer.bind())
"""

TRACED = f"""{APP}
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

trace.set_tracer_provider(TracerProvider())
"""

MANY = """
import ingress as serve
from fastapi import FastAPI

api = FastAPI()

@serve.deployment(num_replicas=64)
@serve.ingress(api)
class Many:
    pass

def add(number):
    @api.get(f"/route/{number}/{{name}}")
    async def route(name: str):
        return number

for number in range(500):
    add(number)

app = Many.bind()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_module(tmp_path, "app", APP)
    write_module(tmp_path, "many", MANY)
    return tmp_path


class Served:
    """A server with a page. Requests to it end when `go` is touched, at the end at the latest."""

    def __init__(self, folder: Path, app: str = "app:app", *options: str) -> None:
        self.folder = folder
        self.admin = f"http://127.0.0.1:{free_port()}"
        self._command = [*INGRESS, "run", app, "--port", "0", *options]
        self._command += ["--admin", self.admin.removeprefix("http://")]
        self._threads: list[threading.Thread] = []
        self.process: ServerProcess

    @contextmanager
    def running(self) -> Iterator[ServerProcess]:
        with process(self._command, self.folder, environment(self.folder)) as server:
            server.wait_for("Ctrl-C to stop")
            self.process = server
            try:
                yield server
            finally:
                for name in ("go", "go-block"):
                    (self.folder / name).touch()
                for each in self._threads:
                    each.join(PATIENCE_S)

    def send(self, *paths: str) -> None:
        for path in paths:
            thread = threading.Thread(target=self._get, args=(path,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _get(self, path: str) -> None:
        try:
            get(self.process.port, path)
        except OSError:
            pass  # the server was killed


class Page:
    """A page in the browser, and all that went wrong in it."""

    def __init__(self, browser: Any, url: str, *, width: int = 1280, **options: Any) -> None:
        height = 800 if width > 500 else 844
        self.page = browser.new_page(viewport={"width": width, "height": height}, **options)
        self.wrong: list[str] = []
        self.asked: set[str] = set()
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("dialog", lambda dialog: self.wrong.append(dialog.message))
        self.page.on("request", lambda request: self.asked.add(request.url))
        self.page.goto(url)

    def wait_until(self, condition: str) -> None:
        """Wait until an expression is true. The page's policy allows Playwright's own wait not."""
        wait_until(lambda: self.page.evaluate(condition))

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def wait_for(self, selector: str, text: str) -> str:
        """Wait until the text of an element matches, and return it."""
        pattern = re.compile(text, re.DOTALL)
        sync_api.expect(self.page.locator(selector)).to_contain_text(pattern, timeout=WAIT_MS)
        return self.text(selector)


@contextmanager
def page_of(browser: Any, url: str, **options: Any) -> Iterator[Page]:
    page = Page(browser, url, **options)
    try:
        yield page
    finally:
        page.page.close()


def test_it_shows_a_request_while_it_runs_a_stall_by_its_line_and_what_was_slow(
    browser: Any, folder: Path
) -> None:
    served = Served(folder)
    with served.running() as server, page_of(browser, served.admin) as page:
        for number in range(60):
            get(server.port, f"/items/{number % 7}")
        served.send("/report", "/orders", "/orders", "/score")
        page.wait_for("#map", "Shop.report, .*app.py:13")
        page.wait_for("#map", "lane db 1/1")
        page.wait_for("#map", "Scorer#0.*own process")
        assert "GET /orders" in page.text("#map")
        begin = time.monotonic()
        served.send("/export")
        text = page.wait_for("#problems", "the event loop of Shop#0 stands")
        took_s = time.monotonic() - begin
        print(f"\na stall was on the page after {took_s:.2f} s")
        assert took_s < 5
        assert "at app.py:13" in text
        page.wait_for("#map", "stands for .* s")
        page.wait_for("#verdict", "■ .*problem")
        pictures(browser, served.admin)
        (folder / "go-block").touch()
        page.wait_until("!document.querySelector('#problems').innerText.includes('stands')")
        page.wait_for("#problems", "an event loop stalled")
        get(server.port, "/checkout")
        page.page.click("#show-failed")
        page.wait_for("#requests", r"GET /checkout.*no stock at app.py:\d+")
        page.wait_for("#deployments", "Shop● HEALTHY")
        assert page.wrong == []
        assert {url.split("/")[2] for url in page.asked if url.startswith("http")} == {
            served.admin.removeprefix("http://")
        }


def test_the_ids_of_a_failed_request_can_be_copied(browser: Any, folder: Path) -> None:
    served = Served(folder)
    with served.running() as server, page_of(browser, served.admin) as page:
        page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        get(server.port, "/checkout", "X-Request-ID: find-me-7\r\n")
        page.page.click("#show-failed")
        page.wait_for("#requests", "find-me-7")
        page.page.get_by_role("button", name="Copy the request id find-me-7").click()
        page.wait_for("#requests", "copied")
        assert page.page.evaluate("navigator.clipboard.readText()") == "find-me-7"
        assert page.page.evaluate("String(getSelection())").strip() == "find-me-7"
        sync_api.expect(page.page.locator("#requests")).not_to_contain_text("copied")
        # 2 s have passed: several views, which kept the row, the selection and the focus.
        assert page.page.evaluate("String(getSelection())").strip() == "find-me-7"
        focused = page.page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert focused == "Copy the request id find-me-7"
        assert "grep -F -e REQUEST_ID" in page.text("main")
        assert "find-me-7" in server.output
        assert page.wrong == []


def test_a_request_is_opened_with_its_steps_its_place_and_its_log_lines(
    browser: Any, folder: Path
) -> None:
    served = Served(folder)
    with served.running() as server, page_of(browser, served.admin) as page:
        get(server.port, "/checkout", "X-Request-ID: mine-1\r\n")
        get(server.port, "/checkout", "X-Request-ID: other-2\r\n")
        page.page.click("#show-failed")
        page.wait_for("#requests", "mine-1")
        row = page.page.locator("#requests tr", has_text="mine-1")
        row.get_by_role("button", name="GET /checkout").click()
        text = page.wait_for("#one", "raise ValueError")
        assert re.search(r"replica\s+default / Shop#0, process \d+", text)
        assert re.search(r"raised at\s+\S+app.py:\d+ in \S*checkout", text)
        assert "no stock" in text
        assert "other-2" not in text
        page.page.keyboard.press("Escape")
        sync_api.expect(page.page.locator("#one")).to_be_hidden()
        card = page.page.locator("#map article", has_text="Shop#0")
        card.get_by_text("Last log lines").click()
        page.wait_for("#map", "ERROR .*request mine-1")
        get(server.port, "/checkout", "X-Request-ID: later-3\r\n")
        page.wait_for("#map", "ERROR .*request later-3")  # while it is open, it goes on
        assert page.wrong == []


def test_a_trace_id_is_a_link_to_the_trace(
    browser: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv("INGRESS_TRACING", "1")
    monkeypatch.setenv("INGRESS_TRACE_URL", "http://127.0.0.1:16686/trace/{trace_id}")
    write_module(folder, "traced", TRACED)
    served = Served(folder, "traced:app")
    with served.running() as server, page_of(browser, served.admin) as page:
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        get(server.port, "/checkout", f"traceparent: 00-{trace_id}-b7ad6b7169203331-01\r\n")
        page.page.click("#show-failed")
        page.wait_for("#requests", trace_id)
        link = page.page.get_by_role("link", name=f"Trace {trace_id}")
        assert link.get_attribute("href") == f"http://127.0.0.1:16686/trace/{trace_id}"
        assert link.get_attribute("rel") == "noreferrer"
        assert page.wrong == []


def pictures(browser: Any, url: str) -> None:
    """Make the screenshots of the documentation."""
    if os.environ.get("INGRESS_SCREENSHOTS") != "1":
        return
    PICTURES.mkdir(exist_ok=True)
    for name, width, scheme in (
        ("light", 1280, "light"),
        ("dark", 1280, "dark"),
        ("phone", 390, "light"),
    ):
        with page_of(browser, url, width=width, color_scheme=scheme) as page:
            page.wait_for("#map", "stands for")
            page.page.wait_for_timeout(600)
            page.page.screenshot(path=PICTURES / f"page-{name}.png")
            wide = page.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width  # nothing is cut off at the side
            if name == "light":
                page.page.locator("#map").screenshot(path=PICTURES / "map.png")


def test_a_killed_replica_and_its_return_are_shown(browser: Any, folder: Path) -> None:
    served = Served(folder)
    with served.running(), page_of(browser, served.admin) as page:
        found = re.search(r"own process (\d+)", page.wait_for("#map", r"own process \d+"))
        assert found is not None
        os.kill(int(found[1]), signal.SIGKILL)
        page.wait_for("#map", rf"own process (?!{found[1]}\b)\d+")
        page.wait_for("#map", "RUNNING, own process")
        page.wait_for("#deployments", r"Scorer\s*● HEALTHY")


def test_it_survives_a_restart_of_the_server_and_says_so(browser: Any, folder: Path) -> None:
    served = Served(folder)
    with served.running() as server:
        page = Page(browser, served.admin)
        page.wait_for("#connection", "live")
        server.signal(signal.SIGKILL)
        server.wait()
    page.wait_for("#connection", "connection lost, trying again; shown is the state of")
    with served.running():
        page.wait_for("#connection", "live.*the server restarted at")
        page.wait_for("#verdict", "healthy")
    page.page.close()


def test_it_says_that_the_server_stops_and_opens_no_second_stream(
    browser: Any, folder: Path
) -> None:
    served = Served(folder, "app:app", "--workers", "2")
    with served.running() as server:
        page = Page(browser, served.admin)
        streams: list[str] = []
        page.page.on("request", lambda each: streams.append(each.url))
        page.wait_for("#connection", "live")
        served.send("/score")
        page.wait_for("#map", "Scorer#0.*1 of")
        server.signal()
        page.wait_for("#connection", "the server stops")
        page.page.wait_for_timeout(2000)  # some more such events
        assert [each for each in streams if each.endswith("events")] == []
        assert "Invalid" not in page.text("body")
        assert page.wrong == []
        (folder / "go").touch()
        page.wait_for("#connection", "connection lost, trying again; shown is the state of")
    page.page.close()


def test_hostile_names_are_shown_as_text(browser: Any, folder: Path) -> None:
    served = Served(folder)
    with served.running() as server, page_of(browser, served.admin) as page:
        get(server.port, "/checkout")
        get(server.port, "/%3Cimg%20src=x%20onerror=hacked=1%3E")
        page.page.click("#show-failed")
        page.wait_for("#requests", "<b>bold</b>")
        page.wait_for("#requests", "<script>window.hacked = 1</script> no stock")
        page.wait_for("#routes", "/<img src=x onerror=hacked=1>")
        assert page.page.evaluate("window.hacked") is None
        assert page.page.locator("main script, main img, main b b").count() == 0
        assert page.wrong == []


def test_a_keyboard_is_enough(browser: Any, folder: Path) -> None:
    served = Served(folder)
    with served.running(), page_of(browser, served.admin) as page:
        page.wait_for("#connection", "live")
        names: list[str] = []
        for _ in range(25):
            page.page.keyboard.press("Tab")
            names.append(page.page.evaluate(
                "[document.activeElement.getAttribute('aria-label'),"
                " document.activeElement.innerText, document.activeElement.id].join(' ')"
            ))  # fmt: skip
        for expected in ("Skip to", "Pause", "Record 10 s", "Deployments", "default / Shop",
                         "Requests/s: ", "Latency: ", "filter"):  # fmt: skip
            assert any(expected in name for name in names), (expected, names)
        page.page.locator("#charts svg").first.focus()
        page.page.keyboard.press("ArrowLeft")
        page.page.keyboard.press("p")
        page.wait_for("#connection", "paused at")
        page.page.keyboard.press("p")
        page.wait_for("#connection", "live")
        unnamed = page.page.evaluate(
            "[...document.querySelectorAll('button, input, [role=img], [role=region]')]"
            ".filter(each => !each.getAttribute('aria-label') && !each.innerText)"
            ".filter(each => !each.closest('label')).length"
        )
        assert unnamed == 0


def test_a_token_is_asked_for(browser: Any, folder: Path) -> None:
    served = Served(folder, "app:app", "--admin-token", "secret")
    with served.running(), page_of(browser, served.admin) as page:
        page.page.wait_for_selector("dialog[open]")
        page.page.fill("#token", "secret")
        page.page.keyboard.press("Enter")
        page.wait_for("#connection", "live")
        page.wait_for("#deployments", "Shop")


def test_500_routes_and_64_replicas_are_drawn_without_jank(browser: Any, folder: Path) -> None:
    served = Served(folder, "many:app")
    with served.running() as server, page_of(browser, served.admin) as page:
        for number in range(500):
            get(server.port, f"/route/{number}/x")
        page.wait_for("#route-count", "(500)")
        page.wait_until("document.querySelectorAll('.replica').length === 64")
        page.page.evaluate("window.frames_ms.length = 0")
        page.wait_until("window.frames_ms.length >= 5")
        took = sorted(page.page.evaluate("window.frames_ms"))
        print(f"\n500 routes, 64 replicas: a view is drawn in {took[len(took) // 2]:.1f} ms "
              f"in the middle, {took[-1]:.1f} ms at most")  # fmt: skip
        assert took[len(took) // 2] < 100
