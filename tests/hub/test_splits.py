"""Which files of a data set hold which split of which subset."""

from __future__ import annotations

import pytest

from trainkit.hub.cache import missing_files, needed_files
from trainkit.hub.references import RepoRef
from trainkit.hub.splits import NoSuchPartError, RowSelection, files_by_split, of_other_formats, selected_splits

SUBSETS = """---
license: odc-by
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
  - split: test
    path: ["held/out-[0-9]*.parquet", "held/more/**"]
- config_name: code
  data_dir: code
---
# A data set
---
"""
FILES = [
    "README.md",
    "code/dev.jsonl",
    "code/train.jsonl",
    "data/2019/000.parquet",
    "data/2020/000.parquet",
    "held/more/x/deep.parquet",
    "held/out-1.parquet",
    "held/out-a.parquet",
    "sample/100BT/0.parquet",
    "sample/10BT/0.parquet",
    "sample/10BT/notes.txt",
]
CONVERTED = ["default/train/0000.parquet", "en/partial-train/0000.parquet", "en/test/0000.parquet"]


def head(configs: str) -> str:
    return f"---\nconfigs:\n{configs}\n---\n"


def test_a_readme_lists_subsets_by_patterns() -> None:
    assert files_by_split(FILES, SUBSETS) == {"train": ("data/2019/000.parquet", "data/2020/000.parquet")}
    assert files_by_split(FILES, SUBSETS, "sample-10BT") == {
        "train": ("sample/10BT/0.parquet",),
        "test": ("held/more/x/deep.parquet", "held/out-1.parquet"),
    }
    assert files_by_split(FILES, SUBSETS, "code") == {"train": ("code/train.jsonl",), "validation": ("code/dev.jsonl",)}


@pytest.mark.parametrize(
    ("configs", "found"),
    [
        ("- config_name: a\n  data_files: one.jsonl", {"train": ("one.jsonl",)}),
        ("- data_files: [one.jsonl, two.jsonl]", {"train": ("one.jsonl", "two.jsonl")}),
        ("- data_files: {test: two.jsonl}", {"test": ("two.jsonl",)}),
        ("- {config_name: a, data_files: one.jsonl}\n- {config_name: b, data_files: two.jsonl, default: true}",
         {"train": ("two.jsonl",)}),
        ("- {config_name: a, data_files: './t?o.jsonl'}", {"train": ("two.jsonl",)}),
    ],
)  # fmt: skip
def test_the_forms_in_which_a_readme_lists_files(configs: str, found: dict[str, tuple[str, ...]]) -> None:
    assert files_by_split(["one.jsonl", "two.jsonl"], head(configs)) == found


@pytest.mark.parametrize("readme", ["", "# Rows", "---\nconfigs: {\n---\n", "---\nlicense: mit\n---\n", "---\n[]\n---"])
def test_without_a_list_names_and_folders_tell(readme: str) -> None:
    names = ["README.md", "a/train-00000-of-00002.parquet", "dev.parquet", "test/x.parquet", "x.parquet", "y.jsonl"]
    assert files_by_split(names, readme) == {
        "train": ("a/train-00000-of-00002.parquet", "x.parquet"),
        "validation": ("dev.parquet",),
        "test": ("test/x.parquet",),
    }
    assert of_other_formats([*names, "dataset_info.json", ".z.csv", "a/z.csv.gz"], readme) == ["a/z.csv.gz", "y.jsonl"]
    assert files_by_split(["rows.json", "dataset_info.json"], readme) == {"train": ("rows.json",)}
    assert of_other_formats([], readme) == []


def test_shards_of_another_name_beside_known_splits_are_a_split_of_their_own() -> None:
    names = [f"plain_text/{each}-00000-of-00001.parquet" for each in ("test", "train", "unsupervised")]
    assert files_by_split(names) == dict(
        zip(("test", "train", "unsupervised"), [(each,) for each in names], strict=True)
    )
    parts = [f"part-{number:05}-of-00002.parquet" for number in range(2)]
    assert files_by_split(parts) == {"train": tuple(parts)}


def test_the_hubs_own_conversion_has_folders_of_subsets() -> None:
    assert files_by_split(CONVERTED) == {"train": ("default/train/0000.parquet",)}
    assert files_by_split(CONVERTED, subset="en").keys() == {"partial-train", "test"}
    assert files_by_split(CONVERTED[1:]).keys() == {"partial-train", "test"}  # the only one
    with pytest.raises(NoSuchPartError, match="several subsets, and none is the default"):
        files_by_split([*CONVERTED[1:], "de/train/0000.parquet"])


@pytest.mark.parametrize(
    ("readme", "subset", "told"),
    [
        (SUBSETS, "sample-11BT", "default, sample-10BT, code"),
        (head("- {config_name: a, data_files: x.jsonl}\n- {config_name: b, data_files: y.jsonl}"), None, "a, b"),
        ("", "a", "leave data.subset out"),
    ],
)
def test_a_subset_that_is_not_there(readme: str, subset: str | None, told: str) -> None:
    with pytest.raises(NoSuchPartError, match="subset") as caught:
        files_by_split(FILES, readme, subset)
    assert (caught.value.key, told in caught.value.hint) == ("subset", True)


def test_hidden_files_are_of_a_data_set_only_where_they_are_named() -> None:
    names = ["a.jsonl", ".checkpoints/a.jsonl", "x/__more/b.jsonl", "._a.jsonl"]
    assert files_by_split(names) == {"train": ("a.jsonl",)}
    for pattern, found in (("**", "a.jsonl"), (".check*/*", ".checkpoints/a.jsonl"), ("x/__*/*", "x/__more/b.jsonl")):
        assert files_by_split(names, head(f"- {{data_files: '{pattern}'}}")) == {"train": (found,)}
    assert files_by_split(names, head("- {config_name: more, data_dir: x/__more}")) == {"train": ("x/__more/b.jsonl",)}


def test_the_splits_that_a_run_reads() -> None:
    assert selected_splits(["train", "validation", "test"], RowSelection()) == ("train", "validation")
    assert selected_splits(["train", "test"], RowSelection()) == ("train", "")
    assert selected_splits(["all"], RowSelection()) == ("all", "")
    assert selected_splits(["train", "test"], RowSelection(validation_split="test")) == ("train", "test")
    for splits, asked, key in (
        (["a", "b"], RowSelection(), "split"),
        (["train"], RowSelection(split="tran"), "split"),
        (["train"], RowSelection(validation_split="dev"), "validation_split"),
    ):
        with pytest.raises(NoSuchPartError) as caught:
            selected_splits(splits, asked)
        assert caught.value.key == key


def test_only_what_a_run_reads_is_fetched() -> None:
    rows = RepoRef("data.path", "dataset", "owner/rows", rows=RowSelection("sample-10BT"))
    assert needed_files(rows, FILES, SUBSETS) == ("README.md", "sample/10BT/0.parquet")
    mixed = RepoRef(
        "data.mix.1.path", "dataset", "owner/rows", rows=RowSelection("code", validation_split="validation")
    )
    assert needed_files(mixed, FILES, SUBSETS) == ("README.md", "code/train.jsonl", "code/dev.jsonl")
    rows = RepoRef("data.path", "dataset", "owner/rows")
    saved = ["dataset_dict.json", "train/state.json", "train/data-00000-of-00001.arrow", "README.md"]
    assert set(needed_files(rows, saved)) == set(saved[:3])
    with pytest.raises(NoSuchPartError, match="has no subset 'en'"):
        needed_files(RepoRef("data.path", "dataset", "owner/rows", rows=RowSelection("en")), saved)
    rows = RepoRef("data.path", "dataset", "owner/rows")
    assert "no file of rows (.parquet, " in missing_files(rows, ["README.md", "rows.txt", "model.bin"])
    assert not missing_files(rows, ["README.md", "rows.json.gz"])
