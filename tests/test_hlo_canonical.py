"""Equal programs have equal lines, whatever their names; one other operation gives other lines."""

import re

import jax
import jax.numpy as jnp
import pytest
from support.hlo_canonical import canonical, digest

PROGRAM = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, num_partitions=2

FileNames
1 "/home/a/step.py"

%region_0.1 (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[] parameter(0), metadata={op_name="dense_grads/psum"}
  %b.1 = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a.1, %b.1), metadata={op_name="dense_grads/psum" stack_frame_id=3}
}

%fused (p.1: f32[4], p.2: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(0)
  %p.2 = f32[4]{0} parameter(1)
  ROOT %subtract.1 = f32[4]{0} subtract(%p.1, %p.2)
}

ENTRY %main.9 (p.3: f32[4], p.4: f32[4]) -> (f32[4], f32[4], s32[]) {
  %p.3 = f32[4]{0} parameter(0), sharding={replicated}, metadata={op_name="state.tables[\\'a\\']"}
  %p.4 = f32[4]{0} parameter(1), metadata={op_name="inputs.labels"}
  %all-reduce.1 = f32[4]{0} all-reduce(%p.4), channel_id=7, replica_groups={{0,1}}, to_apply=%region_0.1, metadata={op_name="psum"}
  %all-reduce.2 = f32[4]{0} all-reduce(%p.3), channel_id=9, replica_groups={{0,1}}, to_apply=%region_0.1
  %fusion.1 = f32[4]{0} fusion(%all-reduce.1, %all-reduce.2), kind=kLoop, calls=%fused
  %constant.1 = s32[] constant(5), metadata={op_name="a } in a \\"name\\""}
  ROOT %tuple.1 = (f32[4]{0}, /*index=1*/f32[4]{0}, s32[]) tuple(%fusion.1, %all-reduce.2, %constant.1)
}
"""  # noqa: E501
OUTPUTS = ("state.tables['a']", "loss", "count")


def changed(*changes):
    text = PROGRAM
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def reordered():
    """Independent instructions and whole computations in another order."""
    header, files, one, two, entry = PROGRAM.split("\n\n")
    first, p3, p4, reduce1, reduce2, fusion, constant, *last = entry.splitlines()
    entry = "\n".join([first, constant, p4, p3, reduce2, reduce1, fusion, *last])
    return "\n\n".join([header, files, two, one, entry])


@pytest.mark.parametrize(
    "same",
    [
        changed(("fusion.1", "wrapped.77"), ("%fused", "%other"), ("p.1", "q.8"), ("main.9", "b"), ("region_0.1", "r")),
        changed(("jit_step", "jit_train"), ("/home/a/step.py", "/home/b/x.py"), ("dense_grads/psum", "elsewhere")),
        changed(("channel_id=7", "channel_id=1"), ("channel_id=9", "channel_id=7")),
        changed(("/*index=1*/", ""), (', metadata={op_name="psum"}', "")),
        reordered(),
    ],
)
def test_names_numbers_metadata_and_order_do_not_count(same):
    assert same != PROGRAM
    assert canonical(same, OUTPUTS) == canonical(PROGRAM, OUTPUTS)


@pytest.mark.parametrize(
    "change",
    [
        ("subtract(", "add("),
        ("subtract(%p.1, %p.2)", "subtract(%p.2, %p.1)"),
        ("fusion(%all-reduce.1, %all-reduce.2)", "fusion(%all-reduce.2, %all-reduce.1)"),
        ("constant(5)", "constant(6)"),
        ("f32[] add(", "f32[] maximum("),
        ("f32[4]{0} subtract", "f64[4]{0} subtract"),
        ("channel_id=9", "channel_id=7"),
        ("channel_id=9, replica_groups={{0,1}}", "channel_id=9, replica_groups={{1,0}}"),
        ("sharding={replicated}", "sharding={devices=[2]<=[2]}"),
        ("kind=kLoop", "kind=kInput"),
        ("{0}: (0, {}, may-alias)", "{1}: (0, {}, may-alias)"),
        ("{0}: (0, {}, may-alias)", ""),
        ("num_partitions=2", "num_partitions=4"),
        ("tuple(%fusion.1, %all-reduce.2", "tuple(%all-reduce.2, %fusion.1"),
        ("inputs.labels", "inputs.weights"),
    ],
)
def test_one_other_operation_counts(change):
    assert digest(changed(change), OUTPUTS) != digest(PROGRAM, OUTPUTS)


def test_arguments_and_results_are_known_by_their_paths():
    other = changed(
        ("p.3 = f32[4]{0} parameter(0)", "p.3 = f32[4]{0} parameter(1)"),
        ("p.4 = f32[4]{0} parameter(1)", "p.4 = f32[4]{0} parameter(0)"),
        ("tuple(%fusion.1, %all-reduce.2, %constant.1)", "tuple(%constant.1, %fusion.1, %all-reduce.2)"),
        ("{0}: (0, {}, may-alias)", "{1}: (1, {}, may-alias)"),
        ("(f32[4]{0}, /*index=1*/f32[4]{0}, s32[]) tuple", "(s32[], f32[4]{0}, f32[4]{0}) tuple"),
        ("state.tables", "state.embeddings.tables"),
    )
    outputs = ("count", "state.embeddings.tables['a']", "loss")
    assert digest(other, outputs) != digest(PROGRAM, OUTPUTS)
    renamed = [(r"^state\.tables\b", "state.embeddings.tables")]
    assert canonical(other, outputs) == canonical(PROGRAM, OUTPUTS, renamed)


@pytest.mark.fresh_compile
def test_what_xla_really_writes_is_read_to_the_last_line():
    def compiled(function):
        text = jax.jit(function).lower(jnp.ones((3, 3)), jnp.ones(3)).compile().as_text()
        return text, canonical(text, ["loss", "grads"])

    def step(x, y):
        with jax.named_scope("a"):
            total, _ = jax.lax.scan(lambda carry, row: (carry + jnp.sin(row) @ y, None), jnp.float32(0), x)
        return total, jax.lax.cond(total > 0, jnp.cos, jnp.exp, jnp.sort(x, axis=0))

    def under_other_names(x, weights):
        scanned, _ = jax.lax.scan(lambda s, r: (s + jnp.sin(r) @ weights, None), jnp.float32(0), x)
        return scanned, jax.lax.cond(scanned > 0, jnp.cos, jnp.exp, jnp.sort(x, axis=0))

    def otherwise(x, y):
        total, _ = jax.lax.scan(lambda carry, row: (carry + jnp.cos(row) @ y, None), jnp.float32(0), x)
        return total, jax.lax.cond(total > 0, jnp.cos, jnp.exp, jnp.sort(x, axis=0))

    text, lines = compiled(step)
    instructions = len(re.findall(r"^\s+(?:ROOT )?%\S+ = ", text, re.MULTILINE))
    assert len([line for line in lines if line.startswith("  %")]) == instructions - 1  # the tuple of results
    renamed = [(r"\bweights\b", "y")]
    assert canonical(compiled(under_other_names)[0], ["loss", "grads"], renamed) == lines
    assert compiled(otherwise)[1] != lines
