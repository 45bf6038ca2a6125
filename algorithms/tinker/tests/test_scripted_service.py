"""The engine with a service that is scripted, over HTTP, with the client that is installed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from agl_core.config.sections import LoraSection
from agl_core.errors import EngineError
from agl_core.testing.engines import ENGINE_CHECKS, EngineCase, EngineCheck, engine_context
from agl_tinker.plugin import TinkerEngine, TinkerOptions
from agl_tinker.service import Service

from .scripted import ScriptedService, scripted_service
from .skyrl_tx import KEY

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedService]:
    with pytest.MonkeyPatch.context() as environment, scripted_service(tmp_path_factory.mktemp("service")) as running:
        environment.setenv("TINKER_API_KEY", KEY)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def case(service: ScriptedService, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineCase]:
    folder = tmp_path_factory.mktemp("case")
    (folder / "run").mkdir()
    context = engine_context(folder, str(service.policy), lora=LoraSection(rank=8))
    engine = TinkerEngine(TinkerOptions(base_url=service.url, base_model="bigrams"), context)
    try:
        yield EngineCase(engine, await engine.start(), context, folder, tolerance=1e-5)
    finally:
        await engine.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_busy_service_is_asked_again(service: ScriptedService, case: EngineCase) -> None:
    service.statuses |= {"asample": [429], "forward_backward": [429, 503], "optim_step": [429]}
    service.waits.update(asample=2, forward_backward=1, optim_step=2)
    before = await case.version()
    result = await case.update(await case.sampled())
    assert result.version == before + 1
    assert result.metrics["steps_applied"] == 2
    assert not any(service.statuses.values())
    assert not any(service.waits.values())


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_fails_is_said_with_its_reason(service: ScriptedService, case: EngineCase) -> None:
    before, batch = await case.version(), await case.sampled()
    service.failures["optim_step"] = ["A worker was lost"]
    with pytest.raises(EngineError, match=rf"{service.url} failed, making an optimizer step.*A worker was lost"):
        await case.update(batch)
    assert await case.version() == before
    assert (await case.update(batch)).version == before + 1
    service.failures["asample"] = ["The weights expired"]
    reply = await case.ask()
    assert reply.status_code >= 500
    assert "The weights expired" in reply.text


@pytest.mark.asyncio(loop_scope="module")
async def test_a_checkpoint_has_the_adapter_as_peft_loads_it(case: EngineCase, tmp_path: Path) -> None:
    """The newest client has no archive, and the older one nothing else."""
    saved = list[bytes]()
    for number in range(2):
        await case.update(await case.sampled())
        await case.engine.save(tmp_path / str(number))
        model = tmp_path / str(number) / case.policy / "model"
        saved.append((model / "adapter_model.safetensors").read_bytes())
        described = json.loads((model / "adapter_config.json").read_text())
    assert saved[0] != saved[1]
    assert described["base_model_name_or_path"] == case.context.policies[case.policy].model
    assert sorted(described["target_modules"]) == sorted(LoraSection().targets)
    AutoTokenizer.from_pretrained(model)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
async def test_the_engine_keeps_the_contract(case: EngineCase, check: EngineCheck) -> None:
    await check(case)


def test_a_key_that_the_service_does_not_know_is_said(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_KEY", f"{KEY}-else")
    monkeypatch.delenv("TINKER_API_KEY")  # The client 0.15 prefers it to the key that it is given.
    with pytest.raises(EngineError, match=r"refused, asked for a s\w+.*: .*Invalid API key.*OTHER_KEY"):
        Service(TinkerOptions(base_url=service.url, api_key_env="OTHER_KEY")).sampler_of("bigrams")
