"""What else comes from flash-attn's modules: padding and its inverse, and `import flash_attn` itself."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashattn.integrations import flash_attn as fa
from flashattn.integrations import flash_attn_3 as fa3
from flashattn.integrations.flash_attn import install_as_flash_attn, uninstall_flash_attn

# ------------------------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_unpad_and_pad(dtype):
    mask = torch.tensor([[0, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 1]]).to(dtype)
    x = torch.randn(4, 3, 2, requires_grad=True)
    rows, indices, cu_seqlens, longest, used = fa.unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()]) and indices.tolist() == [1, 2, 3, 5, 9, 10, 11]
    assert cu_seqlens.tolist() == [0, 2, 4, 4, 7] and cu_seqlens.dtype == torch.int32
    assert longest == 3 and type(longest) is int and used.tolist() == [2, 2, 0, 3]
    back = fa.pad_input(rows, indices, 4, 3)
    assert torch.equal(back, x * mask.bool()[..., None])
    assert torch.equal(torch.autograd.grad(back.sum(), x)[0], mask.bool()[..., None].expand(x.shape).float())


def test_rows_that_are_placed_but_not_used():
    mask, unused = torch.tensor([[1, 0, 0], [1, 1, 0]]), torch.tensor([[0, 1, 0], [0, 0, 0]])
    _, indices, cu_seqlens, longest, used = fa.unpad_input(torch.zeros(2, 3, 1), mask, unused)
    assert (indices.tolist(), cu_seqlens.tolist(), longest, used.tolist()) == ([0, 1, 3, 4], [0, 2, 4], 2, [1, 2])
    with pytest.raises(ValueError, match=r"unused_mask has shape \(2, 2\): expected \(2, 3\)"):
        fa.unpad_input(torch.zeros(2, 3, 1), mask, unused[:, :2])


# ------------------------------------------------------------------------------------------------------------------------ installing


@pytest.fixture
def clean():
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash-attn is installed here")
    yield
    uninstall_flash_attn()


def test_others_import_it_by_its_name(clean):
    install_as_flash_attn()
    install_as_flash_attn()
    import flash_attn
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # noqa: F401
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    assert flash_attn.flash_attn_func is fa.flash_attn_func and flash_attn_varlen_func is fa.flash_attn_varlen_func
    assert flash_attn.__version__.startswith("2.8") and importlib.util.find_spec("flash_attn") is not None
    assert flash_attn.bert_padding.pad_input is pad_input
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.layers"):
        importlib.import_module("flash_attn.layers")
    with pytest.raises(ModuleNotFoundError, match="flash_attn_interface"):
        importlib.import_module("flash_attn_interface")
    install_as_flash_attn(fa3=True)
    assert importlib.import_module("flash_attn_interface").flash_attn_func is fa3.flash_attn_func
    uninstall_flash_attn()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")


def test_a_real_one_is_not_hidden_unless_forced(clean, tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="a real flash_attn can be imported here"):
        install_as_flash_attn()
    real = importlib.import_module("flash_attn")
    with pytest.raises(RuntimeError, match="force=True"):
        install_as_flash_attn()
    install_as_flash_attn(force=True)
    assert importlib.import_module("flash_attn").flash_attn_func is fa.flash_attn_func
    uninstall_flash_attn()
    assert importlib.import_module("flash_attn") is real
    del sys.modules["flash_attn"]


def test_nobody_gets_it_unasked():
    code = "import sys, flashattn.integrations.flash_attn; print('flash_attn' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "False"
