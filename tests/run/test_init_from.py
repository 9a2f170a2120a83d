"""Agents and policies that begin as those of another run, and the files in which they lie."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from torchpod import checkpoint
from torchpod.agent import Agent
from torchpod.checkpoint import CheckpointError
from torchpod.compose import load
from torchpod.distributed import Ranks
from torchpod.main import main
from torchpod.makers import make_agent, make_env
from torchpod.metrics import read_metrics, short
from torchpod.run.execute import Run, execute
from torchpod.run.init_from import layers_of, with_loaded_weights

STEPS = 4 * 8
"""Of an iteration."""
SETTINGS = (
    "algo=ippo",
    "env=tag_gridworld",
    "env.grid_length=6",
    "env.max_episode_steps=9",
    "compile=false",
    "logger.console=false",
    "num_envs=4",
    "algo.unroll_length=8",
    "algo.agent.hidden=[8]",
    "algo.agent.normalize_observation=true",
    "algo.learner.num_minibatches=2",
    "algo.learner.anneal_learning_rate=false",
    "evaluation.episodes=1",
)


def train(folder: Path, *overrides: str, iterations: int = 2) -> Run:
    return execute(load([*SETTINGS, f"total_env_steps={iterations * STEPS}", f"run_dir={folder}", *overrides]))


def from_(source: object, train: bool = False, policy: str = "runner") -> str:
    return f"algo.agent.policies={{{policy}:{{train:{str(train).lower()},from:{source}}}}}"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load_weights(checkpoint.latest(folder))


def of(policy: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters and statistics, without hyperparameters: these have no dot in their names."""
    prefix = f"policies.{policy}."
    own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
    return {name: x for name, x in own.items() if "." in name}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("policies") / "first").dir


def test_every_policy_lies_in_a_file_of_its_own(first: Path):
    whole, files = weights(first), checkpoint.policies_of(checkpoint.latest(first))
    assert files.keys() == {"tagger", "runner"}
    parts = {f"policies.{p}.{k}": x for p, file in files.items() for k, x in safetensors.torch.load_file(file).items()}
    assert equal(parts, whole)
    assert whole["policies.runner.normalizer.moments.observation.total"] > 0


@pytest.mark.parametrize("loop", ["loop=anakin", "loop=sebulba"])
def test_a_frozen_policy_stays_what_it_was_in_the_other_run(loop: str, first: Path, tmp_path: Path):
    run = train(tmp_path / "run", from_(first), loop, "seed=7", "algo.agent.entropy_coefficient=0.3")
    found = weights(run.dir)
    assert equal(of("runner", found), of("runner", weights(first)))
    assert not equal(of("tagger", found), of("tagger", weights(first)))
    assert found["policies.runner.entropy_coefficient"].item() == pytest.approx(0.3)  # hyperparameters are its own
    other = train(tmp_path / "other", "algo.agent.policies={runner:{train:false}}", loop, "seed=7")
    assert not equal(of("tagger", found), of("tagger", weights(other.dir)))  # it has acted from the first step on


def test_both_loops_begin_with_it_to_the_bit(first: Path, tmp_path: Path):
    runs = [
        train(tmp_path / name, from_(first), *loop).dir
        for name, *loop in (("anakin",), ("sebulba", "loop=sebulba", "loop.num_actor_threads=1", "loop.lag=0"))
    ]
    assert equal(*map(weights, runs))


def test_a_policy_can_be_trained_further_or_by_another_name(first: Path, tmp_path: Path):
    config = load(
        [*SETTINGS, "algo.agent.policies={runner:{from:" + f"{first}" + "},tagger:{from:" + f"{first}:runner" + "}}"]
    )
    agent = with_loaded_weights(make_agent(config.algo, make_env(config.env).spec), None, Ranks())()
    state = agent.state_dict()
    for policy in ("runner", "tagger"):
        assert equal(of(policy, state), of("runner", weights(first)))
    assert {name.split(".")[1] for name, _ in agent.named_parameters()} == {"tagger", "runner"}
    run = train(tmp_path / "run", from_(first, train=True))
    assert not equal(of("runner", weights(run.dir)), of("runner", weights(first)))


def test_a_run_folder_a_checkpoint_and_a_copied_file_are_the_same(first: Path, tmp_path: Path):
    folder = checkpoint.latest(first)
    file = shutil.copy(checkpoint.policies_of(folder)["runner"], tmp_path / "good_runner.safetensors")
    for source in (first, folder, f"{folder}:runner", file):
        config = load([*SETTINGS, from_(source)])
        agent = with_loaded_weights(make_agent(config.algo, make_env(config.env).spec), None, Ranks())()
        assert equal(of("runner", agent.state_dict()), of("runner", weights(first))), source


SEBULBA = ("loop=sebulba", "loop.num_actor_threads=2", "loop.lag=1")


@pytest.mark.parametrize(
    "loop",
    [(), *(pytest.param(x, marks=pytest.mark.slow) for x in (SEBULBA, ("compile=true",)))],
    ids=["anakin", "sebulba", "compiled"],
)
def test_a_resumed_run_reads_its_own_checkpoint_alone(loop: tuple[str, ...], first: Path, tmp_path: Path):
    source = shutil.copytree(first, tmp_path / "source")
    for name, trained in (("frozen", False), ("trained", True)):
        straight = train(tmp_path / f"{name}-straight", from_(first, trained), *loop, iterations=4)
        train(tmp_path / name, from_(source, trained), *loop)
        moved = source.rename(tmp_path / "moved")
        execute(load([f"resume={tmp_path / name}", f"total_env_steps={4 * STEPS}"]))
        moved.rename(source)
        assert equal(weights(tmp_path / name), weights(straight.dir))
        assert f"from: {source}" in (tmp_path / name / "config.yaml").read_text()


@pytest.mark.parametrize("loop", [(), pytest.param(SEBULBA, marks=pytest.mark.slow)], ids=["anakin", "sebulba"])
def test_separate_policies_and_their_schedules_go_on_to_the_bit(loop: tuple[str, ...], tmp_path: Path):
    """On the plane, with values that see everybody, and settings of the policies' own."""
    plane = (
        "algo=mappo",
        "env=tag_continuous",
        "env.num_taggers=2",
        "env.num_runners=3",
        "env.num_other_agents_observed=2",
    )
    own = "algo.agent.policies={tagger:{entropy_coefficient:0.2},fast:{agents:[2],discount:0.9},slow:[3,4]}"
    points = "algo.learner.schedules={learning_rate.fast:[[0,0.01],[96,0]],policies.slow.clip:[[32,0.2],[96,0.05]]}"
    settings = (*plane, "env.grid_length=4", "env.tagging_distance=0.1", own, points, *loop)
    straight = train(tmp_path / "straight", *settings, iterations=4)
    train(tmp_path / "halves", *settings)
    execute(load([f"resume={tmp_path / 'halves'}", f"total_env_steps={4 * STEPS}"]))
    assert equal(weights(tmp_path / "halves"), weights(straight.dir))
    assert straight.variables["policies.slow.clip"].item() == pytest.approx(0.05)
    assert {name.split(".")[1] for name, _ in straight.agent.named_parameters()} == {"tagger", "fast", "slow"}
    # What the runners got, by policy too.
    told = [f"{name}/episode_{kind}" for name in ("fast", "slow") for kind in ("return", "length")]
    ended = [row for row in read_metrics(tmp_path / "straight") if row["episodes"]]
    for row in ended:
        assert not {"tagger/episode_return", "runner/episode_return"} & row.keys() and row.keys() >= set(told)
        for kind in ("return", "length"):
            of_one, of_two = (row[f"{name}/episode_{kind}"] for name in ("fast", "slow"))
            assert (of_one + 2 * of_two) / 3 == pytest.approx(row[f"episode_{kind}/runner"], rel=1e-5)
    assert ended
    scores = straight.summary["eval_return"]
    assert scores["policies"].keys() == {"fast", "slow"} and 0 <= scores["episode"]["tag_rate"] <= 1
    parts = [scores["policies"][name]["mean"] for name in ("fast", "slow", "slow")]
    assert sum(parts) / 3 == pytest.approx(scores["groups"]["runner"]["mean"], rel=1e-5)


def test_the_last_line_tells_policies_from_groups_that_are_called_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    names = "algo.agent.policies={runner:[0,1],tagger:[2,3,4]}"
    assert main(["train", *SETTINGS, names, f"total_env_steps={STEPS}", f"run_dir={tmp_path / 'run'}"]) == 0
    score = json.loads((tmp_path / "run/summary.json").read_text())["eval_return"]
    assert set(score["groups"]) == set(score["policies"]) == {"tagger", "runner"}
    groups, policies = ([f"{k} {short(x['mean'])}" for k, x in score[kind].items()] for kind in ("groups", "policies"))
    told = ", ".join([*groups, *(f"policy {x}" for x in policies)])
    assert f", 1 episodes: {told}, tag_rate " in capsys.readouterr().out


def test_the_learning_rate_of_a_policy_has_a_schedule_of_its_own(tmp_path: Path):
    """Where it is 0 its networks stay, and the other's move."""
    points = "algo.learner.schedules={learning_rate.runner:[[32,0.01],[33,0]]}"
    first, second, third = (train(tmp_path / str(n), points, iterations=n).variables for n in (1, 2, 3))
    for name in (name for name in first if name.endswith("weight")):
        assert not torch.equal(first[name], second[name])
        assert torch.equal(second[name], third[name]) == name.startswith("policies.runner."), name


def test_every_member_of_a_population_begins_with_it(first: Path, tmp_path: Path):
    train(tmp_path / "run", from_(first), "population=2")
    for p in range(2):
        found = weights(tmp_path / "run" / "members" / str(p))
        assert equal(of("runner", found), of("runner", weights(first)))
    again = train(tmp_path / "again", from_(tmp_path / "run" / "members" / "1"))
    assert equal(of("runner", weights(again.dir)), of("runner", weights(first)))
    assert main(["train", *SETTINGS, from_(tmp_path / "run"), f"run_dir={tmp_path / 'whole'}"]) == 1


def test_layers_are_those_of_the_agent_and_of_each_policy():
    class Own(Agent):
        def __init__(self) -> None:
            super().__init__()
            self.policies = nn.ModuleList([nn.Sequential(nn.Linear(2, 3), nn.ReLU())])

    agents = {"own": Own(), "none": Agent()}
    for activation in ("tanh", "relu"):
        settings = ["algo=torchrl", "loss=ClipPPOLoss", "env=tag_gridworld", f"algo.agent.activation={activation}"]
        config = load(settings)
        agents[activation] = make_agent(config.algo, make_env(config.env).spec)()
    found = {name: layers_of(agent) for name, agent in agents.items()}
    net = {"0": "Linear", "1": "ReLU"}
    whole = {"policies": "ModuleList", "policies.0": "Sequential"} | {f"policies.0.{x}": net[x] for x in net}
    assert found["own"] == {"": whole, "0": net} and found["none"] == {"": {}}
    differing = {x for x, kind in found["tanh"]["runner"].items() if found["relu"]["runner"][x] != kind}
    assert differing and {found["tanh"]["runner"][x] for x in differing} == {"Tanh"}
    assert {x.partition(".")[0] for x in differing} == {"actor", "critic"}
    assert all(found["tanh"][""][f"policies.runner.{x}"] == kind for x, kind in found["tanh"]["runner"].items())


ALONE = (
    *("algo=ppo", "env=pendulum", "compile=false", "logger.console=false", "num_envs=4", "evaluation.episodes=1"),
    *("algo.unroll_length=8", "algo.learner.num_minibatches=2", "algo.agent.hidden=[8]"),
    "algo.agent.normalize_observation=true",
)


def train_alone(folder: Path, *overrides: str, iterations: int = 2) -> Run:
    return execute(load([*ALONE, f"total_env_steps={iterations * STEPS}", f"run_dir={folder}", *overrides]))


def learned(run: Run) -> dict[str, torch.Tensor]:
    """Parameters and statistics."""
    return {name: x for name, x in run.variables.items() if name not in run.agent.hyperparameters}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_alone(tmp_path_factory.mktemp("alone") / "first")


def begun(source: object, *overrides: str) -> Agent:
    """The agent of a run that begins so."""
    config = load([*ALONE, f"init_from={source}", *overrides])
    return with_loaded_weights(make_agent(config.algo, make_env(config.env).spec), config.init_from, Ranks())()


def test_an_agent_begins_as_that_of_another_run(alone: Run, tmp_path: Path):
    folder = checkpoint.latest(alone.dir)
    copy = shutil.copy(folder / "weights.safetensors", tmp_path / "good.safetensors")
    other = ("algo=a2c", "algo.agent.entropy_coefficient=0.3", "env.max_episode_steps=50")
    for source, overrides in ((alone.dir, ()), (folder, ()), (copy, ()), (alone.dir, other)):
        agent = begun(source, *overrides)
        state = agent.state_dict()
        assert equal({name: state[name] for name in learned(alone)}, learned(alone)), source
        if overrides:  # hyperparameters, and that it has others, are its own
            assert state["entropy_coefficient"].item() == pytest.approx(0.3)
            assert state.keys() - learned(alone).keys() == set(agent.hyperparameters)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("loop=sebulba",),
        ("population=2",),
        pytest.param(("compile=true",), marks=pytest.mark.slow),
        pytest.param(("loop=sebulba", "compile=true"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_what_was_trained_acts_from_the_first_step_on(overrides: tuple[str, ...], alone: Run, tmp_path: Path):
    """With learning rate 0 it stays, but for its statistics, which go on from where they were."""
    still = ("algo.learner.learning_rate=0", "algo.learner.anneal_learning_rate=false", "seed=5")
    run = train_alone(tmp_path / "run", f"init_from={alone.dir}", *still, *overrides, iterations=1)
    total = "normalizer.moments.observation.total"
    lead = 2 if "population=2" in overrides else 1
    for name, x in learned(run).items():
        for one in x if lead == 2 else [x]:
            if name == total:
                assert one.item() > alone.variables[name].item() > 0
            elif "moments" not in name:
                assert torch.equal(one, alone.variables[name]), name
    assert f"init_from: {alone.dir}" in (run.dir / "config.yaml").read_text()


def test_learning_from_replay_goes_on_with_other_rewards(tmp_path: Path):
    settings = (
        *("algo=td3", "algo.replay.capacity=512", "algo.replay.min_size=32", "algo.replay.batch_size=8"),
        *("algo.learner.num_minibatches=1", "algo.agent.hidden=[8]"),
    )
    own = [x for x in ALONE if not x.startswith(("algo=", "algo.agent", "algo.learner"))]

    def train_td3(name: str, *overrides: str) -> Run:
        return execute(
            load([*own, *settings, f"total_env_steps={4 * STEPS}", f"run_dir={tmp_path / name}", *overrides])
        )

    first = train_td3("first")
    again = train_td3("again", f"init_from={first.dir}", "algo.agent.reward_scale=0.5", "algo.learner.learning_rate=0")
    assert equal(learned(first), learned(again))
    assert again.variables["reward_scale"].item() == 0.5 != first.variables["reward_scale"].item()


def test_a_run_that_goes_on_does_not_begin_again_as_another(alone: Run, tmp_path: Path, capsys):
    source = shutil.copytree(alone.dir, tmp_path / "source")
    straight = train_alone(tmp_path / "straight", f"init_from={source}", iterations=4)
    run = train_alone(tmp_path / "run", f"init_from={source}", "algo.learner.anneal_learning_rate=false")
    shutil.rmtree(source)
    assert main(["train", f"resume={run.dir}", f"total_env_steps={4 * STEPS}", f"init_from={tmp_path}/other"]) == 1
    told = f"init_from={tmp_path}/other cannot change: {run.dir} has {source}; leave it out, or start a new run."
    assert told in capsys.readouterr().err
    same = f"init_from={tmp_path}/./source/"
    more = execute(load([f"resume={run.dir}", f"total_env_steps={4 * STEPS}", same]))
    assert more.summary["env_steps"] == straight.summary["env_steps"] and not equal(learned(more), learned(run))


def test_a_run_looked_for_is_not_the_one_that_it_begins_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`resume=auto` looks among those of the same experiment and seed."""
    monkeypatch.chdir(tmp_path)
    first = execute(load([*ALONE, f"total_env_steps={2 * STEPS}"]))
    again = ["resume=auto", f"init_from={first.dir}", "env.max_episode_steps=50"]
    second = execute(load([*ALONE, f"total_env_steps={STEPS}", *again]))
    assert second.dir != first.dir and second.summary["env_steps"] <= STEPS
    third = execute(load([*ALONE, f"total_env_steps={3 * STEPS}", *again]))
    assert third.dir == second.dir and third.summary["env_steps"] > STEPS


TORCHRL = ("algo=torchrl", "env=cartpole", *(x for x in ALONE if not x.startswith(("algo=", "env=", "algo.agent"))))
CATEGORICAL = (
    *("loss=DistributionalDQNLoss", "algo.agent.hidden=[8]", "algo.agent.num_atoms=11", "algo.agent.low=-10"),
    *("algo.replay.capacity=512", "algo.replay.min_size=32", "algo.replay.batch_size=8"),
    "algo.learner.num_minibatches=1",
)


def test_what_follows_from_settings_must_be_the_same(tmp_path: Path):
    first = execute(load([*TORCHRL, *CATEGORICAL, f"total_env_steps={2 * STEPS}", f"run_dir={tmp_path / 'first'}"]))

    def begun_with(low: float) -> Agent:
        config = load([*TORCHRL, *CATEGORICAL, f"init_from={first.dir}", f"algo.agent.low={low}"])
        return with_loaded_weights(make_agent(config.algo, make_env(config.env).spec), config.init_from, Ranks())()

    for name, x in begun_with(-10.0).named_parameters():
        assert torch.equal(x, first.variables[name])
    with pytest.raises(CheckpointError, match="support follows from settings, and is another one there; give it the"):
        begun_with(-3.0)


def test_a_coefficient_that_a_loss_adapts_begins_as_its_settings_say(tmp_path: Path):
    settings = [*TORCHRL, "loss=KLPENPPOLoss", "algo.agent.hidden=[8]", "+algo.agent.arguments.beta=5.0"]
    first = execute(load([*settings, f"total_env_steps={4 * STEPS}", f"run_dir={tmp_path / 'first'}"]))
    config = load([*settings, f"init_from={first.dir}"])
    agent = with_loaded_weights(make_agent(config.algo, make_env(config.env).spec), config.init_from, Ranks())()
    (name,) = (name for name, _ in agent.named_buffers() if name.rpartition(".")[2] == "beta")
    assert agent.get_buffer(name) == 5.0 != first.variables[name]


def test_what_was_drawn_at_random_comes_along(alone: Run):
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("directions", torch.randn(3, 4))
            self.register_buffer("powers", torch.arange(3.0))

    class Own(Agent):
        def __init__(self) -> None:
            super().__init__()
            self.features = Features()

    first = Own()
    folder = checkpoint.save(
        alone.dir.parent / "own", 1, dict(first.named_buffers()), {}, {}, ranks=Ranks(), keep=1, layers=layers_of(first)
    )
    begun = with_loaded_weights(Own, str(folder), Ranks())()
    assert torch.equal(begun.features.directions, first.features.directions)


def test_all_policies_begin_as_those_of_a_run_and_one_as_another(first: Path, tmp_path: Path):
    second = train(tmp_path / "second", "seed=3").dir
    config = load([*SETTINGS, "algo=ia2c", "algo.agent.entropy_coefficient=0.3", from_(second), f"init_from={first}"])
    make = make_agent(config.algo, make_env(config.env).spec)
    state = with_loaded_weights(make, config.init_from, Ranks())().state_dict()
    assert equal(of("tagger", state), of("tagger", weights(first)))
    assert equal(of("runner", state), of("runner", weights(second)))
    assert state["policies.tagger.entropy_coefficient"].item() == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        ("{dir}/nowhere", (), "init_from={dir}/nowhere is no folder; give the folder of a run, a checkpoint of it, or"),
        ("{run}/metrics.jsonl", (), "init_from={run}/metrics.jsonl holds no weights; give the folder of a run, a ch"),
        ("", (), "init_from is empty; name a run folder, or leave it out."),
        ("{run}/..", (), " is a folder of runs; name one of them, e.g. {run}"),
        ("{dir}", (), "{dir} holds no checkpoint; give a folder that torchpod train has written."),
        ("{file}", (), "{file} holds no weights of a checkpoint ("),
        (
            "{run}",
            ("algo.agent.hidden=[9]",),
            "the agent cannot begin as {run}/checkpoints/0000000002/weights.safetensors: encoder.net.0.bias is float32 "
            "[8] there and float32 [9] here; give it the same networks and an environment of the same shapes (that run "
            "has algo=ppo env=pendulum).",
        ),
        ("{run}", ("env=mountain_car_continuous",), " there and float"),
        ("{run}", ("algo.agent.normalize_observation=false",), "float64 [3] there and missing here; give it the same"),
        (
            "{run}",
            ("algo.agent.activation=relu",),
            "encoder.net.1 is Tanh there and ReLU here; give it the same networks",
        ),
    ],
)
def test_an_agent_that_does_not_fit_is_refused_in_one_sentence(
    source: str,
    overrides: tuple[str, ...],
    message: str,
    alone: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    is_refused([*ALONE, "init_from=" + source, *overrides], message, alone.dir, tmp_path, capsys)


def is_refused(settings: list[str], message: str, run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a sentence, before there is a run folder; {run}, {dir} and {file}, which holds no weights, are paths."""
    file = folder / "other.safetensors"
    file.write_text("nothing")

    def named(text: str) -> str:
        return text.replace("{run}", str(run)).replace("{dir}", str(folder)).replace("{file}", str(file))

    assert main(["train", *map(named, settings), f"run_dir={folder / 'new'}"]) == 1
    error = capsys.readouterr().err
    assert named(message) in error and error.count("\n") == 1
    assert not (folder / "new").exists()


def damaged(file: Path) -> Path:
    """A file whose last byte is another."""
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return file


def test_damaged_weights_are_no_beginning(alone: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    copy = shutil.copytree(alone.dir, tmp_path / "copy")
    file = damaged(checkpoint.latest(copy) / "weights.safetensors")
    assert main(["train", *ALONE, f"init_from={copy}", f"run_dir={tmp_path / 'new'}"]) == 1
    assert f"{file} is missing or damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        (
            "{dir}/nowhere",
            (),
            "policies.runner.from={dir}/nowhere: {dir}/nowhere is no folder; give that of a run, or ",
        ),
        ("{dir}", (), "{dir} holds no checkpoint; give a folder that torchpod train has written."),
        ("{run}:hunter", (), "/checkpoints/0000000002 has no policy hunter, but tagger, runner; give RUN:POLICY."),
        (
            "{run}",
            ("algo.agent.hidden=[9]",),
            "policies.runner cannot begin as {run}/checkpoints/0000000002/policy-runner.safetensors: encoder.net.0.bias"
            " is float32 [8] there and float32 [9] here; give it the same networks and the same agents (that run has "
            "algo=ippo env=tag_gridworld).",
        ),
        ("{run}", ("algo.agent.normalize_observation=false",), "float64 [21] there and missing here; give it the same"),
        ("{run}", ("algo.agent.normalize_reward=true",), "is missing there and float64 [] here; give it the same"),
        (
            "{run}",
            ("algo.agent.activation=relu",),
            "encoder.net.1 is Tanh there and ReLU here; give it the same networks, algo.agent.activation among",
        ),
        ("{file}", (), "{file} holds no weights of a checkpoint ("),
        ("3", (), "policies.runner.from=3 must name a run folder, e.g. {from: runs/first}."),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_sentence(
    source: str,
    overrides: tuple[str, ...],
    message: str,
    first: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    is_refused([*SETTINGS, from_(source), *overrides], message, first, tmp_path, capsys)


def test_a_damaged_file_is_refused_by_those_who_load_it_and_not_needed_on_resume(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    copy = shutil.copytree(first, tmp_path / "copy")
    file = damaged(checkpoint.policies_of(checkpoint.latest(copy))["runner"])
    assert main(["train", *SETTINGS, from_(copy), f"run_dir={tmp_path / 'new'}"]) == 1
    assert f"{file} is missing or damaged" in capsys.readouterr().err
    more = [f"total_env_steps={3 * STEPS}", "logger.console=false"]
    resumed, unharmed = tmp_path / "copy", train(tmp_path / "unharmed", iterations=3).dir
    assert main(["train", f"resume={resumed}", *more]) == 0
    assert equal(weights(resumed), weights(unharmed))
