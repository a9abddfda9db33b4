"""What the operating system tells, from made-up folders, and the real one."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from asynctrt.doctor.machine import read_machine

ROOT = Path(__file__).parents[2]


def write(root, path, content):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content)


def test_limits_of_a_container_with_cgroups_of_version_2(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/pod/app\n")
    write(tmp_path, "sys/fs/cgroup/pod/cpu.max", "150000 100000\n")
    write(tmp_path, "sys/fs/cgroup/pod/app/cpu.max", "max 100000\n")
    write(tmp_path, "sys/fs/cgroup/pod/app/cpu.stat", "usage_usec 1\nnr_throttled 7\n")
    write(tmp_path, "sys/fs/cgroup/pod/memory.max", "1000000\n")
    write(tmp_path, "sys/fs/cgroup/pod/app/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/pod/app/memory.current", "900000\n")
    write(tmp_path, "sys/fs/cgroup/pod/app/memory.stat", "anon 1\ninactive_file 300000\n")
    write(tmp_path, "sys/fs/cgroup/pod/app/memory.events", "oom 3\noom_kill 2\n")
    write(tmp_path, "sys/fs/cgroup/pod/app/pids.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/pod/pids.max", "100\n")
    machine = read_machine(tmp_path)
    assert machine.quota_cores == 1.5
    assert machine.throttled == 7
    assert machine.memory_limit_nbytes == 1_000_000
    assert machine.memory_used_nbytes == 600_000
    assert machine.oom_kills == 2
    assert machine.tasks == 100


def test_limits_of_a_container_that_sees_only_its_own_group(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/../../../system.slice/docker-1.scope\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "400000 100000\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "5000\n")
    machine = read_machine(tmp_path)
    assert (machine.quota_cores, machine.memory_limit_nbytes) == (4, 5000)


def test_limits_of_a_container_with_cgroups_of_version_1(tmp_path):
    write(tmp_path, "proc/self/cgroup", "4:memory:/docker/1\n2:cpu,cpuacct:/docker/1\n1:name=systemd:/\n")
    write(tmp_path, "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us", "50000\n")
    write(tmp_path, "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us", "100000\n")
    write(tmp_path, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path, "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", "777\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path, "sys/fs/cgroup/memory/docker/1/memory.usage_in_bytes", "100\n")
    write(tmp_path, "sys/fs/cgroup/memory/docker/1/memory.oom_control", "under_oom 0\noom_kill 1\n")
    machine = read_machine(tmp_path)
    assert (machine.quota_cores, machine.memory_limit_nbytes) == (0.5, 777)
    assert (machine.memory_used_nbytes, machine.oom_kills) == (100, 1)


def test_a_machine_that_tells_nothing(tmp_path):
    machine = read_machine(tmp_path)
    assert machine.memory_limit_nbytes is None
    assert machine.quota_cores is None
    assert machine.clocksource is None
    assert machine.governors == machine.device_nodes == ()
    assert machine.gpus_on_the_bus == 0


def test_gpus_drivers_cores_and_clocks(tmp_path):
    for number, (vendor, kind) in enumerate(
        (("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000"))
    ):
        write(tmp_path, f"sys/bus/pci/devices/{number}/vendor", vendor)
        write(tmp_path, f"sys/bus/pci/devices/{number}/class", kind)
    write(tmp_path, "dev/nvidia0", "")
    write(
        tmp_path,
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12.3\n",
    )
    write(tmp_path, "proc/17/comm", "nvidia-cuda-mps\n")
    write(tmp_path, "proc/meminfo", "MemTotal:  1000 kB\n")
    write(tmp_path, "sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n")
    for core, governor in enumerate(("powersave", "performance", "powersave")):
        write(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor", f"{governor}\n")
    machine = read_machine(tmp_path)
    assert machine.gpus_on_the_bus == 1
    assert machine.device_nodes == ("/dev/nvidia0",)
    assert machine.kernel_driver == "580.95.05"
    assert machine.mps_daemons == 1
    assert machine.memory_nbytes == 1_024_000
    assert machine.clocksource == "hpet"
    assert machine.governors == ("performance", "powersave")


def test_files_that_are_not_as_expected(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "nonsense\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "\n")
    write(tmp_path, "proc/driver/nvidia/version", "\n")
    write(tmp_path, "proc/meminfo", "MemTotal: many\n")
    machine = read_machine(tmp_path)
    assert machine.quota_cores is machine.memory_limit_nbytes is machine.kernel_driver is None


@pytest.mark.tier2
def test_the_limit_of_locked_memory_is_that_of_the_process():
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    program = (
        "import json, resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536));"
        "from asynctrt.doctor.machine import read_machine; print(json.dumps(read_machine().memlock_nbytes))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30, cwd=ROOT
    )
    assert json.loads(done.stdout) == 65536
    here = read_machine().memlock_nbytes
    assert here == (None if soft == resource.RLIM_INFINITY else soft)
