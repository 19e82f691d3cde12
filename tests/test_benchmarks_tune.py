"""The tuner, without a GPU: which row it prints, for which calls, and that a wrong tile is no candidate.

The surprising fact: a tile that was timed may never run, because the table has a row in its way; the tuner asks the table itself.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from benchmarks import tune
from benchmarks.workloads import WORKLOADS, square

from flashattn.dispatch.configs import Config

TINY = square("tiny", 1, 24, 2, 1, 16, True, "float32")


def test_ranking_weighs_workloads_alike_and_drops_what_failed_on_one():
    a, b, c = Config(1, 1, 1, 1), Config(2, 2, 2, 2), Config(3, 3, 3, 3)
    ranked = tune.rank({"short": {a: 1.0, b: 2.0, c: 0.1}, "long": {a: 100.0, b: 90.0}})
    assert [config for _, config in ranked] == [a, b]
    assert ranked[0][0] == pytest.approx((0.1 / 1.0 * 90 / 100) ** 0.5)


def test_kernel_flops_add_up_to_the_backward_plus_the_scores_rebuilt():
    w = WORKLOADS["fa3-d128-s4096-causal"]
    assert tune.kernel_flops("forward", w) == w.flops("fwd")
    scores, both = 2 * w.pairs() * w.head_dim, w.flops("fwd")  # q k, and dout v, which is as long here
    assert tune.kernel_flops("dkdv", w) + tune.kernel_flops("dq", w) == w.flops("bwd") + both
    assert tune.kernel_flops("dk", w) + tune.kernel_flops("dv", w) == tune.kernel_flops("dkdv", w) + scores


def test_the_speed_of_delta_is_in_bytes():
    w = WORKLOADS["fa3-d128-s4096"]
    assert tune.speed("delta", w, 2.0) == 16384 * 16 * (2 * 128 * 2 + 4) / 2e6
    assert tune.speed("dq", w, 2.0) == tune.kernel_flops("dq", w) / 2e9
    assert [tune.candidates(tune_arguments("delta", rows=rows)) for rows in ("", "8,1,4,1")] == [
        [Config(16, 1, 4, 1), Config(32, 1, 4, 1)], [Config(8, 1, 4, 1)]]  # fmt: skip


def tune_arguments(kernel, rows):
    return SimpleNamespace(kernel=kernel, rows=rows, block_m=(16, 32), block_n=(32, 64), num_warps=(4,), num_stages=(2, 3))


CAP = (9, 0)
ROW = Config(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("table", "key", "workload", "reason"),
    [
        ({}, ("dkdv", 2, 128), "fa3-d128-s4096", None),
        ({("dkdv", 2, 128, "open"): ROW}, ("dkdv", 2, 128), "fa3-d128-s4096", "takes ('dkdv', 2, 128, 'open')"),
        ({("dkdv", 2, 128, "open"): ROW}, ("dkdv", 2, 128), "fa3-d128-s4096-causal", None),
        ({("dkdv", 2, 128, "open"): ROW}, ("dkdv", 2, 128), "packed-16k", None),
        ({}, ("dkdv", 2, 128, "open"), "fa3-d128-s4096", None),
        ({("dq", 2, 128, "padded"): ROW}, ("dq", 2, 128), "dims-d96-s4096", "takes ('dq', 2, 128, 'padded')"),
        ({("dq", 2, 128, "padded"): ROW}, ("dq", 2, 128), "fa3-d128-s4096", None),
        ({("dk", 2, 256): ROW, ("dv", 2, 256): ROW}, ("dkdv", 2, 256), "fa3-d256-s4096", "runs forward, tangent, delta, dk, dv, dq"),
        ({("dk", 2, 256): ROW, ("dv", 2, 256): ROW}, ("dk", 2, 256), "fa3-d256-s4096", None),
        ({}, ("dk", 2, 256), "fa3-d256-s4096", "of which 'dv' has no row"),
    ],
)
def test_what_the_table_has_in_the_way_of_a_row_is_named(monkeypatch, table, key, workload, reason):
    monkeypatch.setitem(tune.TABLES, CAP, table)
    found = tune.in_the_way(key, WORKLOADS[workload], CAP)
    assert found is None if reason is None else found.startswith(workload) and found.endswith(reason)
    assert tune.TABLES[CAP] == table


@pytest.mark.parametrize(
    ("kind", "workload"),
    [("open", "fa3-d128-s4096-causal"), ("padded", "fa3-d128-s4096"), ("open", "dims-d96-s4096"), ("open", "packed-16k")],
)
def test_tuning_refuses_a_kind_that_the_workloads_are_not(kind, workload, capsys):
    with pytest.raises(SystemExit) as stopped:
        tune.main(["--kernel", "dkdv", "--kind", kind, "--workloads", workload, "--device", "cpu"])
    assert stopped.value.code == 2 and f"take no '{kind}' rows: {workload}" in capsys.readouterr().err


def test_tuning_refuses_workloads_of_different_rows(capsys):
    with pytest.raises(SystemExit) as stopped:
        tune.main(["--kernel", "forward", "--workloads", "fa3-d64-s4096,fa3-d128-s4096"])
    assert stopped.value.code == 2 and "different rows" in capsys.readouterr().err


TUNE_TINY = ["--workloads", "tiny", "--rows", "32,16,4,1;16,32,4,1", "--rounds", "1", "--slice-ms", "0.1", "--device", "cpu"]


@pytest.mark.interpret
@pytest.mark.parametrize("kernel", tune.FAMILIES)
def test_tuning_prints_rows_that_can_be_pasted(kernel, capsys, monkeypatch):
    monkeypatch.setitem(WORKLOADS, "tiny", replace(TINY, dtype="float16", seqlen_q=32, seqlen_k=32))
    assert tune.main(["--kernel", kernel, *TUNE_TINY]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("    (")]
    pasted = eval("{" + "\n".join(lines) + "\n}", {"Config": Config})
    assert set(pasted) == {(kernel, 2, 64)} and len(lines) == 2


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("kernel", "kind", "changes"),
    [
        ("dkdv", "open", {"seqlen_q": 128, "seqlen_k": 128, "causal": False, "heads_q": 1}),
        ("dv", "padded", {"head_dim": 24, "head_dim_v": 24}),
        ("dq", "", {"lengths": (20, 1, 9), "batch": 3}),
        ("tangent", "", {}),
        ("tangent", "", {"lengths": (20, 1, 9), "batch": 3}),
    ],
)
def test_tuning_of_some_calls(kernel, kind, changes, capsys, monkeypatch):
    monkeypatch.setitem(WORKLOADS, "tiny", replace(TINY, **{"dtype": "float16", "seqlen_q": 20, "seqlen_k": 20, **changes}))
    assert tune.main(["--kernel", kernel, *(["--kind", kind] if kind else []), *TUNE_TINY]) == 0
    printed = capsys.readouterr().out
    key = (kernel, 2, 64, *([kind] if kind else []))
    pasted = eval("{" + "\n".join(line for line in printed.splitlines() if line.startswith("    ")) + "\n}", {"Config": Config})
    assert set(pasted) == {key}
    assert ("not served by these rows as the table is: tiny runs forward" in printed) == (kernel == "dv")


@pytest.mark.interpret
def test_a_wrong_tile_is_not_a_candidate(monkeypatch, capsys):
    real = tune.bench

    def bench(kernel, workload, device):
        made = real(kernel, workload, device)

        def launch(config):
            made.launch(config)
            if config.block_m == 32:
                made.outputs["out"][:, 0] = 0

        return tune.Bench(launch, made.outputs)

    monkeypatch.setattr(tune, "bench", bench)
    monkeypatch.setitem(WORKLOADS, "tiny", replace(TINY, dtype="float16", seqlen_q=32, seqlen_k=32))
    assert tune.main(["--kernel", "forward", *TUNE_TINY]) == 0
    printed = capsys.readouterr().out
    assert "not (32, 16, 4, 1): out is wrong" in printed and "Config(32, 16" not in printed and "Config(16, 32" in printed
