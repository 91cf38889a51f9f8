"""The files of a trace: one for each rank, named after it. The only code here that opens files."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path

from recjax.errors import DataError
from recjax.lab.formats.trace import MAX_RANKS

MAX_BYTES = 2**31  # of one file, unpacked
RATIO, ALWAYS_BYTES = 100, 2**20  # times that a file may unpack to, beyond so much; real traces have 10 to 60
GZIPPED = ".gz"  # may stand at the end of a JSON file's name
_RANK = re.compile(r"(\d{1,9})\.(?:json|json\.gz|et)$")  # the number before the ending
_PROFILE = ".pt.trace.json"  # at the end of the names that PyTorch's profiler gives its files
NO_TRACE = (
    "these are files of PyTorch's profiler, which say when kernels ran and not what was sent. Name the folder of the "
    "execution trace of the same steps (ExecutionTraceObserver), and give this one with --kineto."
)
GROUPS = "comm_groups.json"  # names of process groups -> ranks, beside Chakra protobuf files


def rank_files(folder: Path, ending: str = "") -> dict[int, Path]:
    """Rank -> its file: those whose names end in a number and .json, .json.gz or .et, as all formats name them.

    Args:
      folder: where they lie.
      ending: take only files that end so, or so and in .gz; "" takes all.

    Raises:
      DataError: no such folder or no such file in it, two files of one rank, or a rank beyond what is possible.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder. Name the folder that holds a trace's files, one for each rank.")
    found: dict[int, Path] = {}
    profile = False
    for path in sorted(folder.iterdir()):
        profile = profile or path.name.removesuffix(GZIPPED).endswith(_PROFILE)
        match = _RANK.search(path.name)
        if not match or not path.name.removesuffix(GZIPPED).endswith(ending):
            continue
        rank = int(match.group(1))
        if rank >= MAX_RANKS:
            raise DataError(f"{path}: rank {rank:,}, but a trace has at most {MAX_RANKS:,} ranks.")
        if rank in found:
            raise DataError(
                f"{folder}: {found[rank].name} and {path.name} are both of rank {rank}. Keep each trace, and each "
                "format, in a folder of its own (or say which with --format)."
            )
        found[rank] = path
    if not found and profile:
        raise DataError(f"{folder}: {NO_TRACE}")
    if not found:
        raise DataError(
            f"{folder}: there is no trace in it: no file whose name ends in the number of a rank and "
            f"{ending or '.json or .et'}, such as trace.0.json. Write one with `recjax trace PRESET --out DIR`."
        )
    return found


def load(path: Path) -> bytes:
    """The content of one file of a trace, unpacked if its name ends in .gz.

    A packed file may be at most `ALWAYS_BYTES` and `RATIO` times its size, and no more than that is unpacked.

    Raises:
      DataError: it cannot be read, is no plain file of this folder, is too large, or a damaged gzip file.
    """
    try:
        if not path.is_file() or path.resolve().parent != path.parent.resolve():  # a link to itself is no file
            raise DataError(f"{path}: not a plain file of this folder. Copy the trace's files into it.")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DataError(f"{path}: {size:,} bytes, more than the {MAX_BYTES:,} that a trace's file may have.")
        if path.suffix != GZIPPED:
            return path.read_bytes()
        most = min(MAX_BYTES, ALWAYS_BYTES + RATIO * size)
        with gzip.open(path) as packed:
            content = packed.read(most + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: no whole gzip file ({error}). Copy it again, or rename it if it is plain.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    if len(content) > most:
        raise DataError(
            f"{path}: its {size:,} bytes unpack to more than {most:,}, the most that are read of them: {RATIO} times "
            f"as many and 1 MiB, and never more than {MAX_BYTES:,}. Traces unpack to 10 to 60 times their size; if you "
            f"trust this one, unpack it yourself: gunzip {path.name}"
        )
    return content
