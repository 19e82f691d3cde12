"""What tests/sanitize.py makes of racecheck's report."""

from pathlib import Path

from sanitize import ENTRIES, KERNEL, entry_lines, races

FIRST = min(line for file, line in entry_lines() if file == "forward.py")
HANDED = f"""========= Error: Race reported between Read access at {KERNEL}+0x140 in forward.py:{FIRST}
=========     and Write access at {KERNEL}+0x9940 in forward.py:{FIRST + 2} [27 hazards]
========= """
OURS = f"""========= Error: Race reported between Read access at {KERNEL}+0x150 in channel.py:{FIRST}
=========     and Write access at {KERNEL}+0xc6e0 in forward.py:{FIRST} [14 hazards]
========= """
UNKNOWN = f"""========= Error: Race reported between Read access at {KERNEL}+0x150
=========     and Write access at {KERNEL}+0xc6e0
========= """


def test_only_the_hand_over_is_excused():
    whole = "========= COMPUTE-SANITIZER\n{}\nlaunched all\n========= RACECHECK SUMMARY: 5 hazards displayed (113 errors, 0 warnings)\n"
    assert races(whole.format(HANDED)) == ([], 1)
    found, handed = races(whole.format("\n".join((HANDED, OURS, HANDED, UNKNOWN))))
    assert handed == 2 and len(found) == 2 and "channel.py" in found[0]
    assert races(whole.format("")) == ([], 0)


def test_the_roles_are_not_the_entries():
    for file, names in ENTRIES.items():
        source = (Path(__file__).parent.parent / "src/flashattn/kernels/hopper" / file).read_text().splitlines()
        for line, text in enumerate(source, 1):
            if text.startswith("def "):
                assert ((file, line) in entry_lines()) == (text.split("(")[0][4:] in names)
