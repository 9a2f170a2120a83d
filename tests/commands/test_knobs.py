"""The search, on made-up surfaces of speed and memory."""

import math
import random
from collections.abc import Callable

import pytest

from torchpod.commands.knobs import GAIN, Search, Setting
from torchpod.commands.probe import Answer, ProbeError

T = 128
START = Setting(64, num_minibatches=4)


class Surface:
    """Answers of probes by formula, with a record of what was asked. Rows of 0 agents are not cut into chunks."""

    def __init__(
        self,
        rate: Callable[[Setting], float] = lambda s: 1e6,
        memory: Callable[[Setting], float] = lambda s: 1e8 + 1e6 * s.num_envs,
        limit: float = math.inf,
        agents: int = 1,
    ) -> None:
        self.rate, self.memory, self.limit, self.agents = rate, memory, limit, agents
        self.asked: list[Setting] = []

    def __call__(self, setting: Setting) -> Answer:
        self.asked.append(setting)
        memory, limit = int(self.memory(setting)), int(min(self.limit, 10**15))
        if memory > limit:
            return Answer("out of memory", memory_bytes=limit, limit_bytes=limit, why="stopped at the limit")
        rows = T * setting.num_envs // (setting.num_minibatches or 1) * self.agents
        return Answer("fits", self.rate(setting), 1.0, memory, limit, minibatch_rows=rows)

    def envs(self) -> list[int]:
        return list(dict.fromkeys(setting.num_envs for setting in self.asked))


class TestEnvs:
    def test_it_doubles_for_as_long_as_that_is_faster(self):
        surface = Surface(rate=lambda s: s.num_envs)
        assert Search(surface, max_envs=5000).run(START).setting.num_envs == 4096
        assert surface.envs() == [64 * 2**k for k in range(7)]

    def test_past_a_peak_it_looks_twice_and_returns(self):
        surface = Surface(rate=lambda s: 1e6 - abs(s.num_envs - 1000))
        assert Search(surface).run(START).setting.num_envs == 64  # within 5 % of the peak
        surface = Surface(rate=lambda s: 1.0 / (1.0 + abs(math.log2(s.num_envs / 1024))))
        assert Search(surface).run(START).setting.num_envs == 1024
        assert max(surface.envs()) == 4096

    def test_a_gain_that_adds_up_over_two_doublings_counts(self):
        surface = Surface(rate=lambda s: 1.04 ** math.log2(s.num_envs))
        assert Search(surface, max_envs=1024).run(START).setting.num_envs == 1024
        assert Search(Surface(rate=lambda s: 1.02 ** math.log2(s.num_envs))).run(START).setting == START

    def test_rates_are_compared_as_if_each_had_a_core_of_its_own(self):
        def measure(setting: Setting) -> Answer:
            share = 0.9 if setting.num_envs == 128 else 0.1
            return Answer("fits", share * setting.num_envs, cpu_share=share)

        assert Search(measure, max_envs=1024).run(START).setting.num_envs == 1024

    def test_what_is_predicted_not_to_fit_is_not_started(self):
        surface = Surface(rate=lambda s: s.num_envs, limit=1e9)
        search = Search(surface, default_chunk=2048)
        assert search.run(START).setting.num_envs == 512
        assert max(surface.envs()) == 512  # 900 fit
        assert search.most_envs == 900
        hopeless = next(row for row in search.rows if row.answer is None)
        assert (hopeless.setting.num_envs, hopeless.fits, hopeless.rate) == (1024, False, 0.0)
        assert hopeless.predicted_bytes == pytest.approx(1e8 + 1e6 * 1024)

    def test_two_probes_predict_all_others_where_memory_is_linear(self):
        search = Search(Surface(rate=lambda s: s.num_envs), max_envs=4096)
        search.run(START)
        rows = [row for row in search.rows if row.setting.num_minibatches == 4 and row.setting.chunk_rows is None]
        assert [row.predicted_bytes for row in rows[:2]] == [None, None]
        for row in rows[2:]:
            assert row.answer and row.predicted_bytes == pytest.approx(row.answer.memory_bytes)

    def test_memory_that_jumps_unforeseen_ends_the_search_as_well(self):
        def memory(setting: Setting) -> float:
            return 1e8 if setting.num_envs < 1000 else 1e12

        surface = Surface(rate=lambda s: s.num_envs, memory=memory, limit=1e9)
        search = Search(surface, default_chunk=2048)
        assert search.run(START).setting.num_envs == 512
        assert [row.setting.num_envs for row in search.rows if row.answer and not row.fits] == [1024]
        assert search.most_envs is None  # a level line has no end

    def test_largest_goes_on_although_it_gets_slower(self, seed: int):
        rng = random.Random(seed)
        base, slope, limit = rng.uniform(0, 5e8), rng.uniform(1e4, 1e6), rng.uniform(1e9, 1e10)
        surface = Surface(lambda s: 1 / s.num_envs, lambda s: base + slope * s.num_envs, limit)
        best = Search(surface, largest=True, default_chunk=2048).run(START).setting
        fitting = int((limit - base) / slope)
        assert best.num_envs == 64 * 2 ** min(14, int(math.log2(fitting / 64)))
        assert best.num_minibatches == 1

    @pytest.mark.parametrize(("limit", "found"), [(1e9, 896), (0.7e9, 512), (0.8e9, 640), (0.9e9, 768)])
    def test_fine_also_looks_between_powers_of_two(self, limit: float, found: int):
        surface = Surface(rate=lambda s: s.num_envs, limit=limit)
        assert Search(surface, fine=True, default_chunk=2048).run(START).setting.num_envs == found

    def test_it_halves_a_start_that_does_not_fit(self):
        surface = Surface(limit=1.2e8)
        assert Search(surface).run(START).setting.num_envs == 16
        assert surface.envs()[:3] == [64, 32, 16]

    def test_no_start_has_more_than_max_envs(self):
        surface = Surface()
        Search(surface, max_envs=16).run(START)
        assert surface.envs() == [16]

    def test_where_nothing_fits_it_says_so(self):
        with pytest.raises(ProbeError, match="not even num_envs=1 fits into memory: stopped at the limit"):
            Search(Surface(limit=10)).run(START)


class TestChunks:
    @pytest.mark.parametrize("agents", [1, 100])
    @pytest.mark.parametrize("begin", [64, 4096])
    def test_a_minibatch_that_outgrows_memory_is_cut_into_chunks_that_fitted(self, begin: int, agents: int):
        """Also that of the start."""

        def memory(setting: Setting) -> float:
            rows = T * setting.num_envs // 4 * agents
            return 1e5 * setting.num_envs + 1e5 / agents * min(rows, setting.chunk_rows or rows)

        surface = Surface(lambda s: s.num_envs, memory, 1e9, agents)
        best = Search(surface).run(Setting(begin, num_minibatches=4)).setting
        # In one piece 303 fit; in chunks of the 8,192 rows that each agent of 256 has, 1,808.
        assert (best.num_envs, best.chunk_rows) == (1024, 8192 * agents)
        assert Setting(512, 4, 8192 * agents) in surface.asked  # two chunks where one was too many

    @pytest.mark.parametrize(("num_envs", "agents"), [(1024, 1), (8, 128)])
    @pytest.mark.parametrize("fastest", [256, 512, 1024, 2048, 4096, 16384])
    def test_the_fastest_chunk_is_found_above_and_below(self, fastest: int, num_envs: int, agents: int):
        def rate(setting: Setting) -> float:
            return 1.0 / (1.0 + abs(math.log2((setting.chunk_rows or 2048) / fastest)))

        start = Setting(num_envs, num_minibatches=1)
        best = Search(Surface(rate, agents=agents), max_envs=num_envs, default_chunk=2048).run(start).setting
        assert best.chunk_rows == (None if fastest == 2048 else fastest)

    def test_agents_without_chunks_are_not_asked_for_any(self):
        surface = Surface(agents=0, limit=1e9, rate=lambda s: s.num_envs)
        Search(surface, fine=True).run(START)
        assert {setting.chunk_rows for setting in surface.asked} == {None}


def test_fewer_minibatches_by_their_divisors():
    surface = Surface(rate=lambda s: 1 / (s.num_minibatches or 1))
    best = Search(surface, max_envs=64, default_chunk=2048).run(Setting(64, num_minibatches=12)).setting
    assert best.num_minibatches == 1
    assert [s.num_minibatches for s in surface.asked if s.chunk_rows is None] == [12, 6, 3, 1]


def test_minibatches_that_are_not_faster_stay_as_they_are():
    surface = Surface(rate=lambda s: 1.0 if s.num_minibatches == 12 else 0.999 * GAIN)
    best = Search(surface, max_envs=64, default_chunk=2048).run(Setting(64, num_minibatches=12)).setting
    assert best.num_minibatches == 12


@pytest.mark.parametrize("fastest", [1, 2, 4, 8])
def test_the_fastest_number_of_actors_is_found(fastest: int):
    def rate(setting: Setting) -> float:
        return 1.0 / (1.0 + abs(math.log2((setting.num_actor_threads or 1) / fastest)))

    surface = Surface(rate)
    start = Setting(64, num_minibatches=1, num_actor_threads=2)
    best = Search(surface, max_envs=64, default_chunk=2048, max_actors=4).run(start).setting
    assert best.num_actor_threads == min(4, fastest)
    assert all((setting.num_actor_threads or 0) <= 4 for setting in surface.asked)


class TestFailures:
    def test_one_that_has_nothing_to_do_with_memory_ends_the_search(self):
        def measure(setting: Setting) -> Answer:
            if setting.num_envs > 200:
                raise ProbeError("the simulator lost its licence")
            return Surface(rate=lambda s: s.num_envs)(setting)

        with pytest.raises(ProbeError, match="lost its licence"):
            Search(measure).run(START)

    def test_settings_that_cannot_work_are_refused_at_the_start_and_an_end_later(self):
        def measure(setting: Setting) -> Answer:
            if setting.num_envs > 200:
                return Answer("refused", why="too many.")
            return Surface(rate=lambda s: s.num_envs)(setting)

        assert Search(measure, max_envs=4096).run(START).setting.num_envs == 128
        with pytest.raises(ProbeError, match="too many."):
            Search(measure).run(Setting(256))

    def test_a_start_whose_half_is_refused_says_that_memory_is_what_it_lacks(self):
        surface = Surface(limit=10)

        def measure(setting: Setting) -> Answer:
            return surface(setting) if setting.num_envs > 5 else Answer("refused", why="use a multiple of 4.")

        search = Search(measure)
        with pytest.raises(ProbeError) as error:
            search.run(Setting(13, num_minibatches=4))
        assert str(error.value) == (
            "not even num_envs=6 fits into memory, and half of that is refused; lower algo.unroll_length or the size "
            "of the networks, or begin with another num_envs: use a multiple of 4."
        )
        assert [row.setting.num_envs for row in search.rows] == [13, 6, 3]
