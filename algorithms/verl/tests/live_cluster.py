"""A Ray cluster of two nodes, both on this machine: the engine over them, and the loss of the one that is not the head.

Each node is a `ray start` of its own, at an address of its own (on Linux all of 127.0.0.0/8 is this machine), with a
GPU that is none. A lost node is a SIGKILL for its Ray and all that hangs on it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import pytest_asyncio

from agl_core.capture.requests import HEADER_POLICY
from agl_core.errors import EngineError
from agl_core.protocols import EngineContext, PolicySpec, Upstream
from agl_verl.options import VerlOptions
from agl_verl.plugin import VerlEngine

from . import live_engine, live_runs, parity, verl_bench

HEAD, OTHER = "127.0.0.2", "127.0.0.3"
LOST = rf"A node of the Ray cluster was lost \({OTHER}\)"
in_one_loop = pytest.mark.asyncio(loop_scope="module")
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere this machine has one address of its own"),
]


class Node:
    """One node's Ray."""

    def __init__(self, folder: Path, host: str, *options: str) -> None:
        self._log = folder / f"{host}.log"
        common = [f"--node-ip-address={host}", f"--temp-dir={folder / host}", "--num-cpus=16", "--num-gpus=1"]
        ports = ["--min-worker-port=0", "--max-worker-port=0"]
        start = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        command = [*start, *common, *ports, f"--object-store-memory={2**28}", *options]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + 300
        while "Ray runtime started" not in self._log.read_text():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.2)

    def kill(self) -> None:
        """End it, and everything that hangs on it, without a word."""
        family = []
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # Workers have groups of their own.
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(family, 30)


class Cluster:
    """A head, and another node, which can be lost and come back."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind((HEAD, 0))
            port = probe.getsockname()[1]
        self._folder = folder
        self.address = f"{HEAD}:{port}"
        self._nodes = {HEAD: Node(folder, HEAD, "--head", f"--port={port}", "--include-dashboard=false")}

    def start(self) -> None:
        """Have both nodes; the one that is up stays as it is."""
        self._nodes[HEAD].wait_until_up()
        if OTHER not in self._nodes:
            self._nodes[OTHER] = Node(self._folder, OTHER, f"--address={self.address}")
        self._nodes[OTHER].wait_until_up()

    def lose_a_node(self) -> None:
        self._nodes.pop(OTHER).kill()

    def stop(self) -> None:
        for node in self._nodes.values():
            node.kill()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not below pytest's own folder: the paths of sockets, which Ray has there, may not be long.
    with (
        tempfile.TemporaryDirectory(prefix="agl-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("RAY_AUTH_MODE", "disabled")  # Unset, a head asks for the user's token, and nodes send none.
        started = Cluster(Path(folder))
        try:
            started.start()
            yield started
        finally:
            started.stop()


def new_engine(cluster: Cluster, run_dir: Path) -> VerlEngine:
    spec = PolicySpec(
        model=str(live_engine.POLICY),
        dtype="float32",
        optimizer={"learning_rate": 1e-3},
        algorithm="grpo",
        algorithm_options=live_engine.OPTIONS,
    )
    options = VerlOptions(address=cluster.address, nodes=2, device="cpu", gradient_checkpointing=False, max_context=512)
    return VerlEngine(options, EngineContext(run_dir, 1, {"default": spec}, False, (), "the-key", 10))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[VerlEngine, Upstream]]:
    served = new_engine(cluster, tmp_path_factory.mktemp("run"))
    upstream = await served.start()
    try:
        yield served, upstream
    finally:
        await served.stop()


@in_one_loop
async def test_an_update_over_two_nodes_is_served_by_both(engine: tuple[VerlEngine, Upstream]) -> None:
    served, upstream = engine
    assert {urlsplit(url).hostname for url in upstream.urls} == {HEAD, OTHER}
    batch = verl_bench.recorded_batch(parity.VOCABULARY, seed=3)
    result = await served.update("default", batch)
    assert result.metrics["grad_norm"] > 0
    for url in upstream.urls:
        assert (await live_engine.ask(replace(upstream, urls=(url,)))).headers[HEADER_POLICY] == "1"


@in_one_loop
async def test_another_run_is_refused_meanwhile(
    cluster: Cluster, engine: tuple[VerlEngine, Upstream], tmp_path: Path
) -> None:
    other = new_engine(cluster, tmp_path)
    with pytest.raises(EngineError, match="Another run of veRL is under way in the Ray cluster"):
        await other.start()


@in_one_loop
async def test_a_node_that_is_lost_in_an_update_ends_it_with_the_remedy(
    cluster: Cluster, engine: tuple[VerlEngine, Upstream]
) -> None:
    """The engine's last: nothing works after it."""
    served, upstream = engine
    batch = verl_bench.recorded_batch(parity.VOCABULARY, seed=4, rollouts=300)
    async with asyncio.timeout(300):
        update = asyncio.create_task(served.update("default", batch))
        await a_call_waits(upstream)
        assert not update.done()
        cluster.lose_a_node()
        with pytest.raises(EngineError, match=LOST) as raised:
            await update
    assert "agl train --resume" in str(raised.value)


async def a_call_waits(upstream: Upstream) -> None:
    """Until weights are trained: nothing is answered meanwhile."""
    while True:
        call = asyncio.create_task(live_engine.ask(upstream))
        _, waiting = await asyncio.wait({call}, timeout=3)
        for task in waiting:
            task.cancel()
        if waiting:
            return


def test_a_run_that_loses_a_node_between_updates_goes_on_when_it_is_back(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "calc"
    cluster.start()
    over_both = {"engine.verl.address": cluster.address, "engine.verl.nodes": 2, "engine.verl.device": "cpu"}
    training = subprocess.Popen(
        live_runs.command(tmp_path, **over_both), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while len(live_runs.steps_of(run)) < 3:
            assert training.poll() is None, training.communicate()[0]
            time.sleep(0.1)
        cluster.lose_a_node()  # Agents ask for the fourth step.
        output = training.communicate(timeout=300)[0]
    finally:
        training.kill()
    assert training.returncode == 2, output
    output = " ".join(output.split())
    assert re.search(LOST, output), output
    assert "agl train --resume" in output

    too_early = live_runs.resume(run)
    assert too_early.returncode == 2, too_early.stdout
    output = " ".join((too_early.stdout + too_early.stderr).split())
    assert f"The Ray cluster at '{cluster.address}' has 1 GPUs, but engine.verl asks for 2 nodes x 1" in output

    cluster.start()
    done = live_runs.resume(run)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    steps = live_runs.steps_of(run)
    assert [line["step"] for line in steps] == list(range(1, live_runs.STEPS + 1))
    assert [line["restart"] for line in steps] == [0, 0, 2, 2, 2], "from the checkpoint of step 2"
