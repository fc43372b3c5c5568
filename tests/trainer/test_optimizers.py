"""Optimizers: their parameter groups, the state that they keep, what they refuse; and learning rates."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.trainer.training import CPU, MakeSettings
from trainkit.errors import TrainingError
from trainkit.optimizers import OPTIMIZERS
from trainkit.recipe.schema import GptModel, Optimizer, Schedule
from trainkit.trainer.distributed import process_group
from trainkit.trainer.models.gpt import Gpt, build_gpt
from trainkit.trainer.optim import build_optimizer, learning_rate
from trainkit.trainer.parallel.single_and_ddp import Single
from trainkit.trainer.settings import World

HERE = tuple(name for name in OPTIMIZERS if name != "adamw_apex_fused")  # whose kernels run on CUDA only


@pytest.fixture
def model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(GptModel(layers=1, heads=2, hidden_size=64), sequence_length=64)


def stepped(model: Gpt, **settings: Any) -> torch.optim.Optimizer:
    """An optimizer after one step."""
    optimizer = build_optimizer(model, Optimizer.model_validate(settings))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model(tokens, tokens).backward()
    optimizer.step()
    return optimizer


def state_bytes(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    """Tensors with dimensions only: step counters are no state per parameter, and quantization maps are shared."""
    held = optimizer.state[parameter]
    return sum(
        value.nbytes
        for name, value in held.items()
        if isinstance(value, torch.Tensor) and value.dim() and not name.startswith("qmap")
    )


def test_sharded_tensors_reach_no_kernel_that_takes_whole_ones(model: Gpt) -> None:
    asked = Optimizer.model_validate({"name": "adamw_anyprecision"})
    assert build_optimizer(model, asked).defaults["triton"] is None  # on CUDA its triton kernels, then
    own = Optimizer.model_validate({"name": "adamw_anyprecision", "args": {"foreach": False}})
    with process_group(World(), CPU, needed=True):
        whole, mesh = torch.ones(4, 4), init_device_mesh("cpu", (1,))
        sharded = nn.ParameterDict({"weight": nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))})
        assert build_optimizer(sharded, asked).defaults["triton"] is False
        assert build_optimizer(sharded, own).defaults["triton"] is None


@pytest.mark.parametrize("name", HERE)
def test_every_optimizer_decays_matrices_and_no_norm_or_bias(name: str, model: Gpt) -> None:
    groups = build_optimizer(model, Optimizer.model_validate({"name": name, "weight_decay": 0.2})).param_groups
    assert {group["weight_decay"] for group in groups} == {0.2, 0.0}
    for group in groups:
        assert {parameter.dim() for parameter in group["params"]} == {2 if group["weight_decay"] else 1}


@pytest.mark.parametrize(
    ("name", "per_parameter"),
    [
        ("adamw_torch", 8),
        ("adamw_torch_fused", 8),
        ("adamw_torch_foreach", 8),
        ("adamw_anyprecision", 8),
        ("adagrad", 4),
        ("sgd", 4),
    ],
)
def test_state_takes_as_many_bytes_per_parameter_as_its_kind_says(name: str, per_parameter: int, model: Gpt) -> None:
    optimizer = stepped(model, name=name)
    held = sum(state_bytes(optimizer, parameter) for parameter in model.parameters())
    assert held == per_parameter * sum(parameter.numel() for parameter in model.parameters())


def test_muon_updates_the_matrices_of_blocks_and_adamw_the_rest(model: Gpt) -> None:
    optimizer = stepped(model, name="muon")
    kept = {name: set(optimizer.state[each]) for name, each in model.named_parameters()}
    matrices = {name for name, held in kept.items() if held == {"momentum_buffer"}}
    in_blocks = {
        f"{place}.weight"
        for place, each in model.named_modules()
        if isinstance(each, nn.Linear) and place.startswith("blocks.")
    }
    assert matrices == in_blocks != set()
    assert all(held == {"step", "exp_avg", "exp_avg_sq"} for name, held in kept.items() if name not in matrices)
    for name, each in model.named_parameters():
        assert state_bytes(optimizer, each) == (4 if name in matrices else 8) * each.numel()


def test_muon_takes_the_steps_of_pytorchs_own_two(model: Gpt) -> None:
    other = copy.deepcopy(model)
    ours = build_optimizer(model, Optimizer.model_validate({"name": "muon", "lr": 1e-2, "args": {"ns_steps": 4}}))
    hidden = [each for name, each in other.named_parameters() if "blocks" in name and each.dim() == 2]
    rest = [each for name, each in other.named_parameters() if not ("blocks" in name and each.dim() == 2)]
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, ns_steps=4, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [each for each in rest if each.dim() == dimensions], "weight_decay": decay}
        for dimensions, decay in ((2, 0.1), (1, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    tokens = torch.arange(8)[None]
    for _ in range(3):
        for each, optimizers in ((model, (ours,)), (other, (muon, adamw))):
            each.zero_grad()
            each(tokens, tokens).backward()
            for one in optimizers:
                one.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_muon_updates_a_sharded_matrix_as_a_whole_one() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(6, 4), torch.randn(3, 6, 4)
    ends = []
    with process_group(World(), CPU, needed=True):
        mesh = init_device_mesh("cpu", (1,))
        for place in (lambda whole: whole, lambda whole: distribute_tensor(whole, mesh, [Shard(0)])):
            layer = nn.Linear(4, 6, bias=False)
            layer.weight = nn.Parameter(place(start.clone()))
            blocks = nn.ModuleList([nn.ModuleDict({"layer": layer})])
            optimizer = build_optimizer(blocks, Optimizer.model_validate({"name": "muon", "lr": 1e-2}))
            for gradient in gradients:
                layer.weight.grad = place(gradient.clone())
                optimizer.step()
            ends.append(layer.weight)
        assert isinstance(ends[1], DTensor)
        assert torch.allclose(ends[0], ends[1].full_tensor(), rtol=0, atol=1e-7)


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix(model: Gpt) -> None:
    optimizer = stepped(model, name="adafactor", lr=1e-2)
    for parameter in model.parameters():
        expected = sum(parameter.shape) if parameter.dim() == 2 else parameter.numel()
        assert state_bytes(optimizer, parameter) == 4 * expected


def test_8_bit_adam_keeps_two_bytes_of_state_and_eight_for_embeddings_and_small_tensors(model: Gpt) -> None:
    optimizer = stepped(model, name="adamw_bnb_8bit")
    embeddings = {model.tokens.weight, model.positions.weight}
    assert min(parameter.numel() for parameter in embeddings) >= 4096  # else they would be in 32-bit anyway
    for parameter in model.parameters():
        per_parameter = state_bytes(optimizer, parameter) / parameter.numel()
        if parameter in embeddings or parameter.numel() < 4096:
            assert per_parameter == 8
        else:
            assert per_parameter == pytest.approx(2 + 2 * 4 / 256, rel=0.01)  # and a scale for each block of 256


def test_bf16_weights_under_anyprecision_take_six_bytes_and_gather_small_updates() -> None:
    """Updates below half a step of bf16 are lost by plain AdamW, and kept by Kahan summation."""
    moved = {}
    for name in ("adamw_torch", "adamw_anyprecision"):
        model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        torch.nn.init.ones_(model.weight)
        optimizer = build_optimizer(model, Optimizer.model_validate({"name": name, "lr": 1e-3, "weight_decay": 0.0}))
        for _ in range(10):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        moved[name] = 1 - model.weight.detach().float().mean().item()
        if name == "adamw_anyprecision":
            assert state_bytes(optimizer, model.weight) == 6 * model.weight.numel()
    assert moved["adamw_torch"] == 0
    assert moved["adamw_anyprecision"] == pytest.approx(10 * 1e-3, rel=0.25)


def test_every_form_of_adamw_agrees(model: Gpt) -> None:
    start = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.arange(4)[None]
    ends = {}
    for name in ("adamw_torch", "adamw_torch_fused", "adamw_torch_foreach", "adamw_anyprecision", "adamw_bnb_8bit"):
        model.load_state_dict(start)
        # A large eps: keys' biases have no gradient but rounding noise, which a small one would blow up.
        settings = Optimizer.model_validate({"name": name, "lr": 1e-2, "eps": 1e-3})
        optimizer = build_optimizer(model, settings)
        for _ in range(3):
            optimizer.zero_grad()
            model(tokens, tokens).backward()
            optimizer.step()
        ends[name] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    reference = ends.pop("adamw_torch")
    moved = (reference - torch.cat([start[name].flatten() for name, _ in model.named_parameters()])).norm()
    for name, end in ends.items():
        # Quantized state is as near as its 8 bits allow: measured 0.8 % of the way that the weights went.
        assert (end - reference).norm() / moved < (0.02 if name == "adamw_bnb_8bit" else 1e-5), name


@pytest.mark.parametrize("name", [*HERE, "torch.optim:RMSprop"])
def test_what_is_saved_goes_on_as_if_never_stopped(name: str, make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(optimizer={"name": name, "lr": 1e-2}, model={"hidden_size": 64})
    tokens = torch.arange(8)[None]

    def engine() -> Single:
        torch.manual_seed(0)
        return Single(build_gpt(settings.recipe), settings, World(), CPU)

    def step(strategy: Single) -> torch.Tensor:
        loss: torch.Tensor = strategy.model(tokens, tokens)
        strategy.backward(loss, last=True)
        strategy.update(1e-2)
        return loss.detach()

    one, other = engine(), engine()
    for _ in range(2):
        step(one)
    (tmp_path / "saved").mkdir()
    one.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    assert [step(one), step(one)] == [step(other), step(other)]


def test_any_class_is_taken_by_its_import_path_with_its_arguments(model: Gpt) -> None:
    settings = {"name": "torch.optim:RMSprop", "lr": 0.5, "args": {"alpha": 0.7, "centered": True}}
    optimizer = build_optimizer(model, Optimizer.model_validate(settings))
    assert isinstance(optimizer, torch.optim.RMSprop)
    assert [optimizer.param_groups[0][name] for name in ("lr", "alpha", "centered")] == [0.5, 0.7, True]


def test_a_class_of_ones_own_stands_in_the_working_folder(
    model: Gpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_optimizer.py").write_text("import torch\nclass Mine(torch.optim.SGD):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    optimizer = build_optimizer(model, Optimizer.model_validate({"name": "my_own_optimizer:Mine"}))
    assert type(optimizer).__name__ == "Mine"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "no_such_package:Adam"}, "no_such_package:Adam cannot be imported"),
        ({"name": "torch.optim:Adum"}, "torch.optim:Adum cannot be imported"),
        ({"name": "sgd", "args": {"momentun": 0.9}}, "momentun"),
        ({"name": "muon", "args": {"momentun": 0.9}}, "momentun"),
        pytest.param(
            {"name": "torch.optim:Muon"},
            "torch.optim:Muon does not take .* Muon only supports 2D parameters",
            marks=pytest.mark.needs("torch>=2.9"),
        ),
    ],
)
def test_a_class_that_is_not_there_or_does_not_fit_is_named(model: Gpt, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        build_optimizer(model, Optimizer.model_validate(settings))


LAST = {"cosine": 0.1, "linear": 0.1, "constant": 1.0, "constant_with_warmup": 1.0, "wsd": 0.1}


def rates(steps: int = 20, **schedule: object) -> list[float]:
    rate = learning_rate(Optimizer(lr=1.0), Schedule.model_validate(schedule), steps)
    return [rate(step) for step in range(steps)]


@pytest.mark.parametrize("name", LAST)
def test_a_schedule_warms_up_to_the_peak_and_ends_where_it_should(name: str) -> None:
    found = rates(name=name, warmup_steps=4)
    assert found[-1] == pytest.approx(LAST[name])
    assert max(found) == 1.0
    assert found[:4] == ([1.0] * 4 if name == "constant" else pytest.approx([0.2, 0.4, 0.6, 0.8]))
    assert found[4:] == sorted(found[4:], reverse=True)


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("name", [*LAST])
def test_counted_from_zero_a_schedule_is_that_of_transformers(name: str, warmup: int) -> None:
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    kind = "warmup_stable_decay" if name == "wsd" else name
    decay = {"num_decay_steps": 2, "decay_type": "linear"} if name == "wsd" else None  # the defaults of the recipe
    theirs = transformers.get_scheduler(
        kind, optimizer, num_warmup_steps=warmup, num_training_steps=20, scheduler_specific_kwargs=decay
    )
    warming = {} if name == "constant" else {"warmup_steps": warmup}
    found = rates(name=name, min_lr_ratio=0.0, from_zero=True, **warming)
    assert found == pytest.approx(rates_of(theirs, optimizer), abs=1e-12)


def rates_of(schedule: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """The rates of 20 steps by a schedule of PyTorch's form."""
    found = []
    for _ in range(20):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(("decay", "theirs"), [("linear", "linear"), ("cosine", "cosine"), ("sqrt", "1-sqrt")])
def test_a_decay_of_each_shape_is_that_of_transformers(decay: str, theirs: str) -> None:
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = transformers.get_wsd_schedule(
        optimizer, num_warmup_steps=4, num_decay_steps=6, num_training_steps=20, decay_type=theirs, min_lr_ratio=0.1
    )
    found = rates(name="wsd", warmup_steps=4, decay_steps=0.3, decay_type=decay, from_zero=True)
    assert found == pytest.approx(rates_of(schedule, optimizer), abs=1e-12)


def test_wsd_holds_the_peak_until_its_last_steps_which_a_longer_run_only_moves() -> None:
    found = rates(name="wsd", warmup_steps=4, decay_steps=5, min_lr_ratio=0.0)
    assert found[4:15] == [1.0] * 11
    assert found[15:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    longer = rates(40, name="wsd", warmup_steps=4, decay_steps=5, min_lr_ratio=0.0)
    assert longer[:15] == found[:15]  # from a checkpoint of the stable phase a run can decay, or go on
    assert longer[35:] == found[15:]


def test_a_run_too_short_for_its_decay_decays_in_what_is_left() -> None:
    assert rates(6, name="wsd", warmup_steps=4, decay_steps=50, min_lr_ratio=0.0)[4:] == pytest.approx([0.5, 0.0])


def test_a_cosine_is_halfway_in_the_middle() -> None:
    assert rates(steps=11, name="cosine", min_lr_ratio=0.0)[5] == pytest.approx(0.5)


def test_no_step_is_taken_at_rate_zero_before_the_end() -> None:
    assert min(rates(name="linear", warmup_steps=19, min_lr_ratio=0.1)) > 0


def test_a_run_shorter_than_its_warm_up_stays_below_the_peak() -> None:
    assert max(rates(steps=3, warmup_steps=10)) < 0.5
