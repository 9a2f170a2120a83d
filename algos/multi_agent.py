"""Many agents and several policies: IPPO, MAPPO and IA2C.

Every agent of an environment with groups follows one policy. To a policy its agents are rows: it sees B x N of them
where the environment has B, and is an agent like any other, which knows nothing of the others. So are independent PPO,
de Witt et al. 2020 (https://arxiv.org/abs/2011.09533), and independent A2C; in MAPPO, Yu et al. 2022
(https://arxiv.org/abs/2103.01955), the values of an agent also look at what all the others observe.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Bound
from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.nets.nets import STATE, seen
from torchpod.specs import Array, EnvSpec, SpecTree, features, width
from torchpod.types import LAST, ActorOutput, Batch, LossOutput, TimeStep, Trajectory, Tree

LATER = ("annealed", "optimizer_intervals", "replayed", "reuse_forward", "target_rate", "through_env")
"""What an agent may ask its loop for, and `Policies` does not pass on."""
_METRICS = ("loss", "grad_norm", "episode_return", "episode_length")
"""What names of metrics of the run begin with, before a slash, as those of a policy do with its own name."""
_KEYS = (
    *("observation", "reward", "discount", "step_type"),
    *("action", "next", "done", "terminated", "truncated", "is_init"),
    *("raw_reward", "game_over", "alive", "episode"),
)
"""Keys of a trajectory as TensorDict (interop/tensordicts.py), where what a policy says of actions has its name."""
OWN = ("agents", "train", "from")
"""What a policy may say besides settings of its agent."""


@dataclass(frozen=True)
class IPPOConfig(PPOConfig):
    """PPO's settings are those of every policy that says nothing else."""

    policies: dict[str, Any] | None = None
    """`{policy: [agents]}`, or `{policy: {agents: [...], train: false, entropy_coefficient: 0.1}}` with settings of its
    own. Agents are numbers, which count those of all groups in their order, or names of groups; a policy named like a
    group need not say them. If none says any, every group has a policy. With `train: false` one stays as it is. With
    `from: RUN`, or `RUN:POLICY`, it begins as the policy of its name, or that one, of another run (init_from.py)."""


@dataclass(frozen=True)
class MAPPOConfig(IPPOConfig):
    """The same."""


@dataclass(frozen=True)
class IA2CConfig(A2CConfig):
    """A2C's settings are those of every policy that says nothing else."""

    policies: dict[str, Any] | None = None
    """Who follows which policy, and settings of a policy's own, as of `algo=ippo`."""


class Members(NamedTuple):
    """The agents of a policy: of each group those from `start` to `stop`, or these."""

    parts: tuple[tuple[str, slice | tuple[int, ...]], ...]
    size: int

    def of(self, tree: dict[str, Tree], axis: int) -> Tree:
        """What a tree by group, `[..., N_group, ...]`, says of them, `[..., N, ...]`, N at `axis`."""
        found = [pytree.tree_map(lambda x, part=part: _pick(x, part, axis), tree[g]) for g, part in self.parts]
        return found[0] if len(found) == 1 else pytree.tree_map(lambda *x: torch.cat(x, axis), *found)


class Policies(Agent):
    """An agent per policy, and who follows it.

    Args:
      spec: of an environment with groups.
      config: a dataclass with `policies`; see `IPPOConfig`.
      make: makes the agent of a policy.
      config_class: of that agent's settings.
      central: whether its observations hold what all agents observe, too, under `STATE`.

    Raises:
      ValueError: if the environment has no groups, an agent has no policy or two, the agents of a policy do not observe
        or act alike, or nothing is to be trained.
    """

    def __init__(
        self,
        spec: EnvSpec,
        config: Any,
        make: Callable[[EnvSpec, Any], Agent],
        config_class: type,
        *,
        central: bool = False,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        if spec.groups is None:
            raise ValueError(
                f"{kind} needs an environment with groups of agents, and {spec.name} has one agent; use algo=ppo."
            )
        self.groups, self._central, self._observed = dict(spec.groups), central, spec.observation
        common = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "policies"}
        given = {name: _as_mapping(of) for name, of in (config.policies or {}).items()}
        if not any("agents" in own for own in given.values()):
            given = dict.fromkeys(spec.groups, {}) | given
        for name in given:
            _check_name(name, spec)
        ids = _ids(spec, given)
        self._members = {name: _members(self.groups, own) for name, own in ids.items()}
        self._places = _places(self.groups, ids)
        whole = {name: ((name, slice(0, size)),) for name, size in self.groups.items()}
        self.teams = {name: own.of for name, own in self._members.items() if own.parts != whole.get(name)}
        sources = {name: own["from"] for name, own in given.items() if "from" in own}
        self.begins_as = {f"policies.{name}": _source(name, source) for name, source in sources.items()}
        self._trained = tuple(name for name, own in given.items() if own.get("train", True))
        self.policy_groups = self._trained
        if not self._trained:
            raise ValueError(f"policies {sorted(given)} are all train: false; {kind} has nothing to learn.")
        self.policies = nn.ModuleDict()
        for name, own in given.items():
            settings = common | {k: v for k, v in own.items() if k not in OWN}
            for unknown in settings.keys() & {"learning_rate", "max_grad_norm"}:
                every = ", ".join(f"{other}: ..." for other in self._trained)
                raise ValueError(
                    f"policies.{name}.{unknown} is the learner's; write algo.learner.{unknown}={{{every}}}, with a "
                    "number for every policy that is trained."
                )
            for unknown in settings.keys() - {f.name for f in dataclasses.fields(config_class)}:
                raise ValueError(
                    f"policies.{name}.{unknown} is no setting; known: {', '.join(sorted([*OWN, *common]))}."
                )
            agent = make(self._spec_of(spec, name), config_class(**settings))
            for asked in LATER:
                if getattr(agent, asked) != getattr(Agent, asked):
                    raise ValueError(
                        f"policy {name} asks for {asked}, which policies of many agents cannot have; turn it off."
                    )
            if list(agent.optimizer_groups()) != ["loss"]:
                raise ValueError(
                    f"policy {name} has the optimizer groups {list(agent.optimizer_groups())}; a policy is one, leave "
                    "them out."
                )
            if name not in self._trained:
                agent.requires_grad_(False)
            self.policies[name] = agent
        agents = dict(self._agents())
        self.recurrent = any(agent.recurrent for agent in agents.values())
        if self.recurrent and not all(agent.recurrent for agent in agents.values()):
            raise ValueError(f"of the policies {sorted(agents)} some are recurrent; let all of them be, or none.")
        trained = {name: agents[name] for name in self._trained}
        self.standardise = tuple(f"{name}/{x}" for name, agent in trained.items() for x in agent.standardise)
        self.max_lag = min((x.max_lag for x in trained.values() if x.max_lag is not None), default=None)
        self.may_fall_back = any(agent.may_fall_back for agent in agents.values())

    def optimizer_groups(self) -> dict[str, tuple[str, ...]]:
        """One per policy that is trained."""
        return {name: (f"policies.{name}.",) for name in self._trained}

    def initial_state(self, batch_size: int) -> Tree:
        """By policy, `[B, N, ...]`."""
        found = {}
        for name, agent in self._agents():
            size = self._members[name].size
            found[name] = _unflat(agent.initial_state(batch_size * size), 0, size)
        return found

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        """See `Agent.act`; what the agents say besides is by policy, `[B, N]`."""
        own = self._keys(keys)
        action, extras, new = {}, {}, {}
        for name, agent in self._agents():
            members = self._members[name]
            rows = self._rows(timestep, members, 0)
            out, after = agent.act(rows, _flat(state[name], 0), members.of(own, 1).flatten(0, 1), explore)
            action[name] = _unflat(out.action, 0, members.size)
            extras[name], new[name] = (_unflat(x, 0, members.size) for x in (out.extras, after))
        return ActorOutput(self._by_group(action), extras), new

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """See `Agent.prepare`; columns are named `POLICY/COLUMN`, and who is out of the game has weight 0."""
        t, out, own = trajectory.timestep, trajectory.output, self._keys(keys)
        steps: dict[str, Tree] = {"weight": (t.step_type[:-1] != LAST).float()}
        actor_state, report = {}, {}
        for name, agent in self._agents(trained=True):
            members = self._members[name]
            self._check_said(name, out.extras, (*t.step_type[1:].shape, members.size))
            rows = Trajectory(
                self._rows(t, members, 1),
                ActorOutput(_flat(members.of(out.action, 2), 1), _flat(out.extras[name], 1)),
                _flat(trajectory.actor_state[name], 0),
                _flat(trajectory.last_actor_state[name], 0),
            )
            batch = agent.prepare(rows, members.of(own, 1).flatten(0, 1))
            columns = _unflat(batch.steps, 1, members.size)
            if "alive" in t.extras:
                columns["weight"] = columns["weight"] * self._alive(t, members)
            steps |= {f"{name}/{column}": x for column, x in columns.items()}
            actor_state[name] = _unflat(batch.actor_state, 0, members.size)
            report |= {f"{name}/{column}": x for column, x in _unflat(batch.report, 1, members.size).items()}
        for name in [name for name in self.policies if name not in self._trained]:
            reward = self._members[name].of(t.reward, 2)[1:]
            weight = steps["weight"][..., None].expand_as(reward)
            if "alive" in t.extras:
                weight = weight * self._alive(t, self._members[name])
            report |= {f"{name}/reward": reward, f"{name}/weight": weight}
        return Batch(steps, actor_state, report)

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        """The losses of the policies, each of its own rows."""
        losses, metrics, changed, axis = {}, {}, {}, 1 if self.recurrent else 0
        for i, (name, agent) in enumerate(self._agents(trained=True)):
            columns = {k.removeprefix(f"{name}/"): x for k, x in batch.steps.items() if k.startswith(f"{name}/")}
            state = _flat(batch.actor_state[name], 0) if self.recurrent else ()
            out = agent.loss(Batch(_flat(columns, axis), state), random.fold_in(keys, i), None)
            losses[name] = cast(Tensor, out.loss)
            metrics |= {f"{name}/{k}": x for k, x in out.metrics.items()}
            changed |= {f"policies.{name}.{k}": x for k, x in out.buffers.items()}
        return LossOutput(losses, metrics, buffers=changed)

    def statistics(self, trajectory: Trajectory) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """See `Agent.statistics`; of who is out of the game there are none."""
        seen, t = {}, trajectory.timestep
        for name, agent in self._agents(trained=True):
            members = self._members[name]
            output = ActorOutput((), _flat(trajectory.output.extras[name], 1))
            own = agent.statistics(Trajectory(self._rows(t, members, 1), output, (), ()))
            if "alive" in t.extras:
                alive = self._alive(t, members).flatten(1)
                own = {k: (x[0], x[1] * alive) if isinstance(x, tuple) else (x, alive) for k, x in own.items()}
            seen |= {f"policies.{name}.{k}": x for k, x in own.items()}
        return seen

    def _check_said(self, name: str, extras: dict[str, Tree], lead: tuple[int, ...]) -> None:
        """That what `act` says of the agents of a policy, besides actions, is `[T, B, N, ...]`."""
        kind = type(self).__name__
        if not isinstance(extras.get(name), dict):
            raise ValueError(
                f"{kind} needs extras[{name!r}], a dict of what policy {name} says, and act returned only "
                f"{sorted(extras)}; let act return extras by policy."
            )
        for path, x in pytree.tree_flatten_with_path(extras[name])[0]:
            if x.shape[:3] != lead:
                raise ValueError(
                    f"{kind} needs extras[{name!r}]{pytree.keystr(path)} of shape [T, B, N, ...], here "
                    f"{list(lead)}, and it has shape {list(x.shape)}; let act give each agent of policy {name} its "
                    "own, [B, N, ...]."
                )

    def _alive(self, timestep: TimeStep, members: Members) -> Tensor:
        """Who decides for himself, `[T, B, N]` bool of timesteps `[T + 1, B]`."""
        return members.of(timestep.extras["alive"], 2)[:-1]

    def _agents(self, trained: bool = False) -> Iterator[tuple[str, Agent]]:
        names = self._trained if trained else self.policies
        return ((name, cast(Agent, self.policies[name])) for name in names)

    def _keys(self, keys: Tensor) -> dict[str, Tensor]:
        """A key per agent, `{group: [B, N, 3]}`."""
        sizes = list(self.groups.values())
        own = random.fold_in(keys[:, None], torch.arange(sum(sizes), device=keys.device))
        return dict(zip(self.groups, own.split(sizes, 1), strict=True))

    def _rows(self, timestep: TimeStep, members: Members, axis: int) -> TimeStep:
        """What a policy sees of timesteps `[..., B]`, B at `axis`: `[..., B * N]`."""
        step_type = timestep.step_type.unsqueeze(axis + 1).expand(*timestep.step_type.shape, members.size)
        trees = timestep.reward, timestep.discount, timestep.observation
        reward, discount, observation = (members.of(tree, axis + 1) for tree in trees)
        if self._central:
            seen = [_numbers(x, self._observed[group]) for group, x in timestep.observation.items()]
            state = torch.cat([x.flatten(axis + 1) for x in seen], -1).unsqueeze(axis + 1)
            state = state.expand(*step_type.shape, state.shape[-1])
            own = observation if isinstance(observation, dict) else {"own": observation}
            observation = own | {STATE: state}
        return TimeStep(*(_flat(x, axis) for x in (step_type, reward, discount, observation)), extras={})

    def _by_group(self, tree: dict[str, Tree]) -> dict[str, Tree]:
        """From what there is of every policy, `[B, N, ...]`, what there is of every group."""

        def of(group: str) -> Tree:
            names, order = self._places[group]
            found = [tree[name] for name in names]
            whole = found[0] if len(found) == 1 else pytree.tree_map(lambda *x: torch.cat(x, 1), *found)
            return pytree.tree_map(lambda x: _pick(x, order, 1), whole)

        return {group: of(group) for group in self.groups}

    def _spec_of(self, spec: EnvSpec, name: str) -> EnvSpec:
        """What the agents of a policy observe and do."""
        groups = [group for group, _ in self._members[name].parts]
        observation, action = spec.observation[groups[0]], spec.action[groups[0]]
        for group in groups[1:]:
            if (spec.observation[group], spec.action[group]) != (observation, action):
                raise ValueError(
                    f"policy {name} has agents of {groups[0]} and of {group}, which do not observe or act alike in "
                    f"{spec.name}: {observation}, {action}, and {spec.observation[group]}, {spec.action[group]}; give "
                    "them policies of their own."
                )
        if self._central:
            total = sum(n * _num_numbers(spec.observation[g]) for g, n in self.groups.items())
            own = observation if isinstance(observation, dict) else {"own": observation}
            observation = own | {STATE: Array((total,))}
        return EnvSpec(
            f"{name} of {spec.name}",
            observation,
            action,
            max_episode_steps=spec.max_episode_steps,
            truncates_early=spec.truncates_early,
        )


class IPPO(Policies):
    """PPO for every policy, which sees nothing but its own agents."""

    def __init__(self, spec: EnvSpec, config: IPPOConfig = IPPOConfig()) -> None:
        super().__init__(spec, config, PPO, PPOConfig)


class MAPPO(Policies):
    """PPO for every policy, with values that see what all agents observe."""

    def __init__(self, spec: EnvSpec, config: MAPPOConfig = MAPPOConfig()) -> None:
        super().__init__(spec, config, PPO, PPOConfig, central=True)


class IA2C(Policies):
    """A2C for every policy."""

    def __init__(self, spec: EnvSpec, config: IA2CConfig = IA2CConfig()) -> None:
        super().__init__(spec, config, A2C, A2CConfig)


def _as_mapping(given: Any) -> dict[str, Any]:
    """`{agents: ...}` of `[ids]`."""
    return dict(given) if isinstance(given, Mapping) else {"agents": given}


def _check_name(name: str, spec: EnvSpec) -> None:
    of_group = name in (spec.groups or ()) and not {".", "/"} & set(name)
    is_name = isinstance(name, str) and (of_group or name.isidentifier())
    if not is_name or name in (*_METRICS, *_KEYS) or hasattr(nn.ModuleDict, name):
        repair = (
            f"; give the agents of that group others: policies={{NAME: [{name}]}}"
            if name in (spec.groups or ())
            else ""
        )
        raise ValueError(
            f"policy {name!r} must have a name of letters, digits and underscores, and not one like train, loss or done"
            f"{repair}."
        )


def _source(name: str, given: Any) -> str:
    """A run that a policy is to begin as."""
    if not isinstance(given, str) or not given:
        raise ValueError(f"policies.{name}.from={given!r} must name a run folder, e.g. {{from: runs/first}}.")
    return given


def _ids(spec: EnvSpec, given: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """The agents of each policy, by number."""
    groups = spec.groups or {}
    agents, found, owners = _agents_of(groups), {}, {}
    numbers, total = {g: [i for i, (group, _) in enumerate(agents) if group == g] for g in groups}, len(agents)
    told = f"{spec.name} has agents 0 to {total - 1} in groups " + ", ".join(f"{g} ({n})" for g, n in groups.items())
    for name, own in given.items():
        asked = own.get("agents", [name] if name in groups else None)
        asked = asked if asked is None or isinstance(asked, list | tuple | range) else [asked]
        if not asked or not all(_is_agent(a, groups, total) for a in asked):
            raise ValueError(f"policy {name} has agents {asked}, and {told}; name some of them.")
        found[name] = [int(i) for a in asked for i in (numbers[a] if isinstance(a, str) else [a])]
        for i in found[name]:
            if i in owners:
                raise ValueError(f"agent {i} of {spec.name} has policies {owners[i]} and {name}; give it one of them.")
            owners[i] = name
    left = [i for i in range(total) if i not in owners]
    if left:
        shown = f"{left[:5]}{' and more' if len(left) > 5 else ''}"
        raise ValueError(f"agents {shown} have no policy in {sorted(given)}; {told}.")
    return found


def _is_agent(asked: Any, groups: dict[str, int], total: int) -> bool:
    """The name of a group, or the number of an agent."""
    return asked in groups if isinstance(asked, str) else type(asked) is int and 0 <= asked < total


def _agents_of(groups: dict[str, int]) -> list[tuple[str, int]]:
    """By number: the group of an agent, and its place in it."""
    return [(group, place) for group, n in groups.items() for place in range(n)]


def _members(groups: dict[str, int], ids: list[int]) -> Members:
    """Where the agents of a policy are."""
    agents = _agents_of(groups)
    places = {g: [agents[i][1] for i in ids if agents[i][0] == g] for g in groups}
    return Members(tuple((g, _short(own)) for g, own in places.items() if own), len(ids))


def _places(groups: dict[str, int], ids: dict[str, list[int]]) -> dict[str, tuple[list[str], Any]]:
    """For each group, the policies of its agents, and where in what these say, put side by side, its agents are."""
    agents, order = _agents_of(groups), list(groups)
    # As `Members.of` has them: group after group.
    said = {name: sorted(own, key=lambda i: order.index(agents[i][0])) for name, own in ids.items()}
    found = {}
    for group in groups:
        names = [name for name, own in said.items() if any(agents[i][0] == group for i in own)]
        at = {agents[i]: place for place, i in enumerate(i for name in names for i in said[name])}
        found[group] = names, _short([at[group, k] for k in range(groups[group])])
    return found


def _short(index: list[int]) -> slice | tuple[int, ...]:
    """A slice, where it is one: a view instead of a copy."""
    step = range(index[0], index[0] + len(index))
    return slice(step.start, step.stop) if index == list(step) else tuple(index)


def _pick(x: Tensor, part: slice | tuple[int, ...], axis: int) -> Tensor:
    if isinstance(part, slice):
        return x.narrow(axis, part.start, part.stop - part.start)
    return x.index_select(axis, torch.tensor(part, device=x.device))


def _flat(tree: Tree, axis: int) -> Tree:
    """`[..., B, N, ...]`, B at `axis`, to `[..., B * N, ...]`."""
    return pytree.tree_map(lambda x: x.flatten(axis, axis + 1), tree)


def _unflat(tree: Tree, axis: int, size: int) -> Tree:
    """The other way around."""
    return pytree.tree_map(lambda x: x.unflatten(axis, (-1, size)), tree)


def _numbers(observation: Tree, spec: SpecTree) -> Tensor:
    """All that networks see of it, `[..., n]`."""
    return torch.cat([features(observation if k is None else observation[k], of) for k, of in seen(spec).items()], -1)


def _num_numbers(spec: SpecTree) -> int:
    return sum(width(x) for x in seen(spec).values())
