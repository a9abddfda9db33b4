"""The memory that a process may have."""

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


V2 = {"proc/self/cgroup": "0::/pod/app\n"}
V1 = {"proc/self/cgroup": "4:memory:/docker/1\n2:cpu,cpuacct:/docker/1\n1:name=systemd:/\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (V2 | {"sys/fs/cgroup/pod/memory.max": "777\n", "sys/fs/cgroup/pod/app/memory.max": "max\n"}, 777),
        (
            {
                "proc/self/cgroup": "0::/../../../system.slice/docker-1.scope\n",
                "sys/fs/cgroup/memory.max": "5000\n",
            },
            5000,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "777\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            777,
        ),
        (V2 | {"sys/fs/cgroup/memory.max": "\n", "proc/meminfo": "MemTotal: many\n"}, None),
    ],
    ids=["a group above it", "a container that sees only its own group", "version 1", "nonsense"],
)
def test_the_limit_of_a_container(tmp_path, files, expected):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    assert memory_nbytes(tmp_path) == expected
