"""Makes the pictures of the documentation, a screenshot and the badges: python docs/pictures.py [--run RUN] [--gallery FOLDER]

RUN is the folder of a finished run; without it, the demo is trained and timed first. The gallery shows the front page, a guide, the
report, a comparison and a terminal on small and large screens, light and dark; run `make docs` before. Needs Chromium and its
driver.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import subprocess
import sys
import tempfile
import tomllib
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
WIDTH, HEIGHT, SCALE = 1000, 860, 1.6  # narrow, so that small screens can show the text
WIDTHS = (400, 800, 1400)  # of the gallery
SMARTPRUNE = [sys.executable, "-m", "smartprune"]
SHORT = ["--dense-epochs", "4", "--search-epochs", "6", "--finetune-epochs", "4", "--onnx", "off"]
ERASE = "\r\x1b[K"  # what the progress writes before a line that replaces the last one
TERMINAL = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Terminal</title>
<style>:root {{ color-scheme: light dark }}
pre {{ font: 13px/1.4 monospace; max-width: {columns}ch; white-space: pre-wrap; word-break: break-all }}</style><pre>{text}</pre>
"""


def badges() -> str:
    """Facts of pyproject.toml as an SVG picture, which needs no server."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    pythons = [item.rsplit(" ", 1)[1] for item in project["classifiers"] if re.search(r"Python :: 3\.\d+$", item)]
    torch = next(item for item in project["dependencies"] if item.startswith("torch"))
    facts = {"python": ", ".join(pythons), "pytorch": torch.removeprefix("torch>=") + " or later", "licence": project["license"]}
    parts, x = [], 0.0
    for name, value in facts.items():
        left, right = 7.0 * len(name) + 14, 7.0 * len(value) + 14
        parts += [
            f'<rect x="{x:g}" width="{left:g}" height="22" fill="#454f54"/>',
            f'<rect x="{x + left:g}" width="{right:g}" height="22" fill="#0b6e69"/>',
            f'<text x="{x + left / 2:g}" y="15">{name}</text>',
            f'<text x="{x + left + right / 2:g}" y="15">{value}</text>',
        ]
        x += left + right + 8
    style = 'font-family="Verdana,DejaVu Sans,sans-serif" font-size="12" text-anchor="middle" fill="#fff"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{x - 8:g}" height="22" {style}>'
    return "\n".join([head, *parts, "</svg>", ""])


def shown(written: str, share: float = 1.0) -> str:
    """What a terminal shows of a program's output, after this share of its progress lines."""
    ticks = [match.start() for match in re.finditer(re.escape(ERASE), written)]
    end = ticks[int(share * len(ticks))] if share < 1 else len(written)
    lines = written[:end].replace("\r\n", "\n").split("\n")
    return "\n".join(line.rpartition(ERASE)[2] for line in lines)


def terminal(columns: int, folder: Path, *words: str) -> str:
    """Runs a command on a terminal, in a folder, and returns everything that it writes."""
    main, other = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen([*SMARTPRUNE, *words], stdout=other, stderr=other, env=environment, cwd=folder)
    os.close(other)
    written = b""
    try:
        while chunk := os.read(main, 4096):
            written += chunk
    except OSError:  # the end of the output on Linux
        pass
    os.close(main)
    if process.wait():
        raise SystemExit(f"smartprune {' '.join(words)} failed:\n{written.decode()}")
    return written.decode()


def gallery(folder: Path, run: Path, work: Path) -> None:
    """Screenshots of every page at every width, light and dark, in the folder."""
    site = DOCS.parent / "build" / "site"
    if not (site / "index.html").exists():
        raise SystemExit("docs/pictures.py: build/site is missing; run: make docs")
    grid = ["--methods", "smart,gradual", "--sparsities", "0.8,0.9", "--seeds", "0,1", "--jobs", "1"]
    subprocess.run([*SMARTPRUNE, "sweep", *grid, *SHORT, "--out", str(work / "sweep")], check=True)
    subprocess.run([*SMARTPRUNE, "compare", str(work / "sweep"), "--html", str(work / "compare.html")], check=True)
    pages = {"readme": site / "index.html", "guide": site / "guides" / "budgets.html", "report": run / "report.html"}
    pages["compare"] = work / "compare.html"
    folder.mkdir(parents=True, exist_ok=True)
    browser = start_browser()
    try:
        for width in WIDTHS:
            columns = width // 9
            text = shown(terminal(columns, work, "train", *SHORT, "--out", f"run{width}"), 0.8)
            pages["terminal"] = work / "terminal.html"
            pages["terminal"].write_text(TERMINAL.format(columns=columns, text=escape(text)))
            for name, page in pages.items():
                for dark in (False, True):
                    browser.open(page, width, dark=dark)
                    browser.picture(folder / f"{name}-{width}-{'dark' if dark else 'light'}.png")
    finally:
        browser.close()


def start_browser() -> Any:
    """The browser that the tests use."""
    sys.path.insert(0, str(DOCS.parent / "tests"))
    from helpers.browser import MISSING, Browser

    if MISSING is not None:
        raise SystemExit(f"docs/pictures.py {MISSING}")
    return Browser()


def screenshot(page: Path, picture: Path) -> None:
    """Writes the top of a page as a picture."""
    browser = start_browser()
    try:
        browser.open(page, WIDTH, HEIGHT, scale=SCALE)
        browser.picture(picture)
    finally:
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a finished run (default: the demo is trained and timed)")
    parser.add_argument("--gallery", type=Path, metavar="FOLDER", help="write the screenshots of all pages here as well")
    args = parser.parse_args()
    (DOCS / "badges.svg").write_text(badges())
    with tempfile.TemporaryDirectory() as folder:
        run, work = args.run, Path(folder)
        if run is None:
            run = work / "demo"
            subprocess.run([*SMARTPRUNE, "train", "--out", str(run)], check=True)
            subprocess.run([*SMARTPRUNE, "bench", str(run), "--batch", "1"], check=True)  # the page then shows the speed
        screenshot(run / "report.html", DOCS / "report.png")
        if args.gallery is not None:
            gallery(args.gallery, run, work)


if __name__ == "__main__":
    main()
