"""The floors of a network small enough to count by hand."""

import pytest

from torchpod.bench import floor

LAYERS = [(3, 4), (4, 2), (3, 4), (4, 1)]  # an actor and a critic that both read 3 numbers
GPU = floor.Gpu(bytes_per_s=1000.0, tf32_flops_per_s=100.0, float32_flops_per_s=10.0)


def test_flops_leave_out_the_gradients_of_observations_alone():
    # Forward: 2 * (12 + 8 + 12 + 4) = 72, of which 2 * (12 + 12) = 48 read the observation.
    assert floor.flops(rows=1, epochs=0, layers=LAYERS, observation_size=3) == 72
    assert floor.flops(rows=10, epochs=2, layers=LAYERS, observation_size=3) == 10 * (72 + 2 * (3 * 72 - 48))


def test_bytes_are_those_of_states_and_of_rows_written_once_and_read_once_per_epoch():
    # A row is 4 * (3 + 6) = 36 bytes: written once, read by 2 epochs; a state of 16 bytes is read and written.
    assert floor.moved_bytes(rows=5, epochs=2, observation_size=3, state_bytes=16) == 5 * (2 * 16 + 3 * 36)


def test_the_floor_is_the_largest_of_launches_bytes_and_flops():
    least = floor.floor(2_000_000, 500.0, 30.0, gpu=GPU, tf32=True)
    assert least == pytest.approx((2.0, 0.5, 0.3)) and least.seconds == pytest.approx(2.0)
    assert floor.floor(0, 500.0, 30.0, gpu=GPU, tf32=False).seconds == pytest.approx(3.0)


def test_peaks_are_found_by_the_name_of_the_device():
    assert floor.find("NVIDIA H200") is floor.GPUS["H200"]
    assert floor.find("NVIDIA H100 80GB HBM3") is floor.GPUS["H100"]
    assert floor.find("NVIDIA H100 PCIe") is floor.GPUS["H100 PCIe"]
    assert floor.find("another one") is None and floor.find(None) is None
