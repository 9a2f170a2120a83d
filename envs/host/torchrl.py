"""TorchRL environments as host environments: any `torchrl.envs.EnvBase`, with its transforms."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchpod import random
from torchpod.envs.arguments import needs_nothing
from torchpod.envs.host.spaces import channels_last, masked, numbers, opened
from torchpod.envs.host.timesteps import host_timestep
from torchpod.specs import HOST, Box, Discrete, EnvSpec, SpecTree
from torchpod.types import ACTION_MASK, TimeStep, Tree


class TorchRL:
    """A batch of `torchrl.envs.EnvBase` behind the contract of `Env`; state None, everything on the CPU.

    Where an episode is over, the next step resets it instead, and is its `FIRST`; the others step meanwhile. The keys
    of `init` seed the environments, once; the keys of `step` are not used. An observation of one entry is that tensor,
    of more a dict by their names. Images of bytes `[C, H, W]` become `[H, W, C]`, as everywhere; floats stay. One-hot
    actions become Discrete; float actions are clipped to their bounds, and where those differ from entry to entry, the
    spec says [-1, 1] and actions are scaled. An `action_mask` beside other entries, of any numbers, says which actions
    are allowed: one entry per value. It may be nested, as in `to_torchrl`.

    Args:
      make: a function that returns an EnvBase of batch size `[]`, of which there will be one per row, or `[n]`, of
        which there will be one for n rows; also the class itself. If it has an argument `num_envs`, it is called with
        the number of rows, and returns one of that batch size.

    Raises:
      ValueError: for a batch of more axes, or one that Gymnasium resets by itself (`GymEnv(name, num_envs=n)`); if the
        observation has other entries than float, integer or bool tensors; if the action is no single one-hot,
        categorical or bounded tensor; if a mask does not fit the action, or allows nothing while an episode goes on; or
        if the reward is not one number.
    """

    traits = HOST

    def __init__(self, make: Callable[..., Any]) -> None:
        from torchrl.envs import EnvBase, VecGymEnvTransform  # its import takes seconds

        if isinstance(make, EnvBase):
            raise ValueError(
                f"TorchRL makes as many as it steps, and got one {type(make).__name__}; hand over its class, or a "
                "function that makes it."
            )
        needs_nothing(make, "TorchRL", known=["num_envs"])
        self._make = make
        self._sized = "num_envs" in inspect.signature(make).parameters
        self._parts: list[_Part] = []
        probe = make(num_envs=1) if self._sized else make()
        if not isinstance(probe, EnvBase):
            told = getattr(make, "__name__", repr(make))
            raise ValueError(f"{told} returned a {type(probe).__name__}, and must return a torchrl.envs.EnvBase.")
        try:
            self.rows_each = _rows(probe)
            name = getattr(make, "__name__", type(probe).__name__)
            if any(isinstance(module, VecGymEnvTransform) for module in probe.modules()):
                raise ValueError(
                    f"{name} returned a batch that Gymnasium resets by itself, such as GymEnv(..., num_envs=n), and "
                    "here rows are reset in the step after their end; use one GymEnv per row, or SerialEnv or "
                    "ParallelEnv of them."
                )
            if len(probe.reward_keys) != 1 or "terminated" not in probe.done_keys:
                raise ValueError(
                    f"{name} has the rewards {probe.reward_keys} and the ends {probe.done_keys}; use an environment "
                    "with one of each, not in groups."
                )
            observation = {key: _spec_of(leaf, probe, key) for key, leaf in _leaves(probe.observation_spec)}
            self._names = list(observation)
            if probe.full_reward_spec[probe.reward_key].shape[len(probe.batch_size) :].numel() != 1:
                raise ValueError(f"{name}: its reward has the shape {list(probe.reward_spec.shape)}; use one number.")
            action, self._to_native = _action_of(probe, name)
        finally:
            probe.close(raise_if_closed=False)
        whole: SpecTree = observation if len(observation) > 1 else next(iter(observation.values()))
        whole = masked(whole, action, f"{name}: observation_spec")
        self.spec = EnvSpec(name, whole, action, truncates_early=True)

    def init(self, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.init`; a second call begins again, with new environments.

        Raises:
          ValueError: if there are not as many keys as rows in whole environments.
        """
        self.close()
        total, rows = keys.shape[0], keys.shape[0] if self._sized else self.rows_each
        if total % rows:
            raise ValueError(
                f"{self.spec.name} has {rows} rows each, and num_envs={total} is no multiple of that; let its maker "
                "take an argument num_envs, or choose another number."
            )
        for seed in random.bits(keys[::rows], 1)[:, 0].tolist():
            env = self._make(num_envs=rows) if self._sized else self._make()
            self._parts.append(_Part(env, rows))
            env.set_seed(seed % 2**31)
        self._was_last = np.ones(total, bool)
        observations = [part.reset(None) for part in self._parts]
        no = np.zeros(total, bool)
        return None, self._timestep(observations, np.zeros(total, np.float32), no, no)

    def step(self, state: None, action: Tree, keys: Tensor) -> tuple[None, TimeStep]:
        """See `Env.step`."""
        if not self._parts:
            raise RuntimeError(f"{self.spec.name}: init() comes before step().")
        native, rows = self._to_native(action.detach()), len(self._was_last) // len(self._parts)
        resets = torch.from_numpy(self._was_last).split(rows)
        found = [part.step(*x) for part, *x in zip(self._parts, native.split(rows), resets, strict=True)]
        observations, *outcome = zip(*found, strict=True)
        return None, self._timestep(observations, *(torch.cat(x).numpy() for x in outcome))

    def close(self) -> None:
        """Closes the environments."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.env.close(raise_if_closed=False)

    def _timestep(self, observations: Any, *outcome: np.ndarray) -> TimeStep:
        specs = self.spec.observation if isinstance(self.spec.observation, dict) else {"": self.spec.observation}
        columns = zip(*observations, strict=True)
        pairs = zip(specs.items(), columns, strict=True)
        named = {name: channels_last(torch.cat(x).to(spec.dtype), spec) for (name, spec), x in pairs}
        timestep, self._was_last = host_timestep(named if "" not in specs else named[""], self._was_last, *outcome)
        if ACTION_MASK in named:
            named[ACTION_MASK], stuck = opened(named[ACTION_MASK], self.spec.action, ~self._was_last)
            if stuck is not None:
                raise ValueError(
                    f"{self.spec.name} gave an action_mask that allows nothing, in row {stuck[0]}; allow something, or "
                    "end the episode."
                )
        return timestep


class _Part:
    """One environment of TorchRL, as `rows` rows."""

    def __init__(self, env: Any, rows: int) -> None:
        self.env, self._rows = env, rows
        self._specs = {key: spec.shape for key, spec in _nested(env.observation_spec)}
        written = self._specs | {env.reward_key: env.full_reward_spec[env.reward_key].shape}
        ends = {key: env.full_done_spec[key].shape for key in ("terminated", "done")}
        self._written, self._stepped = written, written | ends  # by `_step`, which may leave ends to `step`
        self._now: Any = None

    def reset(self, rows: Tensor | None) -> list[Tensor]:
        """The first observations of all rows, or of some and the newest of the others."""
        if rows is None or not self.env.batch_size:
            self._now = self.env.reset()
        else:
            self._now = self.env.reset(self._now.set("_reset", self._mask(rows)))
        self._require(self._now, self._specs, "_reset()")
        return self._observations(self._now)

    def step(self, action: Tensor, resets: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Observations `[rows, ...]`; reward, terminated and truncated `[rows]`; all but the first unsaid at resets."""
        no = torch.zeros(self._rows, dtype=torch.bool)
        if resets.all():
            return self.reset(resets), no.float(), no, no
        env, now = self.env, self._now
        now = now.set(
            env.action_key, action.to(env.device or "cpu").reshape(env.full_action_spec[env.action_key].shape)
        )
        if resets.any() and env.batch_locked:  # who can let single rows wait does; what others make of them is not read
            now = now.set("_step", self._mask(~resets))
        try:
            stepped = env.step(now)
        except (AttributeError, KeyError, RuntimeError):
            self._require(env._step(now), self._written, "_step()")  # TorchRL does not say what is missing
            raise
        stepped.pop("_step", None)
        after = stepped["next"]
        self._require(after, self._stepped, "_step()")  # step_mdp would keep the last observation
        self._now = env.step_mdp(stepped)
        reward = self._column(after[env.reward_key])
        terminated = self._column(after["terminated"])
        ended = self._column(after["done"]) | terminated
        seen = self.reset(resets) if resets.any() else self._observations(self._now)
        return seen, reward, terminated, ended & ~terminated

    def _require(self, written: Any, specs: Mapping[Any, Any], where: str) -> None:
        """That all of it was written, and as the specs say.

        Raises:
          ValueError: if not.
        """
        for key, shape in specs.items():
            x = written.get(key, None)
            if x is None or x.shape != shape:
                found = sorted(map(str, written.keys(True, True))) if x is None else f"it with shape {list(x.shape)}"
                raise ValueError(
                    f"{type(self.env).__name__}.{where} must write {key!r} with shape {list(shape)}, which its specs "
                    f"say, and wrote {found}; write it so, or change the specs."
                )

    def _mask(self, rows: Tensor) -> Tensor:
        return rows.reshape(self.env.full_done_spec["done"].shape).to(self.env.device or "cpu", copy=True)

    def _observations(self, tensordict: Any) -> list[Tensor]:
        skipped = len(self.env.batch_size)
        return [
            x.reshape(self._rows, *x.shape[skipped:]).to("cpu", copy=True)
            for x in (tensordict[key] for key in self._specs)
        ]

    def _column(self, x: Tensor) -> Tensor:
        return x.reshape(self._rows).to("cpu", copy=True)


def _rows(env: Any) -> int:
    if len(env.batch_size) > 1:
        raise ValueError(f"{type(env).__name__} has the batch size {list(env.batch_size)}; use one axis, or none.")
    return env.batch_size.numel()


def _nested(spec: Any) -> list[tuple[Any, Any]]:
    return list(spec.items(include_nested=True, leaves_only=True))


def _leaves(spec: Any) -> list[tuple[str, Any]]:
    """Names and specs of all entries; parts of a nested name are joined by a dot, but of the only mask."""
    paths = [((key,) if isinstance(key, str) else key, leaf) for key, leaf in _nested(spec)]
    masks = [path for path, _ in paths if path[-1] == ACTION_MASK]
    return [(ACTION_MASK if [path] == masks else ".".join(path), leaf) for path, leaf in paths]


def _spec_of(leaf: Any, env: Any, name: str) -> SpecTree:
    from torchrl.data import Categorical

    shape, dtype = tuple(leaf.shape[len(env.batch_size) :]), leaf.dtype
    if dtype is None or not isinstance(getattr(leaf, "dtype", None), torch.dtype):
        raise ValueError(f"{type(env).__name__}: the observation {name} is {leaf}; use tensors.")
    if min(shape, default=1) < 0:
        raise ValueError(
            f"{type(env).__name__}: the observation {name} is of parts of several kinds or shapes, {list(shape)}; make "
            "it one tensor."
        )
    if isinstance(leaf, Categorical) and not shape and dtype != torch.bool:
        return Discrete(int(leaf.space.n))
    return numbers(shape, dtype if dtype in (torch.uint8, torch.bool) else torch.float32)


def _action_of(env: Any, name: str) -> tuple[Box | Discrete, Callable[[Tensor], Tensor]]:
    """The spec of an action, and the function that turns actions `[B, ...]` of it into those of TorchRL."""
    from torchrl.data import Bounded, Categorical, MultiOneHot, OneHot

    if len(env.action_keys) != 1:
        raise ValueError(f"{name} has the actions {env.action_keys}; use an environment with one.")
    spec = env.full_action_spec[env.action_key]
    shape = tuple(spec.shape[len(env.batch_size) :])
    if isinstance(spec, OneHot) and not isinstance(spec, MultiOneHot):
        num, dtype = shape[-1], spec.dtype
        return Discrete(num), lambda action: torch.nn.functional.one_hot(action, num).to(dtype)
    if isinstance(spec, Categorical) and shape in ((), (1,)):
        return Discrete(int(spec.space.n)), lambda action: action.to(spec.dtype).reshape(-1, *shape)
    if not isinstance(spec, Bounded) or not spec.dtype.is_floating_point:
        raise ValueError(
            f"{name}: its action is {type(spec).__name__} {list(shape)}; use OneHot, Categorical or Bounded."
        )
    low, high = (x.cpu()[(0,) * len(env.batch_size)] for x in (spec.low, spec.high))
    if (low == low.flatten()[0]).all() and (high == high.flatten()[0]).all():
        box = Box(shape, float(low.flatten()[0]), float(high.flatten()[0]))
        return box, lambda action: action.clamp(low, high).to(spec.dtype)
    if not (low.isfinite() & high.isfinite()).all():
        return Box(shape), lambda action: action.clamp(low, high).to(spec.dtype)
    center, half = (high + low) / 2, (high - low) / 2
    return Box(shape, -1.0, 1.0), lambda action: (center + half * action).clamp(low, high).to(spec.dtype)
