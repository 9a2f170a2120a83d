"""Networks in CPU programs: what is recognised, and that it computes what the module does."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin
from torchpod.compile import Compiler
from torchpod.envs import CartPole
from torchpod.kernels import gxx, mlp
from torchpod.kernels.inductor import trace
from torchpod.learner import LearnerConfig

SIZES = [[4, 64, 64, 2], [4, 64, 64, 1], [32, 48, 16], [7, 16, 128, 32, 20], [3, 80, 5], [16, 256, 4]]


def network(sizes, activation=nn.Tanh, bias=True):
    layers = [nn.Linear(a, b, bias=bias) for a, b in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*(module for layer in layers for module in (layer, activation())))[:-1]


def parameters(net, population=1):
    """Random ones, with a P axis in a population."""
    lead = () if population == 1 else (population,)
    return {name: torch.randn(*lead, *x.shape) / x.shape[-1] ** 0.5 for name, x in net.named_parameters()}


def output_of(net):
    return lambda params, x: torch.func.functional_call(net, params, (x,))


def gradient_of(net):
    def loss(params, x):
        y = torch.func.functional_call(net, params, (x,))
        return (y.sin() * torch.arange(y.numel(), device=y.device).view_as(y).cos()).sum(), y

    return lambda params, x: torch.func.grad(loss, has_aux=True)(params, x)


def operators(fn, *args):
    """Names of the operators that `fuse` put into the graph of a function."""
    graph = trace(fn, args)[0]
    mlp.fuse(graph)
    return sorted(str(node.target).split(".")[1] for node in graph.graph.nodes if "torchpod" in str(node.target))


def require_close_to_float64(fn, params, x, population=1):
    actual = Compiler(True, population)(fn)(params, x)
    exact = Compiler(False, population)(fn)(*pytree.tree_map(torch.Tensor.double, (params, x)))
    for a, b in zip(pytree.tree_leaves(actual), pytree.tree_leaves(exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6 * max(1.0, float(b.abs().max())))


@pytest.fixture
def generator(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@pytest.mark.parametrize(
    ("activation", "population"),
    [
        (nn.Tanh, 1),
        (nn.ReLU, 3),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((nn.ReLU, 1), (nn.Tanh, 3))),
    ],
)
def test_networks_and_gradients_are_those_of_float64(activation, population, generator):
    sizes = SIZES[int(torch.randint(len(SIZES), ()))]
    net, rows = network(sizes, activation), int(torch.randint(1, 200, ()))
    lead = () if population == 1 else (population,)
    params, x = parameters(net, population), torch.randn(*lead, rows, sizes[0])
    for fn in (output_of(net), gradient_of(net)):
        require_close_to_float64(fn, params, x, population)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [1, 5, 48, 51, 98])
def test_every_size_is_computed(sizes, rows, generator):
    """The operators themselves, without compiling a program for each."""
    mlp.load()
    gxx.load_needed()
    net = network(sizes)
    layers = [module for module in net.modules() if isinstance(module, nn.Linear)]
    x, doutput = torch.randn(rows, sizes[0]), torch.randn(rows, sizes[-1])
    flat = [p.detach() for layer in layers for p in (layer.weight, layer.bias)]
    ops, n = torch.ops.torchpod, len(layers)
    output, *hidden = getattr(ops, f"mlp{n}_kept")(x, *flat, 1)
    torch.testing.assert_close(output, net(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(getattr(ops, f"mlp{n}")(x, *flat, 1), output, rtol=0, atol=0)
    gradients = getattr(ops, f"mlp{n}_backward")(doutput, x, *hidden, *flat[2::2], 1)
    expected = torch.autograd.grad(net(x), [p for layer in layers for p in (layer.weight, layer.bias)], doutput)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("density", [0.0, 0.1, 0.24, 0.3, 1.0])
@pytest.mark.parametrize("sizes", [[400, 64, 64, 3], [67, 80, 1], [64, 16, 144, 2]])
def test_zeros_in_wide_inputs_are_left_out(sizes, density, generator):
    mlp.load()
    gxx.load_needed()
    net = network(sizes, nn.ReLU)
    layers = [module for module in net.modules() if isinstance(module, nn.Linear)]
    rows = int(torch.randint(1, 130, ()))
    x = torch.randn(rows, sizes[0]) * (torch.rand(rows, sizes[0]) < density)
    x[: rows // 2] *= (torch.rand(sizes[0]) < density).float()  # tiles of both kinds
    doutput, flat = torch.randn(rows, sizes[-1]), [p.detach() for layer in layers for p in (layer.weight, layer.bias)]
    ops, n = torch.ops.torchpod, len(layers)
    output, *hidden = getattr(ops, f"mlp{n}_kept")(x, *flat, 2)
    torch.testing.assert_close(output, net(x), rtol=1e-4, atol=1e-5)
    gradients = getattr(ops, f"mlp{n}_backward")(doutput, x, *hidden, *flat[2::2], 2)
    expected = torch.autograd.grad(net(x), [p for layer in layers for p in (layer.weight, layer.bias)], doutput)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    x[-1, -1] = torch.nan
    assert getattr(ops, f"mlp{n}_kept")(x, *flat, 2)[1][-1].isnan().any()


@pytest.mark.parametrize("population", [1, 3])
def test_threads_share_out_rows_or_networks(population, generator):
    net, rows = network([4, 64, 64, 2]), 5000
    lead = () if population == 1 else (population,)
    params, x = parameters(net, population), torch.randn(*lead, rows, 4)
    fn = Compiler(True, population)(gradient_of(net))
    alone = fn(params, x)
    torch.set_num_threads(3)
    try:
        together, again = fn(params, x), fn(params, x)
    finally:
        torch.set_num_threads(1)
    for a, b, c in zip(*map(pytree.tree_leaves, (alone, together, again)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5 * float(a.abs().max()))
        assert torch.equal(b, c)


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ppo_is_recognised_alone_and_in_a_population(shared):
    """Policy and value: two networks, or one of both."""
    env = CartPole()
    for population in (1, 2):
        anakin = Anakin(
            lambda: PPO(env.spec, PPOConfig(shared=shared)),
            env,
            num_envs=4,
            unroll_length=8,
            learner=LearnerConfig(num_minibatches=2),
            num_iterations=1,
            compiler=(compiler := Names(population)),
        )
        anakin.iterate(anakin.init(0))
        found = compiler.found
        networks = 1 if shared else 2
        assert found["step"] == ["mlp3"] * networks
        assert found["_gradient_one"] == ["mlp3_backward"] * networks + ["mlp3_kept"] * networks
    assert ({(4, 64, 64, 3)} if shared else {(4, 64, 64, 2), (4, 64, 64, 1)}) <= mlp.FUSED


class Names(Compiler):
    """Compiles nothing, and notes the operators that each program would have."""

    def __init__(self, population):
        super().__init__(False, population)
        self.found = {}

    def __call__(self, fn, **options):
        call = super().__call__(fn, **options)

        def noted(*args):
            mapped = torch.vmap(fn) if self.population > 1 else fn
            self.found.setdefault(fn.__name__, operators(mapped, *args))
            return call(*args)

        return noted


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.torso, self.heads = network([4, 16, 16]), nn.ModuleList([nn.Linear(16, 2), nn.Linear(16, 1)])

    def forward(self, x):
        features = self.torso(x).tanh()
        return torch.cat([head(features) for head in self.heads], -1)


class Skips(nn.Module):
    """Adds a hidden layer to the output."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.first(x).tanh()
        return self.second(hidden) + hidden


@pytest.mark.parametrize(
    ("net", "forward", "backward"),
    [
        (network([4, 64, 64, 2], bias=False), [], []),
        *(
            pytest.param(net, [], [], marks=pytest.mark.slow)
            for net in (
                network([4, 24, 2]),  # no multiple of 16
                network([4, 512, 2]),  # too wide
                network([4, 2]),
                network([4, 16, 16, 16, 16, 2]),
                network([4, 64, 64, 2], nn.ELU),
                nn.Sequential(network([4, 16, 16]), nn.Tanh(), network([16, 16, 2], nn.ReLU)),
                Skips(),
            )
        ),
        (TwoHeads(), ["mlp2"], []),
    ],
)
def test_what_is_not_recognised_is_computed_all_the_same(net, forward, backward, generator):
    params, x = parameters(net), torch.randn(20, 4)
    assert operators(gradient_of(net), params, x) == backward
    require_close_to_float64(gradient_of(net), params, x)
    if forward != ["mlp2"]:
        assert operators(output_of(net), params, x) == forward
    require_close_to_float64(output_of(net), params, x)


@pytest.mark.parametrize("population", [1, 2])
def test_a_number_for_each_row_is_no_bias(population, generator):
    """As many rows as outputs: their shapes are the same."""

    def fn(x, first, second, offset):
        return offset.reshape(-1, 1) + torch.tanh(x @ first.T) @ second.T

    lead = () if population == 1 else (population,)
    args = [torch.randn(*lead, *shape, generator=generator) for shape in ((16, 4), (16, 4), (16, 16), (16,))]
    expected = (fn if population == 1 else torch.vmap(fn))(*args)
    torch.testing.assert_close(Compiler(True, population)(fn)(*args), expected, rtol=1e-4, atol=1e-4)


class Convolution(nn.Module):
    """Whose features come in the layout that the convolution likes."""

    def __init__(self):
        super().__init__()
        self.convolution, self.head = nn.Conv2d(2, 16, 3, padding=1), network([480, 16, 1], nn.ReLU)

    def forward(self, x):
        return self.head(self.convolution(x.permute(0, 3, 1, 2)).relu().flatten(1))


@pytest.mark.parametrize("population", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_inputs_come_in_any_layout(population, generator):
    net, lead = Convolution(), () if population == 1 else (population,)
    params, x = parameters(net, population), torch.randn(*lead, 7, 6, 5, 2)
    fn = output_of(net)
    assert operators(fn if population == 1 else torch.vmap(fn), params, x) == ["mlp2"]
    require_close_to_float64(fn, params, x, population)
    require_close_to_float64(gradient_of(net), params, x, population)


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("population", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_a_policy_learns_from_critics_whose_input_alone_has_a_gradient(activation, population, generator):
    """As DDPG, TD3 and SAC do: the policy's own output goes through tanh."""
    policy, critic = network([3, 64, 48, 2], activation), network([5, 32, 64, 1], activation)
    lead = () if population == 1 else (population,)
    params, x = (parameters(policy, population), parameters(critic, population)), torch.randn(*lead, 77, 3)

    def gradient(params, x):
        def loss(own):
            action = torch.func.functional_call(policy, own, (x,)).tanh()
            value = torch.func.functional_call(critic, params[1], (torch.cat([x, action], -1),))
            return (value.sin() * torch.arange(value.numel()).view_as(value)).sum()

        return torch.func.grad(loss)(params[0])

    mapped = gradient if population == 1 else torch.vmap(gradient)
    assert operators(mapped, params, x) == ["mlp3_backward", "mlp3_dx", "mlp3_kept", "mlp3_kept"]
    require_close_to_float64(gradient, params, x, population)


@pytest.mark.parametrize("sizes", [*SIZES, [70, 32, 1]])
def test_gradients_of_inputs_alone_are_right_in_every_size(sizes, generator, three_threads):
    """The operator itself, also where threads share out rows, or networks."""
    mlp.load()
    gxx.load_needed()
    kind = int(torch.randint(1, 3, ()))  # tanh or relu
    net, n = network(sizes, [nn.Tanh, nn.ReLU][kind - 1]), len(sizes) - 1
    params = parameters(net)
    flat, op = list(params.values()), getattr(torch.ops.torchpod, f"mlp{n}_dx")
    for rows in (1, 5, 98, 1025):
        x, doutput = torch.randn(rows, sizes[0], requires_grad=True), torch.randn(rows, sizes[-1])
        _, *hidden = getattr(torch.ops.torchpod, f"mlp{n}_kept")(x.detach(), *flat, kind)
        (expected,) = torch.autograd.grad(output_of(net)(params, x), x, doutput)
        dx = op(doutput, *hidden, *flat[::2], kind)
        torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-4)
        twice = [torch.stack([y, -2.0 * y]) for y in (doutput, *hidden, *flat[::2])]
        twice[1:] = [torch.stack([y[0], y[0]]) for y in twice[1:]]
        torch.testing.assert_close(op(*twice, kind), torch.stack([dx, -2.0 * dx]), rtol=1e-5, atol=1e-5)


def test_a_gradient_with_respect_to_both_is_left_alone(generator):
    net, x = network([4, 16, 2]), torch.randn(20, 4)

    def both(params, x):
        return torch.func.grad(lambda p, x: output_of(net)(p, x).sin().sum(), argnums=(0, 1))(params, x)

    assert operators(both, parameters(net), x) == []
    require_close_to_float64(both, parameters(net), x)


def test_other_types_and_second_derivatives_are_left_alone(generator):
    net, x = network([4, 16, 2]), torch.randn(20, 4)
    params = parameters(net)
    assert operators(output_of(net), *pytree.tree_map(torch.Tensor.double, (params, x))) == []

    def twice(params, x):
        inner = lambda p: output_of(net)(p, x).sin().sum()  # noqa: E731
        return torch.func.grad(lambda p: sum(g.square().sum() for g in torch.func.grad(inner)(p).values()))(params)

    require_close_to_float64(twice, params, x)


NARROWER = """
import itertools, sys, time
import torch
from torchpod.kernels import gxx, mlp

torch.set_num_threads(1)
torch.manual_seed(int(sys.argv[1]))
mlp.need = lambda name, *flags: gxx.library(name, *flags, *sys.argv[2:])
mlp.load()
ops = torch.ops.torchpod


def compute(x, parameters, doutput):
    output, *hidden = ops.mlp3_kept(x, *parameters, 1)
    return output, *ops.mlp3_backward(doutput, x, *hidden, *parameters[2::2], 1)


def plainly(x, parameters, doutput):
    parameters, y = [p.requires_grad_() for p in parameters], x
    for i in range(0, len(parameters), 2):
        y = torch.nn.functional.linear(y, *parameters[i : i + 2])
        y = y.tanh() if i + 2 < len(parameters) else y
    return y, *torch.autograd.grad(y, parameters, doutput)


for sizes in ([4, 64, 64, 2], [7, 16, 80, 20], [400, 48, 64, 3], [32, 256, 16, 5]):
    for rows in (1, 4, 9, 2048 if sizes[0] == 4 else 100):
        x = torch.randn(rows, sizes[0]) * (torch.rand(rows, sizes[0]) < (1.0 if sizes[0] < 64 else rows / 400))
        parameters = [y for a, b in itertools.pairwise(sizes) for y in (torch.randn(b, a) / a**0.5, torch.randn(b))]
        doutput = torch.randn(rows, sizes[-1])
        exact = plainly(x.double(), [p.double() for p in parameters], doutput.double())
        for actual, expected in zip(compute(x, parameters, doutput), exact, strict=True):
            size = max(1.0, float(expected.detach().abs().max())) * max(1.0, rows / 100) ** 0.5  # sums round as a walk
            torch.testing.assert_close(actual.double(), expected.detach(), rtol=1e-5, atol=3e-6 * size)
        if rows == 2048:
            times = {compute: [], plainly: []}
            for _ in range(15):
                for f, taken in times.items():
                    began = time.perf_counter()
                    f(x, parameters, doutput)
                    taken.append(time.perf_counter() - began)
print(min(times[compute]) / min(times[plainly]))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags are those of x86")
@pytest.mark.parametrize(
    ("capability", "flags", "slowest"),
    [
        (None, (), 1.5),
        pytest.param("avx2", ("-mno-avx512f",), 2.0, marks=pytest.mark.slow),
        pytest.param("default", ("-mno-avx",), 8.0, marks=pytest.mark.slow),
    ],
)
def test_vectors_of_any_width_are_right_and_not_slow(capability, flags, slowest, seed):
    """`slowest`: times what torch takes, a product of matrices after the other, with the widest vectors there are."""
    told = os.environ | ({} if capability is None else {"ATEN_CPU_CAPABILITY": capability})
    command = [sys.executable, "-c", NARROWER, str(seed), *flags]
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < slowest
