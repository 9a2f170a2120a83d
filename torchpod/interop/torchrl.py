"""Agents made of a TorchRL loss: `LossAgent(actor, loss, spec=env.spec)` runs in both loops like any agent.

The loss is called as a pure function of its parameters (pure_loss.py) and draws by our keys (keyed.py), so that an
update is the learner's: minibatches, chunks, ranks, clipping, Adam, targets, the NaN guard, checkpoints. It reads a
TensorDict with TorchRL's keys: `observation`, `action`, what the actor wrote beside it, and

- losses with a critic (PPO, A2C, Reinforce): `advantage`, `value_target` and `state_value`. Advantages are ours
  (ops/returns.py, computed once per trajectory; GAE or V-trace, as the loss's estimator is): TorchRL's estimators do
  not compile, and know nothing of resets;
- all others: `("next", "observation")`, `("next", "reward")`, `("next", "done")` and `("next", "terminated")`; an
  environment's discount that is not 0 counts as 1 there, for TorchRL's targets know no other.

A loss says what each row costs (`reduction="none"`), and the agent sums the rows up, without the resets. Where a loss
makes one number of all rows (an adaptive coefficient, running statistics, CQL's mean of its log-sum-exp, the cloning
of TD3+BC), copies of others are in the place of resets.
"""

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.objectives import KLPENPPOLoss, LossModule, ValueEstimators

from torchpod import random
from torchpod.actions import any_allowed, mask_of
from torchpod.agent import Agent, Bound
from torchpod.interop.both_ways import both_ways
from torchpod.interop.fit import Fit, require_kinds
from torchpod.interop.keyed import Keyed, NothingElseDraws
from torchpod.interop.pure_loss import TORCHRL, PureLoss
from torchpod.interop.purity import left_alone, require_pure
from torchpod.interop.unfit import UNSUPPORTED, Watched, is_torchrls, shapes_of
from torchpod.ops.exploration import falling
from torchpod.ops.returns import gae, vtrace
from torchpod.specs import Box, Discrete, EnvSpec, MultiDiscrete
from torchpod.types import LAST, ActorOutput, Batch, LossOutput, TimeStep, Trajectory, Tree

# Of tensordict, about an option of torch that it reads.
warnings.filterwarnings("ignore", message="torch._dynamo.config.inline_inbuilt_nn_modules is deprecated")


class _Net(NamedTuple):
    """A network of TorchRL's, and the names that its parameters have in the agent."""

    module: nn.Module
    names: dict[str, str]

    def __call__(self, variables: Mapping[str, Tensor], *data: Any) -> Any:
        own = {name: variables[other] for name, other in self.names.items()}
        return functional_call(self.module, own, data)


class _LogProb(nn.Module):
    """Of given actions, under the distribution of an actor."""

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor = actor

    def forward(self, data: TensorDict, action: Tensor) -> Tensor:
        return cast(Any, self.actor).get_dist(data).log_prob(action)


class LossAgent(Agent):
    """See the module.

    Args:
      actor: writes `action`, and what the loss wants to know about it (`action_log_prob`).
      loss: built of this actor; it is the agent's from now on. Its `reduction` becomes "none", and its
        `normalize_advantage`, if set, is done by the learner, over all rows of a minibatch and without resets. Its
        targets begin as copies of what they follow.
      spec: of the environment.
      discount: gamma. None: that of the loss's own value estimator.
      gae_lambda: of the advantages, for a loss with a critic; None: that of the estimator (0 for TD0, 1 for TD1).
      target_rate: how fast targets follow, if the loss has targets: 1 - tau of TorchRL's `SoftUpdate(eps=tau)`.
      target_interval: optimizer steps between two movements of the targets; `HardUpdate` is target_rate=1 and more
        than one step.
      epsilon: share of random actions while exploring, for actors that choose the best of discrete ones; for losses
        without a critic, as `noise` is.
      noise: standard deviation of what is added to continuous actions while exploring, in units of half their range.
      exploration_fraction: part of the run in which epsilon falls from 1 to its value, which may be 0.
      groups: optimizer groups by prefixes of parameters, e.g. `{"actor": ("actor_network.",), ...}`; None: one.
      adaptive: coefficients that the loss itself changes while it runs; None: `beta` of KLPENPPOLoss.

    Raises:
      ValueError: if environment, actor and loss do not fit, or a number is out of range; the message names it.
    """

    may_fall_back = True

    def __init__(
        self,
        actor: TensorDictModuleBase,
        loss: LossModule,
        *,
        spec: EnvSpec,
        discount: float | None = None,
        gae_lambda: float | None = None,
        target_rate: float = 0.005,
        target_interval: int = 1,
        epsilon: float = 0.0,
        noise: float = 0.0,
        exploration_fraction: float = 0.0,
        groups: Mapping[str, tuple[str, ...]] | None = None,
        adaptive: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        require_kinds(actor, loss, spec)
        fractions = {
            "discount": discount,
            "gae_lambda": gae_lambda,
            "target_rate": target_rate,
            "epsilon": epsilon,
            "exploration_fraction": exploration_fraction,
        }
        for name, value in fractions.items():
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}={value} of LossAgent must lie from 0 to 1.")
        for name, value, least in (("target_interval", target_interval, 1), ("noise", noise, 0)):
            if not value >= least:
                raise ValueError(f"{name}={value} of LossAgent must be at least {least}.")
        if spec.groups is not None:
            raise ValueError(
                f"LossAgent trains one agent, and {spec.name} has the groups {sorted(spec.groups)}; make one per "
                "policy (docs/torchrl-losses.md)."
            )
        self._spec, self._name = spec, type(loss).__name__
        if self._name in UNSUPPORTED and is_torchrls(type(loss)):
            raise ValueError(f"LossAgent cannot train with {self._name}: {UNSUPPORTED[self._name]}.")
        self._groups = dict(groups or {"loss": ("",)})
        if not isinstance(spec.action, Discrete | MultiDiscrete | Box):
            raise ValueError(
                f"LossAgent needs one Discrete, MultiDiscrete or Box action, and {spec.name} has {spec.action}."
            )
        critic = loss.__dict__.get("critic_network")
        if "critic_network" in loss.__dict__ and critic is None:
            raise ValueError(f"{self._name} was made without a critic; give it one that writes 'state_value' per row.")
        self._on_policy = critic is not None
        self._fit = Fit(spec, self._name, self._on_policy)
        self.replayed = 0 if self._on_policy else 1
        self._explores = self._set_up_exploration(epsilon, noise, exploration_fraction)
        reduction = getattr(loss, "reduction", "mean")
        self._set_up(loss, discount, gae_lambda)
        if adaptive is None:
            adaptive = ("beta",) if isinstance(loss, KLPENPPOLoss) else ()
        coefficients = sorted(name for name, x in loss._buffers.items() if x is not None)
        for name in adaptive:
            if name not in coefficients:
                raise ValueError(
                    f"adaptive={adaptive} has {name!r}, and the coefficients of {self._name} are {coefficients}; name "
                    "some of these."
                )
        example = self._example(actor, loss)
        if critic is not None:
            self._fit.check_value(critic, cast(Any, loss.tensor_keys).value, example)
        self._check_loss(loss, example)

        self._pure = PureLoss(loss, adaptive, bootstraps=not self._on_policy)
        self._check_groups()
        self._keys = cast(Any, loss.tensor_keys)
        for name, x in (self._pure.params | self._pure.buffers).items():
            _register(self, name, x)
        self.hyperparameters = (*self.hyperparameters, *self._pure.settings)
        self._actor = _Net(actor, self._pure.names_in(actor, "actor"))
        self._critic = None if critic is None else _Net(critic, self._pure.names_in(critic, "critic"))
        if self._on_policy and self._pure.delayed:
            names = [x.removesuffix("_network").replace("critic", "value") for x in self._pure.delayed]
            raise ValueError(
                f"{self._name} has a target of {' and '.join(self._pure.delayed)}, and what losses with a critic read "
                f"here is of the networks themselves; make it without {' and '.join(f'delay_{x}' for x in names)}."
            )
        self.target_rate = target_rate if self._pure.delayed else None
        self.target_interval = target_interval
        log_prob = getattr(self._keys, "sample_log_prob", None)
        self._of_actions = _Net(_LogProb(actor), {f"actor.{name}": x for name, x in self._actor.names.items()})
        self.max_lag = int(log_prob in self._extras) if self._on_policy and not self._clips else None
        names = inspect.signature(type(loss).__init__).parameters
        nets = [name for name, net in loss.__dict__.items() if isinstance(net, TensorDictModuleBase)]
        delays = [name for name in names if name.endswith("value") and f"{name.removeprefix('delay_')}_network" in nets]
        if "delay_value" in delays:  # beside one of Q, it is the one that the loss looks ahead with
            delays = ["delay_value"]
        targets = {f"delay_{name.removesuffix('_network')}" for name in self._pure.delayed}
        if not self._on_policy and delays and targets.isdisjoint(delays):
            expected = " or ".join(f"target_{name.removeprefix('delay_')}_network_params" for name in delays)
            found = " and ".join(f"target_{name}_params" for name in self._pure.delayed) or "none"
            raise ValueError(
                f"{self._name} has no target network of values; make it with {' or '.join(delays)}=True (it looks "
                f"ahead with {expected}, and of targets has {found})."
            )
        require_pure(self._pure, self._renamed(example, self._keys), reduction)

    def _set_up_exploration(self, epsilon: float, noise: float, fraction: float) -> bool:
        """Whether there is more of it than the actor's own."""
        action = self._spec.action
        if self._on_policy and (epsilon or noise):
            raise ValueError(
                f"{'epsilon' if epsilon else 'noise'}={epsilon or noise} would take other actions than those whose "
                f"log-probability {self._name} learns from; leave it out: its actor explores by its distribution."
            )
        if epsilon and not isinstance(action, Discrete):
            raise ValueError(
                f"epsilon={epsilon} is for discrete actions, and {self._spec.name} has {action}; use noise."
            )
        if noise and not (isinstance(action, Box) and action.bounded):
            raise ValueError(f"noise={noise} is for actions within bounds, and {self._spec.name} has {action}.")
        # With epsilon 0 the share falls all the same, from 1, and with fraction 0 it is epsilon at once.
        falls = epsilon > 0 or fraction > 0 and not self._on_policy and isinstance(action, Discrete)
        if falls:
            self.annealed = ("remaining",)
            for name, value in (("remaining", 1.0), ("epsilon", epsilon), ("exploration_fraction", fraction)):
                self.hyperparameter(name, value)
        elif noise:
            self.hyperparameter("noise", noise)
        return falls or noise > 0

    def _set_up(self, loss: LossModule, discount: float | None, gae_lambda: float | None) -> None:
        """What changes in the loss itself."""
        own = cast(Any, loss)
        if not hasattr(own, "reduction"):
            raise ValueError(f"{self._name} has no reduction; a loss must say what each row costs, to mask resets.")
        if own.reduction not in ("mean", "none"):
            raise ValueError(
                f"{self._name} has reduction={own.reduction!r}, and LossAgent takes the mean over rows that are no "
                "resets; leave it out."
            )
        if getattr(own, "loss_mask_key", "auto") not in ("auto", None):
            raise ValueError(
                f"{self._name} has loss_mask_key={own.loss_mask_key!r}, and LossAgent leaves out the rows between "
                "episodes alone; leave it out, and let the loss multiply what a row costs."
            )
        if getattr(own, "use_prioritized_weights", "auto") is False:
            raise ValueError(
                f"{self._name} has use_prioritized_weights=False, and rows have the weights that replay gives them; "
                "leave it out."
            )
        own.reduction, self._clips = "none", None
        if getattr(own, "functional", True) is False or getattr(own, "advantage_norm", None) is not None:
            raise ValueError(f"{self._name} must be made with functional=True and without advantage_norm.")
        if hasattr(own, "log_explained_variance"):
            own.log_explained_variance = False  # that of measures.py leaves resets out
        own._has_update_associated.update(dict.fromkeys(own._has_update_associated, True))  # the learner's
        # A loss may be handed to several agents one after the other, and the first of them has changed it.
        if getattr(own, "normalize_advantage", False) or getattr(own, "normalized_by_torchpod", False):
            own.normalize_advantage, own.normalized_by_torchpod = False, True
            self.standardise = ("advantage",)
        if getattr(own, "with_lagrange", False):
            raise ValueError(f"{self._name} with with_lagrange=True says nothing of single rows; leave it out.")
        made = {**own.__dict__, **own._modules}.get("_value_estimator") is not None
        usual = ValueEstimators.GAE if self._on_policy else ValueEstimators.TD0
        if not made and getattr(own, "default_value_estimator", usual) not in (usual, None):
            own.make_value_estimator()
        estimator = {**own.__dict__, **own._modules}.get("_value_estimator")
        if getattr(estimator, "average_rewards", False):
            raise ValueError(
                f"{self._name} with average_rewards is not supported, for a batch is cut into chunks; scale rewards in "
                "the environment (torchpod.envs.transforms)."
            )
        if not self._on_policy:
            if gae_lambda is not None:
                raise ValueError(f"gae_lambda={gae_lambda} is of losses with a critic, which {self._name} has not.")
            if type(estimator).__name__ not in ("NoneType", "TD0Estimator"):
                raise ValueError(
                    f"{self._name} gets rows in any order, and its {type(estimator).__name__} reads them as time; use "
                    "make_value_estimator(ValueEstimators.TD0)."
                )
            if discount is not None and "gamma" in own._buffers:
                own._buffers["gamma"].fill_(discount)
            elif discount is not None:
                own.make_value_estimator(own.default_value_estimator, gamma=discount)
            return
        kind = type(estimator).__name__
        if estimator is not None and (kind not in _ESTIMATORS or not is_torchrls(type(estimator))):
            raise ValueError(
                f"{self._name} has a {kind}, and advantages here are torchpod's own, as those of "
                f"{', '.join(_ESTIMATORS)}; use one of these."
            )
        if getattr(estimator, "average_gae", False):
            raise ValueError(f"{self._name} with average_gae is not supported; use normalize_advantage of the loss.")
        if getattr(estimator, "average_adv", False):
            raise ValueError(f"{self._name} with average_adv is not supported; use normalize_advantage of the loss.")
        if kind == "VTrace":
            names = {"rho_clip": "rho_thresh", "c_clip": "c_thresh"}
            self._clips = {ours: float(getattr(estimator, theirs)) for ours, theirs in names.items()}
        fixed = {"TD0Estimator": 0.0, "TD1Estimator": 1.0, "VTrace": 1.0}
        if gae_lambda is None:
            gae_lambda = fixed.get(kind, float(getattr(estimator, "lmbda", 0.95)))
        self.hyperparameter("discount", float(getattr(estimator, "gamma", 0.99)) if discount is None else discount)
        self.hyperparameter("gae_lambda", gae_lambda)

    def _example(self, actor: TensorDictModuleBase, loss: LossModule) -> TensorDict:
        """Rows as the loss will get them, of floats drawn, of 0 and True; what they say about the actor is kept."""
        rows = _EXAMPLE_ROWS
        key, keys = random.key(0), random.split(random.key(0), rows)

        def drawn(seed: int, shape: tuple[int, ...] = (1,)) -> Tensor:
            return random.uniform(random.fold_in(key, seed), rows * math.prod(shape)).reshape(rows, *shape)

        def observations(seed: int) -> Tree:
            def leaf(s: Any) -> Tensor:
                if s.dtype.is_floating_point:
                    low, high = getattr(s, "low", -math.inf), getattr(s, "high", math.inf)
                    return drawn(seed, s.shape).to(s.dtype).clamp(low, high)
                return torch.full((rows, *s.shape), s.dtype == torch.bool, dtype=s.dtype)  # a mask allows everything

            return pytree.tree_map(leaf, self._spec.observation, is_leaf=lambda s: hasattr(s, "dtype"))

        data = TensorDict({"observation": observations(1)}, batch_size=[rows])
        known = set(data.keys(True, True))
        exploring = set_exploration_type(ExplorationType.RANDOM)
        with torch.no_grad(), TORCHRL, exploring, Keyed(keys), NothingElseDraws():
            out = self._fit.called("the actor", actor, data)
        self._action = getattr(loss.tensor_keys, "action", "action")
        action = out.get(self._action, None)
        if action is None:
            raise ValueError(
                f"the actor must write {self._action!r} with shape {list(self._spec.action.shape)} per row, and writes "
                f"{sorted(map(str, set(out.keys(True, True)) - known))}; make it a ProbabilisticActor or a QValueActor."
            )
        self._one_hot = self._fit.check_action(actor, action, data)
        self._fit.check_kind(loss)
        self._fit.check_bounds(loss)
        self._fit.check_action_space(loss, one_hot=self._one_hot is not None)
        wanted = set(getattr(loss, "in_keys", ()))
        if self._clips:
            wanted.add(cast(Any, loss.tensor_keys).sample_log_prob)
        written = {key for key in out.keys(True, True) if isinstance(key, str)} - known - {self._action}
        self._extras = tuple(sorted(wanted & written))
        if taken := {"weight", "next", "observation"} & {*self._extras}:
            raise ValueError(
                f"the actor writes {min(taken)!r} for {self._name}, and rows have something else of that name; give it "
                "another."
            )
        if self._on_policy:
            self._fit.check_log_prob(actor, loss, shapes_of(out, [*written]), wanted)
            columns = {name: drawn(2 + i) for i, name in enumerate(_COLUMNS)}
        else:
            done = drawn(2) < 0.5
            following = {"reward": drawn(3), "done": done, "terminated": done & (drawn(4) < 0.5)}
            columns = {"next": {"observation": observations(5), **following}}
        extras = {name: out.get(name) for name in self._extras}
        return data.update(TensorDict({"action": action, **extras, **columns}, batch_size=[rows]))

    def _check_loss(self, loss: LossModule, example: TensorDict) -> None:
        """Runs the loss once: whether it can use what it will get, and so that it makes all that it makes lazily."""
        data, rows = self._renamed(example, loss.tensor_keys), example.shape[0]
        found = {name: net for name, net in loss.__dict__.items() if isinstance(net, TensorDictModuleBase)}
        networks = {f"{name} of {self._name}": net for name, net in found.items()}
        watched = Watched(networks)
        try:
            with left_alone(loss), Keyed(random.key(0)), NothingElseDraws(), watched:
                out = loss(data.clone())
        except Exception as error:
            if isinstance(error, NotImplementedError) and str(error):  # it says itself what it has not
                raise ValueError(str(error)) from error
            told = watched.layer() is None and self._fit.misvalued(loss.tensor_keys, watched, networks, every=True)
            told = told or self._fit.why(watched, networks, self._name, data, error)
            raise ValueError(told) from error
        if told := self._fit.misvalued(loss.tensor_keys, watched, networks, every=False):
            raise ValueError(told)
        if not isinstance(out, TensorDictBase):
            raise ValueError(f"forward() of {self._name} returns a {type(out).__name__}; return a TensorDict.")
        terms = {name: x for name, x in out.items() if isinstance(name, str) and name.startswith("loss")}
        if not terms:
            raise ValueError(
                f"{self._name} gives {sorted(map(str, out.keys()))}; a loss gives keys that begin with loss."
            )
        for name, x in terms.items():
            if not _has_rows(x, rows) or x.shape.count(rows) > 1:  # of every row with every other
                raise ValueError(
                    f"{name} of {self._name} has shape {list(x.shape)} with reduction='none' and {rows} rows; a loss "
                    f"must say what each row costs, [..., {rows}] or [{rows}, 1], to mask resets."
                )

    def _check_groups(self) -> None:
        names = self._pure.params
        for group, prefixes in self._groups.items():
            for prefix in prefixes:
                if not any(name.startswith(prefix) for name in names):
                    known = sorted({name.split(".")[0] for name in names})
                    raise ValueError(
                        f"groups[{group!r}] of LossAgent has {prefix!r}, and no parameter of {self._name} begins so; "
                        f"they begin with {known}."
                    )

    # What the agent is: its variables are those of the loss, under the names of pure_loss.py.

    def _apply(self, fn: Any, recurse: bool = True) -> "LossAgent":
        for module in (self._pure.loss, self._actor.module, *([self._critic.module] if self._critic else [])):
            module._apply(fn)
        return super()._apply(fn, recurse)

    def variables(self) -> dict[str, Tensor]:
        """Parameters and buffers as they are at the moment."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    @property
    def torchrl_networks(self) -> dict[str, nn.Module]:
        """Actor and critic, by what the names of their layers begin with; their parameters are in the agent."""
        return {"actor.": self._actor.module} | ({} if self._critic is None else {"critic.": self._critic.module})

    def optimizer_groups(self) -> dict[str, tuple[str, ...]]:
        """All follow the sum of the loss's terms: TorchRL detaches what a term is not to move."""
        return self._groups

    def act(self, timestep: TimeStep, state: Tree, keys: Tensor, explore: bool = True) -> tuple[ActorOutput, Tree]:
        """See `Agent.act`."""
        kind = ExplorationType.RANDOM if explore else ExplorationType.DETERMINISTIC

        def once() -> dict[str, Tensor]:
            data = TensorDict({"observation": timestep.observation}, batch_size=[keys.shape[0]])
            with Keyed(keys):
                out = self._actor(self.variables(), data)
            return {"action": out.get(self._action), **{name: out.get(name) for name in self._extras}}

        with TORCHRL, set_exploration_type(kind):
            extras = both_ways(once) if torch.compiler.is_compiling() else once()
        action = extras.pop("action")
        if self._one_hot is not None:
            mask = mask_of(timestep.observation)  # of equal values all are marked
            action = (action != 0 if mask is None else (action != 0) & mask).to(torch.int64).argmax(-1)
        box = self._spec.action
        if self.replayed and isinstance(box, Box) and box.bounded:
            action = action.clamp(box.low, box.high)  # the environment does so: values learn of what was done
        if explore and self._explores:
            action = self._explored(action, timestep.observation, random.fold_in(keys, 1))
        return ActorOutput(action, extras), ()

    def _explored(self, action: Tensor, observation: Tree, keys: Tensor) -> Tensor:
        """Epsilon-greedy among what is allowed, or Gaussian noise within the bounds."""
        if isinstance(self._spec.action, Discrete):
            words, share = random.bits(keys, 2), falling(self.epsilon, self.remaining, self.exploration_fraction)
            is_random = random.to_uniform(words[..., 0]) < share
            drawn = any_allowed(self._spec.action.num_values, observation, words[..., 1])
            return torch.where(is_random, drawn, action)
        box = cast(Box, self._spec.action)
        half = (box.high - box.low) / 2
        drawn = random.normal(keys, math.prod(box.shape)).reshape(action.shape)
        return (action + self.noise * half * drawn.to(action.dtype)).clamp(box.low, box.high)

    def prepare(self, trajectory: Trajectory, keys: Tensor) -> Batch:
        """Advantages and value targets, or transitions; resets get weight 0."""
        t, out = trajectory.timestep, trajectory.output
        last = t.step_type == LAST
        steps: dict[str, Tree] = {
            "observation": pytree.tree_map(lambda x: x[:-1], t.observation),
            "action": out.action,
            **out.extras,
            "weight": (~last[:-1]).to(t.reward.dtype),
        }
        if self._critic is None:
            steps["next"] = {
                "observation": pytree.tree_map(lambda x: x[1:], t.observation),
                "reward": t.reward[1:],
                "done": last[1:],
                "terminated": last[1:] & (t.discount[1:] == 0),
            }
            return Batch(steps)
        rows = pytree.tree_map(lambda x: x.flatten(0, 1), t.observation)
        data = TensorDict({"observation": rows}, batch_size=[last.numel()])
        with Keyed(keys[0]):
            value = self._critic(self.variables(), data).get(self._keys.value).reshape(last.shape)
        of_steps = t.reward[1:], t.discount[1:] * self.discount, last[1:], value[:-1], value[1:]
        if self._clips:
            log_prob = self._log_prob(steps["observation"], out.action, random.fold_in(keys[0], 1))
            ratio = log_prob - out.extras[self._keys.sample_log_prob]
            target, advantage = vtrace(ratio, *of_steps, lambda_=self.gae_lambda, **self._clips)
        else:
            advantage = gae(*of_steps, lambda_=self.gae_lambda)
            target = advantage + value[:-1]
        steps |= {"advantage": advantage, "value_target": target, "state_value": value[:-1]}
        return Batch(steps, report={"reward": t.reward[1:], "value": value[:-1], "value_target": target})

    def _log_prob(self, observation: Tree, action: Tensor, key: Tensor) -> Tensor:
        """Of actions `[T, B, ...]`, as the actor is now; `key` `[3]`, of what it draws."""
        lead = action.shape[: action.ndim - len(self._spec.action.shape)]
        rows, action = pytree.tree_map(lambda x: x.flatten(0, 1), (observation, self._for_torchrl(action)))

        def once() -> dict[str, Tensor]:
            data = TensorDict({"observation": rows}, batch_size=action.shape[:1])
            with Keyed(key):
                return {"log_prob": self._of_actions(self.variables(), data, action)}

        with TORCHRL:
            out = both_ways(once) if torch.compiler.is_compiling() else once()
        return out["log_prob"].reshape(lead)

    def _for_torchrl(self, action: Tensor) -> Tensor:
        if self._one_hot is None:
            return action
        index = torch.arange(self._spec.action.num_values, device=action.device)
        return (action.unsqueeze(-1) == index).to(self._one_hot)

    def loss(self, batch: Batch, keys: Tensor, target: Bound | None) -> LossOutput:
        """The sum of the loss's terms."""
        sums, priority, changed = self.sums(batch, keys, target)
        loss = torch.stack([x for name, x in sums.items() if name.startswith("loss")]).sum()
        metrics = {name: x.detach() for name, x in sums.items() if name not in self._groups}
        losses = loss if [*self._groups] == ["loss"] else dict.fromkeys(self._groups, loss)
        return LossOutput(losses, metrics, priority, changed)

    def sums(
        self, batch: Batch, keys: Tensor, target: Bound | None
    ) -> tuple[dict[str, Tensor], Tensor | None, dict[str, Tensor]]:
        """All that the loss says, its terms among it, as weighted sums over rows; priorities; and changed buffers."""
        steps = dict(batch.steps)
        weight = steps.pop("weight")
        steps["action"] = self._for_torchrl(steps["action"])
        if self._pure.mixes_rows:
            steps = _of_rows_that_count(steps, weight)
        columns = {name: steps[name].unsqueeze(-1) for name in _COLUMNS if name in steps}
        if "next" in steps:
            following = steps["next"]
            columns["next"] = following | {
                name: following[name].unsqueeze(-1) for name in ("reward", "done", "terminated")
            }
        data = self._renamed(TensorDict(steps | columns, batch_size=weight.shape, device=weight.device), self._keys)
        own = self.variables()
        out, changed = self._pure(own, own, target("variables") if target else {}, data, keys)
        priority = data.get(getattr(self._keys, "priority", "td_error"), None)
        if priority is not None:  # of an ensemble the largest
            priority = priority.detach().abs().reshape(weight.shape[0], -1).amax(-1)

        def total(x: Tensor) -> Tensor:
            size = weight.shape[0]
            if _has_rows(x, size):
                x = x.squeeze(-1) if x.shape == (size, 1) else x
                x = x.reshape(-1, size).mean(0)  # over an ensemble
                return (torch.where(weight > 0, x, 0.0) * weight).sum()
            return x.to(weight.dtype).mean() * weight.sum()

        return {name: total(x) for name, x in out.items()}, priority, changed

    @staticmethod
    def _renamed(data: TensorDict, keys: Any) -> TensorDict:
        """With the names that the loss was told by `set_keys`."""
        for name in (*_COLUMNS, "action"):
            key = getattr(keys, name, name)
            if name == "state_value":
                key = getattr(keys, "value", name)
            if name in data.keys() and key != name:
                data.rename_key_(name, key)
        for name in ("reward", "done", "terminated"):
            key = getattr(keys, name, name)
            if ("next", name) in data.keys(True) and key != name:
                data.rename_key_(("next", name), ("next", key))
        return data


_COLUMNS = ("advantage", "value_target", "state_value")
_ESTIMATORS = ("GAE", "MultiAgentGAE", "TD0Estimator", "TD1Estimator", "TDLambdaEstimator", "VTrace")
_EXAMPLE_ROWS = 26
"""A number that no axis of a network has by accident; even, for losses that cut rows in two."""


def _of_rows_that_count(steps: Tree, weight: Tensor) -> Tree:
    """Rows `[R, ...]`; those of weight 0 become copies of others, of each as many up to one."""
    counts = weight > 0
    order = counts.to(torch.uint8).argsort(descending=True, stable=True)  # those that count, then the others
    copies = (~counts).cumsum(0) - 1
    source = order[copies.clamp(min=0) * counts.sum() // (~counts).sum().clamp(min=1)]
    index = torch.where(counts, torch.arange(len(weight), device=weight.device), source)
    return pytree.tree_map(lambda x: x[index], steps)


def _has_rows(x: Tensor, size: int) -> bool:
    """Whether it says something of each row: `[..., R]`, the first axes those of an ensemble, or `[R, 1]`."""
    return x.ndim > 0 and (x.shape[-1] == size or x.shape == (size, 1))


def _register(module: nn.Module, name: str, x: Tensor) -> None:
    """`x` as the parameter or buffer `name` of a module, whose submodules are made as the name wants them."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = cast(nn.Module, module._modules[part])
    if isinstance(x, nn.Parameter):
        module.register_parameter(leaf, x)
    else:
        module.register_buffer(leaf, x)
