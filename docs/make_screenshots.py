"""Makes the pictures in docs/pictures: the pages of a short run of examples/calc, as Chromium shows them.

    export PYTHONPATH=tests/support                # for the browser
    python docs/make_screenshots.py                # trains for some minutes
    python docs/make_screenshots.py runs/calc      # of a run that is there

It needs Chromium (apt-get install chromium).
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
from chromium import CHROMIUM, MISSING, Page, opened

from agl_core.reading.rollouts import Query
from agl_core.reading.runs import open_store, read_entry
from agl_core.types import Mode
from agl_view.groups import Group, find_groups
from agl_view.serving import shown_beside

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
SHORT = ("train.steps=12", "eval.every=6", "eval.tasks=50")
WIDTH = 1280


def train(folder: Path) -> Path:
    """A short run below `folder`."""
    command = [Path(sys.executable).with_name("agl"), "train", ROOT / "examples" / "calc" / "train.toml"]
    subprocess.run([*command, *(f"--set={each}" for each in SHORT)], cwd=folder, check=True)
    return folder / "runs" / "calc"


async def telling(run: Path) -> Group:
    """The group whose rewards differ most: half of its rollouts are right. Of several the latest."""
    async with open_store(run) as store:
        steps = range(1, read_entry(run).steps + 1)
        found = [await find_groups(store, Query(step=step, mode=Mode.TRAIN), 1000) for step in steps]
    return max((group for each in found for group in each.groups), key=lambda each: (each.std or 0.0, each.step))


def photograph(page: Page, file: Path, height: int) -> None:
    """Write what the page shows, down to `height` pixels."""
    page.look(width=WIDTH, height=height)
    file.write_bytes(page.picture())


async def make(run: Path, out: Path) -> None:
    """All pictures of this run, in the folder `out`."""
    group = await telling(run)
    best = max(group.members, key=lambda each: (each.entry.reward or 0.0, -each.entry.rollout.member))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        async with shown_beside(run, "127.0.0.1", 0, None) as shown:
            await asyncio.to_thread(_visit, httpx.URL(shown.address), best.entry.rollout.id, Path(profile), out)


def _visit(address: httpx.URL, rollout: str, profile: Path, out: Path) -> None:
    of_run = str(address.copy_with(query=None))
    with opened(profile) as page:
        page.look()
        page.open(str(address))
        photograph(page, out / "run.webp", 900)
        page.open(f"{of_run}/groups/{rollout}")
        photograph(page, out / "group.webp", 700)
        page.open(f"{of_run}/rollouts/{rollout}")
        photograph(page, out / "rollout.webp", 860)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=PICTURES)
    options = parser.parse_args()
    if CHROMIUM is None:
        parser.error(MISSING)
    options.out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(make(train(Path(folder)) if options.run is None else options.run, options.out))
    print(*sorted(options.out.iterdir()), sep="\n")


if __name__ == "__main__":
    main()
