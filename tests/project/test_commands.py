"""What the documents tell a reader to type exists, and what they link to stands there."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
import typer.core
import typer.main
import yaml

from shoal_cli.commands.app import app

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
PROGRAM = cast("typer.core.TyperGroup", typer.main.get_command(app))
COMMANDS = cast("Mapping[str, typer.core.TyperCommand]", PROGRAM.commands)
OPTIONS_OF_THEIR_OWN = {"agent", "coordinator", "operator"}
"""What they do not know they pass on to the process that they start."""
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def targets() -> dict[str, str]:
    """The Makefile's targets for people, with their line of help."""
    found = re.findall(r"^([a-z][a-z0-9-]*):(?!=)(?:.*?## (.*))?", MAKEFILE, re.MULTILINE)
    return dict(found)


def code_of(document: Path) -> str:
    """What a document shows as code: indented or fenced blocks, and words in backticks."""
    text = document.read_text()
    fenced = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^(?: {4}|\t)(.*)$", text, re.MULTILINE)
    return "\n".join([*fenced, *indented, *re.findall(r"`([^`\n]+)`", text)])


def test_every_target_for_people_says_what_it_does() -> None:
    assert {"help", "run", "check", "protos", "lock", "bench", "clean"} <= targets().keys()
    assert not [name for name, text in targets().items() if not text]
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert set(phony.split()) == targets().keys()


def test_make_help_lists_every_target() -> None:
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert [line.split()[1] for line in shown.splitlines()] == list(targets())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_only_commands_that_exist(document: Path) -> None:
    code = code_of(document)
    assert set(re.findall(r"\bmake ([a-z0-9-]+)", code)) <= targets().keys()
    for tool in re.findall(r"\.venv/bin/([a-z-]+)", code):
        assert (ROOT / ".venv" / "bin" / tool).exists() or not (ROOT / ".venv").exists(), tool
    for script in re.findall(r"(?:examples|hack|bench|tests)/[\w/.-]+\w", code):
        assert (ROOT / script).exists(), script


def test_an_example_that_is_not_there_is_refused_with_those_that_are() -> None:
    command = [str(ROOT / "examples" / "run"), "nope"]
    refused = subprocess.run(command, check=False, capture_output=True, text=True)
    assert refused.returncode == 2
    known = sorted(path.parent.name for path in (ROOT / "examples").glob("*/prepare.py"))
    said = f"examples/run: there is no example nope; known are {' '.join(known)}\n"
    assert refused.stderr == said
    assert "examples/run $(EXAMPLE)" in MAKEFILE


def options_of(command: typer.core.TyperCommand) -> set[str]:
    return {name for each in command.params for name in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_give_shoal_only_options_that_it_has(document: Path) -> None:
    code = code_of(document).replace("\\\n", " ")
    for name, given in re.findall(r"(?:^|[ /])shoal ([a-z-]+)([^\n|;&#]*)", code, re.MULTILINE):
        if name in COMMANDS and name not in OPTIONS_OF_THEIR_OWN:
            wanted = set(re.findall(r"(?<!\S)-{1,2}[a-z][a-z-]*", given))
            assert wanted <= options_of(COMMANDS[name]) | {"--help"}, name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    links += re.findall(r'(?:src|href)="([^"#]+)"', document.read_text())
    local = [link for link in links if "://" not in link]
    assert not [link for link in local if not (document.parent / link).exists()]


def test_pages_install_into_an_environment() -> None:
    """Debian and Raspberry Pi OS refuse to install beside their own packages."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    found = [each for page in pages for each in re.findall(r"(\S*)\bpip install", code_of(page))]
    assert found
    assert [folder for folder in found if not folder.endswith("/bin/")] == []


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    records = {path.name for path in folder.glob("[0-9]*.md")}
    linked = re.findall(r"\]\(([0-9]{4}-[\w-]+\.md)\)", (folder / "README.md").read_text())
    assert sorted(linked) == sorted(records)
    for path in folder.glob("[0-9]*.md"):
        text = path.read_text()
        assert text.startswith(f"# {path.name[:4]}: "), path.name
        parts = re.findall(r"^## (\w+)$", text, re.MULTILINE)
        assert parts == ["Context", "Decision", "Consequences"], path.name


def test_hooks_run_only_what_the_project_has_set_up() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    for repository in hooks["repos"]:
        assert repository["repo"] == "local"
        for hook in repository["hooks"]:
            assert hook["language"] == "system"
            assert hook["entry"].startswith(".venv/bin/")
