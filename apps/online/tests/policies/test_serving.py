"""Serving versions: every API, by the official clients over real HTTP, while what names mean changes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anthropic
import httpx
import openai
import pytest

from agl_core.errors import AglError, CheckpointError, ConfigError, EngineError, ServerError
from agl_core.protocols import Engine, PolicySpec, Upstream
from agl_core.server.listening import Listening
from agl_core.testing.scripts import Fail, Hold, Say
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.training.checkpoints import Checkpoints
from agl_online.policies.engines import Source
from agl_online.policies.gateway import POLICY_KEY, PolicyServer, check_key
from agl_online.policies.shelf import Shelf, wanted_of

from .saved_runs import add_checkpoint, make_run


@dataclass
class Loading:
    """What an engine loaded, and what it still has; a scripted model server answers in its place."""

    loaded: dict[str, PolicySpec] = field(default_factory=dict)
    fails: bool = False

    async def publish(self, name: str, spec: PolicySpec) -> None:
        if self.fails:
            raise EngineError("The weights cannot be read.")
        assert name not in self.loaded
        self.loaded[name] = spec

    async def withdraw(self, name: str) -> None:
        del self.loaded[name]


@dataclass(frozen=True)
class Bench:
    """A running server of policies."""

    upstream: ScriptedUpstream
    engine: Loading
    shelf: Shelf
    said: list[str]
    url: str

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    async def ask(self, model: str) -> str:
        """What answers; the scripted reply is the name by which the engine was asked."""
        async with self.openai() as client:
            raw = await client.chat.completions.with_raw_response.create(
                model=model, messages=[{"role": "user", "content": "Who are you?"}]
            )
        completion = raw.parse()
        answered = str(raw.headers["x-agl-policy"])
        assert str(completion.choices[0].message.content).partition("/")[0] == answered
        assert completion.model == model
        return answered


@asynccontextmanager
async def serving(*names: str, key: str | None = None) -> AsyncIterator[Bench]:
    said: list[str] = []
    async with ScriptedUpstream() as upstream:
        upstream.answer = lambda received: Say(received.body["model"])
        wanted = wanted_of(names)
        sources = {each.reference.run: Source.of(each.reference.run) for each in wanted}
        engine = Loading()
        shelf = Shelf(cast(Engine, engine), wanted, sources, said.append)
        await shelf.refresh()
        listening = Listening("127.0.0.1", 0)
        server = PolicyServer(shelf, Upstream((upstream.url,), {}, "key"), listening, key)
        await server.start()
        try:
            yield Bench(upstream, engine, shelf, said, server.base_url)
        finally:
            await server.stop()


@pytest.fixture(autouse=True)
def calc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "runs" / "calc", {10: 0.5, 20: 0.9, 30: 0.4})


async def test_requests_name_a_version_and_the_same_weights_are_loaded_once(calc: Checkpoints) -> None:
    calc.mark_stable("default", 10)
    async with serving("calc", "calc@30", "calc@0") as bench:
        names = ("calc", "calc@latest", "calc@best", "calc@stable", "calc@10", "calc@20", "calc@30", "calc@0")
        answered = [await bench.ask(each) for each in names]
        async with bench.openai() as client:
            listed = {each.id: each.to_dict()["root"] async for each in client.models.list()}

        assert answered == ["calc@30", "calc@30", "calc@20", "calc@10", "calc@10", "calc@20", "calc@30", "calc@0"]
        assert listed == dict(zip(names, answered, strict=True))
        assert len(bench.engine.loaded) == 4
        assert await bench.ask("gpt-4o-mini") == "calc@30", "one policy answers an agent that names none"


async def test_clients_may_send_here_what_they_may_send_in_training() -> None:
    asked: Any = {"messages": [{"role": "user", "content": "hi"}]}
    async with serving("calc") as bench, bench.openai() as client, httpx.AsyncClient(trust_env=False) as bare:
        unnamed = await bare.post(f"{bench.url}/openai/deployments/calc/chat/completions", json=asked)
        assert (unnamed.status_code, unnamed.json()["model"]) == (200, "calc")
        assert (await bare.post(f"{bench.url}/chat/completions/", json=asked)).json()["model"] == "calc"
        counted = await bare.post(f"{bench.url}/v1/messages/count_tokens", json=asked)
        assert counted.json()["input_tokens"] == unnamed.json()["usage"]["prompt_tokens"]
        response = await client.responses.create(model="calc", input="hi", truncation="auto")
        referred: Any = [{"type": "item_reference", "id": item.id} for item in response.output]
        await client.responses.create(model="calc", input=[*referred, {"role": "user", "content": "go on"}])
        assert bench.upstream.received[-1].body["messages"][0]["content"] == response.output_text
        chat = await bare.post(f"{bench.url}/v1/chat/completions", json={**asked, "return_token_ids": True})
        assert chat.json()["choices"][0]["token_ids"]
    async with serving("calc", key="k") as bench, httpx.AsyncClient(trust_env=False) as bare:
        assert (await bare.post(f"{bench.url}/v1/chat/completions", json=asked)).status_code == 401
        azures = {"api-key": "k"}
        assert (await bare.post(f"{bench.url}/v1/chat/completions", json=asked, headers=azures)).status_code == 200


async def test_every_api_answers(calc: Checkpoints) -> None:
    async with serving("calc@20") as bench:
        asked: Any = {"model": "calc", "max_tokens": 9}
        async with bench.openai() as client:
            chat = await client.chat.completions.create(
                **asked, messages=[{"role": "user", "content": "Hi"}], temperature=0.5, stream=True
            )
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in chat])
            completion = await client.completions.create(**asked, prompt="Hi")
            response = await client.responses.create(model="calc@20", input="Hi")
            following = await client.responses.create(
                model="calc@20", input="And then?", previous_response_id=response.id
            )
        async with anthropic.AsyncAnthropic(base_url=bench.url, api_key="none", max_retries=0) as other:
            message = await other.messages.create(**asked, messages=[{"role": "user", "content": "Hi"}])

    texts = [streamed, completion.choices[0].text, response.output_text, following.output_text]
    block = message.content[0]
    assert block.type == "text"
    assert {each.partition("/")[0] for each in (*texts, block.text)} == {"calc@20"}
    sent = [each.body for each in bench.upstream.received]
    assert (sent[0]["temperature"], sent[0]["max_tokens"]) == (0.5, 9)
    assert sent[2]["max_tokens"] == 48, "without a limit of the request's own, that of training"
    assert [each["content"] for each in sent[3]["messages"]] == ["Hi", response.output_text, "And then?"]
    assert all("return_token_ids" not in each for each in sent)


async def test_a_version_is_swapped_without_dropping_a_call(calc: Checkpoints) -> None:
    async with serving("calc@latest") as bench:
        hold = Hold(Say("calc@30/held"))
        bench.upstream.script(hold)
        held = asyncio.create_task(bench.ask("calc@latest"))
        await asyncio.wait_for(hold.arrived.wait(), 30)

        add_checkpoint(calc, 40, 0.1, ["default"])
        await bench.shelf.refresh()
        assert await bench.ask("calc@latest") == "calc@40"
        assert [name.partition("/")[0] for name in bench.engine.loaded] == ["calc@30", "calc@40"]
        with pytest.raises(openai.NotFoundError, match="Did you mean 'calc@40'"):
            await bench.ask("calc@30")

        hold.release.set()
        assert await held == "calc@30"
        await bench.shelf.refresh()
        assert [name.partition("/")[0] for name in bench.engine.loaded] == ["calc@40"]
        assert "calc@latest is now calc@40" in bench.said
        assert "calc@30 is no longer served" in bench.said


async def test_a_step_that_is_written_again_is_loaded_again(calc: Checkpoints) -> None:
    """A run that is resumed from an earlier checkpoint goes on to other weights of the same step."""
    async with serving("calc@latest") as bench:
        (before,) = bench.engine.loaded
        calc.forget_after(20)
        add_checkpoint(calc, 30, 0.7, ["default"])
        await bench.shelf.refresh()
        (after,) = bench.engine.loaded
        assert (before, after) == ("calc@30/1", "calc@30/2")
        assert await bench.ask("calc@latest") == "calc@30"


async def test_what_cannot_be_followed_leaves_what_is_served(calc: Checkpoints) -> None:
    async with serving("calc@latest") as bench:
        add_checkpoint(calc, 40, 0.1, ["default"])
        bench.engine.fails = True
        for _ in range(3):
            await bench.shelf.refresh()
        assert await bench.ask("calc@latest") == "calc@30"
        assert [each for each in bench.said if "stays" in each] == [
            "calc@latest stays as it is: The weights cannot be read."
        ]
        calc.forget_after(0)
        await bench.shelf.refresh()
        assert await bench.ask("calc@latest") == "calc@30"


async def test_an_adapter_is_loaded_on_its_base(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "tuned", {3: None}, adapter=True)
    async with serving("tuned", "calc") as bench:
        specs = {name.partition("/")[0]: spec for name, spec in bench.engine.loaded.items()}
        folder = tmp_path / "runs"
        assert specs["tuned@3"].model == str(folder / "tuned-base")
        assert specs["tuned@3"].adapter == str(folder / "tuned" / "checkpoints" / "step-000003" / "default" / "model")
        assert specs["calc@30"].model == str(folder / "calc" / "checkpoints" / "step-000030" / "default" / "model")
        assert specs["calc@30"].adapter is None
        with pytest.raises(openai.NotFoundError, match="no model 'gpt-4o-mini'"):
            await bench.ask("gpt-4o-mini")


async def test_the_key_is_needed_where_there_is_one(calc: Checkpoints) -> None:
    async with serving("calc", key="s3cret") as bench:
        for key in ("wrong", "s3cret-"):
            async with bench.openai(key) as client:
                with pytest.raises(openai.AuthenticationError, match=POLICY_KEY):
                    await client.models.list()
        async with anthropic.AsyncAnthropic(base_url=bench.url, api_key="s3cret", max_retries=0) as other:
            message = await other.messages.create(
                model="calc", max_tokens=9, messages=[{"role": "user", "content": "Hi"}]
            )
            assert message.model == "calc"
        async with anthropic.AsyncAnthropic(base_url=bench.url, api_key="x", max_retries=0) as other:
            with pytest.raises(anthropic.AuthenticationError):
                await other.messages.create(model="calc", max_tokens=9, messages=[{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("headers", [{"origin": "https://evil.example"}, {"host": "rebound.example:80"}])
async def test_without_a_key_no_web_page_is_answered(calc: Checkpoints, headers: dict[str, str]) -> None:
    async with serving("calc") as bench, httpx.AsyncClient() as client:
        body = {"model": "calc", "messages": [{"role": "user", "content": "Hi"}]}
        refused = await client.post(f"{bench.url}/v1/chat/completions", json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_name")
        assert bench.upstream.received == []


async def test_a_client_that_hangs_up_frees_the_version(calc: Checkpoints) -> None:
    async with serving("calc@latest") as bench:
        hold = Hold(Say("never"))
        bench.upstream.script(hold)
        asking = asyncio.create_task(bench.ask("calc@latest"))
        await asyncio.wait_for(hold.arrived.wait(), 30)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        (served,) = set(bench.shelf.names.values())
        async with asyncio.timeout(20):
            while served.calls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/v1/chat/completion", "POST", 404), ("/v1/messages", "GET", 405)]
)
async def test_an_unknown_route_says_what_there_is(calc: Checkpoints, path: str, method: str, status: int) -> None:
    async with serving("calc") as bench, httpx.AsyncClient() as client:
        refused = await client.request(method, f"{bench.url}{path}")
        assert refused.status_code == status
        assert "/v1/responses" in refused.text


@pytest.mark.parametrize(
    ("names", "error", "said"),
    [
        (["calc@11"], CheckpointError, "no calc@11"),
        (["calc@stable"], CheckpointError, "agl policy promote"),
        (["clac"], ConfigError, "Did you mean calc"),
        (["calc", "elsewhere/calc"], ConfigError, "Two runs are called 'calc'"),
        (["tuned"], ConfigError, "there is no folder"),
    ],
)
async def test_what_cannot_be_served_is_an_error_at_the_start(
    tmp_path: Path, names: list[str], error: type[AglError], said: str
) -> None:
    make_run(tmp_path / "elsewhere" / "calc", {1: None})
    make_run(tmp_path / "runs" / "tuned", {3: None}, adapter=True)
    (tmp_path / "runs" / "tuned-base").rmdir()
    with pytest.raises(error, match=said):
        async with serving(*names):
            pass


@pytest.mark.parametrize(("host", "key"), [("0.0.0.0", None), ("192.0.2.1", None), ("127.0.0.1", "a\nb")])
def test_others_are_served_with_a_valid_key_only(host: str, key: str | None) -> None:
    with pytest.raises(ServerError, match=POLICY_KEY):
        check_key(host, key)
    check_key("0.0.0.0", "s3cret")
    check_key("::1", None)


async def test_what_a_client_asks_for_beside_the_text_is_returned_or_refused_by_name(calc: Checkpoints) -> None:
    asked: Any = {"model": "calc", "messages": [{"role": "user", "content": "Hi"}]}
    async with serving("calc") as bench, bench.openai() as client:
        reply = await client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
        bench.upstream.headers["x-agl-ignored"] = "verbosity"
        raw = await client.chat.completions.with_raw_response.create(**asked, verbosity="low")
        del bench.upstream.headers["x-agl-ignored"]
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        stream = await client.chat.completions.create(**asked, stream=True, stream_options=options)
        usages = [chunk.usage async for chunk in stream]
        bench.upstream.script(Fail(400, {"error": {"message": "prompt_logprobs = 1 is not supported"}}))
        with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
            await client.chat.completions.create(**asked, extra_body={"prompt_logprobs": 1})

    sent = [each.body for each in bench.upstream.received]
    assert sent[0]["return_token_ids"]
    assert sent[-1]["prompt_logprobs"] == 1
    extra, choice = reply.model_extra or {}, reply.choices[0].model_extra or {}
    assert bytes(choice["token_ids"][:-1]).decode() == reply.choices[0].message.content
    assert extra["prompt_token_ids"]
    assert raw.headers["x-agl-ignored"] == "verbosity"
    assert all(usages)


READING = """
from agl_core.cli import main
from agl_core.server import listening

def run(serving):
    key = serving.cr_frame.f_locals["key"]
    print(key, key in open("/proc/self/environ").read())
    serving.close()

listening.run = run
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the environment of a process")
def test_the_key_is_taken_out_of_what_the_system_shows_of_the_environment() -> None:
    started = [sys.executable, "-c", READING, "policy", "serve", "calc"]
    shown = subprocess.run(started, env={**os.environ, POLICY_KEY: "s3cret-key"}, capture_output=True, text=True)
    assert shown.stdout.split() == ["s3cret-key", "False"], shown.stderr
