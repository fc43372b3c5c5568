"""Slurm's short form of host names."""

from __future__ import annotations

import pytest

from trainkit.schedulers.base import expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ()),
        ("tk1", ("tk1",)),
        ("tk[1-3]", ("tk1", "tk2", "tk3")),
        ("n[1-3,07]", ("n1", "n2", "n3", "n07")),
        ("gpu[08-10]", ("gpu08", "gpu09", "gpu10")),
        ("a1,b[2,4],c", ("a1", "b2", "b4", "c")),
        ("rack[1-2]node[01-02]", ("rack1node01", "rack1node02", "rack2node01", "rack2node02")),
        ("gpu[1-2]-ib", ("gpu1-ib", "gpu2-ib")),
        ("c[a,b]", ("ca", "cb")),
    ],
)
def test_the_short_form_is_written_out(text: str, hosts: tuple[str, ...]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text", ["n[", "n]", "n[1-2", "n[[1]]", "n[]", "n[1,]", "n[3-1]", "n[1-999999]", "a,,b", "[1-400][1-400]x"]
)
def test_what_is_no_list_of_hosts_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        expand(text)
