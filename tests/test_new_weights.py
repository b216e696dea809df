"""New weights for a running server: what cannot fit never begins, and what failed half-way is not answered with."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from sglang_dsv4.new_weights import misfit, shapes, update
from sglang_dsv4.refusals import Refused

WEIGHTS = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "mtp.0.c": torch.zeros(1)}
FITS = {"a": (2, 3), "b": (4,)}


def folder(path, tensors):
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return str(path)


@pytest.fixture
def updater(tmp_path):
    """SGLang's, over a model whose loader maps names: what it serves is known from the folder alone."""
    served = folder(tmp_path / "served", WEIGHTS)
    return SimpleNamespace(model_config=SimpleNamespace(model_path=served), get_model=object)


def answering(answer):
    calls = []

    def original(self, model_path, load_format, *args, **kwargs):
        calls.append(model_path)
        self.model_config.model_path = model_path
        if isinstance(answer, Exception):
            raise answer
        return answer

    return original, calls


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"a": torch.zeros(2, 3)}, "1 missing: b"),
        (WEIGHTS | {"d": torch.zeros(1), "e": torch.zeros(1)}, "2 unexpected: d, e"),
        (WEIGHTS | {"a": torch.zeros(3, 2)}, "1 of another shape: a"),
    ],
)
def test_weights_that_cannot_fit_are_refused_before_one_is_written(tensors, says, updater, tmp_path):
    original, calls = answering((True, "done"))
    done, why = update(original, updater, folder(tmp_path / "new", tensors), "auto")
    assert not done and says in why and calls == []
    assert updater.model_config.model_path.endswith("served")


def test_weights_that_fit_are_loaded(updater, tmp_path):
    original, calls = answering((True, "done"))
    new = folder(tmp_path / "new", {"a": torch.ones(2, 3), "b": torch.ones(4)})
    assert update(original, updater, new, "auto") == (True, "done")
    assert calls == [new] and updater.model_config.model_path == new


@pytest.mark.parametrize("answer", [RuntimeError("half"), (False, "Failed to update weights: half.\nRolling back")])
def test_weights_that_may_be_half_written_end_the_server(answer, updater):
    original, _ = answering(answer)
    with pytest.raises(Refused, match=r"did not load, and those before are gone: .*half.*; start the server again"):
        update(original, updater, updater.model_config.model_path, "auto")


def test_a_model_that_writes_all_or_nothing_goes_on_with_what_it_has(updater):
    model = SimpleNamespace(named_tensors=lambda: {name: WEIGHTS[name] for name in FITS})
    updater.get_model = lambda: model
    original, _ = answering(ValueError("1 quantised"))
    served = updater.model_config.model_path
    assert update(original, updater, served, "auto") == (False, f"{served} was not loaded: 1 quantised")


def test_a_load_that_never_began_keeps_the_path_of_what_is_served(updater):
    original, _ = answering((False, "Failed to get weights iterator: nothing there."))
    assert not update(original, updater, "nowhere", "auto")[0]
    assert updater.model_config.model_path.endswith("served")


def test_what_cannot_be_read_is_one_line(tmp_path):
    new = folder(tmp_path / "new", WEIGHTS)
    assert misfit(new, "nonsense", FITS) == "'nonsense' is no load format"
    (tmp_path / "new" / "model.safetensors").write_bytes(b"broken")
    assert "headers cannot be read" in misfit(new, "auto", FITS)
    assert misfit(str(tmp_path / "nowhere"), "auto", FITS) is None


def test_an_index_says_which_files_count(tmp_path):
    new = tmp_path / "new"
    folder(new, WEIGHTS)
    save_file({"z": torch.zeros(1)}, new / "other.safetensors")
    assert shapes(new) == FITS | {"z": (1,)}
    index = {"weight_map": dict.fromkeys(WEIGHTS, "model.safetensors")}
    (new / "model.safetensors.index.json").write_text(json.dumps(index))
    assert shapes(new) == FITS
