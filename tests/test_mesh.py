"""The mesh: its axes, host devices in a fresh process, and what it says when devices are missing."""

import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec as P

from recjax.errors import ConfigError, DeviceError
from recjax.parallel import mesh as mesh_module
from recjax.parallel.mesh import AXES, MeshConfig, left_aside, make_mesh, replicated, sharded

pytestmark = pytest.mark.light_compile


@pytest.mark.parametrize("devices", [0, 1, 3, 8])
def test_axes_and_sizes(devices):
    mesh = make_mesh(MeshConfig(devices, "cpu"))
    assert mesh.axis_names == AXES == ("replica", "host", "device")
    assert dict(mesh.shape) == {"replica": 1, "host": 1, "device": devices or 8}
    assert mesh.devices.ravel().tolist() == jax.devices("cpu")[: devices or 8]


def test_two_levels():
    mesh = make_mesh(MeshConfig(8, "cpu", hosts=2))
    assert dict(mesh.shape) == {"replica": 1, "host": 2, "device": 4}
    assert mesh.devices.ravel().tolist() == jax.devices("cpu")  # host by host
    assert dict(make_mesh(MeshConfig(0, "cpu", hosts=4)).shape) == {"replica": 1, "host": 4, "device": 2}


def test_hosts_must_divide_the_devices():
    message = r"8 devices cannot be shared evenly among 3 hosts\. Set mesh\.hosts to 1, 2, 4 or 8, or mesh\.devices"
    with pytest.raises(ConfigError, match=message):
        MeshConfig(8, hosts=3)
    with pytest.raises(ConfigError, match=message):  # known only when there is a mesh
        make_mesh(MeshConfig(0, "cpu", hosts=3))
    with pytest.raises(ConfigError, match="hosts is 0; it must be at least 1"):
        MeshConfig(8, hosts=0)


def test_shardings():
    mesh = make_mesh(MeshConfig(4, "cpu"))
    assert sharded(mesh).spec == P(("replica", "host", "device"))
    assert sharded(mesh, ("host", "device")).spec == P(("host", "device"))
    assert sharded(mesh).shard_shape((8, 3)) == (2, 3)
    assert replicated(mesh).shard_shape((8, 3)) == (8, 3)


def test_too_few_host_devices():
    with pytest.raises(DeviceError, match=r"mesh\.devices=9, but JAX sees 8 cpu .* restart .*'jax_num_cpu_devices', 9"):
        make_mesh(MeshConfig(9, "cpu"))
    with pytest.raises(DeviceError, match=r"Pass mesh\.devices=8, on which no number depends: to the command, recjax"):
        make_mesh(MeshConfig(9, "cpu"))
    with pytest.raises(DeviceError, match=r"Pass mesh\.devices=8 mesh\.hosts=1, on which no number depends"):
        make_mesh(MeshConfig(10, "cpu", hosts=2))
    with pytest.raises(DeviceError, match=r"Pass mesh\.devices=8 mesh\.replicas=1: to"):  # averaging groups differ
        make_mesh(MeshConfig(10, "cpu", replicas=2))


def test_too_few_accelerators(monkeypatch):
    class Gpu:
        platform = "gpu"

    monkeypatch.setattr(jax, "devices", lambda *_: [Gpu(), Gpu()])
    message = r"mesh\.devices=3, but JAX sees 2 gpu .* Pass mesh\.devices=2, .* or mesh\.platform=cpu for 3 host"
    with pytest.raises(DeviceError, match=message):
        make_mesh(MeshConfig(3))


def test_a_gpu_that_is_left_aside_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(mesh_module, "_DEVICE_FILES", tmp_path)
    (tmp_path / "nvidiactl").touch()  # of the driver, which is there without a GPU too
    assert left_aside(MeshConfig(8, "cpu")) is None
    (tmp_path / "nvidia0").touch()
    assert "a GPU" in left_aside(MeshConfig(8, "cpu")) and "mesh.platform=gpu" in left_aside(MeshConfig(8, "cpu"))
    assert left_aside(MeshConfig(0, "gpu")) is None and left_aside(MeshConfig(8)) is None


def test_a_platform_that_is_not_there():
    with pytest.raises(DeviceError, match=r"mesh\.platform=tpu: JAX finds no such device .* or set mesh\.platform=cpu"):
        make_mesh(MeshConfig(1, "tpu"))


def test_a_negative_number_of_devices():
    with pytest.raises(ConfigError, match="devices is -1"):
        MeshConfig(-1)


def fresh(script: str, **environment: str) -> str:
    """What a new process prints, in which no test has set anything."""
    inherited = {k: v for k, v in os.environ.items() if k != "NPROC" and not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"from recjax.parallel.mesh import MeshConfig, make_mesh\n{script}"],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.full
@pytest.mark.smoke
def test_host_devices_are_made_before_jax_starts():
    script = """
import os, jax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
mesh = make_mesh(MeshConfig(DEVICES, "cpu"))
print(mesh.devices.size, len(jax.devices()), jax.devices()[0].platform, os.environ.get("NPROC"))
"""
    # Before JAX 0.12 threads for twice the devices, so that collectives cannot deadlock, also where a variable of JAX's
    # makes them; then as many as XLA thinks best.
    threads = ("16", "18") if jax.__version_info__ < (0, 12) else ("None", "None")
    assert fresh(script.replace("DEVICES", "5")) == f"5 5 cpu {threads[0]}"
    assert fresh(script.replace("DEVICES", "0"), JAX_NUM_CPU_DEVICES="9") == f"9 9 cpu {threads[1]}"


def test_a_platform_whose_plugin_is_not_installed(monkeypatch):
    """JAX_PLATFORMS=cuda does this to an installation for CPU: JAX fails an assertion of its own."""

    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(DeviceError, match=r"auto with JAX_PLATFORMS=cuda: JAX finds no such device \(not installed\)"):
        make_mesh(MeshConfig())


@pytest.mark.full
def test_jax_platforms_may_name_what_nobody_knows():
    script = """
from recjax.errors import DeviceError
try:
    make_mesh(MeshConfig())
except DeviceError as error:
    print(error)
"""
    message = "mesh.platform=auto with JAX_PLATFORMS=nonesuch: JAX finds no such device ("
    assert message in fresh(script, JAX_PLATFORMS="nonesuch")
