"""The average of the weights of several models of one spec: checkpoints of a run, or runs (a model soup).

    W = (W_1 + ... + W_k) / k        in float64

Averages of checkpoints smooth the end of a run (Izmailov et al., 2018: SWA); averages of runs that were fine-tuned from
one start often beat each of them (Wortsman et al., 2022). Runs that start from different random weights cannot be
averaged, since their hidden units do not correspond. Running statistics of BatchNorm are averaged like weights. If the
first model was trained with `quantize`, the average is quantized too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from allmlp import checkpoint
from allmlp.data.preprocessing import known_preprocessing
from allmlp.errors import UserError, plural
from allmlp.files import RUN
from allmlp.quantization import round_weights
from allmlp.record import read_run
from allmlp.weights import folder
from allmlp.weights.bundled import model_path
from allmlp.weights.convert import check_finite, read_tokenizer_files


def average_models(folders: Sequence[Path], target: Path) -> Path:
    """Save the average of models of one spec as `target`, with the preprocessing of the first."""
    if len(folders) < 2:
        raise UserError("an average needs at least two models, or the checkpoints of one run: --last 3")
    folders = [*map(model_path, folders)]
    spec = folder.read_spec(folders[0])
    for other in folders[1:]:
        if folder.read_spec(other) != spec:
            raise UserError(
                f"{other} has a different config from {folders[0]}: only models of one spec have an average"
            )
        if class_names(other) != class_names(folders[0]):
            raise UserError(f"{other} has other classes than {folders[0]}, or in another order")
        if normalization(other) != normalization(folders[0]):
            raise UserError(f"{other} normalizes its inputs with another mean or std than {folders[0]}")
        if tokenizers_differ(other, folders[0]):
            raise UserError(f"{other} has another tokenizer than {folders[0]}: their embeddings are of other tokens")
    states = (finite_weights(one, folder.load(one, dtype=None).state_dict()) for one in folders)
    return save_average(folders[0], states, target)


def class_names(path: Path) -> tuple[str, ...]:
    preprocessing = known_preprocessing(path)
    return preprocessing.class_names if preprocessing else ()


def normalization(path: Path) -> tuple[object, object]:
    preprocessing = known_preprocessing(path)
    return getattr(preprocessing, "mean", None), getattr(preprocessing, "std", None)


def tokenizers_differ(path: Path, other: Path) -> bool:
    """Whether both folders have a tokenizer, but not the same."""
    files, other_files = read_tokenizer_files(path), read_tokenizer_files(other)
    return bool(files and other_files) and files != other_files


def finite_weights(path: Path, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the model or checkpoint at `path`; UserError if one of them would spoil the average."""
    return {name: check_finite(path, name, weight) for name, weight in state.items()}


def average_checkpoints(run: Path, last: int, target: Path) -> Path:
    """Save the average of the last checkpoints of a finished run; of their EMA weights, if the run has any."""
    checkpoints = checkpoint.complete(run)[-last:]
    if len(checkpoints) < last:
        raise UserError(
            f"{run} has {plural(len(checkpoints), 'checkpoint')}, not {last}: train with --set keep_checkpoints={last}"
        )
    return save_average(run, (finite_weights(place, model_weights(place)) for place in checkpoints), target)


def model_weights(place: Path) -> dict[str, Tensor]:
    """The model's weights in a checkpoint: the EMA weights, if the run has any."""
    return checkpoint.read_part(place, "ema") or {
        name.removeprefix("model."): weight
        for name, weight in checkpoint.read_part(place, "task").items()
        if name.startswith("model.")
    }


def save_average(like: Path, states: Iterable[Mapping[str, Tensor]], target: Path) -> Path:
    model = folder.load(like, dtype=None)
    state = model.state_dict()
    mean = average(states)
    if mean.keys() != state.keys():
        name = min(mean.keys() ^ state.keys())
        raise UserError(f"the weights are not those of the model in {like}: {name}; of a run with lora, average runs")
    model.load_state_dict({name: weight.to(state[name].dtype) for name, weight in mean.items()})
    quantization = read_run(like).quantize if (like / RUN).is_file() else None
    if quantization is not None:  # the mean of quantized weights is not quantized
        quantization.apply(model)
        round_weights(model)
    return folder.save(model, target, like=like)


def average(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Mean of every tensor in float64; integer tensors, such as batch counts, are those of the last state."""
    total: dict[str, Tensor] = {}
    count = 0
    for state in states:
        count += 1
        for name, tensor in state.items():
            added = tensor.double() if tensor.is_floating_point() else tensor
            total[name] = total[name] + added if name in total and tensor.is_floating_point() else added
    return {name: tensor / count if tensor.is_floating_point() else tensor for name, tensor in total.items()}
