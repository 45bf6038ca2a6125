"""The runs that the pages show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agl_core.config.load import CONFIG_FILE
from agl_core.errors import ConfigError, nearest


class RunFolders:
    """Runs, and folders of runs: what appears in these is shown too."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [path.resolve() for path in paths]

    def named(self) -> dict[str, Path]:
        """The runs, the newest first, by their names in addresses; of two folders of one name, the second is `NAME~2`.

        A name stays as long as the order of the folders' paths does.
        """
        times: dict[Path, float] = {}
        for path in self._paths:
            own = path / CONFIG_FILE
            for file in [own] if own.is_file() else sorted(path.glob(f"*/{CONFIG_FILE}")):
                try:
                    times[file.parent] = file.stat().st_mtime
                except OSError:  # It was removed meanwhile.
                    continue
        names: dict[Path, str] = {}
        for folder in sorted(times):
            taken = sum(other.name == folder.name for other in names)
            names[folder] = folder.name if not taken else f"{folder.name}~{taken + 1}"
        return {names[folder]: folder for folder in sorted(times, key=lambda folder: (-times[folder], folder))}

    def find(self, name: str) -> Path:
        """The run of this name. ConfigError if there is none."""
        runs = self.named()
        if name not in runs:
            raise ConfigError(f"There is no run '{name}' here. {nearest(name, runs)}")
        return runs[name]
