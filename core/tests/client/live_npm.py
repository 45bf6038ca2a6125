"""Clients of the JavaScript world: tool loops of the AI SDK.

`make test-frameworks` runs it in an environment of its own, with the newest releases. It needs Node and npm.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running_servers import stack_fixture

from agl_core.testing.scripts import Raw, Received, Say, Step
from agl_core.types import Call
from agl_server.testing import LeasedAttempt, Stack

AI_SDK = {
    "5": ["ai@5", "@ai-sdk/openai@2", "@ai-sdk/anthropic@2", "zod"],
    "6": ["ai@6", "@ai-sdk/openai@3", "@ai-sdk/anthropic@3", "zod"],
}
LOOP = """
import { generateText, streamText, tool, stepCountIs } from "ai";
import { createOpenAI } from "@ai-sdk/openai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { z } from "zod";

const { BASE, KEY, PROVIDER, STORE, STREAM } = process.env;
const model = PROVIDER === "anthropic"
  ? createAnthropic({ baseURL: BASE, apiKey: KEY })("claude")
  : createOpenAI({ baseURL: `${BASE}/v1`, apiKey: KEY }).responses("o4-mini");
const add = tool({
  description: "Adds.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const messages = [{ role: "user", content: "What is 1 + 2?" }];
const asked = {
  model, tools: { add }, stopWhen: stepCountIs(4), maxRetries: 0,
  providerOptions: { openai: { store: STORE === "true" } },
};
const run = async (request) => {
  if (!STREAM) return generateText(request);
  const result = streamText({ ...request, onError({ error }) { throw error; } });
  await result.consumeStream();
  return { text: await result.text, response: await result.response };
};
const first = await run({ ...asked, messages });
messages.push(...first.response.messages, { role: "user", content: "Thanks." });
const second = await run({ ...asked, messages });
console.log(JSON.stringify([first.text, second.text]));
"""


def installed(name: str, packages: list[str]) -> Path:
    """A folder of this environment with the newest releases of npm packages."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.fail("These tests need Node and npm on the PATH.")
    folder = Path(sys.prefix) / "npm" / name
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([npm, "install", "--no-audit", "--no-fund", "--prefix", folder, *packages], check=True)
    return folder


a_stack = stack_fixture(timeout=300)


async def run(*command: str | Path, env: dict[str, str], cwd: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, env=env, cwd=cwd, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


def continues(calls: list[Call]) -> bool:
    """True if each call's messages begin with those of the call before it and the model's own reply to them."""
    for before, after in itertools.pairwise(calls):
        messages, own = before.request["messages"], before.choices[0].message
        echoed = after.request["messages"][: len(messages) + 1]
        fields = {name: value for name, value in own.items() if value is not None}
        if echoed != [*messages, {**fields, "content": own.get("content")}]:
            return False
    return True


async def tool_results(attempt: LeasedAttempt) -> list[Any]:
    episode = await attempt.close()
    return [(result.tool, result.result) for transition in episode.transitions for result in transition.tool_results]


@pytest.mark.parametrize("version", AI_SDK)
@pytest.mark.parametrize(("provider", "store"), [("openai", "true"), ("openai", "false"), ("anthropic", "")])
@pytest.mark.parametrize("stream", ["", "yes"])
async def test_the_ai_sdk_runs_a_tool_and_goes_on(
    stack: Stack, version: str, provider: str, store: str, stream: str
) -> None:
    folder = await asyncio.to_thread(installed, f"ai-sdk-{version}", AI_SDK[version])
    (folder / "loop.mjs").write_text(LOOP)
    attempt = await stack.attempt()
    url, key = stack.url(attempt.key).removesuffix("/v1"), stack.key(attempt.key)

    def answer(received: Received) -> Step:
        if len(received.body["messages"]) > 1:
            return Say("It is 3.")
        function = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
        message = {
            "role": "assistant",
            "content": None if store == "false" else "Let me add.",
            "reasoning_content": "A sum.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
        return Raw(json.dumps({"id": "x", "object": "chat.completion", "model": "m", "choices": [choice]}).encode())

    stack.upstream.answer = answer
    env = {**os.environ, "BASE": url, "KEY": key, "PROVIDER": provider, "STORE": store, "STREAM": stream}
    output = await run("node", folder / "loop.mjs", env=env, cwd=folder)
    assert json.loads(output.strip().splitlines()[-1]) == ["It is 3.", "It is 3."]
    calls = await attempt.calls()
    assert len(calls) == 3
    assert continues(calls)
    assert await tool_results(attempt) == [("add", "3")]
