"""The doctor's measurements between two real processes that take themselves for two hosts."""

import pytest

from launchers import write_config


@pytest.fixture(scope="module")
def seen(launch_once, tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "runs").mkdir()
    return launch_once("ranks_doctor.py", write_config(folder), folder / "runs")


def test_all_ranks_have_the_hosts_and_the_figures(seen):
    assert [rank["hosts"] for rank in seen] == [[["n0", 1], ["n1", 1]]] * 2
    first = seen[0]["network"]
    assert (first["backend"], first["ranks"], first["hosts"], first["bytes"]) == ("gloo", 2, 2, 2**20)
    assert 0 < first["latency"] < 1
    assert first["bandwidth"] > 1e5
    assert set(first["links"]) == {"n0", "n1"}
    assert all(speed > 1e5 for speed in first["links"].values())


def test_the_clock_that_is_ahead_is_found_within_its_uncertainty(seen):
    for rank in seen:
        clocks = rank["network"]["clocks"]
        assert clocks["n0"] == {"ahead_seconds": 0.0, "uncertainty_seconds": 0.0}
        error = abs(clocks["n1"]["ahead_seconds"] - 7.0)
        assert error <= clocks["n1"]["uncertainty_seconds"] < 1
        (found,) = [each for each in rank["findings"] if each["code"] == "clock"]
        assert (found["level"], found["hosts"]) == ("problem", ["n1"])


def test_the_host_that_differs_is_named(seen):
    (found,) = [each for each in seen[0]["findings"] if each["code"] == "hosts-differ"]
    assert "driver" in found["text"]
    assert found["level"] == "warning"


def test_a_shared_folder_is_seen_and_others_are_not(seen):
    assert not [each for each in seen[0]["findings"] if each["code"] == "disk-not-shared"]
    assert [rank["apart"] for rank in seen] == [[True, False]] * 2
    assert [rank["left"] for rank in seen] == [[[], []]] * 2


def test_rank_0_alone_examines_the_run(seen):
    assert seen[1]["of_run"] is None
    assert "gemm-emulated" in seen[0]["of_run"]
    assert seen[0]["devices_of_host"] == 1
