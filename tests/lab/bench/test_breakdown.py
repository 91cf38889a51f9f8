"""Which part of a step an operation belongs to, and how moments are shared among operations that overlap."""

import textwrap

import pytest

from recjax.lab.bench.breakdown import hidden_share, part_of, scopes, split


@pytest.mark.parametrize(
    ("scope", "part"),
    [
        ("jit(train_step)/gather/gather", "gather"),
        ("jit(train_step)/jvp(pool)/gather", "pool"),
        ("jit(train_step)/dense_backward/transpose(jvp(pool))/scatter-add", "pool_backward"),
        ("jit(train_step)/jvp(dense_forward)/dot_general", "dense_forward"),
        ("jit(train_step)/dense_backward/transpose(jvp(dense_forward))/dot_general", "dense_backward"),
        ("jit(train_step)/jvp(jit(log_sigmoid))/jit(softplus)/exp", "dense_forward"),  # the loss
        ("jit(train_step)/dense_backward/transpose(jvp(jit(log_sigmoid)))/mul", "dense_backward"),
        ("jit(train_step)/sparse_update/jit(argsort)/sort", "sparse_update"),
        ("jit(train_step)/shard_map/dense_update/jit(_where)/select_n", "dense_update"),
        ("jit(train_step)/div", "other"),
        ("inputs.routing.features['x'].inverse", "other"),
        ("", "other"),
    ],
)
def test_the_part_of_a_scope(scope: str, part: str) -> None:
    assert part_of(scope) == part


def test_an_operation_without_a_scope_takes_the_nearest() -> None:
    hlo = textwrap.dedent("""
        %inner (p: f32[4]) -> f32[4] {
          %p = f32[4]{0} parameter(0)
          ROOT %add.1 = f32[4]{0} add(%p, %p), metadata={op_name="jit(train_step)/sparse_update/add"}
        }

        ENTRY %main (x: f32[4]) -> f32[4] {
          %x = f32[4]{0} parameter(0), metadata={op_name="state.tables['g']"}
          %fusion = f32[4]{0} fusion(%x), kind=kLoop, calls=%inner
          %dot.2 = f32[4]{0} dot(%fusion, %x), metadata={op_name="jit(train_step)/jvp(dense_forward)/dot"}
          %copy.3 = f32[4]{0} copy(%dot.2)
          %copy.4 = f32[4]{0} copy(%copy.3)
          ROOT %far = f32[4]{0} negate(%copy.4)
        }
    """)
    found = {name: part_of(scope) for name, scope in scopes(hlo).items()}
    assert found["fusion"] == "sparse_update"  # what is inside, not what it feeds
    assert found["copy.3"] == found["copy.4"] == "dense_forward"
    assert found["dot.2"] == "dense_forward"


def test_moments_are_shared_by_what_runs_then_and_add_up() -> None:
    #  0    10    20    30    40    50
    #  aaaaaaaaaaaaaaa
    #        bbbbbbbbbbbbbbb
    #        b(again)                cccc
    shares, idle = split([(0, 30, "a"), (10, 40, "b"), (10, 20, "b"), (45, 50, "c")])
    # 0-10 a alone; 10-20 a 1/3, b 2/3; 20-30 a, b half each; 30-40 b; 40-45 nobody; 45-50 c
    assert shares == pytest.approx({"a": 10 + 10 / 3 + 5, "b": 20 / 3 + 5 + 10, "c": 5})
    assert idle == 5
    assert sum(shares.values()) + idle == pytest.approx(50)
    assert split([]) == ({}, 0.0)


def test_the_share_of_the_host_that_is_hidden() -> None:
    #  0    10    20    30    40    50
    #  hhhhhhhh       hhhhhhhhhhhhhhhhhhhhh   host, 0 to 15, 22 to 35 and 35 to 60
    #       dddddddddd    dddddd              devices: 10 to 20,
    #         ddddddddd         ddddd         12 to 25, 30 to 40 and 43 to 50
    devices = [(10, 20), (30, 40), (12, 25), (43, 50)]
    # from 10 to 50 the host works 5 + 28, of which no device does from 25 to 30 and from 40 to 43
    assert hidden_share([(0, 15), (22, 35), (35, 60)], devices) == pytest.approx(25 / 33)
    assert hidden_share([(0, 9)], devices) is None and hidden_share([(0, 9)], []) is None
