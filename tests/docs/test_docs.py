"""What the documentation says is so: commands, values, metrics, messages, links."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from tests.docs.blocks import PAGES, ROOT, Block, all_blocks
from tools import api_reference

from stasis.cli import main as stasis
from stasis.controllers.metrics import Metrics as Controller
from stasis.core.plan import Outcome
from stasis.daemon.metrics import Metrics as Agent
from stasis.plugin.cli import main as plugin
from stasis.webhook.metrics import Metrics as Webhook

SHELL = [block for block in all_blocks() if block.language == "sh"]
_STARTS = re.compile(r"^(kubectl|helm|make|stasis|pip|docker|curl) ", re.MULTILINE)


def commands(block: Block) -> list[list[str]]:
    """Words of each command line, without comments; continued lines are one."""
    text = block.text.replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def test_every_shell_block_says_whether_it_is_run() -> None:
    assert SHELL
    assert [str(block) for block in SHELL if not block.mark] == []


def test_commands_stand_in_blocks_marked_as_shell() -> None:
    assert [str(b) for b in all_blocks() if b.language != "sh" and _STARTS.search(b.text)] == []


def programs() -> list[tuple[str, click.Group, list[str]]]:
    found = []
    for block in SHELL:
        for words in commands(block):
            if words[:2] == ["kubectl", "stasis"]:
                found.append((str(block), plugin, words[2:]))
            elif words[0] == "stasis":
                found.append((str(block), stasis, words[1:]))
    return found


@pytest.mark.parametrize(("where", "program", "words"), programs(), ids=lambda value: str(value)[:60])
def test_a_command_of_ours_is_one(where: str, program: click.Group, words: list[str]) -> None:
    if "||" in words:
        words = words[: words.index("||")]
    command = program.commands[words[0]]
    if "-f" in words:  # a file that the reader has
        index = words.index("-f")
        words = words[:index] + words[index + 2 :] if words[0] == "fork" else words
    command.make_parser(click.Context(command)).parse_args(list(words[1:]))


def test_chart_values_that_are_named_exist() -> None:
    values = yaml.safe_load((ROOT / "charts/stasis/values.yaml").read_text())
    named = set()
    for page in PAGES:
        text = page.read_text()
        named |= set(re.findall(r"--set ([\w.]+)=", text))
        top = "|".join(values)
        named |= set(re.findall(rf"`((?:{top})(?:\.[a-zA-Z]+)+)(?:: \w+)?`", text))
    missing = [p for p in sorted(named) if not _has(values, p.split(".")) and not p.endswith(".stasis.dev")]
    assert len(named) > 5
    assert missing == []


def _has(values: Any, path: list[str]) -> bool:
    for key in path:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


def test_metrics_are_those_of_the_code() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| \w+ \| ([\w, ]*?) ?\|", page, re.MULTILINE))
    real: dict[str, str] = {}
    for part in (Controller(), Agent(), Webhook()):
        for metric in vars(part).values():
            if hasattr(metric, "_labelnames"):
                described = next(iter(metric.describe()))
                name = described.name + ("_total" if described.type == "counter" else "")
                real[name] = ", ".join(metric._labelnames)
    assert documented == real


def source() -> str:
    """Ours, with texts that are written in pieces put together."""
    text = "".join(path.read_text() for path in sorted((ROOT / "operator/src/stasis").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    text = source()
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    parts = [part.strip() for message in messages for part in message.split("...") if len(part.strip()) > 4]
    assert len(parts) > 15
    assert [part for part in parts if part not in text] == []


def test_every_event_is_in_troubleshooting() -> None:
    told = set()
    for folder in ("controllers", "core"):
        for path in (ROOT / "operator/src/stasis" / folder).glob("*.py"):
            text = path.read_text()
            told |= set(re.findall(r'\.tell\([^,]+, "(\w+)"', text))
            told |= set(re.findall(r'_let_go\("(\w+)"', text)) | set(re.findall(r'\(\), "(\w+)", f?"', text))
    told |= {str(outcome).capitalize() for outcome in Outcome} - {"Superseded"}
    page = (ROOT / "docs/troubleshooting.md").read_text()
    assert len(told) > 10
    assert [reason for reason in sorted(told) if f"| {reason} |" not in page] == []


def test_alerts_are_those_of_the_chart() -> None:
    chart = set(re.findall(r"alert: (\w+)", (ROOT / "charts/stasis/templates/monitoring.yaml").read_text()))
    for page in ("metrics.md", "troubleshooting.md"):
        assert set(re.findall(r"\bStasis[A-Z]\w+", (ROOT / "docs" / page).read_text())) == chart


def test_the_api_s_page_is_that_of_its_definitions() -> None:
    assert api_reference.PAGE.read_text() == api_reference.page()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_example_is_a_runtime_and_an_enabled_job() -> None:
    runtime, job = yaml.safe_load_all((ROOT / "docs/examples/gpt.yaml").read_text())
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["metadata"]["labels"] == {"stasis.dev/policy": "default"}
