"""The tests' own compile cache: entries are whole, scopes are those of the source, children share it, old ones go."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import compile_cache

from recjax.utils.program_cache import DAY, Entries


def test_an_entry_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    entries = Entries(str(tmp_path))
    assert entries.get("a") is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed here, or the disk is full")))
        entries.put("a", b"one")
    assert entries.get("a") is None and os.listdir(tmp_path) == []
    entries.put("a", b"two")
    entries.put("a", b"three")  # of another process, that was as quick
    assert entries.get("a") == b"three" and os.listdir(tmp_path) == ["a"]
    (tmp_path / "a").write_bytes(b"")  # after a power failure
    assert entries.get("a") is None


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path):
    Entries(str(tmp_path / "missing")).put("a", b"one")


def compiled(scope):
    def inner(x):
        with jax.named_scope(scope):
            return jnp.sin(x) @ x

    return jax.jit(inner).lower(jnp.ones((3, 3))).compile().as_text()


def elsewhere(scope):  # the same program, from other lines
    def inner(x):
        with jax.named_scope(scope):
            y = jnp.sin(x)
            return y @ x

    return jax.jit(inner).lower(jnp.ones((3, 3))).compile().as_text()


def test_a_program_from_the_cache_has_the_scopes_of_its_own_source(monkeypatch):
    keys, get = [], Entries.get
    monkeypatch.setattr(Entries, "get", lambda self, key: keys.append(key) or get(self, key))
    for scope in ("fetch", "update"):
        text = compiled(scope)
        assert f"jit(inner)/{scope}/dot_general" in text
        assert elsewhere(scope) == text
    one, two, three, four = (key for key in keys if key.startswith("jit_inner"))
    assert one == two != three == four


def test_devices_share_what_is_compiled_and_each_runs_it_itself(monkeypatch):
    """Also meshes of as many devices in another order, whose exchanges go between these."""
    kept, written = {}, []
    monkeypatch.setattr(Entries, "get", lambda self, key: kept.get(key))
    monkeypatch.setattr(Entries, "put", lambda self, key, value: (written.append(key), kept.update({key: value})))
    devices = jax.devices()

    def mine(x):
        return x * 3

    for device in devices:
        x = jax.device_put(np.float32(device.id), device)
        found = jax.jit(mine)(x)
        assert found.devices() == {device} and found == device.id * 3
    assert len([key for key in written if key.startswith("jit_mine")]) == 1

    def ours(a):
        return jax.lax.ppermute(a, "x", [(n, (n + 1) % 4) for n in range(4)]) + 10 * jax.lax.axis_index("x")

    for order in ([0, 1, 2, 3], [7, 0, 2, 5]):
        mesh = jax.sharding.Mesh(np.array(devices)[order], "x")
        x = jax.device_put(np.arange(4), jax.NamedSharding(mesh, P("x")))
        found = jax.jit(jax.shard_map(ours, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(x)
        assert np.asarray(found).tolist() == [3, 10, 21, 32]
        assert {shard.device.id: int(shard.data[0]) for shard in found.addressable_shards} == dict(
            zip(order, [3, 10, 21, 32], strict=True)
        )
    assert len([key for key in written if key.startswith("jit_ours")]) == 1


PROGRAM = "import jax; jax.jit(lambda x: x * 2 + 1)(3.0)"


@pytest.mark.full
@pytest.mark.parametrize(("path", "writes"), [(None, True), ("", False)])
def test_a_process_writes_only_if_it_does_so_safely(tmp_path, path, writes):
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    if path is not None:
        environment["PYTHONPATH"] = path  # without sitecustomize.py
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
    assert bool(os.listdir(tmp_path)) == writes


def test_what_nobody_uses_goes(tmp_path):
    now = 100 * DAY
    killed, now_written = "v1/.a.unfinished-7", "v1/.b.unfinished-8"
    for name, days in (("v1/used", 13), ("v1/old", 15), (killed, 2), (now_written, 0), ("v0/old", 15)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (now, now - days * DAY))
    compile_cache.prune(tmp_path, now)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["v1", now_written, "v1/used"]
