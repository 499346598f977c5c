"""What became of each public name of Apex: transformer and contrib."""

from __future__ import annotations

from lightning_apex.migrate.row import Row, gone, torchs

_PARALLELISM = "This package does mixed precision and optimizers, not model parallelism."
_TP = "`torch.distributed.tensor.parallel"
_STEP = "Its step(grads=...) is not offered."
_SOME = "It worked on some GPUs and shapes only."
_FSDP = "`fully_shard` of `torch.distributed.fsdp`, or ZeroRedundancyOptimizer"
_CUDNN = "A wrapper of one cuDNN graph for one shape; torch.compile and cuDNN's own heuristics took its place."

TRANSFORMER = (
    gone("apex.transformer", "Megatron-Core, or torch.distributed", _PARALLELISM, covers=True),
    torchs("apex.transformer.amp.GradScaler", "`torch.amp.GradScaler`, or `lightning_apex.LossScaler`"),
    torchs("apex.transformer.parallel_state", "`torch.distributed.device_mesh.init_device_mesh`", covers=True),
    torchs("apex.transformer.tensor_parallel", _TP + ".parallelize_module`", covers=True),
    torchs("apex.transformer.tensor_parallel.ColumnParallelLinear", _TP + ".ColwiseParallel`"),
    torchs("apex.transformer.tensor_parallel.RowParallelLinear", _TP + ".RowwiseParallel`"),
    torchs(
        "apex.transformer.tensor_parallel.VocabParallelEmbedding",
        "`RowwiseParallel` of `torch.distributed.tensor.parallel` on an nn.Embedding",
    ),
    torchs(
        "apex.transformer.tensor_parallel.vocab_parallel_cross_entropy",
        _TP + ".loss_parallel`",
    ),
    torchs("apex.transformer.tensor_parallel.checkpoint", "`torch.utils.checkpoint.checkpoint`"),
    torchs("apex.transformer.pipeline_parallel", "`torch.distributed.pipelining`", covers=True),
    torchs("apex.transformer.functional", "`torch.compile` over the plain formula", covers=True),
    torchs("apex.transformer.functional.FusedScaleMaskSoftmax", "`torch.nn.functional.scaled_dot_product_attention`"),
    torchs("apex.transformer.layers", "`torch.nn.LayerNorm`", covers=True),
    torchs("apex.transformer.layers.FusedLayerNorm", "`torch.nn.LayerNorm`"),
    torchs("apex.transformer.layers.FastLayerNorm", "`torch.nn.LayerNorm`"),
    torchs("apex.transformer.layers.MixedFusedLayerNorm", "`torch.nn.LayerNorm`"),
    gone("apex.transformer.enums", "Megatron-Core's enums", _PARALLELISM, covers=True),
    gone(
        "apex.transformer.microbatches",
        "Megatron-Core, or Lightning's `accumulate_grad_batches`",
        _PARALLELISM,
        covers=True,
    ),
    gone("apex.transformer.utils", "Megatron-Core", _PARALLELISM, covers=True),
    gone("apex.transformer.log_util", "Python's logging", "It set the level of Apex's own log.", covers=True),
    gone("apex.transformer.testing", "Megatron-Core", "Test models of Apex.", covers=True),
)

_DISTRIBUTED = "Sharded optimizers belong to a sharded model: torch's FSDP and ZeroRedundancyOptimizer."

CONTRIB: tuple[Row, ...] = (
    gone("apex.contrib", "see the names below", "Experiments of Apex, each for some GPUs and shapes.", covers=True),
    torchs("apex.contrib.clip_grad", "`torch.nn.utils.clip_grad_norm_`", module=True),
    torchs("apex.contrib.clip_grad.clip_grad_norm_", to="torch.nn.utils.clip_grad_norm_"),
    torchs("apex.contrib.xentropy", "`torch.nn.functional.cross_entropy`", covers=True),
    torchs(
        "apex.contrib.xentropy.SoftmaxCrossEntropyLoss",
        "`F.cross_entropy(x, y, label_smoothing=s, ignore_index=p, reduction='none')`",
    ),
    torchs("apex.contrib.layer_norm", "`torch.nn.LayerNorm`", module=True),
    torchs("apex.contrib.layer_norm.FastLayerNorm", to="torch.nn.LayerNorm"),
    torchs("apex.contrib.multihead_attn", "`torch.nn.functional.scaled_dot_product_attention`", covers=True),
    torchs("apex.contrib.multihead_attn.SelfMultiheadAttn", "`torch.nn.MultiheadAttention`"),
    torchs("apex.contrib.multihead_attn.EncdecMultiheadAttn", "`torch.nn.MultiheadAttention`"),
    torchs("apex.contrib.fmha", "`torch.nn.functional.scaled_dot_product_attention`", covers=True),
    torchs("apex.contrib.group_norm", "`torch.nn.GroupNorm`", module=True),
    torchs("apex.contrib.group_norm.GroupNorm", "`torch.nn.GroupNorm`, and `act='silu'` as an nn.SiLU after it"),
    torchs("apex.contrib.focal_loss", "`torchvision.ops.sigmoid_focal_loss`", covers=True),
    torchs("apex.contrib.index_mul_2d", "`a[index] * b` under `torch.compile`", covers=True),
    torchs("apex.contrib.nccl_allocator", "`torch.cuda.MemPool` with NCCL's allocator", covers=True),
    torchs("apex.contrib.sparsity", "`torch.sparse.to_sparse_semi_structured`, or torchao's sparsity", covers=True),
    torchs("apex.contrib.sparsity.ASP", "`torchao.sparsity` and `torch.sparse.to_sparse_semi_structured`"),
    torchs("apex.contrib.transducer", "`torchaudio.functional.rnnt_loss`", covers=True),
    torchs("apex.contrib.transducer.TransducerLoss", "`torchaudio.functional.rnnt_loss`"),
    torchs("apex.contrib.transducer.TransducerJoint", "`f.unsqueeze(2) + g.unsqueeze(1)`"),
    gone(
        "apex.contrib.groupbn.BatchNorm2d_NHWC",
        "`lightning_apex.SyncBatchNorm(..., channel_last=True, fuse_relu=True)`, with a process group for `bn_group`",
        _SOME,
    ),
    gone("apex.contrib.groupbn", "`lightning_apex.SyncBatchNorm`", _SOME, covers=True),
    gone("apex.contrib.cudnn_gbn", "`lightning_apex.SyncBatchNorm` with a process group", _CUDNN, covers=True),
    gone("apex.contrib.cudnn_gbn.GroupBatchNorm2d", "`lightning_apex.SyncBatchNorm` with a process group", _CUDNN),
    gone("apex.contrib.conv_bias_relu", "`torch.nn.Conv2d` and ReLU, with `torch.compile`", _CUDNN, covers=True),
    gone("apex.contrib.bottleneck", "torchvision's `Bottleneck`, with `torch.compile`", _CUDNN, covers=True),
    gone(
        "apex.contrib.peer_memory",
        "`torch.distributed._symmetric_memory`",
        "It was for images spread over GPUs.",
        covers=True,
    ),
    gone("apex.contrib.gpu_direct_storage", "`torch.cuda.gds`", "torch has its own.", covers=True),
    gone("apex.contrib.openfold_triton", "the kernels of OpenFold itself", "They were for one model.", covers=True),
    gone("apex.contrib.torchsched", "`torch.compile`", "An experiment with its scheduling.", covers=True),
    gone(
        "apex.contrib.optimizers",
        "`lightning_apex.optimizers`",
        _STEP,
        covers=True,
    ),
    gone(
        "apex.contrib.optimizers.FusedAdam",
        "`lightning_apex.optimizers.FusedAdam`",
        _STEP,
    ),
    gone(
        "apex.contrib.optimizers.FusedLAMB",
        "`lightning_apex.optimizers.FusedLAMB`",
        _STEP,
    ),
    gone(
        "apex.contrib.optimizers.FusedSGD",
        "`lightning_apex.optimizers.FusedSGD`",
        _STEP,
    ),
    gone(
        "apex.contrib.optimizers.FP16_Optimizer",
        "`lightning_apex.fp16_utils.FP16_Optimizer`",
        "It was for the old optimizers.",
    ),
    gone(
        "apex.contrib.optimizers.DistributedFusedAdam",
        _FSDP,
        _DISTRIBUTED,
    ),
    gone(
        "apex.contrib.optimizers.DistributedFusedLAMB",
        _FSDP,
        _DISTRIBUTED,
    ),
)

SECTIONS: dict[str, tuple[Row, ...]] = {"transformer": TRANSFORMER, "contrib": CONTRIB}
