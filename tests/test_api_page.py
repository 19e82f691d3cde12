"""docs/api.md says what there is: every public name with its signature, every command and environment variable, and the table of support.

Its code is run and its commands are repeated by test_docs.py, like those of every page.
"""

import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from benchmarks import console

import flashattn
from flashattn import commands, info
from flashattn.dispatch import support, table
from flashattn.dispatch.table import KERNELS
from flashattn.roofline import cli

PAGE = (Path(__file__).parent.parent / "docs" / "api.md").read_text(encoding="utf-8")
PLACES = [
    "flashattn",
    "flashattn.roofline",
    *(f"flashattn.integrations.{name}" for name in ("flash_attn", "flash_attn_3", "sdpa", "transformers")),
]
PUBLIC = [(place, name) for place in PLACES for name in import_module(place).__all__]


class Told(str):
    """A default as the page has it."""

    __repr__ = str.__str__


def signature(name: str, thing) -> str:
    """As in a call's documentation: without annotations."""
    found = []
    for parameter in inspect.signature(thing).parameters.values():
        default = parameter.default
        if default is not parameter.empty and callable(default):
            parameter = parameter.replace(default=Told(f"{default.__module__}.{default.__name__}"))
        found.append(parameter.replace(annotation=parameter.empty))
    return f"{name}{inspect.Signature(found)}"


def section(title: str) -> str:
    """Of the page, from its heading to the next one as high."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]


def shown(text: str) -> list[str]:
    """The signatures in its ```text blocks, each on one line."""
    inside = "\n".join(re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return [line for line in re.sub(r"\n +", " ", inside).splitlines() if line]


@pytest.mark.parametrize("place, name", PUBLIC, ids=[f"{place}.{name}" for place, name in PUBLIC])
def test_every_public_name_has_its_signature(place, name):
    thing = getattr(import_module(place), name)
    text = section(name if place == "flashattn" else place)
    if callable(thing):
        assert signature(name, thing) in shown(text)
    else:
        assert f"`{name}`" in text
    assert "**Raises**" in text or "Error`" in text, "what it raises"
    assert place != "flashattn" or ("**Raises" in text and "```python" in text)


def test_the_page_shows_nothing_that_is_gone():
    known = {
        signature(name, getattr(import_module(place), name)) for place, name in PUBLIC if callable(getattr(import_module(place), name))
    }
    assert set(shown(PAGE)) == known


def test_a_signature_has_no_annotations_and_names_its_functions():
    def f(a: int, *, b: str = "c", d=len) -> int: ...

    assert signature("f", f) == "f(a, *, b='c', d=builtins.len)"


def test_every_command_is_there():
    text = section("Commands")
    for group in (commands.cli, cli.cli):
        assert isinstance(group, click.Group) and group.commands
        assert [name for name in group.commands if f"`{name}`" not in text] == []


def test_every_environment_variable_is_there():
    """Those that are read are those that `info` prints: another would be in no document."""
    text = section("Environment variables")
    assert [name for name in info.SETTINGS if f"| `{name}" not in text] == []
    source = "\n".join(path.read_text(encoding="utf-8") for path in Path(flashattn.__file__).parent.glob("**/*.py"))
    assert set(re.findall(r"environ\.get\(\"(\w+)\"", source)) - {"PYTHONPATH"} <= set(info.SETTINGS)


# -------------------------------------------------------------------------------------------------------------------- the table of support


def test_the_table_of_support_is_what_the_dispatch_table_says(monkeypatch):
    if find_spec("triton") is None or table.gluon_reasons() or table.interpreter_reasons():
        pytest.skip("other kernels run with these versions of Triton and numpy")
    text = section("Which kernel runs what")
    assert support.table() in text and console.replaced(text) == text
    hopper, portable, eager = KERNELS
    assert support.against(hopper, support.PLAIN, "forward") == [] and support.against(eager, support.PLAIN, "second") == []
    monkeypatch.setattr(support, "KERNELS", (portable,))
    assert "| softcap | yes |\n" in support.table() and "| second derivatives (`create_graph=True`) | no (" in support.table()
    monkeypatch.setattr(support, "FEATURES", {"odd": {"alibi": True, "top_left": True, "head_dim_v": 20, "seqlen_k": 1 << 31}})
    monkeypatch.setattr(support, "KERNELS", (hopper, portable))
    assert "| odd | no (1, 2, 3) | yes |\n" in support.table() and "\n2. `hopper`: head_dim_v 20: rows of out" in support.table()


@pytest.mark.parametrize("name", support.FEATURES)
def test_every_row_of_support_is_another_problem(name):
    """A change that changes nothing would say yes for a feature that nobody asked about."""
    assert name == "bfloat16" or (support.FEATURES[name] and vars(support.PLAIN) | support.FEATURES[name] != vars(support.PLAIN))


def test_support_is_a_command(capsys):
    assert commands.main(["support"]) == 0
    assert capsys.readouterr().out == support.table()
