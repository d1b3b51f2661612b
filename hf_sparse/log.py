"""What the library tells while it works: one logger, as transformers has one."""

from __future__ import annotations

import functools
import logging
import os

logger = logging.getLogger("hf_sparse")


def show_progress_messages() -> None:
    """Called when a model is loaded, not on import: the library's own messages (a calibration begins, a plan is used)
    reach the screen unless the application set up logging itself. HF_SPARSE_VERBOSITY (debug, info, warning, error)
    sets the level.
    """
    level = os.environ.get("HF_SPARSE_VERBOSITY", "info").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(f"HF_SPARSE_VERBOSITY: expected debug, info, warning or error, got {level.lower()!r}")
    if logger.level == logging.NOTSET:
        logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("hf_sparse: %(message)s"))
        logger.addHandler(handler)


@functools.cache
def warn_once(message: str) -> None:
    """Warns once per process and message."""
    logger.warning(message)
