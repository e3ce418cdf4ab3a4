"""The page in a real browser: requests, mouse, keyboard, screen sizes and printing."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import smartprune as sp
from helpers import training_jobs
from helpers.browser import MISSING, Browser
from helpers.finished_runs import write_macs_left, write_run
from helpers.hostile_names import HOSTILE
from helpers.pruned_models import model_and_receipt
from smartprune.artifacts.receipt import Receipt
from smartprune.reports.page import write_page
from smartprune.run_files import PAGE

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
NAMELESS = """
const label = (e) => e.labels && e.labels[0] && e.labels[0].textContent;
const name = (e) => (e.getAttribute('aria-label') || label(e) || e.textContent || '').trim();
return [...document.querySelectorAll('button, select, canvas, svg, [tabindex="0"], a, [role=region], [role=application]')]
  .filter((e) => !name(e)).map((e) => e.outerHTML.slice(0, 80));
"""


CLIPPED_TEXT = """return [...document.querySelectorAll('svg text')].filter((e) => {
  const a = e.getBoundingClientRect(), b = e.closest('svg').getBoundingClientRect();
  return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
}).map((e) => e.textContent)"""


@pytest.fixture(scope="module")
def runs_to_compare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of runs that were trained in three ways."""
    folder = tmp_path_factory.mktemp("compare")
    for epochs, methods in ((4, ("magnitude", "gradual")), (40, ("smart",)), (8, ("smart",))):
        for seed in range(1 if epochs == 40 else 3):
            for number, method in enumerate(methods):
                run = write_run(
                    folder / f"{epochs}",
                    0.8 + 0.03 * seed - 0.5 * number * (seed == 0),
                    seed=seed,
                    method=method,
                    search_epochs=epochs,
                )
                write_macs_left(run, 1000, 200 + 33 * number)
    page = folder / "page.html"
    assert training_jobs.run_cli("compare", str(folder), "--html", str(page)) == 0
    return page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.mark.parametrize("dark", [False, True])
def test_page_opens_without_console_messages_or_requests(browser: Browser, run: Path, dark: bool) -> None:
    browser.open(run / PAGE, dark=dark)
    messages, requests = browser.logs()
    assert messages == []
    assert requests == [(run / PAGE).resolve().as_uri()]
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == (
        "rgb(20, 24, 26)" if dark else "rgb(255, 255, 255)"
    )
    browser.click("#theme")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)" if dark else "rgb(20, 24, 26)"
    )
    browser.click("#theme")
    browser.run("localStorage.clear()")
    assert browser.logs()[0] == []


def spot(browser: Browser, row: int, column: int) -> tuple[float, float]:
    """The middle of a block of the first panel on the screen, found by the colours of the pixels."""
    browser.run("document.getElementById('map').scrollIntoView({block: 'center'})")
    browser.settle()
    left, top, width, height = browser.run(
        """const c = document.getElementById('map'), b = c.getBoundingClientRect();
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        const ground = [d[0], d[1], d[2]].join(); // outside of all panels
        const ink = (x, y) => { const i = 4 * (y * c.width + x); return [d[i], d[i + 1], d[i + 2]].join() !== ground; };
        let x0 = 1e9, y0 = 1e9;
        for (let y = 0; y < c.height; y++)
          for (let x = 0; x < c.width; x++) if (ink(x, y)) { x0 = Math.min(x0, x); y0 = Math.min(y0, y); }
        let w = 1; while (ink(x0 + w, y0)) w++; let h = 1; while (ink(x0, y0 + h)) h++;
        return [b.left + x0, b.top + y0, w + 1, h + 1];"""
    )
    return left + (column + 0.5) * width, top + (row + 0.5) * height


def test_map_responds_to_mouse_and_keys(browser: Browser, run: Path) -> None:
    browser.open(run / PAGE, 1280, 1000)
    receipt = Receipt.load(run / "receipt.json")
    row = next(row for row in receipt.layers if row.name == "stages.2.0.conv1")
    number = browser.run(
        "return [...document.getElementById('map-layer').options].findIndex((o) => o.text === arguments[0])", row.name
    )
    browser.run(
        "const s = document.getElementById('map-layer'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))", str(number)
    )
    browser.settle()
    assert browser.text("#map-readout") == f"{row.name}: {row.blocks.kept:,} of {row.blocks.total:,} blocks kept."
    kept = row.mask().reshape(row.grid)

    def check_readout(out: int, inn: int, y: int, x: int) -> None:
        words = browser.text("#map-readout").split(" · ")
        flat = ((out * row.grid[1] + inn) * row.grid[2] + y) * row.grid[3] + x
        assert words[0] == f"block {flat:,} of {row.blocks.total:,}"
        assert words[1:4] == [f"outputs {4 * out}–{4 * out + 3}", f"inputs {2 * inn}–{2 * inn + 1}", f"kernel {y}, {x}"]
        assert words[4] == ("kept" if kept[out, inn, y, x] else "removed")
        assert re.fullmatch(r"score -?[\d.]+(e-\d+)?", words[5])
        norm = float(words[6].removeprefix("norm "))
        assert (norm > 0) == bool(kept[out, inn, y, x])

    browser.point(*spot(browser, 1, 2))
    check_readout(1, 2, 0, 0)
    browser.run("document.getElementById('map').focus()")
    browser.press("right", "down")
    check_readout(2, 3, 0, 0)
    for _ in range(row.grid[1] - 3):
        browser.press("right")
    check_readout(2, 0, 0, 1)  # the next panel
    browser.press("+", "+", "left")
    check_readout(2, row.grid[1] - 1, 0, 0)
    browser.press("0")
    for paint in ("norms", "scores"):
        browser.run(
            "const s = document.getElementById('map-paint'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))", paint
        )
        browser.settle()
    browser.run("const s = document.getElementById('map-kernel'); s.value = '4'; s.dispatchEvent(new Event('change'))")
    browser.settle()
    browser.press("right", "right")
    check_readout(0, 1, 1, 1)
    assert browser.logs()[0] == []


def test_layer_table_opens_the_map(browser: Browser, run: Path) -> None:
    browser.open(run / PAGE)
    browser.click("tr[data-layer] button")
    assert browser.run("return document.activeElement.id") == "map"
    name = browser.text("tr[data-layer] button")
    assert browser.text("#map-readout").startswith(f"{name}: ")
    assert name in browser.run("return document.getElementById('map').getAttribute('aria-label')")


def test_curves_show_the_value_at_the_pointer(browser: Browser, run: Path) -> None:
    browser.open(run / PAGE)
    browser.run("const s = document.querySelector('#figure-loss svg'); s.scrollIntoView({block: 'center'}); s.focus()")
    browser.press("end")
    last = training_jobs.metric_rows(run)[-1]
    steps = sum(
        row["step"]
        for row in training_jobs.metric_rows(run)
        if row["epoch"] == {"dense": 2, "search": 4, "finetune": 1}[row["stage"]]
    )
    words = browser.text("#figure-loss output")
    assert words.startswith(f"step {steps}: ")
    assert float(words.rpartition(" ")[2]) == pytest.approx(last["loss"], rel=1e-3)
    box = browser.run(
        "const b = document.querySelector('#figure-loss svg').getBoundingClientRect(); return [b.left, b.top, b.width, b.height]"
    )
    browser.point(box[0] + box[2] * 0.2, box[1] + box[3] / 2)
    assert browser.text("#figure-loss output") != words


def test_controls_have_accessible_names_and_tab_stops(browser: Browser, run: Path) -> None:
    browser.open(run / PAGE)
    assert browser.run(NAMELESS) == []
    assert browser.run("return document.documentElement.lang") == "en"
    assert browser.run("return [...document.querySelectorAll('h1')].length") == 1
    ids = browser.run("return [...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    browser.run("document.activeElement.blur(); scrollTo(0, 0)")
    seen = set()
    for _ in range(120):
        browser.press("tab")
        seen.add(browser.run("return document.activeElement.id || document.activeElement.closest('figure')?.id"))
        if "map" in seen and "figure-loss" in seen:
            break
    assert {"theme", "layer-table", "map-layer", "map", "zoom-in", "figure-loss"} <= seen


def test_the_headline_is_short(browser: Browser, run: Path) -> None:
    lines = """const h = document.querySelector('h1');
    return Math.round(h.getBoundingClientRect().height / parseFloat(getComputedStyle(h).lineHeight))"""
    for width in (400, 800, 1400):
        browser.open(run / PAGE, width)
        assert browser.run(lines) == 1


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 800, 1400])
def test_comparison_fits_every_width(browser: Browser, runs_to_compare: Path, width: int, dark: bool) -> None:
    browser.open(runs_to_compare, width, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.run("return [...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).length") == 0
    assert browser.run(CLIPPED_TEXT) == []
    letters = """return [...document.querySelectorAll('figure svg')]
        .map((e) => 14 * e.getBoundingClientRect().width / e.viewBox.baseVal.width)"""
    assert min(browser.run(letters)) >= 10
    assert max(browser.run(letters)) <= 20
    headings = browser.run("return [...document.querySelectorAll('h2')].map((e) => e.textContent)")
    assert len(headings) == len(set(headings)) == 4
    assert browser.run("return document.querySelectorAll('figure svg').length") == 3
    colours = """const of = (e, what) => getComputedStyle(e)[what].match(/\\d+/g).map(Number);
        const text = [...document.querySelectorAll('figure svg text')].map((e) => of(e, 'fill'));
        const ground = [...document.querySelectorAll('figure svg rect')].map((e) => getComputedStyle(e).fill);
        return [text, ground, of(document.body, 'backgroundColor')]"""
    texts, grounds, paper = browser.run(colours)
    assert set(grounds) == {"none"}  # the charts are drawn on the paper of the page
    assert min(abs(sum(text) - sum(paper)) for text in texts) > 500
    assert browser.logs()[0] == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 400, 800, 1000, 1400])
def test_page_fits_every_width(browser: Browser, run: Path, width: int, dark: bool) -> None:
    browser.open(run / PAGE, width, 800, dark=dark, touch=width == 360)
    assert browser.run("return document.documentElement.scrollWidth") == width
    sticking = browser.run(
        """return [...document.querySelectorAll('main *')]
        .filter((e) => !e.closest('.scroll, pre, svg') && e.getBoundingClientRect().right > innerWidth + 1)
        .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert sticking == []
    heights = browser.run(
        "return [...document.querySelectorAll('#map-section button, #theme')].map((e) => e.getBoundingClientRect().height)"
    )
    assert min(heights) >= 24
    letters = browser.run(
        """return [...document.querySelectorAll('figure svg text')].map((e) => parseFloat(getComputedStyle(e).fontSize)
        * e.closest('svg').getBoundingClientRect().width / e.closest('svg').viewBox.baseVal.width)"""
    )
    assert min(letters) >= 9
    assert browser.run(CLIPPED_TEXT) == []
    assert browser.run("return [...document.querySelectorAll('.big')].filter((e) => e.scrollWidth > e.clientWidth).length") == 0
    broken = """return [...document.querySelectorAll('.big')].filter((e) => {
      const one = document.createRange(); let broken = false;
      for (const word of e.firstChild.data.matchAll(/\\S+/g)) {
        one.setStart(e.firstChild, word.index); one.setEnd(e.firstChild, word.index + word[0].length);
        broken ||= one.getClientRects().length > 1;
      }
      return broken;
    }).map((e) => e.textContent)"""
    assert browser.run(broken) == []


def test_printed_page_is_light_and_complete(browser: Browser, run: Path) -> None:
    browser.open(run / PAGE, dark=True)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    ground = "return [...document.getElementById('map').getContext('2d').getImageData(0, 0, 1, 1).data].slice(0, 3)"
    assert max(browser.run(ground)) < 64
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.command("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert min(browser.run(ground)) > 200
    table = "const t = document.getElementById('layer-table'); return t.scrollHeight - t.clientHeight"
    assert browser.run(table) <= 1
    browser.command("Emulation.setEmulatedMedia", {"media": "", "features": dark})
    browser.run("dispatchEvent(new Event('afterprint'))")
    browser.settle()
    assert max(browser.run(ground)) < 64


def test_hostile_names_do_not_run_scripts(browser: Browser, tmp_path: Path) -> None:
    torch.save(HOSTILE, tmp_path / "model.pt")
    write_page(tmp_path / "page.html", tmp_path / "model.pt", (8, 8))
    browser.open(tmp_path / "page.html", 360)
    messages, requests = browser.logs()
    assert messages == []
    assert requests == [(tmp_path / "page.html").resolve().as_uri()]
    assert browser.run("return window.hit") is None
    assert browser.run("return document.documentElement.scrollWidth") == 360
    assert browser.text("#map-layer option").startswith("</script>")


def test_injected_scripts_do_not_run(browser: Browser, run: Path, tmp_path: Path) -> None:
    """The page's security policy blocks scripts and requests even if escaping failed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        evil = f"<script>window.hit = 1; fetch('{address}')</script><img src='{address}' onerror='window.hit = 2'>"
        (tmp_path / "page.html").write_text((run / PAGE).read_text().replace("<h1>", f"<h1>{evil}"))
        browser.open(tmp_path / "page.html")
        assert browser.run("return window.hit") is None
        with pytest.raises(TimeoutError):
            server.accept()
    browser.logs()
    assert browser.text("#map-readout")  # the page's own script ran


def test_zooming_a_million_blocks_is_smooth(browser: Browser, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = (torch.rand(1000, 1000) > 0.7).float()
    write_page(tmp_path / "page.html", {"fc.weight": weight}, (1, 1))
    browser.open(tmp_path / "page.html")
    times = browser.later(
        """const times = []; let last = performance.now();
        const frame = () => {
          const now = performance.now(); times.push(now - last); last = now;
          if (times.length > 12) { done(times.slice(1)); return; }
          document.getElementById(times.length < 7 ? 'zoom-in' : 'zoom-out').click();
          requestAnimationFrame(frame);
        };
        requestAnimationFrame(frame);"""
    )
    assert len(times) == 12
    assert sorted(times)[6] < 200  # about 20 on an idle machine; this one may be busy
    assert browser.logs()[0] == []


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_nothing_is_clipped_on_the_page_of_a_file_with_its_receipt(browser: Browser, tmp_path: Path, width: int) -> None:
    torch.manual_seed(0)
    model, receipt = model_and_receipt("unet", (4, 8), 0.6)
    cycles = sp.NPU.edge().estimate(model, torch.randn(1, 3, 8, 8), (4, 8))
    torch.save(model.state_dict(), tmp_path / "a.pt")
    write_page(tmp_path / "page.html", tmp_path / "a.pt", estimate=cycles, receipt=receipt)
    browser.open(tmp_path / "page.html", width)
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.run("return [...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).length") == 0
    assert browser.run(CLIPPED_TEXT) == []
    hidden = browser.run(
        """return [...document.querySelectorAll('main *')].filter((e) => getComputedStyle(e).overflowX === 'hidden'
          && !e.closest('svg') && e.clientWidth && e.scrollWidth > e.clientWidth + 1).map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert hidden == []
    assert browser.logs()[0] == []
