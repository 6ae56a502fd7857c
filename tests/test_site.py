"""Tests of the documentation site's pages; `make docs` builds the site."""

import inspect
import re
from pathlib import Path
from typing import get_type_hints

import pytest

import fedcb2o
from fedcb2o.particles import Result

DOCS = Path(__file__).parents[1] / "docs"
SCRIPTS = sorted((DOCS / "gallery").glob("*.py"))
REFERENCE = "\n".join(
    page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md")
)


@pytest.mark.parametrize("name", fedcb2o.__all__)
def test_reference_has_every_public_name(name):
    assert re.search(rf"^\.\. auto\w+:: fedcb2o\.{name}$", REFERENCE, re.MULTILINE)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_of_the_gallery_has_under_30_lines_and_is_shown(script):
    assert len(script.read_text(encoding="utf-8").splitlines()) < 30
    assert f"load: gallery/{script.name}" in (DOCS / "gallery.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page", sorted((DOCS / "tutorials").glob("*.md")), ids=lambda page: page.stem
)
def test_a_tutorial_is_linked_on_the_start_page(page):
    start = (DOCS / "index.md").read_text(encoding="utf-8")
    assert f"(tutorials/{page.name})" in start
    assert f"\ntutorials/{page.stem}\n" in start


def test_the_signature_of_minimize_returns_a_result():
    assert (
        inspect.signature(fedcb2o.minimize).return_annotation
        is get_type_hints(fedcb2o.minimize)["return"]
        is Result
    )
