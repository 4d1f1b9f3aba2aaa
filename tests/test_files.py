"""Directories that take the place of others."""

from __future__ import annotations

import pytest

from grpo_megatron.files import empty_directory, replace_directory


@pytest.mark.parametrize("is_link", [False, True])
def test_a_directory_takes_the_place_of_another_or_of_a_link(tmp_path, is_link):
    """What the link points to is somebody else's."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "old").touch()
    final = tmp_path / "final"
    if is_link:
        final.symlink_to(elsewhere)
    else:
        elsewhere.rename(final)
    working = empty_directory(tmp_path / "working")
    (working / "new").touch()
    replace_directory(working, final)
    assert [path.name for path in final.iterdir()] == ["new"] and not final.is_symlink()
    assert (elsewhere / "old").exists() == is_link and not working.exists()


def test_an_emptied_link_becomes_a_directory(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "old").touch()
    link = tmp_path / "link"
    link.symlink_to(elsewhere)
    assert list(empty_directory(link).iterdir()) == []
    assert not link.is_symlink() and (elsewhere / "old").exists()
