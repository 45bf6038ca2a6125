"""The keys of `[learn]`: learning from sessions of real use."""

from __future__ import annotations

from agl_core.config.deployment import CanarySection, GateSection
from agl_core.config.sections import Section


class LearnSection(Section):
    """Learning from sessions of real use, whose versions are served through a gate and a canary."""

    gate: GateSection = GateSection()
    canary: CanarySection = CanarySection()
