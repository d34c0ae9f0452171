"""The number of threads: measured on the work itself, watched, recorded and repeated."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import allmlp
from allmlp import threads
from allmlp import training as loop
from allmlp.run import Budget
from train.runs import small
from train.test_train import die_at, losses

Duration = Callable[[int, float], float]


class Machine:
    """A machine with `cores`, on which a unit of work takes what `duration` says for a number of threads and a time."""

    def __init__(self, patch: pytest.MonkeyPatch, duration: Duration, cores: int = 4) -> None:
        self.now, self.count, self.duration = 0.0, cores, duration
        self.used: list[int] = []
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setattr(threads, "limit", lambda: cores)
        patch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: self.now))
        patch.setattr(threads.torch, "get_num_threads", lambda: self.count)
        patch.setattr(threads.torch, "set_num_threads", lambda count: setattr(self, "count", count))

    def work(self) -> None:
        self.used.append(self.count)
        self.now += self.duration(self.count, self.now)

    def run(self, units: int, file: Path | None = None, start: int = 0) -> threads.Threads:
        """Do some units of work; returns what chose the numbers."""
        chooser = threads.Threads(file, start)
        for _ in range(units):
            with chooser:
                self.work()
        return chooser


def quiet(count: int, now: float) -> float:
    return 0.1 / count


def busy(count: int, now: float) -> float:
    """Other processes use the cores: threads wait for one another."""
    return {1: 0.15, 2: 0.8, 4: 1.7}[count]


@pytest.mark.parametrize(
    ("duration", "best"),
    [(quiet, 4), (busy, 1), (lambda count, now: 0.001 * {1: 1.2, 2: 0.9, 4: 1.5}[count], 2)],
    ids=["quiet", "busy", "small"],
)
def test_the_fastest_number_is_used(duration: Duration, best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, duration)
    machine.run(3000)
    assert machine.used[0] == 4 and machine.used[-50:] == [best] * 50
    assert machine.used.count(best) > 2000
    machine = Machine(monkeypatch, duration)
    assert threads.choose(machine.work) == best == machine.count


def test_a_long_first_unit_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It allocates memory and compiles."""
    machine = Machine(monkeypatch, lambda count, now: 60.0 if now == 0 else 4.0 / count)
    machine.run(10)
    assert machine.used[-5:] == [4] * 5


def test_equal_speed_takes_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda count, now: 0.1 - 0.001 * count)
    assert threads.choose(machine.work) == 1


def test_fewer_threads_may_be_worth_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda count, now: {1: 0.12, 2: 0.1, 4: 0.108}[count])
    for worth, best in ((1.05, 2), (1.25, 1)):
        chooser = threads.Threads(worth=worth)
        for one in (chooser, chooser.sibling()):
            for _ in range(40):
                with one:
                    machine.work()
            assert one.count == best


@pytest.mark.parametrize(("before", "after", "best"), [(quiet, busy, 1), (busy, quiet, 4)], ids=["busy", "quiet"])
def test_a_change_is_noticed(before: Duration, after: Duration, best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda count, now: (before if now < 30 else after)(count, now))
    machine.run(2000)
    changed = next(index for index, count in enumerate(machine.used) if count == best and index > 100)
    assert machine.used[-100:] == [best] * 100, changed


def test_a_change_that_one_thread_does_not_feel(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is as fast as before when the other cores become free: measured again from time to time."""
    machine = Machine(monkeypatch, lambda count, now: 0.1 if count == 1 else 0.1 / count if now > 30 else 2.0)
    machine.run(4000)
    assert machine.used[200] == 1 and machine.used[-1] == 4


def test_measuring_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a tenth, on a machine where the wrong number is eleven times slower."""
    machine = Machine(monkeypatch, busy)
    machine.run(5000)
    assert machine.now < 1.1 * 5000 * busy(1, 0.0)


@pytest.mark.parametrize(("others", "expected"), [(3.9, {1}), (2.0, {1, 2}), (0.0, {1, 2, 4})])
def test_threads_for_spare_processors_only(others: float, expected: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors that other processes use are not tried, and the first units have one thread."""
    machine = Machine(monkeypatch, quiet)
    monkeypatch.setattr(threads, "free_seconds", lambda: (4 - others) * machine.now)
    chooser = threads.Threads(spare_only=True)
    for one in (chooser, chooser.sibling()):
        for _ in range(300):
            with one:
                machine.work()
    assert set(machine.used[:3]) == {1} and set(machine.used) == expected and machine.used[-1] == max(expected)
    monkeypatch.setattr(threads, "free_seconds", lambda: 1.0)  # now the others use all
    for _ in range(5000):
        with chooser:
            machine.work()
    assert machine.used[-1] == 1


def test_free_processors_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In seconds of all together: they grow with the work of this process, and where the system does not tell."""
    before, start = threads.free_seconds(), time.process_time()
    while time.process_time() < start + 0.05:
        pass
    assert threads.free_seconds() >= before + 0.03
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "")
    before = threads.free_seconds()
    assert threads.free_seconds() > before


def test_the_record_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is resumed anywhere has the same numbers of threads up to where the first one came."""
    file = tmp_path / threads.FILE
    first = Machine(monkeypatch, lambda count, now: (quiet if now < 5 else busy)(count, now))
    first.run(700, file)
    assert len(set(first.used)) == 3
    record = file.read_text()
    for start in (0, 3, 500, 699):
        file.write_text(record)
        again = Machine(monkeypatch, lambda count, now: 0.01)
        again.run(700 - start, file, start)
        assert again.used == first.used[start:], start
        again.run(300, file, 700)
        assert again.used[-1] == 1, "equally fast: one"


def test_the_record_of_a_machine_with_other_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has ended, and its last number is none of those that are tried here."""
    file = tmp_path / threads.FILE
    file.write_text('{"plan": [[0, 8]], "until": 10}')
    machine = Machine(monkeypatch, lambda count, now: 0.1 * count, cores=6)
    machine.run(100, file, start=10)
    assert set(machine.used) == {8, 6, 3, 1} and machine.used[-1] == 1


def test_the_record_is_written_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, machine = tmp_path / threads.FILE, Machine(monkeypatch, busy)
    chooser = threads.Threads(file)
    for unit in range(100):
        with chooser:
            plan, until = threads.read(file)
            assert unit < until and [count for first, count in plan if first <= unit][-1] == machine.count
            machine.work()
    file.write_text("[]")
    with pytest.raises(allmlp.UserError, match=r"cannot read .*threads\.json"):
        threads.Threads(file)


def test_a_number_set_by_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, machine = tmp_path / threads.FILE, Machine(monkeypatch, busy)
    machine.run(20, file)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    machine.count, machine.duration = 3, quiet
    machine.run(20, file)
    assert machine.used[-20:] == [3] * 20 and threads.choose(machine.work) == 3
    assert len(machine.used) == 40


def test_one_core_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, quiet, cores=1)
    machine.count = 8  # torch's own number knows nothing of quotas
    machine.run(5)
    assert machine.used == [1] * 5 and threads.choose(machine.work) == 1 and len(machine.used) == 5


def test_work_between_batches_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, busy)
    for _ in threads.Threads().over(range(30)):
        machine.work()
    assert len(machine.used) == 30 and machine.used[-1] == 1


def test_a_resumed_run_repeats_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps between the last checkpoint and the end of the process have the same number of threads again."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "limit", lambda: 2)
    monkeypatch.setattr(threads, "SAMPLE", 0.001)
    used: list[int] = []
    original = loop.TrainStep.__call__

    def step(self: loop.TrainStep, batches: Any) -> Any:
        used.append(torch.get_num_threads())
        return original(self, batches)

    monkeypatch.setattr(loop.TrainStep, "__call__", step)
    run = small(save_every=3, eval_every=5, budget=Budget(steps=20))
    with monkeypatch.context() as patch:
        die_at(14, patch)
        with pytest.raises(RuntimeError, match="dies here"):
            loop.train(run, tmp_path, "cpu")
    first, before = used[:], losses(tmp_path)
    assert len(first) == 14 and set(first) == {1, 2}
    # From step 12 on, with another plan for what was not recorded.
    monkeypatch.setattr(threads, "SAMPLE", 100.0)
    loop.train(run, tmp_path, "cpu")
    assert used[14:16] == first[12:14] and len(used) == 14 + 8
    assert {number: losses(tmp_path)[number] for number in before} == before


# --- how many there may be ----------------------------------------------------------------------------


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, math.inf),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/elsewhere\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/docker/1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            math.inf,
        ),
        ({}, math.inf),
    ],
    ids=["v2", "none", "parent", "container", "v1", "v1 none", "no cgroups"],
)
def test_the_quota_of_a_container(files: dict[str, str], expected: float, tmp_path: Path) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    assert threads.quota(tmp_path) == expected


def test_affinity_and_quota_limit_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for quota, expected in ((math.inf, 6), (2.5, 2), (0.5, 1), (8.0, 6)):
        monkeypatch.setattr(threads, "quota", lambda quota=quota: quota)
        assert threads.limit() == expected
