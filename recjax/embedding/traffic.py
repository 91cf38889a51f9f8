"""Bytes that devices send to each other in the exchanges of a step: the true sizes, where the program's are padded."""

from __future__ import annotations

import numpy as np

from recjax.embedding.layout import Group
from recjax.embedding.pooled.layout import PooledExchange
from recjax.embedding.quantize import encoded_bytes
from recjax.embedding.routing.routed import GroupRouting

EXCHANGES = ("id_exchange", "row_exchange", "grad_exchange")

POOLED_EXCHANGES = ("id_exchange", "pooled_exchange", "pooled_grad_exchange")


def pooled_sent_bytes(
    exchange: PooledExchange, counts_NxO: np.ndarray, samples: int, phase: str, item_bytes: int, shared: bool = False
) -> np.ndarray:
    """Like `sent_bytes`, of an exchange of pooled vectors.

    Args:
      exchange: the exchange.
      counts_NxO: entries of the lists of ids, of all devices or the first ones: see `PooledRouting`.
      samples: b.
      phase: one of POOLED_EXCHANGES.
      item_bytes: of a table's element, if that is not bfloat16, and of a weight.
      shared: for the vectors that devices of a host have added up, across hosts.
    """
    asked, group = np.asarray(counts_NxO, np.int64), exchange.groups[0]
    N, devices = len(asked), exchange.devices
    if phase == "id_exchange":
        each = asked * (4 + item_bytes * exchange.weighted)
    else:
        forward = phase == "pooled_exchange"
        precision = exchange.exchange.forward if forward else exchange.exchange.backward
        block = int(encoded_bytes(exchange.block, precision, item_bytes))
        columns = np.array([exchange.columns(owner, shared) for owner in range(devices)])
        each = np.broadcast_to(samples * columns // exchange.block * block, (N, devices))
        if shared:  # only devices of equal numbers within their hosts
            E = devices // exchange.hosts
            each = np.where(np.arange(N)[:, None] % E == np.arange(devices)[None] % E, each, 0)
    found = np.zeros((N, group.all_devices), np.int64)
    for n in range(N):
        first = n // devices * devices  # of its replica group
        found[n, first : first + devices] = each[n]
    return found.T if phase == "pooled_exchange" else found


def sent_bytes(
    group: Group,
    counts: GroupRouting,
    phase: str,
    item_bytes: int,
    inside: bool = False,
    places: tuple[int, int] | None = None,
) -> np.ndarray:
    """Bytes of an exchange without padding. N are the devices of all replica groups, each of which keeps to itself.

    Args:
      group: the table group; not a replicated one, whose rows nobody sends.
      counts: its routing, of all devices or the first ones, in whole hosts; only counts are read.
      phase: one of EXCHANGES.
      item_bytes: of a table's element, if that is not bfloat16.
      inside: for the step inside a host of an exchange in two steps; otherwise the one with the owners.
      places: the first place in the lists and the one after the last, of rows that count; None: all do.

    Returns:
      int64 [N, N]: bytes that device n has for device m, itself included; 0 for devices that take no part. Of devices
      that asked for rows and were not counted, the column (of a row_exchange) or the row is missing.
    """
    asked_NxN = _handed(group, counts) if inside else _asked(group, counts)
    if places is not None:  # a list is filled from its first place on
        asked_NxN = np.clip(asked_NxN - places[0], 0, places[1] - places[0])
    if phase == "id_exchange":
        return asked_NxN * 4
    held_bytes = 2 if group.dtype == "bfloat16" else item_bytes
    columns_N = _relay_columns(group) if inside else _columns(group)
    forward = phase == "row_exchange"
    precision, size = (group.exchange.forward, held_bytes) if forward else (group.exchange.backward, item_bytes)
    if inside:  # decoded already, or not yet encoded
        precision, size = "float32", item_bytes
    row_N = np.array([int(encoded_bytes(int(columns), precision, size)) for columns in columns_N])
    moved_NxN = asked_NxN * row_N  # from the owner in the second place to who asked
    return moved_NxN.T if phase == "row_exchange" else moved_NxN


def _asked(group: Group, counts: GroupRouting) -> np.ndarray:
    """Rows that device n asks of device m, [N, N]; or only those of the first devices, if no others were counted."""
    counts_NxA = np.asarray(counts.counts_NxO, np.int64)
    N, E = len(counts_NxA), group.per_host if group.two_step else 1
    # Where columns are spread everyone is asked for the same rows; otherwise the m-th partner has its own number.
    partners = group.devices // E
    counts_NxP = np.broadcast_to(counts_NxA, (N, partners)) if counts_NxA.shape[1] == 1 else counts_NxA
    found = np.zeros((N, group.all_devices), np.int64)
    for n in range(N):
        first = n // group.devices * group.devices  # of its replica group
        found[n, first + n % E : first + group.devices : E] = counts_NxP[n]
    return found


def _handed(group: Group, counts: GroupRouting) -> np.ndarray:
    """Rows that device n asks of relay m of its host, [N, N]; of the first devices, if no others were counted."""
    handed_NxE = np.asarray(counts.handed_NxE, np.int64)
    N, E = len(handed_NxE), group.per_host
    found = np.zeros((N, group.all_devices), np.int64)
    for relay in range(N):
        first = relay // E * E
        found[first : first + E, relay] = handed_NxE[relay]
    return found


def _columns(group: Group) -> np.ndarray:
    """Columns of a row that each device holds, without padding, [N]."""
    split = group.columns
    widths = np.diff([int(split.start(k)) for k in range(split.owners + 1)])
    return np.tile(widths[[int(group.place(n)[1]) for n in range(group.devices)]], group.replicas)


def _relay_columns(group: Group) -> np.ndarray:
    """Columns of a row that each device has gathered as a relay, [N]: those of its number on all hosts."""
    return np.tile(group.sharding.relayed_columns(group, _columns(group)[: group.devices]), group.replicas)
