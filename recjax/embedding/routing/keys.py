"""Keys of the rows that devices need, (device, bucket, home) as one integer: distinct ones, and those of whole hosts.

The exchange in two steps has each distinct row cross from host to host once. On a mesh of several hosts with several
devices each, device (h, e) asks no owner on another host itself. For all rows of devices (*, e'), whatever their host,
its relay is (h, e'), the device of its own host with the owner's number:

  across hosts   relay (h, e') fetches from each device (h', e') the distinct rows that any device of host h asked for
  inside a host  relay (h, e') hands each device of its host the rows that this one asked for

and gradients go back the same way: summed over the devices of a host by the relay, then sent across. So a row goes to
a host once, however many of its devices look it up, and its gradient leaves the host once. Inside a host every device
gets each of its rows once, as it would in one step. This is the hierarchical exchange of Neo (Mudigere et al. 2022,
section 4.4: first over NVLink, then over the network), with duplicates removed on the way.

Where columns are spread, a relay has the columns of the devices (*, e') for every row: of column-wise tables all
relays fetch the same rows, and a device gets each row from all of them; in a grid, a row from one of them, whole.

`Merged` is made on the host that counts the batch, and needs no more than its own devices' samples; the devices need
not tell their relay what they want. What the devices do with it is in `exchange/wire.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from recjax import kernels
from recjax.embedding.group import Group


def distinct(keys_L: np.ndarray, limit: int, once: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """`np.unique(keys_L, return_inverse=True)` for integers from 0 to `limit` - 1, in linear time.

    Unless `once` equal keys stay apart: all keys, sorted.

    A radix sort by digits of 16 bits, which is how NumPy's stable sort treats 16-bit integers: five to nine times as
    fast as sorting the keys whole, with which routing took as long as all else that a step needs.

    Returns:
      the distinct keys, ascending, [U]; and the index into them of every key: int32 [L].
    """
    if once and (found := kernels.distinct(keys_L, limit)):
        return found
    order_L = np.argsort(keys_L.astype(np.uint16), kind="stable")
    for shift in range(16, (limit - 1).bit_length(), 16):
        digit_L = (keys_L >> shift).astype(np.uint16)[order_L]
        order_L = order_L[np.argsort(digit_L, kind="stable")]
    sorted_L = keys_L[order_L]
    starts_L = np.ones(len(keys_L), bool)
    if once:
        np.not_equal(sorted_L[1:], sorted_L[:-1], out=starts_L[1:])
    inverse_L = np.empty(len(keys_L), np.int32)
    inverse_L[order_L] = np.cumsum(starts_L, dtype=np.int32) - 1
    return sorted_L[starts_L], inverse_L


def ranks(bucket_U: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The place of each element within its bucket, [U].

    Args:
      bucket_U: the bucket of each element, ascending.
      counts: how many elements each bucket has.
    """
    return np.arange(len(bucket_U)) - (np.cumsum(counts) - counts)[bucket_U]


@dataclasses.dataclass(frozen=True)
class Merged:
    """The rows of a group that each host needs, whichever of its devices.

    Attributes:
      group: the table group.
      hosts: H, how many they are: all, or those of which this process has the devices.
      keys_M: sorted distinct keys (host, bucket, home); see `Group.destination`.
      index_U: for each key of a device (see `RoutedBatch.keys`) the index into `keys_M`, int32.
      counts: how many there are of each (host, bucket).
      slots_M: of a cache, the slot that each key's home has in this step: see `sharding.py`.
    """

    group: Group
    hosts: int
    keys_M: np.ndarray
    index_U: np.ndarray
    counts: np.ndarray
    slots_M: np.ndarray | None = None

    @classmethod
    def of(cls, group: Group, keys_U: np.ndarray, devices: int, rows: int) -> Merged:
        """Merges the keys (device, bucket, home) of the devices of each host, or with slots in place of homes.

        Args:
          group: the table group.
          keys_U: ascending.
          devices: whose keys; those of whole hosts.
          rows: homes, or slots, of a bucket.
        """
        hosts = devices // group.per_host
        of_device = group.owners * rows
        keys = keys_U // (of_device * group.per_host) * of_device + keys_U % of_device
        keys_M, index_U = distinct(keys, hosts * of_device, group.dedup)
        return cls(group, hosts, keys_M, index_U, np.bincount(keys_M // rows, minlength=hosts * group.owners))

    def lay_out(self, list_U: np.ndarray, rank_U: np.ndarray, C: int, across: int) -> tuple[np.ndarray, np.ndarray]:
        """Lays out the rows that each relay asks for, and those that it hands to each device of its host.

        K is `across`, A `Group.num_peers`.

        Args:
          list_U: the list that each device's key stands in, numbered device by device.
          rank_U: its place there.
          C: capacity of a list.
          across: K, capacity for the rows that a host asks of one owner.

        Returns:
          slots int32 [N, A, K], asked by each relay of A owners, or of all devices of its number if A is 1; R where
          there is nothing.
          inside int32 [N, E, C]: for each relay and each of the E devices of its host, the indices of the rows that
          this one asked for into the A * K; ascending, those beyond A * K mean nothing and differ, too.
        """
        group, H, E, A = self.group, self.hosts, self.group.per_host, self.group.num_peers
        bucket_M = self.keys_M // group.rows
        rank_M = ranks(bucket_M, self.counts)
        slots = np.full((H * group.owners, across), group.rows, np.int32)
        slots[bucket_M, rank_M] = self.keys_M % group.rows if self.slots_M is None else self.slots_M
        inside = np.tile(A * across + np.arange(C, dtype=np.int32), (H * E * group.num_row_lists, 1))
        inside[list_U, rank_U] = (bucket_M % A * across + rank_M)[self.index_U]
        wanted = inside.reshape(H, E, group.num_row_lists, C).swapaxes(1, 2)
        return self._by_relay(slots, A, across), self._by_relay(wanted, E, C)

    def relay_counts(self, lists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of rows that each relay asks of its owners, int32 [N, A], and hands to devices of its host, [N, E].

        `lists` says how many each list of each device has, [N * lists].
        """
        E = self.group.per_host
        handed = lists.astype(np.int32).reshape(self.hosts, E, self.group.num_row_lists).swapaxes(1, 2)
        return self._by_relay(self.counts.astype(np.int32), self.group.num_peers), self._by_relay(handed, E)

    def _by_relay(self, of_lists: np.ndarray, *shape: int) -> np.ndarray:
        """[N, *shape] from what each of H hosts has for each list; a single list is for all relays."""
        H, E = self.hosts, self.group.per_host
        of_relays = np.broadcast_to(of_lists.reshape(H, self.group.num_row_lists, *shape), (H, E, *shape))
        return of_relays.reshape(H * E, *shape)
