"""docs/skus.md is what the table says now, and the entry that it shows is one."""

import re

import document_skus

from engines.sku import sku_table, skus_from_file


def test_the_page_is_current():
    assert document_skus.PAGE.read_text(encoding="utf-8") == document_skus.page(), "python scripts/document_skus.py"


def test_every_sku_has_a_row_and_a_source():
    page = document_skus.page()
    for name, sku in sku_table().items():
        assert len(re.findall(rf"^\| `{name}` \|", page, re.MULTILINE)) == 1
        assert f"- `{name}`: {sku.source}." in page


def test_the_example_is_a_valid_file(tmp_path):
    example = re.search(r"```toml\n(.*?)```", document_skus.page(), re.DOTALL)
    file = tmp_path / "mine.toml"
    file.write_text(example[1])
    assert skus_from_file(file)["my-gpu"].peak == {"fp32": 30.3e12, "fp16": 121e12}
