"""What became of each public name of Apex: amp, optimizers, parallel, fp16_utils, and what Lightning had of it."""

from __future__ import annotations

from lightning_apex.migrate.row import Row, better, gone, same, torchs

AMP = (
    same("apex.amp", "The whole module; it also knows O4 and O5 (bf16).", module=True),
    better("apex.amp.initialize", "May be called again; models stay picklable, no method of yours is replaced."),
    better("apex.amp.scale_loss", "Two contexts and nested calls are independent; the scale never reaches 0."),
    same("apex.amp.master_params"),
    better("apex.amp.state_dict", "Holds the trackers too: a resumed run equals one without interruption bit for bit."),
    better("apex.amp.load_state_dict", "Takes Apex's dictionaries too."),
    same("apex.amp.disable_casts"),
    same("apex.amp.half_function"),
    same("apex.amp.bfloat16_function"),
    better("apex.amp.float_function", "Nested and keyword arguments are cast as well."),
    same("apex.amp.promote_function"),
    same("apex.amp.register_half_function"),
    same("apex.amp.register_bfloat16_function"),
    same("apex.amp.register_float_function"),
    same("apex.amp.register_promote_function"),
    gone("apex.amp.init", "`amp.initialize(model, optimizer, opt_level='O1')`", "It was superseded in Apex in 2019."),
    gone("apex.amp.register", "`amp.register_float_function` and its like", "It was never documented."),
    gone(
        "apex.amp._amp_state",
        "`amp.state_dict()` to read scales, `amp.master_params(optimizer)` for masters",
        "There are no globals: state hangs on the objects that initialize returned.",
        covers=True,
    ),
    gone("apex.amp.opt.OptimWrapper", "`amp.initialize` with `num_losses`", "It belonged to `amp.init`."),
    gone("apex.amp.scaler.LossScaler", "`lightning_apex.LossScaler`", "It was internal and has another constructor."),
)

OPTIMIZERS = (
    same("apex.optimizers", "The whole module.", module=True),
    better("apex.optimizers.FusedAdam", "CPU too; equal to torch's AdamW and Adam; states load both ways."),
    better("apex.optimizers.FusedSGD", "CPU too; right after a skipped first step; momentum starts per parameter."),
    better("apex.optimizers.FusedLAMB", "CPU too; gradients are not changed by the step."),
    same("apex.optimizers.FusedMixedPrecisionLamb"),
    better("apex.optimizers.FusedNovoGrad", "CPU too; its state loads at any step."),
    better("apex.optimizers.FusedAdagrad", "CPU too; equal to torch's Adagrad."),
    better("apex.optimizers.FusedLARS", "CPU too."),
    better("apex.optimizers.FP16_Optimizer", to="lightning_apex.fp16_utils.FP16_Optimizer"),
)

PARALLEL = (
    same("apex.parallel", "The whole module.", module=True),
    better(
        "apex.parallel.DistributedDataParallel",
        "torch's DistributedDataParallel, taking Apex's arguments too; masters are rank 0's on every rank.",
    ),
    better("apex.parallel.SyncBatchNorm", "CPU too; uneven batches; `z` and `fuse_relu` in every layout."),
    better("apex.parallel.convert_syncbn_model", "Keeps hooks, training flags and shared modules."),
    same("apex.parallel.create_syncbn_process_group"),
    better("apex.parallel.LARC", "Is an Optimizer: schedulers, closures and state dictionaries work."),
    gone(
        "apex.parallel.Reducer",
        "`for p in model.parameters(): dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)`",
        "torch's collectives do it in a line.",
    ),
    gone(
        "apex.parallel.multiproc", "`torchrun --nproc_per_node N script.py`", "torch has its own launcher.", covers=True
    ),
)

FP16_UTILS = (
    same("apex.fp16_utils", "The whole module.", module=True),
    better("apex.fp16_utils.network_to_half", "BatchNorm keeps its fp32 values to the last bit."),
    same("apex.fp16_utils.convert_network"),
    same("apex.fp16_utils.convert_module"),
    same("apex.fp16_utils.BN_convert_float"),
    same("apex.fp16_utils.FP16Model"),
    same("apex.fp16_utils.tofp16"),
    better("apex.fp16_utils.prep_param_lists", "Flat masters may come from parameters of several types."),
    same("apex.fp16_utils.master_params_to_model_params"),
    same("apex.fp16_utils.model_grads_to_master_grads"),
    better("apex.fp16_utils.FP16_Optimizer", "A fixed scale skips overflows too; its state is plain tensors."),
    same("apex.fp16_utils.to_python_float"),
    same("apex.fp16_utils.LossScaler"),
    same("apex.fp16_utils.DynamicLossScaler"),
    gone("apex.fp16_utils.FP16_Module", "`lightning_apex.fp16_utils.FP16Model`", "Apex itself renamed it in 2018."),
    gone("apex.fp16_utils.fp32_to_fp16", "`x.half()`, or `tofp16()` for nested inputs", "Apex dropped it in 2018."),
    gone("apex.fp16_utils.fp16_to_fp32", "`x.float()`", "Apex dropped it in 2018."),
    gone("apex.fp16_utils.Fused_Weight_Norm", "`torch.nn.utils.parametrizations.weight_norm`", "torch's is fused now."),
)

LAYERS = (
    torchs("apex.normalization", "`torch.nn.LayerNorm` and `torch.nn.RMSNorm`, fused in torch", module=True),
    torchs("apex.normalization.FusedLayerNorm", to="torch.nn.LayerNorm"),
    torchs("apex.normalization.FusedRMSNorm", to="torch.nn.RMSNorm", note="Its default eps differs: give it."),
    torchs(
        "apex.normalization.MixedFusedLayerNorm",
        to="torch.nn.LayerNorm",
        note="Name it in `keep_fp32` at O2 and O5 to keep its weights fp32.",
    ),
    torchs(
        "apex.normalization.MixedFusedRMSNorm",
        to="torch.nn.RMSNorm",
        note="Name it in `keep_fp32` at O2 and O5 to keep its weights fp32; its default eps differs.",
    ),
    torchs("apex.mlp", "`torch.nn.Sequential` of Linear and ReLU, compiled with `torch.compile`", module=True),
    torchs("apex.mlp.MLP", "`torch.nn.Sequential` of Linear and ReLU, compiled with `torch.compile`"),
    torchs("apex.mlp.mlp_function", "`torch.nn.functional.linear` and `relu`, under `torch.compile`"),
    torchs("apex.fused_dense", "`torch.nn.Linear`; torch's own matrix product takes the bias", module=True),
    torchs("apex.fused_dense.FusedDense", to="torch.nn.Linear"),
    torchs("apex.fused_dense.FusedDenseGeluDense", "nn.Linear, nn.GELU, nn.Linear under `torch.compile`"),
    torchs("apex.fused_dense.DenseNoBias", "`torch.nn.Linear(..., bias=False)`"),
    torchs("apex.fused_dense.fused_dense_function", to="torch.nn.functional.linear"),
    torchs("apex.fused_dense.dense_no_bias_function", to="torch.nn.functional.linear"),
    torchs("apex.fused_dense.fused_dense_gelu_dense_function", "`F.linear`, `F.gelu`, `F.linear`, compiled"),
    gone(
        "apex.RNN",
        "`torch.nn.LSTM`, `GRU`, `RNN`",
        "Apex dropped it; torch has no mLSTM.",
        covers=True,
    ),
    torchs(
        "apex.reparameterization", "`torch.nn.utils.parametrizations.weight_norm(module)`", covers=True, module=True
    ),
)

_COMPILED = "A compiled part of Apex."

PIECES = (
    gone(
        "apex.multi_tensor_apply",
        "`torch._foreach_mul_` and its like; for clipping `torch.nn.utils.clip_grad_norm_`",
        "The kernels behind it are not public here; the optimizers and the loss scaler use them.",
        covers=True,
    ),
    gone(
        "amp_C",
        "`torch._foreach_norm`, `torch._foreach_mul_`, ...",
        _COMPILED,
        covers=True,
    ),
    gone(
        "apex_C",
        "`torch._utils._flatten_dense_tensors` and its inverse",
        _COMPILED,
        covers=True,
    ),
    gone("syncbn", "`lightning_apex.SyncBatchNorm`", _COMPILED, covers=True),
    gone("fused_layer_norm_cuda", "`torch.nn.functional.layer_norm`", _COMPILED, covers=True),
    torchs("apex.pyprof", "`torch.profiler.profile`, `torch.cuda.nvtx`", covers=True, module=True),
    gone("apex._autocast_utils", "`torch.amp.custom_fwd` and `custom_bwd`", "It was internal to Apex.", covers=True),
)

LIGHTNING = (
    gone(
        "lightning.pytorch.plugins.ApexMixedPrecisionPlugin",
        '`Trainer(plugins=[lightning_apex.ApexPrecision("O2")])`',
        "Lightning removed it in 2.0; it could not resume a run, ApexPrecision can.",
    ),
    gone(
        "lightning.pytorch.plugins.NativeMixedPrecisionPlugin",
        '`Trainer(plugins=[lightning_apex.ApexPrecision("O1")])`, or Lightning\'s `precision="16-mixed"`',
        "Lightning renamed it; it is MixedPrecision there now.",
    ),
    gone(
        "lightning.pytorch.plugins.MixedPrecisionPlugin",
        '`Trainer(plugins=[lightning_apex.ApexPrecision("O1")])`, or Lightning\'s `precision="16-mixed"`',
        "Lightning renamed it; it is MixedPrecision there now.",
    ),
    gone(
        "lightning.pytorch.utilities.AMPType",
        '`Trainer(plugins=[lightning_apex.ApexPrecision("O2")])`',
        "Lightning removed it with its Apex plugin in 2.0.",
        covers=True,
    ),
    gone(
        "lightning.pytorch.utilities._APEX_AVAILABLE",
        "nothing: `import lightning_apex` works on every machine",
        "Lightning removed it with its Apex plugin in 2.0.",
    ),
)

#: Keyword arguments of calls that no longer exist, by the callable's name.
ARGUMENTS: dict[str, dict[str, str]] = {
    "apex.optimizers.FusedAdam": {
        "master_weights": "drop it: O2 and O5 keep masters (`amp.initialize`, `ApexPrecision`)",
    },
    "apex.optimizers.FusedSGD": {
        "materialize_master_grads": "drop it: gradients are never copied unless somebody looks at them",
    },
    "apex.parallel.DistributedDataParallel": {
        "shared_param": "drop it: shared parameters need nothing",
        "retain_allreduce_buffers": "drop it: `gradient_as_bucket_view=True` shares the buckets' memory",
    },
    "apex.normalization.FusedLayerNorm": {"memory_efficient": "drop it: torch.nn.LayerNorm has no such argument"},
    "apex.normalization.FusedRMSNorm": {"memory_efficient": "drop it: torch.nn.RMSNorm has no such argument"},
}

#: Arguments that Lightning's Trainer lost with its Apex plugin; looked for in every call.
TRAINER_ARGUMENTS: dict[str, str] = {
    "amp_backend": 'drop it and write `plugins=[lightning_apex.ApexPrecision("{level}")]` instead of `precision=`',
    "amp_level": 'drop it and write `plugins=[lightning_apex.ApexPrecision("{level}")]` instead of `precision=`',
}

SECTIONS: dict[str, tuple[Row, ...]] = {
    "amp": AMP,
    "Optimizers": OPTIMIZERS,
    "parallel": PARALLEL,
    "fp16_utils": FP16_UTILS,
    "Layers": LAYERS,
    "Kernels": PIECES,
}
