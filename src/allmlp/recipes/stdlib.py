"""Language models on the docstrings of Python's standard library: no download, minutes on two CPU cores."""

from __future__ import annotations

from allmlp.data.docstrings import Docstrings
from allmlp.layers import TinyAttention
from allmlp.models.bert import bert
from allmlp.models.gmlp import gmlp_text
from allmlp.models.mixer import mixer_text
from allmlp.models.model import ModelSpec
from allmlp.optim import Muon
from allmlp.run import Budget, Run
from allmlp.schedule import LinearSchedule
from allmlp.tasks.causal_lm import CausalLM
from allmlp.tasks.masked_lm import MaskedLM
from allmlp.tasks.task import Task


def _docstrings(model: ModelSpec, task: Task = MaskedLM()) -> Run:
    return Run(
        model=model,
        task=task,
        data=Docstrings(),
        batch_size=64,
        budget=Budget(epochs=5),
        optim=Muon(lr=3e-3, weight_decay=0.05),
        schedule=LinearSchedule(warmup_fraction=0.1),
        max_grad_norm=1.0,
        log_every=50,
        eval_every=250,
        save_every=250,
    )


def stdlib_gmlp() -> Run:
    """gMLP, masked language model on the docstrings of Python's standard library.

    allmlp train stdlib_gmlp
    Four minutes on two CPU cores.
    """
    return _docstrings(gmlp_text(4, 96, 384, seq_len=64))


def stdlib_amlp() -> Run:
    """aMLP, masked language model on the docstrings of Python's standard library.

    allmlp train stdlib_amlp
    Six minutes on one CPU core.
    """
    return _docstrings(gmlp_text(4, 96, 384, seq_len=64, attention=TinyAttention(32)))


def stdlib_mixer() -> Run:
    """MLP-Mixer, masked language model on the docstrings of Python's standard library.

    allmlp train stdlib_mixer
    Five minutes on one CPU core.
    """
    return _docstrings(mixer_text(4, 96, 48, 288))


def stdlib_bert() -> Run:
    """BERT, the baseline, on the docstrings of Python's standard library.

    allmlp train stdlib_bert
    Five minutes on one CPU core.
    """
    return _docstrings(bert(3, 96, 2, seq_len=64))


def stdlib_causal() -> Run:
    """Causal gMLP that generates docstrings.

    allmlp train stdlib_causal
    allmlp generate runs/stdlib_causal --prompt "Return the"
    Eight minutes on one CPU core.
    """
    return _docstrings(gmlp_text(4, 96, 384, seq_len=64, causal=True), CausalLM())
