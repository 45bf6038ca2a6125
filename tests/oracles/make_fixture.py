"""Makes fixture.jsonl anew by asking veRL and TRL themselves; `make oracles` has their environment.

.venv-oracles/bin/python -m tests.oracles.make_fixture
"""

from __future__ import annotations

from importlib.metadata import version

from . import oracle_fixture

ORACLES = ("verl", "trl", "torch", "transformers")


def made_now() -> oracle_fixture.Fixture:
    return oracle_fixture.from_oracles({name: version(name).split("+")[0] for name in ORACLES})


if __name__ == "__main__":
    oracle_fixture.write(made_now())
    print(f"Wrote {oracle_fixture.PATH}")
