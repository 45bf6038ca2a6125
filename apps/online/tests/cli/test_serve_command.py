"""`agl serve` where nothing is installed that trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w
from agl_command import Agl, agl_in_process  # noqa: F401

from agl_core.config.load import SERVED, load
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.wire.client import BlockingClient
from agl_core.wire.keys import WORKER_KEY

CONFIG: dict[str, Any] = {
    "config_version": 1,
    "agent": {"entry": "an_agent:solve"},
    "tasks": {"train": {"source": "absent", "token": "a secret"}},
    "policies": {
        "default": {"model": {"path": "./absent"}, "algorithm": {"name": "own", "own": {"token": "a secret"}}}
    },
    "rewards": {"right": {"rule": "absent", "weight": 0.5, "token": "a secret"}},
    "credit": {"name": "identical"},
    "algorithm": {"name": "absent", "absent": {"token": "a secret"}},
    "engine": {"name": "absent", "absent": {"token": "a secret"}},
    "trackers": {"absent": {"token": "a secret"}},
}


def test_a_server_needs_its_store_and_nothing_that_trains(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "from agl_core.cli import main; main()", "serve", "train.toml")
    variables = {**os.environ, WORKER_KEY: "a-worker's-key"}
    with (
        ScriptedUpstream() as model,
        subprocess.Popen(
            command, cwd=recording(tmp_path, model), env=variables, stdout=subprocess.PIPE, text=True
        ) as server,
    ):
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith("serving")).split()[-1]
        try:
            with BlockingClient(url, "a-worker's-key") as client:
                assert client.health().counters["online_open"] == 0
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()
    assert server.returncode == 0

    run = tmp_path / "runs" / "run"
    written = (run / "config.toml").read_text()
    assert "secret" not in written, "which settings of an absent plugin are secrets is not known"
    again = load(run / "config.toml", needs=SERVED).config
    assert (again.engine.name, again.algorithm.name, again.credit.name) == ("absent", "absent", "identical")
    assert (again.rewards["right"].rule, again.rewards["right"].weight) == ("absent", 0.5)
    assert again.tasks["train"].source == "absent"


def recording(folder: Path, model: ScriptedUpstream) -> Path:
    """The folder, with a configuration in which this model server answers sessions."""
    online = {"upstream": model.url, "applications": {"support": 1}}
    (folder / "train.toml").write_text(tomli_w.dumps({**CONFIG, "online": online}))
    return folder
