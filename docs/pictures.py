"""Takes the screenshots of the documentation: python docs/pictures.py [RUN]

RUN is the folder of a finished run; without it, the demo is trained first. Needs Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
WIDTH, HEIGHT = 1400, 900


def screenshot(page: Path, picture: Path, width: int = WIDTH, height: int = HEIGHT) -> None:
    """Writes the top of a page as a picture."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("docs/pictures.py: Chromium is not installed (Debian: apt-get install chromium)")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [chromium, *flags, f"--user-data-dir={profile}", f"--screenshot={picture}", page.resolve().as_uri()],
            check=True,
            stderr=subprocess.DEVNULL,
        )


def main(run: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if run is None:
            run = Path(folder) / "demo"
            subprocess.run([sys.executable, "-m", "smartprune", "train", "--out", str(run)], check=True)
        screenshot(run / "report.html", DOCS / "report.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
