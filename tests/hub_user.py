"""This process as a user of the Hub's double."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import pytest

from hub_double import TOKEN, HubDouble, serving


@contextmanager
def logged_in(folder: Path) -> Iterator[HubDouble]:
    """A Hub with nothing on it, to which huggingface_hub and transformers talk meanwhile, with a token and with their
    caches in `folder`.
    """
    constants = huggingface_hub.constants
    with serving() as double, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", double.url)
        template = double.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", double.url)
        patch.setattr("transformers.utils.hub._hf_api", None)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the double speaks LFS
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr(constants, "HF_ASSETS_CACHE", str(folder / "assets"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
        patch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between tries
        patch.setenv("HF_TOKEN", TOKEN)
        yield double
