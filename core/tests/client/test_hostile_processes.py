"""A process that an agent starts can do nothing to the agent's score, with all that it finds around it."""

from __future__ import annotations

from pathlib import Path

from running_servers import run_worker

from agl_core.testing import episodes as make
from agl_core.testing.server import running_stack
from agl_core.types import Ending, Task
from agl_core.wire import OPERATOR_KEY, WORKER_KEY

AGENT = """
import asyncio, json, os, sys
import httpx

client = httpx.AsyncClient(base_url=os.environ["OPENAI_BASE_URL"], trust_env=False, timeout=60)

async def solve(task, context):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    (await client.post("chat/completions", json=body)).raise_for_status()
    tool = await asyncio.create_subprocess_exec(
        sys.executable, task["tool"], context.rollout, task["sibling"], stdout=asyncio.subprocess.PIPE
    )
    output, _ = await tool.communicate()
    return json.loads(output)
"""

TOOL = """
import itertools, json, os, sys
from pathlib import Path
import httpx

own, sibling = sys.argv[1:]
root = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
parent = Path(f"/proc/{os.getppid()}/environ")
shown = parent.read_bytes().decode(errors="replace").split(chr(0)) if parent.exists() else []
environment = [*(f"{name}={value}" for name, value in os.environ.items()), *shown]
keys = {value.strip() for name, _, value in (line.partition("=") for line in environment) if "KEY" in name} - {""}

call = {"model": "m", "messages": [{"role": "user", "content": "forged"}]}
forged = {"ending": "finished", "result": "forged", "rewards": [{"value": 1.0}]}
tries = [("/agl/v1/leases", {"worker": "w", "capacity": 9}, {})]
for rollout in (own, sibling):
    tries.append((f"/agl/v1/rollouts/{rollout}/attempts/0/close", forged, {}))
    for path, headers in ((f"/rollout/{rollout}/attempt/0", {}), ("", {"x-agl-rollout": f"{rollout}/0"})):
        tries.append((f"{path}/v1/chat/completions", call, headers))
with httpx.Client(base_url=root, trust_env=False, timeout=60) as client:
    taken = [
        path
        for key, (path, body, headers) in itertools.product(keys, tries)
        if client.post(path, json=body, headers={**headers, "authorization": f"Bearer {key}"}).is_success
    ]
print(json.dumps([taken, environment]))
"""


async def test_what_an_async_agent_starts_finds_no_key_that_opens_anything(tmp_path: Path) -> None:
    """It inherits the environment of the worker, which was started with both keys."""
    (tmp_path / "an_agent.py").write_text(AGENT)
    (tmp_path / "a_tool.py").write_text(TOOL)
    async with running_stack() as stack:
        keys, sibling = stack.server.keys, await stack.lease()
        task = Task("t", {"tool": str(tmp_path / "a_tool.py"), "sibling": sibling.rollout})
        inherited = {WORKER_KEY: keys.worker, OPERATOR_KEY: keys.operator}
        own = make.rollout("own", task=task)
        attempt = await run_worker(stack, own, tmp_path, "--entry", "an_agent:solve", **inherited)
        assert attempt.ending is Ending.FINISHED, attempt.error
        taken, environment = attempt.result
        assert taken == []
        assert any(variable.startswith("OPENAI_API_KEY=") for variable in environment)
        attempts = (sibling, attempt.key)
        secrets = [keys.worker, keys.operator, keys.secret, *map(keys.of_lease, attempts), *map(stack.key, attempts)]
        assert [variable for variable in environment if any(secret in variable for secret in secrets)] == []
        assert [await stack.calls(sibling), await stack.store.tool_results([sibling])] == [[], []]
