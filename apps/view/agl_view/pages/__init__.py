"""The pages of runs, rollouts, groups and calls, and what all pages share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from agl_core.config.load import CONFIG_FILE
from agl_core.errors import AglError, ConfigError, nearest
from agl_core.types import Ending, Mode, ToolStatus, Verdict
from agl_core.types.names import RolloutState
from agl_server.health.verdict import MetricsLine, read_metrics, series
from agl_server.reading.explained import (
    GroupReport,
    RolloutReport,
    Turn,
    read_call,
    read_group,
)
from agl_server.reading.rollouts import Query, read_page
from agl_server.reading.runs import RunEntry, read_entry, state_mark
from agl_view.groups import align, groups_on
from agl_view.templating import make_environment, page_address

PAGE_SIZE = 100
"""Rollouts of a page without a step or a filter."""
MAX_SEARCHED = 1000
"""Rollouts of a page with a step or a filter."""
_SURE = (0.05, 0.2, 0.7, 1.6, 3.0)
"""Bounds of a token's shades in nats (negative log-probability)."""
_SORTED_BY = {"state": "state", "progress": "steps", "before": "reward_before", "after": "reward_after", "size": "size"}
"""Columns that sort the list of runs, each by a field of `RunEntry`; the largest first."""
_QUERY = TypeAdapter(Query)


class BadQueryError(AglError, ValueError):
    """The query of an address cannot be read."""


@dataclass(frozen=True, slots=True)
class RunLine:
    name: str
    entry: RunEntry | None
    """None if its folder cannot be read."""
    metrics: Sequence[MetricsLine]

    @property
    def rewards(self) -> list[float]:
        return [value for _, value in series(self.metrics, "train", "reward/mean")]

    @property
    def alarms(self) -> list[str]:
        return sorted({alarm.name.replace("_", " ") for line in self.metrics for alarm in line.alarms})

    @property
    def is_running(self) -> bool:
        return self.entry is not None and self.entry.state == "running"


class RunFolders:
    """Runs, and folders of runs, which are read anew for each page."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [path.resolve() for path in paths]

    def named(self) -> dict[str, Path]:
        """The runs by their names in addresses, the newest first; the second folder of one name is `NAME~2`."""
        times: dict[Path, float] = {}
        for path in self._paths:
            own = path / CONFIG_FILE
            for file in [own] if own.is_file() else sorted(path.glob(f"*/{CONFIG_FILE}")):
                try:
                    times[file.parent] = file.stat().st_mtime
                except OSError:  # It was removed meanwhile.
                    continue
        names: dict[Path, str] = {}
        for folder in sorted(times):
            taken = sum(other.name == folder.name for other in names)
            names[folder] = folder.name if not taken else f"{folder.name}~{taken + 1}"
        return {names[folder]: folder for folder in sorted(times, key=lambda folder: (-times[folder], folder))}

    def find(self, name: str) -> Path:
        """The run of this name. ConfigError if there is none."""
        runs = self.named()
        if name not in runs:
            raise ConfigError(f"There is no run '{name}' here. {nearest(name, runs)}")
        return runs[name]


class Pages:
    """The handlers of the routes."""

    def __init__(self, folders: RunFolders) -> None:
        self.folders = folders
        environment = make_environment()
        # All at once: else the first visit of each page would wait for its own.
        self._templates = {name: environment.get_template(name) for name in environment.list_templates()}

    def render(self, request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        """A page; every template gets `run` and `changed`."""
        page = {"run": request.path_params.get("run"), "changed": None, **values}
        return HTMLResponse(self._templates[template].render(page), status)

    async def runs(self, request: Request) -> Response:
        """The runs whose name has the text of the address, sorted by its column, else the newest first."""
        text, column = request.query_params.get("text", ""), request.query_params.get("sort", "")
        named = self.folders.named().items()
        lines = [run_line(name, folder) for name, folder in named if text.casefold() in name.casefold()]
        if field := _SORTED_BY.get(column):
            values = {line.name: getattr(line.entry, field, None) for line in lines}
            lines.sort(key=lambda line: (values[line.name] is not None, values[line.name] or 0), reverse=True)
        return self.render(request, "runs.html", lines=lines, text=text, changed=page_address("changed"))

    async def changed(self, request: Request) -> Response:
        """A text that changes whenever something is recorded."""
        name = request.path_params.get("run")
        folders = self.folders.named().values() if name is None else [self.folders.find(name)]
        return PlainTextResponse(" ".join(map(state_mark, folders)))

    async def rollouts(self, request: Request) -> Response:
        name, folder = self.found(request)
        query, line, given = read_query(request), run_line(name, folder), request.query_params
        size = PAGE_SIZE if query == Query(mode=query.mode) else MAX_SEARCHED
        chosen = replace(query, mode=Mode.TRAIN) if query.step is None and "mode" not in given else query
        page = await read_page(folder, chosen, size, given.get("before"), given.get("after"))
        if not page.entries and chosen != query:  # Nothing trains here.
            chosen, page = query, await read_page(folder, query, size, given.get("before"), given.get("after"))
        groups = groups_on(page)
        kept = {key: value for key, value in given.items() if key not in ("before", "after")}
        rewards = [reward for group in groups for reward in group.rewards]
        advantages = [abs(m.advantage) for group in groups for m in group.members if m.advantage is not None]
        return self.render(
            request,
            "rollouts.html",
            query=chosen,
            groups=groups,
            matching=len(page.matching),
            total=len(page.entries),
            older=page.older and f"?{urlencode({**kept, 'before': page.older})}",
            newer=page.newer and f"?{urlencode({**kept, 'after': page.newer})}",
            low=min(rewards, default=0.0),
            high=max(rewards, default=0.0),
            most=max(advantages, default=0.0),
            modes=list(Mode),
            endings=list(Ending),
            verdicts=list(Verdict),
            statuses=list(ToolStatus),
            steps={metrics.step for metrics in line.metrics},
            changed=page_address("runs", name, "changed") if line.is_running else None,
        )

    async def group(self, request: Request) -> Response:
        name, folder = self.found(request)
        group = await read_group(folder, request.path_params["id"])
        sides = best_first(group.members)
        rewards = [side.entry.reward for side in sides if side.entry.reward is not None]
        return self.render(
            request,
            "group.html",
            first=sides[0].entry.rollout,
            columns=[
                (side, f"m{side.entry.rollout.member}", page_address("runs", name, "rollouts", side.entry.rollout.id))
                for side in sides
            ],
            rows=align(sides),
            low=min(rewards, default=0.0),
            high=max(rewards, default=0.0),
            most=_most_of_group(group),
            credits=group.credit,
        )

    async def rollout(self, request: Request) -> Response:
        name, folder = self.found(request)
        group = await read_group(folder, request.path_params["id"])
        entry, attempts = group.chosen.entry, group.chosen.attempts
        ids = [side.entry.rollout.id for side in best_first(group.members)]
        at = ids.index(entry.rollout.id)
        agents = dict.fromkeys(turn.transition.agent for attempt in attempts for turn in attempt.turns)
        running = entry.rollout.state is not RolloutState.DONE and run_line(name, folder).is_running
        return self.render(
            request,
            "rollout.html",
            entry=entry,
            attempts=[(a, [_with_earlier(turn) for turn in a.turns], a.terminal(entry.weights)) for a in attempts],
            credits=[credit for credit in group.credit if entry.rollout.id in credit.credit],
            colours={agent: f"agent{number % 6}" for number, agent in enumerate(agents)},
            most=_most_of_group(group),
            before=ids[at - 1] if at > 0 else None,
            after=ids[at + 1] if at + 1 < len(ids) else None,
            changed=page_address("runs", name, "changed") if running else None,
        )

    async def call(self, request: Request) -> Response:
        _, folder = self.found(request)
        query = request.query_params
        attempt = whole(query.get("attempt", "0"), "attempt")
        call = await read_call(folder, query.get("rollout", ""), attempt, query.get("call", ""))
        choices = []
        for choice in call.choices:
            ids = [] if choice.response_ids is None else choice.response_ids.tolist()
            logprobs = [None] * len(ids) if choice.logprobs is None else choice.logprobs.tolist()
            texts = _token_texts(folder, call.policy, ids)
            shown = [str(id) for id in ids] if texts is None else texts
            sampled = [True] * len(ids) if choice.mask is None else choice.mask.tolist()
            tokens = [
                (text, id, logprob, "forced" if not by_policy else _tint(logprob))
                for text, id, logprob, by_policy in zip(shown, ids, logprobs, sampled, strict=True)
            ]
            choices.append((choice, tokens, texts is not None))
        asked = {key: value for key, value in call.request.items() if key != "tools"}
        return self.render(request, "call.html", call=call, asked=asked, choices=choices)

    def found(self, request: Request) -> tuple[str, Path]:
        """The run that the address names."""
        name = str(request.path_params["run"])
        return name, self.folders.find(name)


def read_query(request: Request) -> Query:
    """The query of the address. BadQueryError names what cannot be read."""
    fields: dict[str, Any] = {key: value for key, value in request.query_params.items() if value}
    if "step" in fields:
        fields["step"] = whole(fields["step"], "step")
    try:
        return _QUERY.validate_python(fields)
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        raise BadQueryError(f"{name}={fields[name]} in the address will not do: {problem['msg']}.") from None


def _with_earlier(turn: Turn) -> tuple[Turn, int]:
    """A turn, and the number of its messages up to its agent's last reply."""
    messages = turn.transition.messages if turn.transition.agent_turn else ()
    return turn, max((at for at, message in enumerate(messages, 1) if message.get("role") == "assistant"), default=0)


def run_line(name: str, folder: Path) -> RunLine:
    try:
        metrics = read_metrics(folder)
        return RunLine(name, read_entry(folder, metrics), metrics)
    except (OSError, ValueError, TypeError, AttributeError):  # What others wrote into the folder, or removed from it.
        return RunLine(name, None, ())


def _token_texts(folder: Path, policy: str, ids: Iterable[int]) -> list[str] | None:
    """The text of each token by the policy's last checkpoint; None without one."""
    files = sorted(file for file in folder.glob("checkpoints/*/*/model/tokenizer.json") if file.parts[-3] == policy)
    if not files:
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(files[-1]))
        return [str(tokenizer.decode([id], skip_special_tokens=False)) for id in ids]
    except Exception:  # `tokenizers` is optional, and raises plain Exception for a file that it cannot read.
        return None


def best_first(members: Sequence[RolloutReport]) -> list[RolloutReport]:
    """By reward, the highest first, rollouts without one last."""
    return sorted(members, key=lambda m: (m.entry.reward is None, -(m.entry.reward or 0.0), m.entry.rollout.member))


def _most_of_group(group: GroupReport) -> float:
    """The largest absolute advantage."""
    records = (record for member in group.members for record in member.entry.training_records)
    return max((abs(record.advantage) for record in records if record.advantage), default=0.0)


def _tint(logprob: float | None) -> str:
    return "lpx" if logprob is None else f"lp{sum(-logprob > bound for bound in _SURE)}"


def whole(text: str, name: str) -> int:
    """An integer of at most 15 digits in the address, which stores and browsers take; else BadQueryError."""
    if not re.fullmatch("-?[0-9]{1,15}", text):
        raise BadQueryError(f"{name}={text} in the address is not a whole number, or too large.")
    return int(text)
