"""Files of tables as Arrow batches, with bounded memory: Parquet, ORC, CSV, JSON Lines, Arrow IPC (Feather).

A column of lists of structures is as many columns of lists: see `struct_lists.py`.

pyarrow is imported inside the functions, for it is slow to load.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import encodings.aliases
import glob
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal

from recjax.data.arrow import struct_lists
from recjax.data.text.source_files import unreadable
from recjax.errors import ConfigError, DataError
from recjax.utils.paths import is_remote, place
from recjax.utils.text import did_you_mean, first_repeated

Form = Literal["parquet", "orc", "csv", "json", "arrow"]
FORMS: dict[str, Form] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".orc": "orc",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".feather": "arrow",
    ".arrow": "arrow",
    ".ipc": "arrow",
}
_NAMES: dict[Form, str] = {"parquet": "Parquet", "orc": "ORC", "csv": "CSV", "json": "JSON Lines", "arrow": "Arrow"}
_TEXT: tuple[Form, ...] = ("csv", "json")
PACKED = (".gz", ".bz2", ".zst")  # of text; the others compress inside
DELIMITERS = ",\t;|"  # that a first line is searched for
UTF_8 = "utf-8"
_NEEDS = "Parquet (.parquet), ORC (.orc), CSV (.csv, .tsv, also .gz), JSON Lines (.jsonl) or Arrow (.feather, .arrow)"
_BLOCK_BYTES = 2**23  # of a text file, cut at a time
_BATCH_ROWS = 2**16
_PARQUET_ROWS = 2**17
_MALFORMED = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+): (.*)")  # what Arrow says of a line of CSV


@dataclasses.dataclass(frozen=True)
class TableFile:
    """One file.

    Attributes:
      path: where it is.
      form: its format.
      delimiter: between the fields of a CSV file; "": as the first line has it.
      title: what messages call it; "": its path.
      encoding: of the text of a CSV file.
      untyped: whether text in it may stand for numbers and times, as in a CSV file that it was made of.
    """

    path: Path
    form: Form
    delimiter: str = ""
    title: str = ""
    encoding: str = UTF_8
    untyped: bool = False

    def __str__(self) -> str:
        return self.title or str(self.path)


def find(source: str | os.PathLike[str], delimiter: str = "", encoding: str = UTF_8) -> list[TableFile]:
    """The files that a path means, by name: a file, all files of a folder and of those in it, or a pattern (* ? []).

    Raises:
      ConfigError: a name of no known format, or an encoding of files that are no text; or as for `refuse_whole_disk`.
      DataError: there is none, or they are of several formats.
    """
    text = os.fspath(source)
    whole = place(text)
    if not is_remote(whole):
        refuse_whole_disk(whole, text)
    if whole.is_dir():
        paths = list(_tables_in(whole))
        if not paths:
            raise DataError(f"{whole} holds no table. Give a file, a pattern or a folder of {_NEEDS}.")
        if parted := [path for path in paths if any("=" in part for part in path.relative_to(whole).parts[:-1])]:
            raise DataError(
                f"{parted[0]}: the name of its folder holds values of a column (NAME=VALUE), which are not read. Write "
                "the rows into files that have that column."
            )
    elif whole.exists() or not glob.has_magic(text):
        paths = [whole]
    elif is_remote(whole):
        paths = sorted(place(text[: text.rindex("/")]).glob(text[text.rindex("/") + 1 :]))
    else:
        paths = [place(path) for path in sorted(glob.glob(os.path.expanduser(text), recursive=True))]
    if not paths or not all(path.exists() for path in paths):
        parts = text.split(",")
        if len(parts) > 1 and place(parts[0]).exists():
            raise DataError(
                f"{text} is no file: several are given as a folder that holds them, or as a pattern in quotes, such as "
                f"'{place(parts[0]).parent}/*{place(parts[0]).suffix}'."
            )
        raise DataError(f"{text} does not exist.{_near(whole)} Give a file, a pattern or a folder of {_NEEDS}.")
    files = []
    for path in paths:
        form = form_of(path)
        if form is None:
            raise ConfigError(
                f"{path}: a table is read from {_NEEDS}, as the name's ending tells. Rename or convert it."
            )
        if not path.is_file():
            raise DataError(f"{path} is no regular file. Give {_NEEDS}.")
        if form != "csv" and encoding != UTF_8:
            raise ConfigError(
                f"encoding={encoding} is of CSV, and {path} is no text file: text in {_NAMES[form]} is UTF-8 always. "
                "Leave the encoding out."
            )
        files.append(TableFile(path, form, delimiter, encoding=encoding))
    if len({file.form for file in files}) > 1:
        raise DataError(f"{text} means files of several formats, {files[0].path} and others. Give one format.")
    return files


def refuse_whole_disk(path: Path, text: str) -> None:
    """Refuses a path or pattern that would have all folders of the machine searched, as a stranger's run may have it.

    Args:
      path: the same, located.
      text: what the message calls it.

    Raises:
      ConfigError: it is / or a pattern directly below, of any depth or more than two levels.
    """
    wild = [glob.has_magic(part) for part in path.parts[1:]]
    if not wild or wild[0] and ("**" in path.parts or sum(wild) > 2):
        raise ConfigError(
            f"{text} means all folders of this machine, which are not searched. Name the folder that the files lie in, "
            "as in /data/**/*.csv."
        )


def _near(path: Path) -> str:
    """A file beside one that is not there whose name is much like it, as a question; "" if there is none."""
    with contextlib.suppress(OSError):
        beside = [] if is_remote(path) else [other.name for other in path.parent.iterdir()]
        return did_you_mean(path.name, beside)
    return ""


def form_of(path: PurePath) -> Form | None:
    """The format that a name tells; None if it tells none."""
    inner = PurePath(path.stem) if path.suffix.lower() in PACKED else path
    form = FORMS.get(inner.suffix.lower())
    return form if form in _TEXT or inner is path else None


def _tables_in(folder: Path) -> Iterator[Path]:
    """Yields the tables of a folder and of those in it, by name; not what is hidden, by a dot or as Spark does."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "_")):
            continue
        if path.is_dir():
            yield from _tables_in(path)
        elif path.is_file() and form_of(path) is not None:
            yield path


def schema(file: TableFile) -> Any:
    """The Arrow schema of a file; every column of CSV is binary.

    Raises:
      DataError: it cannot be read, is empty, or has two columns of one name.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = _with_delimiter(file)
    with _reading(file), _opened(file) as stream:
        if file.form == "parquet":
            found = pq.ParquetFile(stream).schema_arrow
        elif file.form == "orc":
            found = _orc(stream).schema
        elif file.form == "arrow":
            found = _ipc(stream).schema
        elif file.form == "json":
            found = _json(stream).schema
        else:
            found = pa.schema([(name, pa.binary()) for name in _csv(file, stream).schema.names])
    found = struct_lists.flat_schema(found)
    if twice := first_repeated(name for name in found.names if name):
        raise DataError(f"{file} has two columns {twice!r}. Rename one of them.")
    return found


def footer(file: TableFile) -> tuple[Any, Any]:
    """The metadata and the Arrow schema of a Parquet file.

    Raises:
      DataError: it cannot be read.
    """
    import pyarrow.parquet as pq

    with _reading(file), _opened(file) as stream:
        opened = pq.ParquetFile(stream)
        return opened.metadata, opened.schema_arrow


def batches(file: TableFile, columns: Sequence[str]) -> Iterator[Any]:
    """The rows of a file as record batches of these columns, in this order, of any number of rows each.

    Raises:
      DataError: it cannot be read to its end; of CSV with the line.
    """
    import pyarrow.parquet as pq

    names = list(columns)
    file = _with_delimiter(file)
    last = schema(file).names[-1] if file.form == "csv" else ""
    with _reading(file), _opened(file) as stream:
        if file.form == "parquet":
            probe = pq.ParquetFile(stream)
            columns = struct_lists.columns_with(probe.schema_arrow, names)
            texts = [field.name for field in probe.schema_arrow if field.name in columns and _is_text(field.type)]
            # What Parquet has in dictionaries stays there: a third of the work.
            reader = pq.ParquetFile(stream, metadata=probe.metadata, read_dictionary=texts)
            # In the caller's thread, and many rows at once: each batch has dictionaries of its own.
            for batch in reader.iter_batches(_PARQUET_ROWS, columns=columns, use_threads=False):
                yield _bytes_where_no_text(struct_lists.with_lists(batch, names))
        elif file.form == "orc":
            stripes = _orc(stream)
            columns = struct_lists.columns_with(stripes.schema, names)
            for number in range(stripes.nstripes):  # a stripe is what ORC can read alone, some 64 MiB
                stripe = stripes.read_stripe(number, columns=columns)
                stripe = _bytes_where_no_text(struct_lists.with_lists(stripe, names))
                for start in range(0, stripe.num_rows, _BATCH_ROWS):
                    yield stripe.slice(start, _BATCH_ROWS)
        elif file.form == "arrow":
            source = _ipc(stream)
            count = getattr(source, "num_record_batches", None)  # of a file; a stream is read to its end
            read = source if count is None else map(source.get_batch, range(count))
            for batch in read:
                batch.validate(full=True)  # damaged offsets would otherwise lead anywhere in memory
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    yield struct_lists.with_lists(batch.slice(start, _BATCH_ROWS), names)
        elif file.form == "json":
            for batch in _json(stream):
                yield struct_lists.with_lists(batch, names)
        else:
            yield from _rows_of_csv(file, stream, names, last)


def _bytes_where_no_text(batch: Any) -> Any:
    """The same rows, with strings that are not UTF-8, which no reader looks for, as bytes: then their row is named."""
    import pyarrow as pa

    def as_bytes(kind: Any) -> Any:
        if pa.types.is_list(kind):
            return pa.list_(as_bytes(kind.value_type))
        return pa.binary() if _is_text(kind) else kind

    for number, (name, column) in enumerate(zip(batch.schema.names, batch.columns, strict=True)):
        words = column.dictionary if pa.types.is_dictionary(column.type) else column
        try:
            words.validate(full=True)
        except pa.ArrowInvalid:
            column = column.dictionary_decode() if words is not column else column
            batch = batch.set_column(number, name, column.cast(as_bytes(column.type)))
    return batch


def _is_text(kind: Any) -> bool:
    import pyarrow.types as t

    return t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind)


def _orc(stream: Any) -> Any:
    """An ORC file, opened."""
    from pyarrow import orc

    return orc.ORCFile(stream)


def _ipc(stream: Any) -> Any:
    """An Arrow IPC file, or else stream, opened."""
    import pyarrow as pa

    try:
        return pa.ipc.open_file(stream)
    except pa.ArrowInvalid:
        stream.seek(0)
        return pa.ipc.open_stream(stream)


def _json(stream: Any) -> Any:
    """A streaming reader of JSON Lines; the first block says which fields there are, and their types."""
    import pyarrow.json

    return pyarrow.json.open_json(stream, pyarrow.json.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES))


def _json_fault(file: TableFile, what: str) -> str:
    """Returns what is wrong with a file of JSON Lines, by a second look at it: Arrow counts rows from a block."""
    first: set[str] = set()
    with _opened(file) as stream, io.TextIOWrapper(stream, "utf-8", "surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                return f"{file}:{number}: the line is no JSON ({error}): {line.strip()[:80]!r}. Mend or remove it."
            if not isinstance(row, dict):
                return f'{file}:{number}: the line is {line.strip()[:80]}, not an object: {{"user": 1, ...}}. Mend it.'
            first = first or set(row)
            if "unexpected field" in what and (more := [key for key in row if key not in first]):
                return (
                    f"{file}:{number}: the field {more[0]!r} is not in the first rows of the file, by which the "
                    "columns are known. Give the first row all fields, null where it has no value."
                )
    return (
        f"{file} cannot be read as JSON Lines ({what}; rows count from a block of {_BLOCK_BYTES:,} bytes). Write each "
        "field with values of one type."
    )


def _rows_of_csv(file: TableFile, stream: Any, columns: list[str], last: str) -> Iterator[Any]:
    """Yields the rows of CSV; `last` is its last column."""
    batch = None
    for batch in _csv(file, stream, [*columns, last]):
        yield batch.select(columns)
    # An open quote swallows all that follows it. In another column than the last that gives too few fields.
    if batch is not None and batch.num_rows and (batch[last][-1].as_py() or b"").endswith(b"\n"):
        raise DataError(
            f"{file}: column {last!r} of the last row ends with a line end, as after a double quote that is not "
            "closed. Close it, so that the rows after it are rows again."
        )


def _csv(file: TableFile, stream: Any, columns: Sequence[str] = ()) -> Any:
    """A streaming reader of CSV; without columns only its names are of use."""
    import pyarrow.csv as csv

    parse = csv.ParseOptions(delimiter=file.delimiter, newlines_in_values=True)
    # With threads a line has no number.
    read = csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES, encoding=file.encoding)
    wanted = list(dict.fromkeys(columns))
    convert = csv.ConvertOptions(
        check_utf8=False,  # convert.py says where text is not UTF-8
        column_types=dict.fromkeys(wanted, _binary()),
        include_columns=wanted,
    )
    return csv.open_csv(stream, read, parse, convert)


def _binary() -> Any:
    import pyarrow as pa

    return pa.binary()


def _with_delimiter(file: TableFile) -> TableFile:
    """A file of CSV with the delimiter that stands most often in its first line, if none is given."""
    if file.form != "csv" or file.delimiter:
        return file
    with _reading(file), _opened(file) as stream:
        first = stream.read(2**16).decode(file.encoding, "replace").partition("\n")[0]
    return dataclasses.replace(file, delimiter=max(DELIMITERS, key=first.count))


def encoding_named(name: str) -> str:
    """The usual name of an encoding of text, in whichever way Python knows it.

    Raises:
      ConfigError: there is none, with names that are near.
    """
    if _is_encoding(name):
        return codecs.lookup(name).name
    aliases = encodings.aliases.aliases.items()
    known = sorted({each.replace("_", "-") for pair in aliases for each in pair if _is_encoding(each)})
    raise ConfigError(
        f"encoding: there is no encoding {name!r:.80}.{did_you_mean(name, known)} Some are utf-8, cp1252 (of Windows), "
        "latin-1, utf-16, shift-jis and gb18030."
    )


def _is_encoding(name: str) -> bool:
    try:
        "".encode(name)  # refuses what turns bytes into bytes, such as bz2
    except (LookupError, ValueError):
        return False
    return True


def _first_wrong_line(file: TableFile) -> int:
    """The number, from 1, of the first line of a CSV file that is no text in its encoding."""
    decoder, line = codecs.getincrementaldecoder(file.encoding)(), 1
    with _opened(file) as stream:
        while block := stream.read(_BLOCK_BYTES):
            try:
                line += decoder.decode(block).count("\n")
            except UnicodeDecodeError as error:
                return line + error.object[: error.start].decode(file.encoding, "replace").count("\n")
            except UnicodeError:  # of UTF-16 without a byte order mark
                break
    return line


@contextlib.contextmanager
def _opened(file: TableFile) -> Iterator[Any]:
    import pyarrow as pa

    with contextlib.ExitStack() as stack:
        if is_remote(file.path):
            stream = stack.enter_context(pa.PythonFile(stack.enter_context(file.path.open("rb")), "r"))
        else:
            stream = stack.enter_context(pa.OSFile(str(file.path)))
        if file.form in _TEXT and file.path.suffix.lower() in PACKED:
            stream = stack.enter_context(
                pa.CompressedInputStream(stream, {".bz2": "bz2", ".zst": "zstd"}.get(file.path.suffix.lower(), "gzip"))
            )
        yield stream


@contextlib.contextmanager
def _reading(file: TableFile) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, EOFError, ValueError) as error:
        if "Empty CSV file" in str(error):
            raise DataError(f"{file} is empty. CSV has a line that names its columns, and rows below it.") from None
        if line := _MALFORMED.search(str(error)):
            raise DataError(
                f"{file}:{line[1]}: the line has {line[3]} field(s), but the header {line[2]}: {line[4][:80]!r}. "
                "Mend the line; a field that holds the delimiter must stand in double quotes."
            ) from None
        if isinstance(error, UnicodeError):
            other = "cp1252" if file.encoding == "utf-8" else "utf-8"
            raise DataError(
                f"{file}:{_first_wrong_line(file)}: the line is no text in {file.encoding} ({error}). "
                f"Name the encoding that the file has, such as encoding={other}, or mend the line."
            ) from None
        if file.form == "json":
            raise DataError(_json_fault(file, " ".join(str(error).split())[:200].rstrip("."))) from None
        what = " ".join(str(error).split())[:200].rstrip(".")
        raise DataError(f"{file} cannot be read as {_NAMES[file.form]} ({what}). Write or copy it again.") from None
    except OSError as error:
        if error.errno is None:  # Arrow's, of the content
            what = " ".join(str(error).split())[:200].rstrip(".")
            raise DataError(f"{file} cannot be read ({what}). Write or copy it again.") from None
        raise unreadable(file.path, error) from None
