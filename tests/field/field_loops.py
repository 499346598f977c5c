"""What people have met in training loops, with casts and while they installed, in whatever package."""

from field_row import row

LOOP = [
    row(
        "Accumulating k batches equals one that is k times larger; the scale is constant meanwhile, and one infinity "
        "skips the step.",
        "lightning/test_levels_train.py::test_accumulation_equals_a_larger_batch",
        "lightning/test_levels_train.py::test_scale_is_constant_in_an_accumulation_window",
        "lightning/test_overflow.py::test_overflow_in_any_micro_batch_skips_the_window",
        "amp/test_amp_accumulation.py::test_accumulated_gradients_are_those_of_the_whole_batch",
    ),
    row(
        "DDP without synchronisation while accumulating: masters are the same on all ranks after each step.",
        "lightning/test_ddp.py::test_ranks_hold_identical_masters_after_each_step",
        "amp/test_amp_ddp.py::test_ranks_are_the_same_after_each_step",
    ),
    row(
        "gradient_clip_val clips unscaled gradients, those of the masters where there are some.",
        "lightning/test_clipping.py::test_clip_equals_fp32_clip",
        "lightning/test_clipping.py::test_clip_does_not_depend_on_the_loss_scale",
    ),
    row(
        "A fused optimizer, dynamic scaling and clipping go together.",
        "lightning/test_clipping.py::test_fused_optimizer_with_dynamic_scale_and_clip",
    ),
    row(
        "On a skipped step a scheduler stands still, unless told otherwise, and nothing warns.",
        "lightning/test_schedulers.py::test_three_overflows_then_four_good_batches",
        "lightning/test_schedulers.py::test_hold_schedulers_false",
    ),
    row(
        "Neither step() nor a group of an optimizer is replaced: schedulers made earlier work on.",
        "lightning/test_field_training.py::test_neither_step_nor_groups_of_an_optimizer_are_replaced",
        "amp/test_amp_loops.py::test_schedulers_made_before_and_after",
    ),
    row(
        "Two optimizers in manual optimization: one skipped and one not, a scale for each loss.",
        "lightning/test_manual.py::test_gan_equals_fp32",
        "lightning/test_manual.py::test_gan_one_skipped_and_one_not",
        "test_examples_amp.py::test_dcgan_trains_two_models_with_three_losses",
    ),
    row(
        "clip_gradients in manual optimization sees unscaled gradients.",
        "lightning/test_manual.py::test_manual_clip_is_on_unscaled_gradients",
    ),
]

CASTING = [
    row(
        "BCELoss is computed in fp32.",
        "lightning/test_field_training.py::test_bce_loss",
        "amp/test_amp_shapes_of_loops.py::test_bce_loss_is_fp32_instead_of_an_error",
    ),
    row(
        "A float_function gets every tensor in fp32, nested and by keyword, with autocast off inside.",
        "amp/test_amp_functions.py::test_every_tensor_is_cast_inside_autocast",
    ),
    row(
        "No stale casts: evaluation then training, checkpointed activations, weights edited by hand.",
        "test_engine.py::TestForward::test_an_evaluation_leaves_no_cast_weights_behind",
        "test_engine.py::TestForward::test_weights_edited_by_hand_count_at_once",
        "test_engine.py::TestForward::test_activation_checkpointing",
        "amp/test_amp_models.py::test_no_stale_casts",
        "amp/test_amp_models.py::test_activation_checkpointing",
    ),
    row(
        "A thousand forward passes and a hundred fits in one process: memory stays flat.",
        "lightning/test_fit_lifecycle.py::test_a_hundred_fits_keep_memory_flat",
        "test_engine.py::TestWayBack::test_many_passes_and_fits_keep_nothing_alive",
        "amp/test_amp_copies.py::test_a_hundred_models_in_one_process",
    ),
    row(
        "disable_casts may be nested and survives exceptions.",
        "amp/test_amp_functions.py::TestDisableCasts::test_fp32_models_compute_in_fp32",
        "amp/test_amp_functions.py::TestDisableCasts::test_half_models_go_on",
    ),
    row(
        "BatchNorm without affine parameters stays fp32, norms of one's own through keep_fp32.",
        "lightning/test_models.py::test_batchnorm_without_affine_or_tracking_keeps_fp32",
        "lightning/test_models.py::test_keep_fp32_by_pattern_and_class",
    ),
    row(
        "Every level trains on a CPU.",
        "lightning/test_levels_train.py::test_level_trains",
        "lightning/test_levels_train.py::test_loss_curve_is_that_of_fp32",
    ),
    row(
        "torch.compile with fullgraph takes SyncBatchNorm's evaluation, and the operators have right schemas.",
        "parallel/test_sync_batch_norm_alone.py::test_eval_compiles_to_one_graph",
        "test_registration.py::test_opcheck",
        "test_batch_norm_door.py::test_opcheck",
    ),
]

INSTALLATION = [
    row(
        "nvcc of another minor version is a note at most; another major version says so, and how to go on.",
        "field/test_field_build.py::test_another_minor_version_is_a_note_at_most",
        "field/test_field_build.py::test_another_major_version_ends_the_build_and_says_how_to_go_on",
        "field/test_field_build.py::test_cuda_that_cannot_be_had_is_never_a_quiet_cpu_build",
    ),
    row(
        "Importing without the compiled extension gives one sentence with the command to type.",
        "test_import.py::test_without_the_extension_one_sentence_says_what_to_type",
    ),
    row(
        "Which backend runs can be asked, and nothing falls back in silence.",
        "test_import.py::test_the_build_can_be_asked_for",
        "test_registration.py::test_the_environment_chooses_the_backend",
    ),
]

LOOPS = [*LOOP, *CASTING, *INSTALLATION]
