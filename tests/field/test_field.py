"""Every case from the field has tests, and these exist."""

import ast
from functools import cache
from pathlib import Path

import pytest
from field_cases import CASES
from field_gradients import GRADIENTS
from field_loops import LOOPS
from field_reports import REPORTS
from field_row import Row
from field_traps import TRAPS

TESTS = Path(__file__).parents[1]
TABLES = {"cases": CASES, "loops": LOOPS, "gradients": GRADIENTS, "reports": REPORTS, "traps": TRAPS}
ROWS = [pytest.param(row, id=f"{name} {i}") for name, rows in TABLES.items() for i, row in enumerate(rows)]


@cache
def names_in(path: Path) -> frozenset[str]:
    """The names of a file's tests: functions, and methods of classes as ``Class::method``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        members = node.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test") else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names = [m.name for m in members if isinstance(m, ast.FunctionDef) and m.name.startswith("test")]
        found |= {prefix + name for name in names}
    return frozenset(found)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_says_what_is_right_and_names_tests_that_exist(row: Row) -> None:
    assert row.right.endswith(".") and row.right[0].isascii()
    assert row.tests, "no test shows it"
    assert len(set(row.tests)) == len(row.tests)
    for test in row.tests:
        file, _, name = test.partition("::")
        assert (TESTS / file).is_file(), test
        assert name in names_in(TESTS / file), test
    assert all(link.startswith("https://github.com/") for link in row.links)


def test_no_row_is_there_twice() -> None:
    said = [row.right for rows in TABLES.values() for row in rows]
    assert len(set(said)) == len(said)
    links = [link for rows in TABLES.values() for row in rows for link in row.links]
    assert len(set(links)) == len(links) >= 60
