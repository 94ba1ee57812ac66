from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import OperationFailed
from aenv.vmm import modules

DEP = """\
kernel/drivers/virtio/virtio_mmio.ko: kernel/drivers/virtio/virtio.ko kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/virtio/virtio.ko: kernel/drivers/virtio/virtio_ring.ko
kernel/drivers/virtio/virtio_ring.ko:
kernel/drivers/net/virtio_net.ko.xz: kernel/net/core/failover.ko.xz kernel/drivers/net/net_failover.ko.xz
kernel/drivers/net/net_failover.ko.xz: kernel/net/core/failover.ko.xz
kernel/net/core/failover.ko.xz:
kernel/drivers/char/hw_random/virtio-rng.ko:
"""


def test_dependencies_come_first_and_once() -> None:
    order = modules.load_order(["virtio_net", "virtio_mmio"], modules.parse_dependencies(DEP), [])
    assert [modules.canonical(path) for path in order] == [
        "failover",
        "net_failover",
        "virtio_net",
        "virtio_ring",
        "virtio",
        "virtio_mmio",
    ]


def test_dash_and_underscore_are_the_same() -> None:
    order = modules.load_order(["virtio_rng"], modules.parse_dependencies(DEP), [])
    assert order == ["kernel/drivers/char/hw_random/virtio-rng.ko"]


def test_builtin_modules_are_left_out_and_missing_ones_refused() -> None:
    assert modules.load_order(["fuse"], {}, ["kernel/fs/fuse/fuse.ko"]) == []
    with pytest.raises(OperationFailed, match="lacks the module fuse"):
        modules.load_order(["fuse"], {}, [])
    with pytest.raises(OperationFailed, match=r"lacks the module b\.ko"):
        modules.load_order(["a"], {"a.ko": ["b.ko"]}, [])


def test_a_circle_is_named() -> None:
    with pytest.raises(OperationFailed, match=r"circle: a\.ko → b\.ko → a\.ko"):
        modules.load_order(["a"], {"a.ko": ["b.ko"], "b.ko": ["a.ko"]}, [])


@given(st.dictionaries(st.integers(0, 40), st.lists(st.integers(0, 40), max_size=4), max_size=40), st.data())
def test_any_order_is_valid(graph: dict[int, list[int]], data: st.DataObject) -> None:
    # Only smaller numbers are depended on, so there is no circle.
    dependencies = {f"m{n}.ko": [f"m{d}.ko" for d in needs if d < n and d in graph] for n, needs in graph.items()}
    wanted = data.draw(st.lists(st.sampled_from(sorted(dependencies)), max_size=6)) if dependencies else []
    order = modules.load_order(wanted, dependencies, [])
    assert len(order) == len(set(order))
    assert set(wanted) <= set(order)
    for position, path in enumerate(order):
        assert set(dependencies[path]) <= set(order[:position])
