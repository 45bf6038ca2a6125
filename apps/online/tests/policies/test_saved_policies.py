"""Saved versions by name, as a folder, and served to the official clients over real HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import yaml
from testing_aids import run_command

from agl_core.errors import CheckpointError, ConfigError, ServerError
from agl_core.testing.upstream import END_TOKEN, ScriptedUpstream
from agl_online.policies import POLICY_KEY, Version, export, load_run, policy_spec, serving
from agl_online.versions import Ledger
from agl_server.store.sqlite import SqliteStore

from .saved_runs import loading_engines, make_run


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "calc", {10: 0.5, 20: 0.9, 30: 0.4})
    Ledger(tmp_path / "runs" / "calc").begin(10, "It is deployed.")
    make_run(tmp_path / "runs" / "tuned", {3: None}, model="adapter_config.json")
    policies = {name: {"model": {"path": "base"}, "agents": [name]} for name in ("solver", "critic")}
    make_run(tmp_path / "runs" / "debate", {4: None}, policies=policies)
    make_run(tmp_path / "runs" / "young", {})
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("calc", "calc@30"),
        ("calc@latest", "calc@30"),
        ("calc@best", "calc@20"),
        ("calc@stable", "calc@10"),
        ("runs/calc@0", "calc@0"),
        ("debate:critic@4", "debate:critic@4"),
    ],
)
def test_a_name_means_a_version(name: str, means: str) -> None:
    assert str(Version.find(name)) == means


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("calk@10", "calk is not a run's folder"),
        ("calc@11", "no checkpoint step-000011. It has: step-000010"),
        ("calc@lattest", "no checkpoint lattest"),
        ("young@best", "no checkpoint best"),
        ("debate@4", "solver, critic"),
        ("debate:solvr@4", "solver, critic"),
    ],
)
def test_a_name_that_means_nothing_is_an_error(name: str, says: str) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=says):
        Version.find(name)


def test_an_exported_version_says_what_trained_it(tmp_path: Path) -> None:
    export(Version.find("calc@20"), tmp_path / "out")

    card = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1]) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["agl", "reinforcement-learning"],
    }
    assert "# calc@20" in card
    assert "trained it with grpo, in the run `calc`" in card
    assert str(tmp_path) not in card, "a place on this machine is of no use elsewhere"
    assert (tmp_path / "out" / "weights").read_text() == "default of step 20"


def test_an_adapter_names_its_base_where_it_is(tmp_path: Path, runs: Path) -> None:
    export(Version.find("tuned"), tmp_path / "out")
    described = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(runs / "base")
    spec = policy_spec(Version.find("tuned"), load_run(runs / "tuned"))
    adapter = runs / "tuned" / "checkpoints" / "step-000003" / "default" / "model"
    assert (spec.model, spec.adapter) == (str(runs / "base"), str(adapter))


def test_nothing_is_written_where_something_is_wrong(tmp_path: Path, runs: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="exists"):
        export(Version.find("calc"), runs / "base")
    with pytest.raises(ConfigError, match="what training started from"):
        export(Version.find("calc@0"), tmp_path / "out")
    tuned = Version.find("tuned")
    (runs / "base").rename(runs / "moved")
    with pytest.raises(ConfigError, match=r"there is no folder.*--set policies\.default\.model\.path"):
        export(tuned, tmp_path / "out")
    (runs / "moved").rename(runs / "base")
    assert sorted(tmp_path.rglob("*")) == before


@dataclass(frozen=True)
class Served:
    """A running server of policies; the scripted model server says by which name it was asked."""

    model: ScriptedUpstream
    url: str

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    async def ask(self, model: str, key: str = "none") -> str | None:
        async with self.openai(key) as client:
            completion = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "Who are you?"}]
            )
        return completion.choices[0].message.content


@asynccontextmanager
async def served(*names: str, key: str | None = None, overrides: Sequence[str] = ()) -> AsyncIterator[Served]:
    async with (
        loading_engines("agl_online.policies") as (model, engines),
        serving(names, host="127.0.0.1", port=0, key=key, overrides=overrides) as (url, _),
    ):
        yield Served(model, url)
        async with SqliteStore(engines[0].folder / "store.sqlite", read_only=True) as store:
            assert await store.rollouts() == []


async def test_every_api_answers_and_nothing_is_recorded() -> None:
    async with served("calc") as policies:
        body: Any = {"model": "calc", "max_tokens": 9}
        async with policies.openai() as client:
            chat = await client.chat.completions.create(
                **body, messages=[{"role": "user", "content": "Hi"}], temperature=0.5, stream=True
            )
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in chat])
            completion = await client.completions.create(**body, prompt="Hi")
            response = await client.responses.create(model="calc", input="Hi")
            following = await client.responses.create(model="calc", input="And then?", previous_response_id=response.id)
        async with anthropic.AsyncAnthropic(base_url=policies.url, api_key="none", max_retries=0) as other:
            message = await other.messages.create(**body, messages=[{"role": "user", "content": "Hi"}])

    block = message.content[0]
    assert block.type == "text"
    assert {streamed, completion.choices[0].text, response.output_text, following.output_text, block.text} == {"calc"}
    sent = [received.body for received in policies.model.received]
    assert (sent[0]["temperature"], sent[0]["max_tokens"]) == (0.5, 9)
    assert sent[2]["max_tokens"] == 48, "without a limit of the request's own, that of training"
    assert [message["content"] for message in sent[3]["messages"]] == ["Hi", response.output_text, "And then?"]


async def test_token_ids_are_for_clients_that_ask() -> None:
    """So a server of sessions can record what a served policy answers, and train on it."""
    async with served("calc") as policies, policies.openai() as client:
        body: Any = {"model": "calc", "messages": [{"role": "user", "content": "Hi"}]}
        plain = await client.chat.completions.create(**body)
        assert plain.choices[0].logprobs is None
        assert not {"token_ids", "prompt_token_ids", "agl"} & {*plain.to_dict(), *plain.choices[0].to_dict()}
        exact = await client.chat.completions.create(**body, logprobs=True, extra_body={"return_token_ids": True})
        assert exact.to_dict()["prompt_token_ids"]
        sampled = [*b"calc", END_TOKEN]
        assert exact.choices[0].to_dict()["token_ids"] == sampled
        assert len(exact.choices[0].logprobs.content or ()) == len(sampled)


async def test_the_runs_prompts_replace_words_of_clients_too() -> None:
    prompts = 'prompts={system = {replace = "Be brief.", text = "Be long."}}'
    async with served("calc", overrides=[prompts]) as policies, policies.openai() as client:
        messages: Any = [{"role": "system", "content": "Please: Be brief."}, {"role": "user", "content": "Be brief."}]
        await client.chat.completions.create(model="calc", messages=messages)

    sent = [message["content"] for message in policies.model.received[0].body["messages"]]
    assert sent == ["Please: Be long.", "Be brief."]


async def test_requests_name_a_version_and_one_alone_answers_any_name() -> None:
    async with served("calc", "calc@10") as policies:
        assert [await policies.ask(name) for name in ("calc", "calc@10")] == ["calc", "calc@10"]
        with pytest.raises(openai.NotFoundError, match=r"calc@11.*calc@10"):
            await policies.ask("calc@11")
        async with policies.openai() as client:
            assert [model.id async for model in client.models.list()] == ["calc", "calc@10"]
    async with served("calc@10") as policies:
        assert await policies.ask("gpt-4o-mini") == "calc@10"


async def test_the_key_is_needed_where_there_is_one() -> None:
    async with served("calc", key="s3cret") as policies, httpx.AsyncClient(trust_env=False) as bare:
        for key in ("wrong", "s3cret-"):
            with pytest.raises(openai.AuthenticationError, match=POLICY_KEY):
                await policies.ask("calc", key)
            async with policies.openai(key) as client:
                with pytest.raises(openai.AuthenticationError, match=POLICY_KEY):
                    await client.models.list()
        assert await policies.ask("calc", "s3cret") == "calc"
        headers = {"Authorization": "Bearer s3cret"}
        refused = await bare.post(f"{policies.url}/agl/v1/leases", json={"worker": "w", "capacity": 1}, headers=headers)
        assert refused.status_code == 401, "it opens no other door"


@pytest.mark.parametrize("headers", [{"origin": "https://evil.example"}, {"host": "rebound.example:80"}])
async def test_without_a_key_no_web_page_is_served(headers: dict[str, str]) -> None:
    async with served("calc") as policies, httpx.AsyncClient() as client:
        body = {"model": "calc", "messages": [{"role": "user", "content": "Hi"}]}
        refused = await client.post(f"{policies.url}/v1/chat/completions", json=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_name")
        assert policies.model.received == []


@pytest.mark.parametrize(("host", "key"), [("0.0.0.0", None), ("192.0.2.1", None), ("127.0.0.1", "a\nb")])
async def test_others_are_served_with_a_valid_key_only(host: str, key: str | None) -> None:
    with pytest.raises(ServerError, match=POLICY_KEY):
        async with serving(["calc"], host=host, port=0, key=key):
            pass


READING = """
from agl_core.cli import main
from agl_server.http import listening

def run(serving):
    work = serving.cr_frame.f_locals["work"]
    key = work.cr_frame.f_locals["key"]
    print(key, key in open("/proc/self/environ").read())
    serving.close()
    work.close()

listening.run = run
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the environment of a process")
def test_the_key_is_taken_out_of_what_the_system_shows_of_the_environment() -> None:
    shown = run_command(sys.executable, "-c", READING, "policy", "serve", "calc", **{POLICY_KEY: "s3cret-key"})
    assert shown.split() == ["s3cret-key", "False"]
