"""What the documents say runs, and what they point to is there.

The python blocks of README.md and of the pages in docs run in order, in one namespace, as a reader would type them. A block that can't run
everywhere is fenced ```python no-run. What a ```console block shows is what its commands print. Links to other sites are not followed.
"""

import inspect
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from benchmarks import console, readme

from flashattn import attention

REPOSITORY = Path(__file__).parent.parent
PAGES = sorted(REPOSITORY.glob("docs/*.md"))
DOCUMENTS = [*sorted(REPOSITORY.glob("*.md")), *PAGES]


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
    """Those in python, but for ```python no-run, and for ```python needs=a,b where `attention` has no argument a or b."""
    missing = {word for block in blocks(text) for word in block.info if not takes(word)}
    return [block for block in blocks(text) if block.info[:1] == ["python"] and not {"no-run", *missing} & set(block.info)]


def takes(word: str) -> bool:
    name, _, arguments = word.partition("=")
    return name != "needs" or set(arguments.split(",")) <= set(inspect.signature(attention).parameters)


def run(document: str, text: str) -> dict:
    """Run the runnable blocks of a document; a traceback names its lines."""
    module, main = ModuleType("__main__"), sys.modules["__main__"]
    sys.modules["__main__"] = module  # where torch looks for what a function reads
    try:  # and not patch.dict, which would unload what the blocks import: torch registers compilers once
        for block in runnable(text):
            exec(compile("\n" * (block.line - 1) + block.code, document, "exec"), vars(module))
    finally:
        sys.modules["__main__"] = main
    return vars(module)


def test_what_a_document_imports_stays_imported():
    name = "wave"
    sys.modules.pop(name, None)
    run("page.md", f"```python\nimport {name}\n```\n")
    assert name in sys.modules


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


@pytest.mark.parametrize("document", [REPOSITORY / "README.md", *PAGES], ids=lambda document: document.name)
def test_code_in_documents_runs(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what it writes stays out of the repository
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as a reader has it, and in seconds
    text = document.read_text(encoding="utf-8")
    assert runnable(text), f"{document.name} shows no code that runs"
    run(document.name, text)


@pytest.mark.parametrize("document", PAGES, ids=lambda document: document.name)
def test_pages_show_what_their_commands_print(document):
    """Not so? `python -m benchmarks.console docs/PAGE.md` runs them anew."""
    text = document.read_text(encoding="utf-8")
    assert console.replaced(text) == text
    assert console.BLOCK.search(text) or document.name != "roofline.md", "a page of commands without any"


def test_output_has_no_colours_whoever_wants_some(monkeypatch):
    plain = console.output("python -m flashattn.roofline ops --gpu H100")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert console.output("python -m flashattn.roofline ops --gpu H100") == plain and "\x1b" not in plain


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document):
    assert broken_links(document) == []


# ------------------------------------------------------------------------------------------------------------------ what was measured


def test_the_readme_tells_what_was_measured(capsys):
    """Not so? `python -m benchmarks.readme` writes that part anew."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert readme.replaced(text, readme.section()) == text
    assert readme.main(["--check"]) == 0
    assert "is what the results give" in capsys.readouterr().out


def test_every_recorded_command_is_in_the_readme():
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (commands,) = [block.code.splitlines() for block in blocks(text) if "python -m benchmarks.readme\n" in block.code]
    recorded = set()
    for suite in ("fa3", "host_overhead", "memory"):
        data = json.loads((readme.RESULTS / f"h200-{suite}.json").read_text())
        recorded |= {data["command"]} if "command" in data else {row["command"] for row in data["rows"]}
    assert recorded <= set(commands)


def speed_row(workload, direction, provider, ms, tflops=None) -> dict:
    return {"workload": workload, "direction": direction, "provider": provider, "ms": ms, "tflops": tflops and float(tflops)}


def results(folder: Path, rows, suite="fa3", **changes) -> Path:
    versions = {"torch": "2.99", "triton": "3.99", "cudnn": "91203"} | changes
    runs = [{"date": "2030-01-02T03:04:05Z", "command": "measure it", "versions": versions}]
    (folder / f"h200-{suite}.json").write_text(json.dumps({"suite": suite, "gpu": "A GPU", "runs": runs, "rows": rows}))
    return folder


ROWS = [
    speed_row("fa3-d64-s512", "fwd", "flashattn-portable", 2.0, 100),
    speed_row("fa3-d64-s512", "fwd", "flashattn-hopper", 1.0, 200.4),
    speed_row("fa3-d64-s512", "fwd", "sdpa-flash", 1.5),
    speed_row("fa3-d64-s512", "fwd", "fa3", 0.5),
    speed_row("fa3-d64-s512", "bwd", "flashattn-portable", 4.0, 50),
    speed_row("fa3-d64-s512", "bwd", "sdpa-flash", None),
    speed_row("fa3-d64-s512", "bwd", "fa3", 5.0),
    speed_row("fa3-d128-s512-causal", "fwd", "sdpa-flash", 1.0),
    speed_row("fa3-d128-s512-causal", "bwd", "flashattn-portable", 1.0, 9.6),
    speed_row("fa3-d128-s512-causal", "bwd", "fa3", 1.25),
]


def test_the_table_has_our_fastest_and_a_dash_where_nothing_was_measured(tmp_path):
    text = readme.section(results(tmp_path, ROWS))
    assert "| | forward | x SDPA flash | x FA3 | backward | x SDPA flash | x FA3 |\n" in text
    assert "| D 64, S 512 | 200 | 1.50 | 0.50 | 50 | - | 1.25 |\n" in text
    assert "| D 128, S 512, causal | - | - | - | 10 | - | 1.25 |\n" in text
    assert "SDPA flash: forward 1.50, ahead in 1 of 1. FA3: forward 0.50, ahead in 0 of 1; backward 1.25, ahead in 2 of 2." in text
    assert "A GPU, 2030-01-02, torch 2.99, Triton 3.99, cuDNN 9.12.3, bfloat16, 16 384 tokens, heads x dim 2048;" in text
    assert "```sh\nmeasure it\npython -m benchmarks.readme\n```" in text and "CPU time" not in text
    assert max(map(len, text.splitlines())) <= 140


def test_what_was_published_stands_beside_what_was_measured(tmp_path):
    rows = [speed_row("fa3-d128-s4096", "fwd", "flashattn-hopper", 2.0, 700), speed_row("fa3-d128-s16384", "bwd", "fa3", 2.0, 650),
            speed_row("fa3-d128-s16384", "bwd", "flashattn-hopper", 2.0, 640)]  # fmt: skip
    text = readme.section(results(tmp_path, rows))
    assert "| forward, D 128 | 4096, 16384 | 638, 648 | -, - | 700, - |\n" in text
    assert "| backward, D 128 | 4096, 16384 | 542, 561 | -, 650 | -, 640 |\n" in text
    assert "published" not in readme.section(results(tmp_path, ROWS))


def test_other_suites_get_tables_of_their_own(tmp_path):
    rows = [speed_row(name, "fwd", provider, ms, 1) for name in ("packed-16k", "packed-16k-llama3-8b-mixed")
            for provider, ms in (("flashattn-portable", 2.0), ("torch-varlen", 3.0))]  # fmt: skip
    text = readme.section(results(results(tmp_path, ROWS), rows, "packed"))
    assert "| D 128, S 4096, packed, causal | 1 | 1.50 | - | - |\n" in text
    assert "| D 128, 20 sequences to S 5213, heads 32/8, packed, causal | 1 | 1.50 | - | - |\n" in text
    assert "heads x dim 2048 or 4096" in text and "h200-packed.json" in text


def test_the_papers_tables_are_told_when_they_were_measured(tmp_path):
    results(tmp_path, ROWS)
    size = [{"provider": "flashattn", "seqlen": 4096, "peak_bytes": 2**29, "failure": None}]
    one = {"provider": "standard", "read": 3e9, "written": 1e9, "ms": 2.0, "predicted": None}
    moved = [one | {"direction": direction} for direction in ("fwd", "bwd")]
    for name, rows in (("memory-paper", size), (readme.DRAM, moved)):
        document = {"date": "2030-01-02T03:04:05Z", "command": f"measure {name}", "rows": rows}
        (tmp_path / f"h200-{name}.json").write_text(json.dumps(document))
    text = " ".join(readme.section(tmp_path).split())
    assert "flash at 4096: published 836 MB (A100, Dao et al. 2022); measured MiB: flashattn 512;" in text
    assert "(benchmarks/results/h200-dram-gpt2-medium-s1024.json), 2030-01-02): standard: 8.0 GB and 4.00 ms" in text
    assert "40.3 -> 4.4 GB" in text and "measure memory-paper measure dram-gpt2-medium-s1024 python -m benchmarks.readme" in text


def test_a_window_is_in_the_label():
    labels = [readme.label(readme.WORKLOADS[name]) for name in ("gpt-oss-window-128-s2048", "gpt-oss-full-s2048")]
    assert labels == ["D 64, S 2048, heads 64/8, causal, window 128", "D 64, S 2048, heads 64/8, causal"]


def test_results_of_different_versions_are_refused(tmp_path):
    results(tmp_path, ROWS)
    data = json.loads((tmp_path / "h200-fa3.json").read_text())
    data["runs"].append(data["runs"][0] | {"versions": data["runs"][0]["versions"] | {"triton": "3.98"}})
    (tmp_path / "h200-fa3.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="differ in triton"):
        readme.section(tmp_path)


def test_the_readme_is_written_and_checked(tmp_path, monkeypatch, capsys):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{readme.BEGIN}\nold numbers\n{readme.END}\nafter\n")
    monkeypatch.setattr(readme, "README", path)
    assert readme.main(["--check"]) == 1 and "old numbers" in path.read_text()
    assert readme.main([]) == 0 and readme.main(["--check"]) == 0
    assert path.read_text() == f"before\n{readme.section()}\nafter\n"
    with pytest.raises(ValueError, match="once each"):
        readme.replaced(f"{readme.END} {readme.BEGIN}", "")


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


def test_blocks_of_arguments_to_come_are_run_when_they_come():
    text = "```python needs=causal,window\na = 1\n```\n```python needs=causal,colour\nb = 1\n```\n"
    assert [block.code for block in runnable(text)] == ["a = 1\n"]


def test_stale_output_is_found_and_written_anew(tmp_path, capsys):
    path, tally = tmp_path / "page.md", "python -m flashattn.roofline lab --tally"
    path.write_text(f"before\n```console\n$ {tally}\nstale\n```\n```sh\n$ {tally}\n```\n")
    assert console.main([str(path), "--check"]) == 1 and "out of date" in capsys.readouterr().out and "stale" in path.read_text()
    assert console.main([str(path)]) == 0 and console.main([str(path), "--check"]) == 0
    text = path.read_text()
    assert text.startswith(f"before\n```console\n$ {tally}\nA running tally") and "stale" not in text
    assert text.endswith(f"4.8046\n```\n```sh\n$ {tally}\n```\n")
    assert console.output("python -m flashattn.roofline ops --gpu none").startswith("flashattn.roofline: no GPU 'none'")
    with pytest.raises(ValueError, match="'rm -r x': expected a command that begins with"):
        console.output("rm -r x")


def test_broken_links_are_found(tmp_path):
    (tmp_path / "here.md").write_text("## There\n")
    (tmp_path / "planted.md").write_text(PLANTED)
    assert broken_links(tmp_path / "planted.md") == ["gone.md", "gone.png", "#no-title", "here.md#nowhere"]
