"""Programs that commands of one process share, for tests of files and messages: most of a command is tracing a step.

Trainers of equal configs, tables and models get the same jitted functions, which keep what they have compiled; and new
tables are copies of the first ones made. Where data lie does not enter a program, so trainers on other data share too.
Modules that count compilations, or change what a step is made of, are not marked so.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from recjax import settings
from recjax.embedding.buffers import initialise
from recjax.train import state
from recjax.train.trainer import Trainer

# Settings of a training that enter no program: where it ends, what it reads in which order, and what it writes when.
_APART = tuple(
    """
    steps epochs shuffle shuffle_blocks eval_every eval_batch_size choose_by patience workers checkpoint_every
    checkpoint_copy keep_checkpoints log_every tensorboard trackers
    """.split()
)
_PLAIN = {name: vars(Trainer)[name].func for name in ("step_program", "predict_program")}
_programs: dict[Any, Any] = {}
_tables: dict[Any, Any] = {}


def _program(name: str, trainer: Trainer) -> Any:
    if trainer.bound.cached or trainer.gives_rows:
        return _PLAIN[name](trainer)
    config = json.loads(settings.to_json(trainer.config))
    del config["data"]
    config["train"] = {name: value for name, value in config["train"].items() if name not in _APART}
    how = trainer.tasks, trainer.options.counts
    key = name, json.dumps(config), trainer.bound, trainer.mesh, nnx.graphdef(trainer.model), how
    if key not in _programs:
        _programs[key] = _PLAIN[name](trainer)
    return _programs[key]


def _initialise(bound: Any, mesh: Any, seed: int, dtype: Any = jnp.float32, apart: bool = False) -> Any:
    key = bound, mesh, seed, jnp.dtype(dtype), apart
    if key not in _tables:
        _tables[key] = initialise(bound, mesh, seed, dtype, apart)
    # The first step donates them. To copy by jnp.copy, a program would be compiled for each shape.
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), _tables[key])


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Shares meanwhile, also with what was made in an earlier `shared`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _PLAIN:
            program = functools.cached_property(functools.partial(_program, name))
            program.__set_name__(Trainer, name)
            patch.setattr(Trainer, name, program)
        patch.setattr(state, "initialise", _initialise)
        yield
