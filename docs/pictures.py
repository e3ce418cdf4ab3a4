"""Makes the pictures of the documentation, a screenshot and the badges: python docs/pictures.py [RUN]

RUN is the folder of a finished run; without it, the demo is trained and timed first. Needs Chromium.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
WIDTH, HEIGHT, SCALE = 1000, 860, 1.6  # narrow, so that small screens can show the text


def screenshot(page: Path, picture: Path, width: int = WIDTH, height: int = HEIGHT) -> None:
    """Writes the top of a page as a picture."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("docs/pictures.py: Chromium is not installed (Debian: apt-get install chromium)")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]
    flags.append(f"--force-device-scale-factor={SCALE}")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [chromium, *flags, f"--user-data-dir={profile}", f"--screenshot={picture}", page.resolve().as_uri()],
            check=True,
            stderr=subprocess.DEVNULL,
        )


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


def main(run: Path | None) -> None:
    (DOCS / "badges.svg").write_text(badges())
    with tempfile.TemporaryDirectory() as folder:
        if run is None:
            run = Path(folder) / "demo"
            smartprune = [sys.executable, "-m", "smartprune"]
            subprocess.run([*smartprune, "train", "--out", str(run)], check=True)
            subprocess.run([*smartprune, "bench", str(run), "--batch", "1"], check=True)  # the page then shows the speed
        screenshot(run / "report.html", DOCS / "report.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
