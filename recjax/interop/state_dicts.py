"""Names and layouts of weights in the state dicts of facebookresearch/dlrm and TorchRec.

  facebook   DLRM_Net of facebookresearch/dlrm, dlrm_s_pytorch.py
             emb_l.{i}.weight, bot_l.{2k}.weight and .bias, top_l.{2k}.weight and .bias
             The interaction is the strictly lower triangle row by row, as here. The sigmoid after its last top layer
             has no weights: recjax gives the logit before it.
  torchrec   DLRM and DLRM_DCN of torchrec/models/dlrm.py
             sparse_arch.embedding_bag_collection.embedding_bags.t_{table}.weight
             dense_arch.model._mlp.{k}._linear.weight and .bias
             inter_arch.crossnet.V_kernels.{l}, W_kernels.{l} and bias.{l}, of shape [N, 1]   (DLRM_DCN)
             over_arch.model.0._mlp.{k}._linear.weight and .bias, and for the last layer over_arch.model.1.weight
             DLRM's interaction is the strictly *upper* triangle row by row, so that the columns of the first top
             layer stand in another order. Both give logits.

torch keeps a linear layer's weight as [outputs, inputs], recjax as [inputs, outputs]. Nothing here computes: values are
moved, so that a round trip gives the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import numpy as np

from recjax.embedding.spec import FeatureSpec
from recjax.errors import ConfigError
from recjax.models.dcnv2 import DCNv2Config
from recjax.models.dlrm import DLRMConfig

Arrays = dict[str, np.ndarray]
Move = Callable[[np.ndarray], np.ndarray]
FORMATS = ("facebook", "torchrec")
_FIRST_BOTTOM = {"facebook": "bot_l.0.weight", "torchrec": "dense_arch.model._mlp.0._linear.weight"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array that both sides have.

    Attributes:
      key: its name in the state dict.
      name: name of the table, or of the dense parameter.
      table: whether it is a table, [V, D] in the order of the rows.
      out: from recjax's layout to the state dict's.
      back: the inverse.
    """

    key: str
    name: str
    table: bool
    out: Move
    back: Move


def recognise(keys: Collection[str]) -> tuple[str, str]:
    """(format, prefix) of a state dict; the prefix is what wrappers put before every key, such as "model.".

    Raises:
      ConfigError: it is neither format's.
    """
    for name, first in _FIRST_BOTTOM.items():
        for key in keys:
            if key.endswith(first):
                return name, key.removesuffix(first)
    some = ", ".join(sorted(keys)[:5]) or "nothing"
    raise ConfigError(
        f"it is no state dict that recjax knows: it holds {some}{', ...' if len(keys) > 5 else ''}, but a DLRM of "
        f"facebookresearch/dlrm has {_FIRST_BOTTOM['facebook']}, and one of TorchRec {_FIRST_BOTTOM['torchrec']}. Save "
        "all of model.state_dict() with numpy.savez(FILE, **{k: v.cpu().numpy() for k, v in state_dict.items()})."
    )


def entries(
    form: str,
    model: object,
    dense: int,
    features: Sequence[FeatureSpec],
    dims: dict[str, int],
    keys: Collection[str] = (),
) -> list[Entry]:
    """All arrays of a model in a format.

    Args:
      form: one of FORMATS.
      model: config of the model.
      dense: K, dense features.
      features: its lookups in the order in which the model sees them.
      dims: lookup -> D.
      keys: those of a state dict that is read: TorchRec's table number i may be called `t_cat_{i}` there, as
        facebookresearch/dlrm's torchrec_dlrm calls Criteo's, instead of by the name that it has in recjax.

    Raises:
      ConfigError: an unknown format, or a model that the format's library cannot compute.
    """
    if form not in FORMATS:
        raise ConfigError(f"unknown format {form!r} of weights; choose one of {', '.join(FORMATS)}.")
    if why := _cannot(form, model, dense, features, dims):
        raise ConfigError(f"weights of this model do not fit {form}: {why}.")
    assert isinstance(model, DLRMConfig | DCNv2Config)
    return _facebook(model, features) if form == "facebook" else _torchrec(model, features, keys)


def _cannot(form: str, model: object, dense: int, features: Sequence[FeatureSpec], dims: dict[str, int]) -> str:
    """Features that the library of a format lacks for this model; empty if nothing."""
    tables = [f.table for f in features]
    if not isinstance(model, DLRMConfig | DCNv2Config) or (form == "facebook" and isinstance(model, DCNv2Config)):
        known = "DLRM" if form == "facebook" else "DLRM and DCN-v2"
        return f"it has no such model as model={getattr(model, 'kind', model)}, only {known}"
    if model.batch_norm:
        return "there layers are not normalised, and here model.batch_norm is set"
    if not dense:
        return "there every model has a bottom MLP, and this one has none, since its data have no dense features"
    if form == "facebook":
        if len(set(tables)) < len(tables):
            return "there every feature has a table of its own, and here some share one"
        mean = [f.name for f in features if f.pooling == "mean" and f.bag != 1]
        return f"there bags are summed, and here that of {mean[0]!r} is averaged" if mean else ""
    if not model.bottom or set(dims.values()) != {model.bottom[-1]}:
        return "there model.bottom must end in the dimension that all embeddings have"
    if len(model.top) < 2:
        return "there model.top must have two layers or more"
    if isinstance(model, DLRMConfig):
        return (
            ""
            if model.interaction == "dot" and not model.interaction_itself
            else ("there the interaction is model.interaction=dot with model.interaction_itself=false")
        )
    return (
        ""
        if model.structure == "stacked" and model.rank
        else ("there model.structure is stacked, and model.rank 1 or more")
    )


def _facebook(model: DLRMConfig | DCNv2Config, features: Sequence[FeatureSpec]) -> list[Entry]:
    found = [Entry(f"emb_l.{i}.weight", f.table, True, _same, _same) for i, f in enumerate(features)]
    found += _mlp("bottom", [f"bot_l.{2 * k}" for k in range(len(model.bottom))])
    return found + _mlp("top", [f"top_l.{2 * k}" for k in range(len(model.top))])


def _torchrec(model: DLRMConfig | DCNv2Config, features: Sequence[FeatureSpec], keys: Collection[str]) -> list[Entry]:
    found = []
    for i, table in enumerate(dict.fromkeys(f.table for f in features)):
        own, numbered = (
            f"sparse_arch.embedding_bag_collection.embedding_bags.t_{n}.weight" for n in (table, f"cat_{i}")
        )
        key = numbered if numbered in keys and own not in keys else own
        found.append(Entry(key, table, True, _same, _same))
    found += _mlp("bottom", [f"dense_arch.model._mlp.{k}._linear" for k in range(len(model.bottom))])
    top = [f"over_arch.model.0._mlp.{k}._linear" for k in range(len(model.top) - 1)] + ["over_arch.model.1"]
    if isinstance(model, DLRMConfig):
        return found + _mlp("top", top, first_inputs=_upper_triangle(model.bottom[-1], len(features)))
    for i in range(model.cross_layers):
        net = "inter_arch.crossnet"
        found.append(Entry(f"{net}.V_kernels.{i}", f"cross.v.{i}.kernel", False, np.transpose, np.transpose))
        found.append(Entry(f"{net}.W_kernels.{i}", f"cross.w.{i}.kernel", False, np.transpose, np.transpose))
        found.append(Entry(f"{net}.bias.{i}", f"cross.w.{i}.bias", False, _column, _flat))
    return found + _mlp("top", top)


def _mlp(ours: str, theirs: Sequence[str], first_inputs: np.ndarray | None = None) -> list[Entry]:
    """Entries of an MLP's layers; `first_inputs` says which of our inputs each of their first layer's inputs is."""
    found = []
    for k, layer in enumerate(theirs):
        out: Move = np.transpose
        back: Move = np.transpose
        if first_inputs is not None and k == 0:
            out, back = _reordered(first_inputs)
        found.append(Entry(f"{layer}.weight", f"{ours}.layers.{k}.kernel", False, out, back))
        found.append(Entry(f"{layer}.bias", f"{ours}.layers.{k}.bias", False, _same, _same))
    return found


def _upper_triangle(dim: int, features: int) -> np.ndarray:
    """Index, among our inputs of the first top layer, of each of TorchRec's: [dim + pairs].

    Pair (i, j), i < j, of the upper triangle row by row is pair (j, i) of the lower one, number j (j - 1) / 2 + i.
    """
    i, j = np.triu_indices(features + 1, 1)
    return np.concatenate([np.arange(dim), dim + j * (j - 1) // 2 + i])


def _reordered(inputs: np.ndarray) -> tuple[Move, Move]:
    inverse = np.argsort(inputs)
    return lambda kernel: kernel[inputs].T, lambda weight: weight.T[inverse]


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _column(x: np.ndarray) -> np.ndarray:
    return x[:, None]


def _flat(x: np.ndarray) -> np.ndarray:
    return x[:, 0]
