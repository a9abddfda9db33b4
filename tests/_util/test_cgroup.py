"""The memory that a process may have; tests/doctor/test_machine.py tries the rest of a container's limits."""

import pytest

from asynctrt._util.cgroup import memory_nbytes


@pytest.mark.parametrize(
    ("total_kib", "limit", "expected"),
    [(1000, "max", 1_024_000), (1000, "500000", 500_000), (1000, "5000000", 1_024_000), (None, "7", 7)],
)
def test_the_least_of_the_machines_and_the_containers_counts(tmp_path, total_kib, limit, expected):
    for folder in ("proc/self", "sys/fs/cgroup"):
        (tmp_path / folder).mkdir(parents=True)
    if total_kib is not None:
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: {total_kib} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(limit)
    assert memory_nbytes(tmp_path) == expected


def test_a_system_that_does_not_tell(tmp_path):
    assert memory_nbytes(tmp_path) is None
