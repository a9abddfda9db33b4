"""A Ray cluster of two nodes on this machine, which leaves nothing behind."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent


@contextmanager
def two_nodes(**environment):
    """Start a cluster without proxies, connect to it, and end it.

    :param environment: more variables of its processes.
    """
    # Paths of its sockets are long, and their length is limited.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    before = dict(os.environ)
    # It writes files beside those of its nodes, and expects that the folder is there.
    (Path(folder) / "ray").mkdir()
    os.environ.update(
        {
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **environment,
        }
    )
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster()
    try:
        for _ in range(2):
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        serve.start(proxy_location="Disabled")
        yield cluster
    finally:
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)
