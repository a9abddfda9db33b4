"""What the operating system tells, from made-up folders, and the real one."""

from asynctrt.doctor.machine import read_machine


def write(root, path, content):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content)


def test_limits_of_a_container_with_cgroups_of_version_2(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/pod/app\n")
    write(tmp_path, "sys/fs/cgroup/pod/cpu.max", "150000 100000\n")
    write(tmp_path, "sys/fs/cgroup/pod/app/cpu.max", "max 100000\n")
    write(tmp_path, "sys/fs/cgroup/pod/memory.max", "1000000\n")
    write(tmp_path, "sys/fs/cgroup/pod/app/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/pod/app/memory.current", "900000\n")
    write(tmp_path, "sys/fs/cgroup/pod/app/memory.stat", "anon 1\ninactive_file 300000\n")
    write(tmp_path, "sys/fs/cgroup/pod/app/memory.events", "oom 3\noom_kill 2\n")
    machine = read_machine(tmp_path)
    assert machine.quota_cores == 1.5
    assert machine.memory_limit_nbytes == 1_000_000
    assert machine.memory_used_nbytes == 600_000
    assert machine.oom_kills == 2


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
    assert machine.gpu_signs == ()


def test_signs_of_gpus(tmp_path):
    for number, (vendor, kind) in enumerate(
        (("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000"))
    ):
        write(tmp_path, f"sys/bus/pci/devices/{number}/vendor", vendor)
        write(tmp_path, f"sys/bus/pci/devices/{number}/class", kind)
    write(tmp_path, "dev/nvidia0", "")
    write(tmp_path, "proc/meminfo", "MemTotal:  1000 kB\n")
    machine = read_machine(tmp_path)
    assert machine.gpu_signs == ("/dev/nvidia0", "/sys/bus/pci/devices/0")
    assert machine.memory_nbytes == 1_024_000


def test_files_that_are_not_as_expected(tmp_path):
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "nonsense\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "\n")
    write(tmp_path, "proc/meminfo", "MemTotal: many\n")
    machine = read_machine(tmp_path)
    assert machine.quota_cores is machine.memory_limit_nbytes is machine.memory_nbytes is None
