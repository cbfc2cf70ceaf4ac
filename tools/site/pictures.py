"""Photograph the pages that gradrein writes, for the guides that explain them: python tools/site/pictures.py.

It reads docs/live (see live.py) and writes docs/pictures/trace.png and report.png. It needs chromium; `make docs`
does not run it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile

from live import ROOT

HEIGHTS = {"trace": 560, "report": 1500}


def main() -> None:
    """Write both pictures."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no chromium: apt-get install chromium")
    (ROOT / "docs" / "pictures").mkdir(exist_ok=True)
    for name, height in HEIGHTS.items():
        with tempfile.TemporaryDirectory() as profile:
            picture = ROOT / "docs" / "pictures" / f"{name}.png"
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000",
                       "--blink-settings=preferredColorScheme=1", f"--window-size=1000,{height}",
                       f"--user-data-dir={profile}", f"--screenshot={picture}"]  # fmt: skip
            page = (ROOT / "docs" / "live" / f"{name}.html").as_uri()
            subprocess.run([browser, *options, page], check=True, capture_output=True)


if __name__ == "__main__":
    main()
