"""A folder of cases is read as its authors wrote it, and mistakes in it are named."""

from pathlib import Path

import pytest

from stasis.cases.spec import expectations, read
from stasis.errors import UsageError

README = """
| case | source reports | expected | right behaviour, technique | plain |
|---|---|---|---|---|
| plain | x | A | as is | works |
| either | x | A; B at resume | compare | works |
| later | x | A | as is; unread data: then B | works |
| never | x | B | find it | refused |

| case | other table |
|---|---|
| never | A |
"""


def folder(tmp_path: Path, **programs: str) -> Path:
    (tmp_path / "programs").mkdir()
    for name, line in programs.items():
        (tmp_path / "programs" / f"{name}.py").write_text(f"{line}\nprint('done')\n")
    return tmp_path


def test_variants_have_the_keys_of_all_and_their_own(tmp_path: Path) -> None:
    line = '# CASE {"shm": "1g", "args": ["x", 1], "variants": {"a": {}, "b": {"shm2": "64m", "env": {"K": "v"}}}}'
    first, second = read(folder(tmp_path, k_one=line))
    assert (str(first), str(second)) == ("one:a", "one:b")
    assert (first.world.shm, first.world.shm2, first.world.args) == ("1g", None, ("x", "1"))
    assert (second.world.shm, second.world.shm2, second.world.env) == ("1g", "64m", {"K": "v"})


def test_keys_that_steer_another_runner_are_passed_over(tmp_path: Path) -> None:
    (case,) = read(folder(tmp_path, k_one='# CASE {"dump": ["--x"], "carry": [], "cycles": 9, "gap": 2}'))
    assert (case.variant, case.world.gap) == ("plain", 2)


@pytest.mark.parametrize(
    "line",
    ['# CASE {"gpa": 2}', '# CASE {"server": "there"}', "# CASE {", "# CASE []", '# CASE {"log": "../../etc/passwd"}'],
)
def test_mistakes_are_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match="k_one"):
        read(folder(tmp_path, k_one=line))


def test_a_readme_says_what_may_be_refused(tmp_path: Path) -> None:
    (folder(tmp_path, k_plain="", k_later="", k_never="", k_unknown="") / "README.md").write_text(README)
    assert expectations(tmp_path) == {"plain": "A", "either": "AB", "later": "AB", "never": "B"}
    assert {case.name: case.refusable for case in read(tmp_path)} == {
        "plain": False,
        "later": True,
        "never": True,
        "unknown": True,
    }


def test_without_a_readme_either_end_is_right(tmp_path: Path) -> None:
    assert [case.refusable for case in read(folder(tmp_path, anything=""))] == [True]


def test_a_pattern_chooses_by_name_and_variant(tmp_path: Path) -> None:
    line = '# CASE {"variants": {"a": {}, "b": {}}}'
    where = folder(tmp_path, k_one=line, k_two=line)
    assert [str(case) for case in read(where, "one:b")] == ["one:b"]
    with pytest.raises(UsageError, match="three"):
        read(where, "three")


def test_a_folder_without_programs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="programs"):
        read(tmp_path)
