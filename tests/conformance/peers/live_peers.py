"""The suites of others against agl's own servers; each test that passes, and each that does not, is an expected one.

`make test-frameworks` runs it in an environment of its own. After a change, AGL_SUITES=write writes what is expected
anew: tests that newly fail stand there under their errors, which a person replaces by the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from agl_online.policies import serving
from agl_server.testing import running_stack

from ...support.obedient import obey
from .suites import EXPECTED, POLICY, SUITES, Suite

MODELS = ("default", "gpt-6-astra", "model_id")
"""The clients' tests ask for the latter two by name."""
USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 10,
    "total_tokens": 30,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 3},
}
CONFIG = """
config_version = 1
name = "calc"
folder = "{run}"
agent.entry = "agent:solve"
tasks.train = {{source = "jsonl", path = "tasks.jsonl"}}
policies.default.model = {{path = "{policy}", dtype = "float32"}}
sampling.max_tokens = 64
algorithm.name = "grpo"
credit.name = "identical"
rewards.answer.rule = "exact_match"
train = {{steps = 1}}
engine.name = "torch"
"""


@pytest.fixture
def obedient() -> Iterator[tuple[str, str]]:
    """The URL and key of an attempt whose model does what it is asked."""
    stack: Any = running_stack(timeout=900, upstream_fields=lambda _: {"models": dict.fromkeys(MODELS, "served")})
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(stack) as running:
        running.upstream.answer, running.upstream.more = obey, {"usage": USAGE}
        key = portal.call(running.lease)
        yield running.url(key), running.key(key)


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL of `agl policy serve` with the calc example's policy, which needs no key."""
    run = tmp_path / "calc"
    run.mkdir()
    (run / "config.toml").write_text(CONFIG.format(run=run, policy=POLICY))
    with start_blocking_portal() as portal:
        served: Any = serving([f"{run}@0"], host="127.0.0.1", port=0, key=None)
        with portal.wrap_async_context_manager(served) as (url, _):
            yield f"{url}/v1", "none"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.distribution)
def test_a_suite_gives_what_is_expected(suite: Suite, request: pytest.FixtureRequest) -> None:
    url, key = request.getfixturevalue(suite.server)
    expected = suite.expected
    outcomes = suite.run(expected.release, url, key)
    if os.environ.get("AGL_SUITES") == "write":
        expected = expected.updated(outcomes)
        expected.write(EXPECTED / f"{suite.distribution}.txt", suite.distribution)
    assert list(expected.differences(outcomes)) == []
    if suite.distribution != "vllm":
        assert version(suite.distribution) == expected.release
