"""Errors for the person who made the mistake, and the exit status each one ends with.

Every message is one paragraph: what was wrong, where (file and line, feature and row, config key),
and what to do about it. The command line prints it without a traceback; from Python it is raised.
"""

from typing import Self


class RecjaxError(Exception):
    """Base of all errors that recjax raises on purpose. Exit status 1.

    Attributes:
      everywhere: whether all processes of a run raise it together, so that none need tell the others.
    """

    exit_status = 1
    everywhere = False

    def in_all(self) -> Self:
        """Itself, as one that all processes raise."""
        self.everywhere = True
        return self


class ConfigError(RecjaxError):
    """Bad usage or configuration. Exit status 2."""

    exit_status = 2


class NoSuchName(ConfigError, KeyError):
    """A name or id that is not there; a KeyError too, so that mappings by name behave as others do."""

    __str__ = Exception.__str__  # that of KeyError would quote the message


class DataError(RecjaxError):
    """Bad, missing or damaged data. Exit status 3."""

    exit_status = 3


class DeviceError(RecjaxError):
    """A device or a peer process is missing or was lost. Exit status 4."""

    exit_status = 4


class StoppedError(SystemExit):
    """SIGTERM stopped the run: with a checkpoint, or before its first step. Status 143, as of what SIGTERM ends.

    It is a request to end the program, as Ctrl-C's `KeyboardInterrupt` is, and no mistake in a setting or in data: so
    neither `except RecjaxError` nor `except Exception` catches it, and a loop over runs ends too. Whoever lets it
    through has an exit status of 143.
    """

    exit_status = 143
    everywhere = True

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = self.exit_status  # that of the message would be 1


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, or the stop button of a notebook, stopped the run. Status 130, as of a process that SIGINT ends.

    Attributes:
      everywhere: as of `RecjaxError`.
    """

    exit_status = 130

    def __init__(self, message: str, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of a traceback: nothing went wrong at the place where it was raised."""
        return [f"KeyboardInterrupt: {self}"]


class TrainingError(RecjaxError):
    """The run itself cannot go on: a non-finite step, an unusable checkpoint, a full disk. Status 1."""


class CheckpointDamage(TrainingError):
    """A checkpoint is damaged, and no other can stand in. Exit status 3, as of damaged data."""

    exit_status = 3


def out_of_memory(error: BaseException) -> bool:
    """Returns whether memory ran out, of a device or this machine; JAX raises a plain RuntimeError then."""
    text = str(error).lower()
    said = ("out of memory", "resource_exhausted", "cannot allocate memory", "failed to map segment")  # of a library
    return isinstance(error, MemoryError) or any(words in text for words in said)
