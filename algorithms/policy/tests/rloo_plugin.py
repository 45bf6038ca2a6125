# rloo.py
import agl_core
from agl_algorithms import PolicyGradient, PolicyGradientOptions, group_statistics


def needs(options):
    return {*options.needs(), agl_core.Capability.GROUPS}


@agl_core.algorithm(name="rloo", options=PolicyGradientOptions, needs=needs)
class Rloo(PolicyGradient):
    """REINFORCE leave-one-out: each return minus the mean of the others of its group (arXiv 2402.14740)."""

    def advantages(self, samples, values_R=None):
        group = group_statistics(samples)
        others_N = (group.rollouts_N - 1).clamp(min=1)
        return samples.at_tokens(group.deviation_N * group.rollouts_N / others_N)
