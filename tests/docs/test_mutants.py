"""The mutants written by hand are about the sources as they are: a name that no longer occurs would
end the nightly run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_each_written_mutant_changes_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "mutate", raising=False)
    import mutate

    found = list(mutate.mutants("written"))
    assert len({mutant.name for mutant in found}) == len(found) > 200
    for mutant in found:
        assert mutant.source != (mutate.ROOT / mutate.PACKAGE / mutant.file).read_text("utf-8")
    assert mutate.missing_tests(found) == []
