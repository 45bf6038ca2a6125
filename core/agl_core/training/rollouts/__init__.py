"""The rollouts that a run learns from: `plan` says which come when, `collect` has them run and scored.

`experience` draws their groups for updates; `recorded` takes another run's in their place; `episodes` reads them.
"""
