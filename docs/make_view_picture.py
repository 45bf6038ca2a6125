"""Makes docs/view-group.png: one group of a run, as a browser shows it.

    agl view runs/calc --no-browser                      # prints an address with a token
    python docs/make_view_picture.py ADDRESS s8-g1-m0

It needs Chromium.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit


def main(address: str, rollout: str) -> None:
    """Open the page of the rollout's group below `address`, and write the picture."""
    opened = urlsplit(address)
    page = f"{opened.scheme}://{opened.netloc}{opened.path.rstrip('/')}/groups/{rollout}?{opened.query}"
    picture = Path(__file__).with_name("view-group.png")
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,700", f"--screenshot={picture}"]
    subprocess.run(["chromium", *options, page], check=True, capture_output=True, timeout=120)
    print(picture)


if __name__ == "__main__":
    main(*sys.argv[1:3])
