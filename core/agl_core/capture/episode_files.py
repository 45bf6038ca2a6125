"""Episodes in a file: what an adapter used alone has recorded, kept for rewards that are computed elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from agl_core.errors import EpisodesError
from agl_core.types import Episode
from agl_core.types.forms import from_json, to_json


def save_episodes(path: str | os.PathLike[str], episodes: Iterable[Episode]) -> None:
    """Write episodes to a file, one JSON object a line; it is there whole or not at all.

        agl_core.save_episodes("episodes.jsonl", callback.episodes())

    `agl reward try CONFIG --run episodes.jsonl` computes their rewards, and `load_episodes` gives them back exactly.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    with part.open("w", encoding="utf-8") as file:
        for episode in episodes:
            file.write(json.dumps(to_json(episode)) + "\n")
    os.replace(part, target)


def load_episodes(path: str | os.PathLike[str]) -> list[Episode]:
    """The episodes that `save_episodes` wrote. EpisodesError names the line that is no episode.

    episodes = agl_core.load_episodes("episodes.jsonl")
    """
    found = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EpisodesError(f"The episodes in {path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(from_json(Episode, json.loads(line)))
        except ValueError as error:
            raise EpisodesError(
                f"Line {number} of {path} is no episode: {error}. Write it with agl_core.save_episodes, one a line."
            ) from error
    return found
