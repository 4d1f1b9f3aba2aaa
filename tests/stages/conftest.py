"""A browser for the pages of reports."""

from __future__ import annotations

import pytest

from tests.stages.browser import WHY_NOT, Browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
