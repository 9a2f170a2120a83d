from torchpod.bench.anakin_worker import measure
from torchpod.bench.clock import Clock


def test_a_profile_accounts_for_the_timed_calls_alone():
    clock = Clock(False)
    m = measure(4, 1, 2, "update", warmup=3, compiler=clock)
    calls = {name: len(seconds) for name, seconds in clock.seconds.items()}
    assert calls["make_step.<locals>.step"] == 2 * 128  # two iterations, none of the warm-up
    assert calls["Learner._gradient_one"] == calls["Learner._apply_one"] == 2 * 16
    assert 0 < sum(map(sum, clock.seconds.values())) < sum(m["wall_s"])
    assert len(clock.table(sum(m["wall_s"])).splitlines()) == sum(map(bool, calls.values())) + 1
    assert m["env_steps"][0] <= 4 * 128 and len(m["env_steps"]) == 2  # resets are no steps
    sizes = [(4, 64), (64, 64), (64, 2), (4, 64), (64, 64), (64, 1)]  # of policy and critic
    forward, inputs = (2 * sum(i * o for i, o in layers) for layers in (sizes, [(4, 64)] * 2))
    assert m.get("flops") == forward + 4 * (3 * forward - inputs)  # to act, and four epochs
