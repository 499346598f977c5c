"""The table tells the truth: what it says is here is here, and takes what Apex's took."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_apex.migrate.names import SECTIONS, find, rows, target
from lightning_apex.migrate.page import page
from lightning_apex.migrate.row import Row
from lightning_apex.migrate.table import ARGUMENTS

ROWS = rows()
PAGE = Path(__file__).parents[2] / "docs" / "migration.md"


def resolve(name: str) -> Any:
    """What a dotted name stands for."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            thing = getattr(thing, part)
        return thing
    raise ImportError(name)


@pytest.mark.parametrize("row", [row for row in ROWS if row.to is not None], ids=lambda row: row.name)
def test_what_takes_a_names_place_is_there(row: Row) -> None:
    assert row.to is not None
    thing = resolve(row.to)
    assert inspect.ismodule(thing) is row.module


@pytest.mark.parametrize("row", [row for row in ROWS if "torch." in row.instead + row.note], ids=lambda row: row.name)
def test_names_of_torch_and_ours_in_the_advice_exist(row: Row) -> None:
    for name in re.findall(r"(?:lightning_apex|(?<![\w.])torch)(?:\.\w+)+", row.instead):
        resolve(name.removesuffix("."))


def test_no_name_has_two_rows_and_every_row_says_what_to_do() -> None:
    names = Counter(row.name for section in SECTIONS.values() for row in section)
    assert [name for name, count in names.items() if count > 1] == []
    for row in ROWS:
        assert row.now, row
        assert row.verdict not in ("same", "better") or (row.to or "").startswith("lightning_apex"), row
        assert row.verdict != "gone" or (row.to is None and row.note), row


def test_what_is_gone_is_not_here() -> None:
    for row in ROWS:
        if row.verdict == "gone" and row.name.startswith("apex."):
            with pytest.raises((ImportError, AttributeError)):
                resolve("lightning_" + row.name)


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page(), "run `python -m lightning_apex.migrate.page > docs/migration.md`"
    for row in ROWS[:-1]:
        assert f"`{row.name}`" in page()


# What Apex's own took, by name, in its last versions with these classes.
SIGNATURES = {
    "apex.optimizers.FusedAdam": "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none "
    "capturable master_weights",
    "apex.optimizers.FusedSGD": "params lr momentum dampening weight_decay nesterov wd_after_momentum "
    "materialize_master_grads set_grad_none",
    "apex.optimizers.FusedLAMB": "params lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging "
    "set_grad_none max_grad_norm use_nvlamb",
    "apex.optimizers.FusedMixedPrecisionLamb": "params lr step bias_correction betas eps weight_decay amsgrad "
    "adam_w_mode grad_averaging max_grad_norm use_nvlamb reduced_precision_dtype",
    "apex.optimizers.FusedNovoGrad": "params lr bias_correction betas eps weight_decay amsgrad reg_inside_moment "
    "grad_averaging norm_type init_zero set_grad_none",
    "apex.optimizers.FusedAdagrad": "params lr eps weight_decay set_grad_none adagrad_w_mode",
    "apex.parallel.LARC": "optimizer trust_coefficient clip eps",
    "apex.parallel.SyncBatchNorm": "num_features eps momentum affine track_running_stats process_group channel_last "
    "fuse_relu",
    "apex.parallel.convert_syncbn_model": "module process_group channel_last",
    "apex.parallel.create_syncbn_process_group": "group_size",
    "apex.parallel.DistributedDataParallel": "module message_size delay_allreduce shared_param "
    "allreduce_trigger_params retain_allreduce_buffers allreduce_always_fp32 num_allreduce_streams "
    "allreduce_communicators gradient_average gradient_predivide_factor gradient_average_split_factor prof",
    "apex.amp.initialize": "models optimizers enabled opt_level cast_model_type patch_torch_functions "
    "keep_batchnorm_fp32 master_weights loss_scale cast_model_outputs num_losses verbosity min_loss_scale "
    "max_loss_scale",
    "apex.amp.scale_loss": "loss optimizers loss_id model delay_unscale delay_overflow_check",
    "apex.amp.master_params": "optimizer",
    "apex.fp16_utils.FP16_Optimizer": "init_optimizer static_loss_scale dynamic_loss_scale dynamic_loss_args verbose",
    "apex.fp16_utils.DynamicLossScaler": "init_scale scale_factor scale_window",
    "apex.fp16_utils.LossScaler": "scale",
    "apex.fp16_utils.prep_param_lists": "model flat_master",
    "apex.fp16_utils.model_grads_to_master_grads": "model_params master_params flat_master",
    "apex.fp16_utils.master_params_to_model_params": "model_params master_params flat_master",
    "apex.fp16_utils.network_to_half": "network",
    "apex.fp16_utils.convert_network": "network dtype",
    "apex.fp16_utils.convert_module": "module dtype",
    "apex.fp16_utils.BN_convert_float": "module",
    "apex.fp16_utils.FP16Model": "network",
    "apex.fp16_utils.to_python_float": "t",
    "apex.normalization.FusedLayerNorm": "normalized_shape eps elementwise_affine memory_efficient",
    "apex.normalization.FusedRMSNorm": "normalized_shape eps elementwise_affine memory_efficient",
    "apex.contrib.clip_grad.clip_grad_norm_": "parameters max_norm norm_type error_if_nonfinite",
    "apex.fused_dense.FusedDense": "in_features out_features bias",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_taken_or_named_as_gone(name: str) -> None:
    parameters = inspect.signature(resolve(target(name) or "")).parameters.values()
    ours = [p.name for p in parameters]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    theirs, gone = SIGNATURES[name].split(), ARGUMENTS.get(name, {})
    assert [argument for argument in theirs if argument not in ours and argument not in gone] == []
    same_places = next((i for i, argument in enumerate(theirs) if argument in gone), len(theirs))
    assert all(a == b for a, b in zip(positional, theirs[:same_places], strict=False)), (positional, theirs)


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        ("apex", "lightning_apex"),
        ("apex.amp.initialize", "lightning_apex.amp.initialize"),
        ("apex.optimizers.fused_adam.FusedAdam", "lightning_apex.optimizers.FusedAdam"),
        ("apex.optimizers.FusedAdam.step", "lightning_apex.optimizers.FusedAdam.step"),
        ("apex.parallel.LARC.LARC", "lightning_apex.parallel.LARC"),
        ("apex.parallel.distributed.DistributedDataParallel", "lightning_apex.parallel.DistributedDataParallel"),
        ("apex.normalization.fused_layer_norm.FusedLayerNorm", "torch.nn.LayerNorm"),
        ("apex.normalization", None),
        ("apex.amp.compat.something", None),
        ("apex.contrib.sparsity.asp.ASP", None),
        ("apex.no_such_thing", None),
    ],
)
def test_names_are_found_where_apex_defined_them(name: str, becomes: str | None) -> None:
    assert target(name) == becomes


def test_the_longest_row_speaks_and_a_covering_one_for_the_rest() -> None:
    assert find("apex.transformer.tensor_parallel.mappings.reduce").name == "apex.transformer.tensor_parallel"
    assert find("apex.transformer.unheard_of").name == "apex.transformer"
    assert find("apex.pyprof.nvtx.init").name == "apex.pyprof"  # documented until 2020
    assert find("apex.contrib.sparsity.ASP.prune").name == "apex.contrib.sparsity.ASP"
    assert find("pytorch_lightning.plugins.precision.apex_amp.ApexMixedPrecisionPlugin").verdict == "gone"
    assert find("apex.amp.compat") is None and find("torch.nn") is None
