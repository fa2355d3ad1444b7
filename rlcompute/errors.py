"""Errors that the platform raises on purpose.

Every class derives from :class:`RlcomputeError` and from the standard exception that a caller would expect,
and carries one message only, so that it survives pickling between processes unchanged. A message says what
was wrong, where (file, row, key or layer) and what to do about it.
"""

from __future__ import annotations


class RlcomputeError(Exception):
    """Root of all deliberate errors."""


class ConfigError(RlcomputeError, ValueError):
    """A configuration key or value is wrong."""


class DataError(RlcomputeError, ValueError):
    """A data file or one of its rows cannot be used."""


class CheckpointError(RlcomputeError, ValueError):
    """A backbone, gate or trainer checkpoint is missing, incomplete, or belongs to something else."""


class BackendError(RlcomputeError, RuntimeError):
    """A kernel backend was forced but is not available, or cannot run the request."""


class StageTimeoutError(RlcomputeError, TimeoutError):
    """A named stage of a distributed run did not finish before its deadline."""


class WorkerError(RlcomputeError, RuntimeError):
    """A rollout worker raised: the message carries the worker's first traceback."""


class CollapseError(RlcomputeError, RuntimeError):
    """Training stopped because the policy collapsed; the message says which sign was seen."""
