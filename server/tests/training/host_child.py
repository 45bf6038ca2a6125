"""An engine's process that does what its settings say: `python -m host_child`, started by `test_host`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from agl_core import errors
from agl_core.protocols import Progress, UpdateResult
from agl_core.types import Batch
from agl_server.engines.child import Host


class Script(BaseModel):
    start: str = ""
    update: str = ""
    lost: bool = False
    log: str = ""
    stages: tuple[str, ...] = ()


class Engine:
    urls, context_length = ("http://127.0.0.1:9/v1",), 77
    version = 4

    def __init__(self, host: Host[Script]) -> None:
        self.host, self.script = host, host.options
        print("a library that prints", flush=True)
        print("waiting:", os.environ.get("WAITING"), flush=True)
        for stage in self.script.stages:
            host.stage(stage)
        if self.script.start == "die":
            os._exit(9)
        if self.script.start == "hang":
            time.sleep(600)
        if self.script.start:
            raise getattr(errors, self.script.start, ValueError)("no such luck")

    def update(self, policy: str, batch: Batch, progress: Progress) -> UpdateResult:
        assert policy == "default"
        if self.script.update == "die":
            os._exit(9)
        if self.script.update == "fail":
            raise RuntimeError("first line\nRayError: no such luck")
        if self.script.update == "wait":
            progress(0.25)
            while not (self.host.context.run_dir / "go-on").exists():
                time.sleep(0.01)
        self.version += 1
        progress(1.0)
        values_N = np.array([0.1 + 0.2])
        return UpdateResult(self.version, {"loss": 1 / 3}, values_N, values_N, (None,))

    def save(self, folder: Path) -> None:
        (folder / "saved").write_text(str(folder))

    def load(self, folder: Path) -> None:
        raise errors.CheckpointError(f"no checkpoint in {folder}")

    def versions(self) -> Mapping[str, int]:
        return {"default": self.version}

    def stats(self) -> Mapping[str, float]:
        if self.script.lost:
            self.host.lost("A node was lost (10.0.0.7)")
        return {"tokens_decoded": 5.0, "seed": self.host.context.seed}


def main() -> None:
    host = Host.connect(Script, at_end=(lambda: time.sleep(60)) if os.environ.get("STUCK") else None)
    if host.options.log:
        print(host.options.log, file=sys.stderr, flush=True)
    with host.starting():
        engine = Engine(host)
    host.serve(engine)


if __name__ == "__main__":
    main()
