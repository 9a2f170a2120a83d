"""What to use where the actions of an environment do not fit an algorithm."""

from torchpod.specs import Box, Discrete, EnvSpec, MultiDiscrete


def has_bounds(action: object) -> bool:
    """Whether actions are in a box with bounds."""
    return isinstance(action, Box) and action.bounded and action.low < action.high


def unfit(algorithm: str, wants: str, spec: EnvSpec) -> str:
    """The sentence of an algorithm that `wants` other actions than an environment has."""
    if spec.groups is not None:
        groups = sorted(spec.groups)
        return f"{algorithm} is for one agent, and {spec.name} has groups {groups}; use algo=ippo, mappo or ia2c."
    return f"{algorithm} needs {wants}, and {spec.name} has {spec.action}; {_instead(spec)}."


def _instead(spec: EnvSpec) -> str:
    """The algorithms that take the actions of an environment, e.g. "use algo=dqn, ppo or sac"."""
    if isinstance(spec.action, Discrete):
        return "use algo=dqn, ppo or sac"
    if has_bounds(spec.action):
        return "use algo=sac, td3, ddpg or ppo"
    if isinstance(spec.action, Box):
        return "give it finite bounds, low < high, or use algo=ppo, a2c or impala"
    if isinstance(spec.action, MultiDiscrete):
        return "use algo=ppo, a2c or impala"
    return "give it one Discrete, MultiDiscrete or Box action"
