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
    predict.add_argument("run_folder", type=expanded, metavar="DIR", help="run folder; needs nothing else")
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
        required=True,
        metavar="FILE",
        help="raw rows: .jsonl (each raw column by name), the text of Criteo or Avazu, with or without labels, also "
        ".gz; of a table of one's own also Parquet, ORC, CSV or Arrow; or a folder of prepared data",
    )
    predict.add_argument(
        "--out",
        type=expanded,
        required=True,
        metavar="FILE",
        help=".csv or .jsonl: row (from 1), logit, probability, in the input's order; replaces a file of scores",
    )
    predict.add_argument(
        "--columns",
        default="",
        metavar="A,B",
        help="columns of the input that the scores carry, as they are there, or `all`",
    )
    predict.add_argument("--overwrite", action="store_true", help="replace --out also if it is no file of scores")
    predict.add_argument(
        "--split", default="test", choices=("train", "validation", "test"), help="of a folder (default: test)"
    )
    common.checkpoint(predict)

    export = common.verb(
        names,
        "export",
        verbs.export,
        "write a trained model as a folder that runs without recjax",
        "export runs/first --out exported --quantize int8",
    )
    export.add_argument("run_folder", type=expanded, metavar="DIR", help="run folder; needs nothing else")
    common.overrides(export)
    common.trusting(export)
    export.add_argument(
        "--out", type=expanded, required=True, metavar="DIR", help="folder to write; must not exist, or be empty"
    )
    export.add_argument(
        "--format",
        choices=("stablehlo", "onnx"),
        default="stablehlo",
        help="stablehlo is run by JAX (the default), onnx by onnxruntime",
    )
    export.add_argument(
        "--quantize",
        choices=("none", "bfloat16", "int8", "int4"),
        default="none",
        help="how rows of tables are written (default: none, as they are)",
    )
    export.add_argument(
        "--user",
        default="",
        metavar="A,B",
        help="features that all candidates of a request have in common: they are looked up once for all of them",
    )
    export.add_argument(
        "--disk",
        default="",
        metavar="A,B",
        help="tables that stay on disk (or `all`): a few rows of them are kept in memory, and each has a checksum",
    )
    export.add_argument(
        "--platforms", default="cpu,cuda,tpu", metavar="A,B", help="where StableHLO is to run (default: cpu,cuda,tpu)"
    )
    common.checkpoint(export)

    serve = common.verb(
        names,
        "serve",
        verbs.serve,
        "answer requests for scores over HTTP, by an export or a run",
        "serve exported --port 8000",
    )
    serve.add_argument("folder", type=expanded, metavar="DIR", help="what `recjax export` wrote, or a run folder")
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="to listen on; 0.0.0.0 lets other machines in, and nothing asks who they are (default: 127.0.0.1)",
    )
    serve.add_argument("--port", type=int, default=8000, metavar="N", help="0: any that is free (default: 8000)")
    serve.add_argument(
        "--most-candidates",
        type=int,
        default=512,
        metavar="N",
        help="of a request, and that are scored at once (default: 512)",
    )
    serve.add_argument(
        "--queue",
        type=int,
        default=128,
        metavar="N",
        help="requests that may be under way; further ones are refused with status 503 (default: 128)",
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
        "--quantize", choices=("none", "bfloat16", "int8", "int4"), help="of a run folder: as for export"
    )
    serve.add_argument("--user", default="", metavar="A,B", help="of a run folder: as for export")
    serve.add_argument("--step", type=common.step, metavar="STEP", help="of a run folder: as for export")
    serve.set_defaults(tunables=True)
