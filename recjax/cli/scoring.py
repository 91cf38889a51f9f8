"""The options of the verbs that give scores: `predict`, `export`, `serve`."""

from __future__ import annotations

from typing import Any

from recjax.cli import common, verbs
from recjax.utils.paths import expanded


def add(names: Any) -> None:
    """Adds the verbs to these subparsers."""
    predict = common.verb(
        names,
        "predict",
        verbs.predict,
        "write the scores of a file of rows",
        "predict runs/first --input rows.jsonl --out scores.csv --columns user,movie",
    )
    predict.add_argument(
        "run_folder", type=expanded, metavar="DIR", help="run folder; the training data are not needed"
    )
    predict.set_defaults(tunables=True)
    predict.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="a.b=value",
        help="settings to change; on_error=skip leaves malformed rows out of the scores, counts them and names the "
        "first",
    )
    common.trusting(predict)
    predict.add_argument(
        "--input",
        type=expanded,
        metavar="FILE",
        help="raw rows: .jsonl (each raw column by name), the text of Criteo or Avazu, with or without labels, also "
        ".gz; for a table of one's own also Parquet, ORC, CSV or Arrow; or a folder of prepared data. With --topk a "
        "table with the users' column (default: all users that training has seen)",
    )
    predict.add_argument(
        "--topk",
        type=int,
        metavar="K",
        help="write the K best of all items for each user, by a model of two sides: row (of the user), rank, score, "
        "user, item",
    )
    common.excluding(predict, "train,validation")
    predict.add_argument(
        "--out",
        type=expanded,
        required=True,
        metavar="FILE",
        help="file of scores to write, .csv, .jsonl or .parquet: row (from 1), logit, probability, in the input's "
        "order; replaces an older file of scores",
    )
    predict.add_argument(
        "--columns",
        default="",
        metavar="A,B",
        help="columns of the input to copy to the scores unchanged, or `all`",
    )
    predict.add_argument("--overwrite", action="store_true", help="replace --out even if it is no file of scores")
    predict.add_argument(
        "--split",
        default="test",
        choices=("train", "validation", "test"),
        help="split of a folder of prepared data (default: test)",
    )
    common.checkpoint(predict)

    export = common.verb(
        names,
        "export",
        verbs.export,
        "write a trained model as a folder that runs without recjax",
        "export runs/first --out exported --quantize int8",
    )
    export.add_argument("run_folder", type=expanded, metavar="DIR", help="run folder; the training data are not needed")
    common.overrides(export)
    common.trusting(export)
    export.add_argument(
        "--out", type=expanded, required=True, metavar="DIR", help="folder to write; must not exist, or be empty"
    )
    export.add_argument(
        "--format",
        choices=("stablehlo", "onnx"),
        default="stablehlo",
        help="format of the model: stablehlo for JAX (the default), onnx for onnxruntime",
    )
    export.add_argument(
        "--quantize",
        choices=("none", "bfloat16", "int8", "int4"),
        default="none",
        help="format of the tables' rows (default: none, unchanged)",
    )
    export.add_argument(
        "--user",
        default="",
        metavar="A,B",
        help="features that all candidates of a request have in common, and that are looked up once for all of them",
    )
    export.add_argument(
        "--disk",
        default="",
        metavar="A,B",
        help="tables that stay on disk (or `all`), of which a few rows are kept in memory; each row has a checksum",
    )
    export.add_argument(
        "--platforms",
        default="cpu,cuda,tpu",
        metavar="A,B",
        help="platforms on which StableHLO is to run (default: cpu,cuda,tpu)",
    )
    common.checkpoint(export)

    serve = common.verb(
        names,
        "serve",
        verbs.serve,
        "answer requests for scores over HTTP, by an export or a run",
        "serve exported --port 8000",
    )
    serve.add_argument(
        "folder", type=expanded, metavar="DIR", help="folder that `recjax export` wrote, or a run folder"
    )
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1); 0.0.0.0 accepts other machines. There is no authentication",
    )
    serve.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port to listen on; 0: any that is free (default: 8000)"
    )
    serve.add_argument(
        "--most-candidates",
        type=int,
        default=512,
        metavar="N",
        help="largest number of candidates in a request and in a scored batch (default: 512)",
    )
    serve.add_argument(
        "--queue",
        type=int,
        default=128,
        metavar="N",
        help="largest number of requests under way; further ones are refused with status 503 (default: 128)",
    )
    serve.add_argument(
        "--connections",
        type=int,
        default=512,
        metavar="N",
        help="largest number of open connections, idle ones included; further ones get status 503 (default: 512)",
    )
    serve.add_argument(
        "--window-ms",
        type=float,
        default=1.0,
        metavar="MS",
        help="time that a request waits for others that are under way, to be scored together (default: 1)",
    )
    common.caches(serve)
    serve.add_argument(
        "--quantize",
        choices=("none", "bfloat16", "int8", "int4"),
        help="for a run folder: as --quantize of `recjax export`",
    )
    serve.add_argument("--user", default="", metavar="A,B", help="for a run folder: as --user of `recjax export`")
    serve.add_argument(
        "--step", type=common.step, metavar="STEP", help="for a run folder: as --step of `recjax export`"
    )
    common.trusting(serve)
    serve.set_defaults(tunables=True, ends_by_signal=True)
