"""What the documents say runs, and what they point to is there.

The python blocks of README.md run in order, in one namespace, as a reader would type them. A block that can't run everywhere is fenced
```python no-run. Links to other sites are not followed.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parent.parent
DOCUMENTS = sorted(REPOSITORY.glob("*.md"))


class Block(NamedTuple):
    line: int  # of its first line of code
    info: list[str]
    code: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a document."""
    found = []
    for match in re.finditer(r"^```([^\n`]*)\n(.*?)^```[ ]*$", text, re.MULTILINE | re.DOTALL):
        found.append(Block(text.count("\n", 0, match.start(2)) + 1, match[1].split(), match[2]))
    return found


def runnable(text: str) -> list[Block]:
    return [block for block in blocks(text) if block.info[:1] == ["python"] and "no-run" not in block.info]


def run(document: str, text: str) -> dict:
    """Run the runnable blocks of a document; a traceback names its lines."""
    namespace = {"__name__": "__main__"}
    for block in runnable(text):
        exec(compile("\n" * (block.line - 1) + block.code, document, "exec"), namespace)
    return namespace


def headings(text: str) -> set[str]:
    """Anchors as GitHub makes them of headings: lower case, punctuation dropped, spaces to hyphens."""
    outside = re.sub(r"^```.*?^```[ ]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ +(.*?) *$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(document: Path) -> list[str]:
    """Links of a document, images too, to files or headings that don't exist."""
    text = document.read_text(encoding="utf-8")
    outside = re.sub(r"^```.*?^```[ ]*$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(<?([^)\s>]+)", outside):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in headings(path.read_text(encoding="utf-8"))):
            broken.append(target)
    return broken


def test_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what it writes stays out of the repository
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert runnable(text), "README.md shows no code that runs"
    run("README.md", text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document):
    assert broken_links(document) == []


# --------------------------------------------------------------------------------------------------------------- the tools themselves

PLANTED = """# A title: with `code`

```python
a = 1
```

```python no-run
b = 1 / 0
```

```bash
false
```

```python
c = a + 1
raise LookupError(c)
```

[good](here.md) ![good](here.md) [good](#a-title-with-code) [good](https://example.org/x) [good](here.md#there) `[no](link)`
[bad](gone.md) ![bad](gone.png) [bad](#no-title) [bad](here.md#nowhere)
"""


def test_blocks_run_in_order_and_errors_name_their_line():
    assert [block.info for block in blocks(PLANTED)] == [["python"], ["python", "no-run"], ["bash"], ["python"]]
    with pytest.raises(LookupError, match="2") as error:
        run("planted.md", PLANTED)
    last = error.traceback[-1]
    assert (str(last.path).endswith("planted.md"), last.lineno + 1) == (True, 17)
    assert PLANTED.splitlines()[16] == "raise LookupError(c)"


def test_broken_links_are_found(tmp_path):
    (tmp_path / "here.md").write_text("## There\n")
    (tmp_path / "planted.md").write_text(PLANTED)
    assert broken_links(tmp_path / "planted.md") == ["gone.md", "gone.png", "#no-title", "here.md#nowhere"]
