"""Files about the project for registries, journals and reviewers agree with pyproject.toml."""

import json
import re
import tomllib

import yaml

from fedcb2o.data import sets
from fedcb2o.federated import attacks
from tests.test_docs import ROOT
from tests.test_readme import count_defences

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA_NAMES = {"pytorch": "torch", "matplotlib-base": "matplotlib"}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_citation_metadata_agree_with_the_project():
    citation = yaml.safe_load(read("CITATION.cff"))
    code, archive = json.loads(read("codemeta.json")), json.loads(read(".zenodo.json"))
    for record, name in ((citation, "title"), (code, "name"), (archive, "title")):
        assert record[name] == PROJECT["name"]
        assert record["version"] == PROJECT["version"]
        assert record["keywords"] == PROJECT["keywords"]
        assert record["license"].endswith(PROJECT["license"])
    for record in (code, archive):
        assert record["description"] == PROJECT["description"]
    authors = [author["name"] for author in PROJECT["authors"]]
    assert [author["name"] for author in citation["authors"]] == authors
    assert [author["name"] for author in code["author"]] == authors
    assert [author["name"] for author in archive["creators"]] == authors
    preprint = citation["preferred-citation"]["identifiers"][0]["value"]
    assert archive["related_identifiers"][0]["identifier"] == preprint
    assert code["referencePublication"].endswith(preprint.removeprefix("arXiv:"))


def test_the_conda_recipe_has_the_requirements_of_the_project():
    recipe = read("deploy/conda/meta.yaml")
    assert f'version = "{PROJECT["version"]}"' in recipe
    (run,) = re.findall(r"\n  run:\n((?:    - .*\n)+)", recipe)
    lines = [line.removeprefix("    - ").split(" ") for line in run.splitlines()]
    requirements = {CONDA_NAMES.get(name, name) + bound for name, bound in lines}
    assert requirements == {*PROJECT["dependencies"], f"python{PROJECT['requires-python']}"}
    assert all(f"{name} = {entry}" in recipe for name, entry in PROJECT["scripts"].items())


def test_the_journal_article_counts_defences_and_attacks_and_marks_missing_figures():
    article = read("paper/joss/paper.md")
    words = " ".join(article.split())
    assert f"{count_defences()} defences and {len(attacks.__all__)} attacks" in words
    cited = set(re.findall(r"@([\w-]+)", article))
    assert cited == set(re.findall(r"^@\w+\{([\w-]+),", read("paper/joss/paper.bib"), re.M))
    assert article.count("TO BE FILLED IN by the authors") == 4
    field = article.partition("# State of the field")[2].partition("\n# ")[0]
    assert len(set(re.findall(r"@([\w-]+)", field))) >= 5  # compared with tools, each cited


def test_the_commands_of_the_artefact_exist():
    text = read("ARTIFACT.md")
    for target in re.findall(r"`make (\w+)`", text):
        assert re.search(rf"^{target}:", read("Makefile"), re.M)
    for module in re.findall(r"-m (paper\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    files = re.findall(r"`((?:docs|tests)/[\w/.-]+\.\w+)`", text)
    assert len(files) == 4
    assert all((ROOT / file).is_file() for file in files)


def test_the_page_of_standards_names_tests_that_exist():
    files = set(re.findall(r"`([\w/]*test_\w+\.py)`", read("docs/standards.md")))
    assert len(files) > 10
    assert [file for file in files if not (ROOT / "tests" / file).is_file()] == []


def test_every_data_set_without_owners_has_a_card():
    carded = set(re.findall(r"`([\w]+)`", read("docs/cards.md"))) | set(
        re.findall(r"`([\w]+)`", read("docs/owners.md"))
    )
    brought = {"arrays", "text", "owner_table"}  # files of the user, and tables of a package
    assert {*sets.__all__} - brought <= carded
